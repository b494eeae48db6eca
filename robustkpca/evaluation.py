"""The evaluation loop: every model, every chunk of samples, every attack; rows are written as they come."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import torch
from torch import Tensor

from robustkpca import __version__, corruptions, methods
from robustkpca.datasets import Chunks, Samples, class_names
from robustkpca.errors import DataError, RobustKPCAError, SpecError, unknown
from robustkpca.models import Classifier, Unusable
from robustkpca.outcomes import Run, chunk_ranges
from robustkpca.spec import CLEAN, AttackSpec, Cell, Suite, ThreatModel, parse_eps

TOLERANCE = 1e-6  # of budgets and of the pixel range, as float32 rounding exceeds them by some 1e-8
TOP_K = 5
KNOWN_CORRUPTIONS = (*corruptions.CORRUPTIONS, *corruptions.EXTRA_CORRUPTIONS)


@dataclass(frozen=True)
class Progress:
    """What has just been done, of how much. One unit is one forward or backward pass of one sample."""

    model: str
    attack: str
    done: float
    total: float


@dataclass(frozen=True)
class _Job:
    """One attack or corruption on one model: the row label, its suite, and what it stands for."""

    label: str
    suite: Suite
    what: AttackSpec | str

    @property
    def passes(self) -> float:
        """Forward and backward passes a sample, over all budgets."""
        if isinstance(self.what, str):
            return 2.0 * len(self.suite.budgets)  # making a corruption costs about a forward pass of a small model
        live = sum(eps > 0 for eps in self.suite.threat.budgets) if self.suite.threat else 0
        return len(self.suite.budgets) + methods.passes(self.what) * live


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

    def run(self, out: Path | str, *, workers: int = 0, on_progress: Callable[[Progress], None] | None = None) -> Run:
        """Do what is not yet done in the folder `out`; see `evaluate`."""
        samples = self.samples
        run = Run.start(Path(out), self.request, environment() | {"ignored": samples.ignored})
        run.manifest["failures"] = {}  # what failed before is tried again
        run.save_manifest()
        jobs = [_Job(label, suite, what) for suite in self.suites for label, what in suite.attacks.items()]
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
            for images, indices in _load(samples, classifier, pending, workers):
                chunk_labels = labels[indices].to(classifier.device)
                ids = [samples.ids[i] for i in indices]
                batch = _Batch(classifier, model, images.to(classifier.device), chunk_labels, ids, self.seed)
                first = indices[0]
                if run.has_chunk(model, CLEAN, first):
                    stored = (
                        pq.ParquetFile(run.chunk_path(model, CLEAN, first)).read(["prediction"]).column(0).to_numpy()
                    )
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
                            with run.timed(model, job.label, len(indices) * len(job.suite.budgets)):
                                rows = batch.rows(job)
                            run.write_chunk(model, job.label, first, rows)
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
        "notes": list(model.notes),
    }


def _load(
    samples: Samples, classifier: Classifier, chunks: Sequence[range], workers: int
) -> Iterator[tuple[Tensor, list[int]]]:
    """Images of each chunk as the classifier takes them, decoded ahead by `workers` processes."""
    dataset = Chunks(samples, classifier.settings.preprocessing, chunks)
    yield from torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=workers)


class _Batch:
    """One chunk on one model: images, labels, ids, and the clean predictions."""

    def __init__(
        self, classifier: Classifier, model: str, images: Tensor, labels: Tensor, ids: list[str], seed: int
    ) -> None:
        self.classifier, self.model, self.seed = classifier, model, seed
        self.images, self.labels, self.ids = images, labels, ids
        self.clean: Tensor = torch.empty(0)  # predictions on the clean images, int64 (B,)

    def clean_rows(self, conditions: Sequence[Cell]) -> pd.DataFrame:
        """The rows of the images as they are; `conditions` says which cell each belongs to."""
        rows = self._score(self.images, CLEAN, "", None, None)
        rows["attack"], rows["budget"] = [c.attack for c in conditions], [c.budget for c in conditions]
        self.clean = torch.tensor(rows["prediction"].to_numpy(), dtype=torch.int64, device=self.images.device)
        return rows.assign(clean_prediction=rows["prediction"])

    def rows(self, job: _Job) -> pd.DataFrame:
        """The rows of one attack or corruption, over all its budgets."""
        if isinstance(job.what, str):
            return pd.concat([self._corrupted(job.label, job.what, s) for s in job.suite.severities], ignore_index=True)
        assert job.suite.threat is not None
        budgets = zip(job.suite.budgets, job.suite.threat.budgets, strict=True)
        parts = [self._attacked(job.label, job.what, job.suite.threat, text, eps) for text, eps in budgets]
        return pd.concat(parts, ignore_index=True)

    def _corrupted(self, label: str, name: str, severity: int) -> pd.DataFrame:
        images = corruptions.corrupt(self.images, name, severity, self.ids, seed=self.seed)
        return self._score(images, label, str(severity), None, None)

    def _attacked(self, label: str, spec: AttackSpec, threat: ThreatModel, budget: str, eps: Fraction) -> pd.DataFrame:
        # A clean prediction of -1 marks logits that were not finite: there the true label stands in, and the row is flagged.
        predicted = torch.where(self.clean < 0, self.labels, self.clean)
        targets = self.labels if threat.labels == "true" else predicted
        found = methods.attack(
            self.classifier,
            self.images,
            targets,
            spec=spec,
            threat=threat,
            eps=eps,
            label=label,
            ids=self.ids,
            seed=self.seed,
        )
        return self._score(found, label, budget, targets, threat)

    @torch.no_grad()
    def _score(
        self, images: Tensor, attack: str, budget: str, attacked_labels: Tensor | None, threat: ThreatModel | None
    ) -> pd.DataFrame:
        """Predict afresh on `images` and measure how far they were moved: an attack's own word is not asked for."""
        logits = self.classifier(images).float()
        finite = logits.isfinite().all(1)
        safe = torch.where(finite[:, None], logits, 0.0)
        prediction = torch.where(finite, safe.argmax(1), -1)
        flags = {"non_finite": ~finite}
        moved = None
        if threat is not None:
            moved = methods.distance(self.classifier, self.images, images, threat)
            if threat.norm != "none":
                # Float32 sums of many values round in proportion to the sum; NaN counts as over.
                slack = TOLERANCE * max(1.0, float(parse_eps(budget)))
                flags["over_budget"] = ~(moved <= float(parse_eps(budget)) + slack)
            if threat.clip and float(parse_eps(budget)) > 0:
                box = (self.classifier.normalize(images) if threat.space == "normalized" else images).flatten(1)
                flags["out_of_box"] = ~((box >= -TOLERANCE) & (box <= 1 + TOLERANCE)).all(1)
        raised = torch.stack(list(flags.values()), dim=1).tolist()
        columns: dict[str, Any] = {
            "model": self.model,
            "attack": attack,
            "budget": budget,
            "sample": self.ids,
            "label": _numpy(self.labels),
            "attacked_label": None if attacked_labels is None else _numpy(attacked_labels),
            "clean_prediction": _numpy(self.clean) if len(self.clean) else -1,
            "prediction": _numpy(prediction),
            "correct": _numpy(prediction == self.labels),
            "correct_top5": None,
            "confidence": _numpy(safe.softmax(1).amax(1).where(finite, float("nan"))),
            "distance": None if moved is None else _numpy(moved),
            "flags": [",".join(n for n, f in zip(flags, row, strict=True) if f) for row in raised],
        }
        if logits.shape[1] > TOP_K:
            best = safe.topk(TOP_K, dim=1).indices
            columns["correct_top5"] = _numpy((best == self.labels[:, None]).any(1) & finite)
        return pd.DataFrame(columns)


def _numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    return tensor.cpu().numpy()
