"""What an evaluation is asked for, checked before anything runs."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from robustkpca import corruptions
from robustkpca._version import __version__
from robustkpca.attacks import registry
from robustkpca.datasets.cache import PixelCache
from robustkpca.datasets.samples import Samples, class_names
from robustkpca.errors import DataError, SpecError, unknown
from robustkpca.models.classifier import Classifier, Unusable
from robustkpca.suites.attack import ROUNDED_GRADIENTS
from robustkpca.suites.suite import Suite

KNOWN_CORRUPTIONS = (*corruptions.CORRUPTIONS, *corruptions.EXTRA_CORRUPTIONS)


def _unique_labels(models: Sequence[Classifier | Unusable]) -> list[str]:
    """Titles, with lambda where it tells two apart, and with their source where two are the same."""
    shorts = list({m.settings.long_title: m.title for m in models if isinstance(m, Classifier)}.values())
    titles = [
        m.settings.long_title if isinstance(m, Classifier) and shorts.count(m.title) > 1 else m.title for m in models
    ]
    labels: list[str] = []
    for m, title in zip(models, titles, strict=True):
        label = title if titles.count(title) == 1 else f"{title} [{Path(m.source).stem or m.source}]"
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
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


class Plan:
    """What is to be evaluated, checked before anything runs.

    `models`: classifiers on their device; an Unusable one stands for weights that could not be loaded and is shown as failed.
    `full_argmax`: answers among all of a model's classes, also where the data set's protocol restricts them. `force`: models with
    RPC-Attention in bfloat16 are attacked by gradients too, which are wrong there.
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
        force: bool = False,
    ) -> None:
        self.samples, self.suites, self.seed, self.batch_size = samples, list(suites), seed, batch_size
        self.full_argmax, self.force = full_argmax, force
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
                    registry.check(what, suite.threat)
        for classifier in usable:
            self.samples.labels_for(classifier.settings)
            if (name := self._misled(classifier)) and not self.force:
                raise SpecError(
                    f"{classifier.title} in bfloat16: the attack {name} follows gradients, which are wrong through RPC-Attention in this "
                    "precision; use float32, or --force for figures that are marked"
                )
            side = classifier.settings.preprocessing.img_size
            if side < corruptions.SMALLEST and any(suite.corruptions for suite in self.suites):
                raise SpecError(
                    f"corruptions need images of at least {corruptions.SMALLEST} px, {classifier.title} takes {side}"
                )

    def _misled(self, classifier: Classifier) -> str | None:
        """The first attack by gradients on a model whose gradients are wrong in its precision: such a figure shows a robustness that is not there."""
        if not classifier.pursues or classifier.dtype != torch.bfloat16:
            return None
        return next((a.name for s in self.suites for a in s.attack if not registry.METHODS[a.method].blind), None)

    def _possible(self, suite: Suite) -> Suite:
        """The suite less the attacks that need more classes than a model has, for all models alike."""
        fewest = min((m for m in self.models if isinstance(m, Classifier)), key=lambda m: m.settings.num_classes)
        classes = fewest.settings.num_classes
        needs = {a.name: registry.least_classes(a) for a in suite.attack if registry.least_classes(a) > classes}
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
        first = next(m for m in self.models if isinstance(m, Classifier))
        return {
            "models": [self._described(label, m) for label, m in zip(self.labels, self.models, strict=True)],
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
            "dtype": str(first.dtype).removeprefix("torch."),
            "device": first.device.type,
            "software": {name: software[name] for name in ("robustkpca", "torch", "timm", "torchattacks")},
        }

    def _described(self, label: str, model: Classifier | Unusable) -> dict[str, Any]:
        if isinstance(model, Unusable):
            return {"label": label, "source": model.source, "weights": None, "settings": None, "notes": [model.reason]}
        return {
            "label": label,
            "source": model.source,
            "weights": model.weights,
            "parameters": sum(p.numel() for p in model.network.parameters()),
            "settings": model.settings.model_dump(mode="json", by_alias=True),
            "attention": model.attention_kernel,
            "notes": [*model.notes, *([ROUNDED_GRADIENTS] if self._misled(model) else [])],
        }

    def readers(self, cache: PixelCache | None) -> dict[int, Callable[[int], Tensor]]:
        """For each model that can be used, a function from the number of a sample to its image as that model takes it."""
        wanted = {i: m.settings.preprocessing for i, m in enumerate(self.models) if isinstance(m, Classifier)}
        if cache is not None:
            return {i: cache.reader(self.samples, p) for i, p in wanted.items()}
        return {i: partial(self.samples.image, preprocessing=p) for i, p in wanted.items()}
