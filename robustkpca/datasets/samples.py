"""Labelled samples with stable ids, whatever they are stored in."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from timm.data import ImageNetInfo
from torch import Tensor

from robustkpca.errors import DataError
from robustkpca.models.settings import ModelSettings, Preprocessing
from robustkpca.suites.cell import CLEAN, Cell


class Samples(ABC):
    """Images, labels and ids. `labels[i]` counts in `classes`; `ids[i]` is unique and stable (a path or an index).

    `conditions[i]` says which cell a sample belongs to before any attack: `clean`, or a released corruption with its
    severity. `expected` counts the samples of each condition that should be there; 0 stands for a part of the set
    that is missing. `among` restricts a model's answers to these class names; `ignored` are files that are no
    samples.
    """

    hash_covers: str  # what `content_hash` is computed from
    resized = True  # whether pictures are resized before the crop; released ImageNet-C is only cropped

    def __init__(
        self,
        name: str,
        ids: Sequence[str],
        labels: NDArray[np.int64],
        classes: tuple[str, ...],
        *,
        conditions: Sequence[Cell] | None = None,
        expected: Mapping[Cell, int] | None = None,
        among: tuple[str, ...] = (),
        ignored: Sequence[str] = (),
    ) -> None:
        if len(ids) == 0:
            raise DataError(f"data {name}: no images found")
        if labels.min() < 0 or labels.max() >= len(classes):
            raise DataError(
                f"data {name}: expected labels from 0 to {len(classes) - 1}, got {labels.min()} to {labels.max()}"
            )
        self.name, self.ids, self.labels, self.classes = name, list(ids), labels, classes
        self.conditions = list(conditions) if conditions is not None else [Cell(CLEAN, "")] * len(self.ids)
        self.expected = dict(expected) if expected is not None else {Cell(CLEAN, ""): len(self.ids)}
        self.among, self.ignored = among, list(ignored)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def conditioned(self) -> bool:
        """Whether the set comes in conditions of its own, to be evaluated without attacks."""
        return any(cell.attack != CLEAN for cell in self.expected)

    @cached_property
    def ids_hash(self) -> str:
        """SHA-256 (16 hex digits) of the ids and the names of their classes, in order."""
        rows = "\n".join(f"{i}\t{self.classes[label]}" for i, label in zip(self.ids, self.labels, strict=True))
        return hashlib.sha256(rows.encode("utf-8", "surrogateescape")).hexdigest()[:16]

    @property
    @abstractmethod
    def content_hash(self) -> str:
        """SHA-256 (16 hex digits) of what `hash_covers` says."""

    @property
    def source_hash(self) -> str:
        """SHA-256 (16 hex digits) that changes when a picture or its file does; the key of caches on this machine."""
        return self.content_hash

    @abstractmethod
    def image(self, index: int, preprocessing: Preprocessing) -> Tensor:
        """One preprocessed image, float32 (C, S, S) in [0, 1], not normalised."""

    @abstractmethod
    def take(self, indices: NDArray[np.int64]) -> Samples:
        """The samples at `indices`, in that order."""

    def limit(self, n: int, seed: int) -> Samples:
        """At most n samples of each condition, spread over the classes as evenly as they allow, drawn with `seed`."""
        if n < 1:
            raise DataError(f"--limit: expected at least 1, got {n}")
        groups: dict[Cell, list[int]] = {}
        for index, cell in enumerate(self.conditions):
            groups.setdefault(cell, []).append(index)
        if all(len(group) <= n for group in groups.values()):
            return self
        chosen = np.concatenate([self._spread(np.array(group), n, seed) for group in groups.values()])
        return self.take(np.sort(chosen))

    def _spread(self, group: NDArray[np.int64], n: int, seed: int) -> NDArray[np.int64]:
        order = group[np.random.default_rng(seed).permutation(len(group))]
        rank = np.empty(len(order), dtype=np.int64)  # how many of its class were drawn before it
        seen: dict[int, int] = {}
        for place, index in enumerate(order):
            label = int(self.labels[index])
            rank[place] = seen.get(label, 0)
            seen[label] = seen.get(label, 0) + 1
        return order[np.argsort(rank, kind="stable")][:n]

    def _taken(self, indices: NDArray[np.int64]) -> dict[str, object]:
        """Keyword arguments of the samples at `indices`."""
        conditions = [self.conditions[i] for i in indices]
        counts = dict.fromkeys(self.expected, 0) | {cell: conditions.count(cell) for cell in dict.fromkeys(conditions)}
        return {"conditions": conditions, "expected": counts, "among": self.among, "ignored": self.ignored}

    def labels_for(self, settings: ModelSettings) -> NDArray[np.int64]:
        """Labels counted as the model counts its logits: by class name, never by the order of folders.

        Where the model has no names, folders named by numbers are those numbers. Raises DataError for anything else.
        """
        names = class_names(settings)
        if names:
            position = {name: i for i, name in enumerate(names)}
            if strange := [name for name in self.classes if name not in position]:
                raise DataError(
                    f"data {self.name}: {len(strange)} of its {len(self.classes)} classes are unknown to "
                    f"{settings.title} "
                    f"({', '.join(strange[:3])}); the model knows {', '.join(names[:3])}, ... ({len(names)})"
                )
            return np.array([position[name] for name in self.classes], dtype=np.int64)[self.labels]
        if all(name.isdecimal() for name in self.classes):
            numbers = np.array([int(name) for name in self.classes], dtype=np.int64)
            if len(set(numbers)) == len(numbers) and numbers.max() < settings.num_classes:
                return numbers[self.labels]
            raise DataError(
                f"data {self.name}: classes up to {numbers.max()}, {settings.title} has logits 0 to "
                f"{settings.num_classes - 1}"
            )
        raise DataError(
            f"data {self.name}: it has {len(self.classes)} classes ({', '.join(self.classes[:3])}, ...), "
            f"{settings.title} has "
            f"{settings.num_classes} without names; say --classes FILE, one name a line in the order of the logits"
        )


def class_names(settings: ModelSettings) -> tuple[str, ...]:
    """The names of a model's logits, in their order; empty when unknown."""
    if isinstance(settings.classes, str):
        return tuple(ImageNetInfo(settings.classes).label_names())
    return settings.classes
