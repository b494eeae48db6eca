"""What an evaluation is asked for, checked before anything runs."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

from robustkpca._version import __version__
from robustkpca.datasets.sample_set import SampleSet
from robustkpca.errors import SpecError
from robustkpca.escape import utf8
from robustkpca.models.model import Unusable
from robustkpca.models.origin import Origin
from robustkpca.runs import names
from robustkpca.runs.request import DataRecord, ModelRecord, Request
from robustkpca.suites.cell import CLEAN_CELL
from robustkpca.suites.suite import Suite
from robustkpca.tasks.base import Options, Task
from robustkpca.tasks.jobs import Job, jobs_of
from robustkpca.tasks.registry import task_named

if TYPE_CHECKING:
    from torch import Tensor

    from robustkpca.datasets.cache import PixelCache


def environment() -> dict[str, Any]:
    """Versions and machine, for the receipt."""
    names = ("torchvision", "timm", "torchattacks", "numpy", "pandas", "pyarrow")
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "robustkpca": __version__,
        "torch": torch.__version__,  # with its build, e.g. +cu130
        **{name: metadata.version(name) for name in names},
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


class Plan:
    """What is to be evaluated, checked before anything runs.

    `models`: on their device; an Unusable one stands for weights that could not be loaded and is shown as failed. The
    task is that of the samples.
    """

    def __init__(
        self,
        models: Sequence[Any],
        samples: SampleSet,
        suites: Sequence[Suite],
        options: Options | None = None,
    ) -> None:
        self.task, self.samples, self.options = task_named(samples.task), samples, options or Options()
        self._check(models, suites)
        adapted = self.task.adapt(models, samples, suites, self.options)
        self.models, self.suites = list(adapted.models), tuple(adapted.suites)
        self.jobs: list[Job] = jobs_of(self.suites, CLEAN_CELL.attack)
        self.request = self._request(adapted.notes or [()] * len(self.models), adapted.facts)
        self.labels = self.request.labels

    def _check(self, models: Sequence[Any], suites: Sequence[Suite]) -> None:
        """Everything that can be found wrong before the first batch, whatever the task."""
        if all(isinstance(m, Unusable) for m in models):
            raise SpecError("expected at least one model that can be loaded")
        if self.options.batch_size < 1:
            raise SpecError(f"--batch-size: expected at least 1, got {self.options.batch_size}")
        if suites and self.samples.conditioned:
            raise SpecError(f"--attack: data {self.samples.name} is evaluated as it is, without attacks")
        attacks = [str(attack) for suite in suites for attack in suite.attacks]
        if twice := {name for name in attacks if attacks.count(name) > 1}:
            raise SpecError(f"--attack: {', '.join(sorted(twice))} given twice")
        for suite in suites:
            names.refuse_missing("suite", suite.name, "rename its file and its `name`")
        for job in jobs_of(suites, CLEAN_CELL.attack):
            job.perturbation_of(self.task).check(job.spec, job.suite.threat)

    def _request(self, notes: Sequence[tuple[str, ...]], facts: Mapping[str, Any]) -> Request:
        """Everything that decides a number."""
        software, samples = environment(), self.samples
        first = next(m for m in self.models if not isinstance(m, Unusable))
        decides = {j.spec.method for j in self.jobs if j.perturbation_of(self.task).decided_by_batch(j.spec)}
        searches = {j.spec.method: j.perturbation_of(self.task).search(j.spec) for j in self.jobs}
        records = [record_of(model, self.task, more) for model, more in zip(self.models, notes, strict=True)]
        dtype = _dtype(first)
        records = [r.model_copy(update={"dtype": None}) if r.dtype == dtype else r for r in names.labelled(records)]
        return Request(
            task=samples.task,
            task_version=self.task.version,
            models=tuple(records),
            data=DataRecord(
                name=samples.name,
                n=len(samples),
                ids=samples.ids_hash,
                content=samples.content_hash,
                content_covers=samples.hash_covers,
                conditions=tuple((*cell.texts, n) for cell, n in samples.expected.items()),
                **facts,
            ),
            suites=self.suites,
            seed=self.options.seed,
            batch_size=self.options.batch_size,
            batch_decides=tuple(sorted(decides)),
            searches={method: search for method, search in sorted(searches.items()) if search is not None},
            dtype=dtype,
            device=torch.device(first.device).type,
            software={name: software[name] for name in ("robustkpca", "torch", "timm", "torchattacks")},
        )

    def readers(self, cache: PixelCache | None) -> dict[int, Callable[[int], Tensor]]:
        """For each model that can be used, a function
        from the number of a sample to its input as that model takes it."""
        usable = {i: m for i, m in enumerate(self.models) if not isinstance(m, Unusable)}
        return {i: self.task.reader(self.samples, model, cache) for i, model in usable.items()}


def record_of(model: Any, task: Task, notes: tuple[str, ...] = ()) -> ModelRecord:
    """What a request says of a model that is called by its title; `notes`: beside its own."""
    chosen = {"given_name": getattr(model, "given_name", None), "group": getattr(model, "group", None)}
    if isinstance(model, Unusable):
        return ModelRecord(label=utf8(model.title), source=utf8(model.source), notes=(utf8(model.reason),), **chosen)
    origin = getattr(model, "origin", Origin())
    return ModelRecord(
        label=utf8(model.title),
        title=utf8(model.title),
        source=utf8(model.source),
        weights=model.weights,
        notes=tuple(map(utf8, (*model.notes, *notes))),
        weight_choice=origin.weight_choice if origin.weight_choice != "raw" else None,
        overrides=tuple(map(str, origin.overrides)) or None,
        recipe=origin.recipe,
        training_seed=origin.seed,
        dtype=_dtype(model),
        **chosen,
        **task.describe(model),
    )


def labels_of(models: Sequence[Any], task: Task) -> list[str]:
    """The models' names, all different (`robustkpca.runs.names`)."""
    return names.names([record_of(model, task) for model in models])


def _dtype(model: Any) -> str:
    return str(model.dtype).removeprefix("torch.")
