"""The evaluation loop: every model, every chunk of samples, every attack; rows are written as they come."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from robustkpca import __version__, corruptions, methods
from robustkpca.datasets import Chunks, Samples, class_names
from robustkpca.draws import seeded
from robustkpca.errors import DataError, RobustKPCAError, SpecError, unknown
from robustkpca.models import Classifier, Unusable
from robustkpca.outcomes import Run, chunk_ranges
from robustkpca.probes import SAMPLES, probe
from robustkpca.scoring import Batch, jobs_of
from robustkpca.spec import CLEAN, Suite

KNOWN_CORRUPTIONS = (*corruptions.CORRUPTIONS, *corruptions.EXTRA_CORRUPTIONS)


@dataclass(frozen=True)
class Progress:
    """What has just been done, of how much. One unit is one forward or backward pass of one sample."""

    model: str
    attack: str
    done: float
    total: float


def _unique_labels(models: Sequence[Classifier | Unusable]) -> list[str]:
    """Titles, told apart by their source where two are the same."""
    titles = [m.title for m in models]
    labels: list[str] = []
    for m in models:
        label = m.title if titles.count(m.title) == 1 else f"{m.title} [{Path(m.source).stem or m.source}]"
        while label in labels:
            label += "'"
        labels.append(label)
    return labels


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
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


class Plan:
    """What is to be evaluated, checked before anything runs.

    `models`: classifiers on their device; an Unusable one stands for weights that could not be loaded and is shown as failed.
    `full_argmax`: answers among all of a model's classes, also where the data set's protocol restricts them.
    """

    def __init__(
        self,
        models: Sequence[Classifier | Unusable],
        samples: Samples,
        suites: Sequence[Suite],
        *,
        seed: int = 0,
        batch_size: int = 100,
        full_argmax: bool = False,
    ) -> None:
        self.samples, self.suites, self.seed, self.batch_size = samples, list(suites), seed, batch_size
        self.full_argmax = full_argmax
        self._check(models)
        self.models = [self._narrowed(m) if isinstance(m, Classifier) else m for m in models]
        self.suites = [self._possible(suite) for suite in self.suites]
        self.labels = _unique_labels(models)
        self.request = self._request()

    def _check(self, models: Sequence[Classifier | Unusable]) -> None:
        """Everything that can be found wrong before the first batch."""
        usable = [m for m in models if isinstance(m, Classifier)]
        if not usable:
            raise SpecError("expected at least one model that can be loaded")
        if self.batch_size < 1:
            raise SpecError(f"--batch-size: expected at least 1, got {self.batch_size}")
        if self.suites and self.samples.conditioned:
            raise SpecError(f"--attack: data {self.samples.name} is evaluated as it is, without attacks")
        labels = [label for suite in self.suites for label in suite.attacks]
        if twice := {label for label in labels if labels.count(label) > 1}:
            raise SpecError(f"--attack: {', '.join(sorted(twice))} given twice")
        for suite in self.suites:
            for what in suite.attacks.values():
                if isinstance(what, str):
                    if what not in KNOWN_CORRUPTIONS:
                        raise SpecError(unknown("corruption", what, KNOWN_CORRUPTIONS))
                elif suite.threat is not None:
                    methods.check(what, suite.threat)
        for classifier in usable:
            self.samples.labels_for(classifier.settings)
            side = classifier.settings.preprocessing.img_size
            if side < corruptions.SMALLEST and any(suite.corruptions for suite in self.suites):
                raise SpecError(
                    f"corruptions need images of at least {corruptions.SMALLEST} px, {classifier.title} takes {side}"
                )

    def _possible(self, suite: Suite) -> Suite:
        """The suite less the attacks that need more classes than a model has, for all models alike."""
        fewest = min((m for m in self.models if isinstance(m, Classifier)), key=lambda m: m.settings.num_classes)
        classes = fewest.settings.num_classes
        needs = {a.name: methods.least_classes(a) for a in suite.attack if methods.least_classes(a) > classes}
        if not needs:
            return suite
        why = f"{max(needs.values())} classes are needed, {fewest.title} has {classes}"
        if len(needs) == len(suite.attack):
            raise SpecError(f"suite {suite.name}: {why}")
        return suite.without(list(needs), why)

    def _narrowed(self, classifier: Classifier) -> Classifier:
        """The classifier answering among the classes that the data set's protocol allows."""
        among = self.samples.among
        names = class_names(classifier.settings)
        if not among or self.full_argmax or set(names) == set(among):
            return classifier
        if strange := [name for name in among if name not in names]:
            raise DataError(
                f"data {self.samples.name}: {len(strange)} of its {len(among)} classes are unknown to {classifier.title} "
                f"({', '.join(strange[:3])})"
            )
        position = {name: i for i, name in enumerate(names)}
        return classifier.restricted([position[name] for name in among], among)

    def _request(self) -> dict[str, Any]:
        """Everything that decides a number, as plain data."""
        software, samples = environment(), self.samples
        restricted = bool(samples.among) and not self.full_argmax
        return {
            "models": [_described(label, m) for label, m in zip(self.labels, self.models, strict=True)],
            "data": {
                "name": samples.name,
                "n": len(samples),
                "ids": samples.ids_hash,
                "content": samples.content_hash,
                "content_covers": samples.hash_covers,
                "resized": samples.resized,
                "conditions": [[cell.attack, cell.budget, n] for cell, n in samples.expected.items()],
                "argmax": f"among {len(samples.among)} classes" if restricted else "among all classes of the model",
            },
            "suites": [suite.model_dump(mode="json") for suite in self.suites],
            "seed": self.seed,
            "batch_size": self.batch_size,
            "dtype": "float32",
            "device": next(m for m in self.models if isinstance(m, Classifier)).device.type,
            "software": {name: software[name] for name in ("robustkpca", "torch", "timm", "torchattacks")},
        }

    def _probed(self, classifier: Classifier, labels: Tensor) -> dict[str, Any]:
        """`probe` of the first samples, whatever the batch size."""
        few = range(min(SAMPLES, len(self.samples)))
        images = torch.stack([self.samples.image(i, classifier.settings.preprocessing) for i in few])
        with seeded(self.seed, "probe"):
            return probe(
                classifier, images.to(classifier.device), labels[: len(few)].to(classifier.device), self.batch_size
            )

    @torch.inference_mode(False)  # inside a caller's inference_mode gradients would fail
    def run(self, out: Path | str, *, workers: int = 0, on_progress: Callable[[Progress], None] | None = None) -> Run:
        """Do what is not yet done in the folder `out`; see `evaluate`."""
        samples = self.samples
        run = Run.start(Path(out), self.request, environment() | {"ignored": samples.ignored})
        run.manifest["failures"] = {}  # what failed before is tried again
        run.save_manifest()
        jobs = jobs_of(self.suites)
        total = (
            sum(isinstance(m, Classifier) for m in self.models) * len(samples) * (1 + sum(job.passes for job in jobs))
        )
        done = 0.0

        def advance(model: str, attack: str, passes: float) -> None:
            nonlocal done
            done += passes
            if on_progress:
                on_progress(Progress(model, attack, done, total))

        for model, classifier in zip(self.labels, self.models, strict=True):
            if isinstance(classifier, Unusable):
                run.fail(model, CLEAN, classifier.reason)
                continue
            labels = torch.from_numpy(samples.labels_for(classifier.settings))
            pending, kept = [], 0.0
            for chunk in chunk_ranges(len(samples), self.batch_size):
                clean = run.has_chunk(model, CLEAN, chunk.start)
                ready = [job for job in jobs if run.has_chunk(model, job.label, chunk.start)]
                if clean and len(ready) == len(jobs):
                    kept += len(chunk) * (1 + sum(job.passes for job in jobs))
                else:
                    kept += len(chunk) * sum(job.passes for job in ready)
                    pending.append(chunk)
            if kept:
                advance(model, "kept from before", kept)
            if model not in run.probes:
                with contextlib.suppress(DataError):  # a picture that cannot be read stops the run at its chunk
                    run.probes[model] = self._probed(classifier, labels)
                    run.save_manifest()
            for images, indices in _load(samples, classifier, pending, workers):
                chunk_labels = labels[indices].to(classifier.device)
                ids = [samples.ids[i] for i in indices]
                batch = Batch(classifier, model, images.to(classifier.device), chunk_labels, ids, self.seed)
                first = indices[0]
                if run.has_chunk(model, CLEAN, first):
                    stored = run.read_chunk(model, CLEAN, first)["prediction"].to_numpy()
                    batch.clean = torch.tensor(stored, dtype=torch.int64, device=classifier.device)
                else:
                    with run.timed(model, CLEAN, len(indices)):
                        rows = batch.clean_rows([samples.conditions[i] for i in indices])
                    run.write_chunk(model, CLEAN, first, rows)
                advance(model, CLEAN, len(indices))
                for job in jobs:
                    if run.has_chunk(model, job.label, first):
                        continue
                    key = f"{model}\t{job.label}"
                    if key not in run.manifest["failures"]:
                        try:
                            if job.after and not run.has_chunk(model, job.after, first):
                                raise RuntimeError(f"{job.after}, whose survivors it attacks, has failed")
                            before = run.read_chunk(model, job.after, first) if job.after else None
                            with run.timed(model, job.label, len(indices) * len(job.suite.budgets)):
                                rows = batch.rows(job, before)
                            run.write_chunk(model, job.label, first, rows)
                            if first == 0 and job.label in batch.examples:
                                run.write_examples(model, job.label, batch.examples[job.label])
                        except RobustKPCAError:
                            raise
                        except Exception as error:  # an attack that breaks must not cost the others
                            reason = str(error).splitlines()[0] if str(error) else ""
                            run.fail(model, job.label, f"{type(error).__name__}: {reason}")
                    advance(model, job.label, len(indices) * job.passes)
            run.save_manifest()  # the times
        return Run.open(run.path)


def evaluate(
    classifiers: Sequence[Classifier],
    samples: Samples,
    suites: Sequence[Suite],
    out: Path | str,
    *,
    seed: int = 0,
    batch_size: int = 100,
    workers: int = 0,
    full_argmax: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
) -> Run:
    """Attack every sample of `samples` on every classifier with every suite, and keep the rows in the folder `out`.

    A folder that holds part of this very request is continued; one that holds another request is refused. Classifiers are on
    their device. Interrupting loses at most the chunk in hand. Returns the run, complete except for what failed.
    """
    plan = Plan(classifiers, samples, suites, seed=seed, batch_size=batch_size, full_argmax=full_argmax)
    return plan.run(out, workers=workers, on_progress=on_progress)


def _described(label: str, model: Classifier | Unusable) -> dict[str, Any]:
    if isinstance(model, Unusable):
        return {"label": label, "source": model.source, "weights": None, "settings": None, "notes": [model.reason]}
    return {
        "label": label,
        "source": model.source,
        "weights": model.weights,
        "parameters": sum(p.numel() for p in model.network.parameters()),
        "settings": model.settings.model_dump(mode="json", by_alias=True),
        "attention": model.attention_kernel,
        "notes": list(model.notes),
    }


def _load(
    samples: Samples, classifier: Classifier, chunks: Sequence[range], workers: int
) -> Iterator[tuple[Tensor, list[int]]]:
    """Images of each chunk as the classifier takes them, decoded ahead by `workers` processes."""
    dataset = Chunks(samples, classifier.settings.preprocessing, chunks)
    yield from torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=workers)
