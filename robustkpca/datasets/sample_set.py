"""Samples of any task: stable ids, the conditions they come in, the clusters they belong to, and hashes."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from robustkpca.errors import DataError
from robustkpca.suites.cell import CLEAN_CELL, Cell


class SampleSet(ABC):
    """Samples in a fixed order. `ids[i]` is unique and stable (a path or an index).

    `conditions[i]` says which cell a sample belongs to before anything perturbs it: clean, or a released corruption
    with its severity. `expected` counts the samples of each condition that should be there; 0 stands for a part of the
    set that is missing. `clusters[i]` names the document or graph that a sample depends on others through; None where
    samples are drawn one by one. `ignored` are files that are no samples.
    """

    task: ClassVar[str] = "classification"  # a name of `robustkpca.tasks.registry.TASKS`, or an import path
    in_memory: ClassVar[bool] = False  # nothing has to be opened or decoded
    hash_covers: str  # what `content_hash` is computed from

    def __init__(
        self,
        name: str,
        ids: Sequence[str],
        *,
        conditions: Sequence[Cell] | None = None,
        expected: Mapping[Cell, int] | None = None,
        clusters: Sequence[str] | None = None,
        ignored: Sequence[str] = (),
    ) -> None:
        if len(ids) == 0:
            raise DataError(f"data {name}: no samples in it")
        self.name, self.ids = name, list(ids)
        self.conditions = list(conditions) if conditions is not None else [CLEAN_CELL] * len(self.ids)
        self.expected = dict(expected) if expected is not None else {CLEAN_CELL: len(self.ids)}
        self.clusters = None if clusters is None else list(clusters)
        self.ignored = list(ignored)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def conditioned(self) -> bool:
        """Whether the set comes in conditions of its own, to be evaluated without attacks."""
        return any(cell != CLEAN_CELL for cell in self.expected)

    @property
    def ids_hash(self) -> str:
        """SHA-256 (16 hex digits) of the ids and of what they are labelled with, in order."""
        rows = "\n".join(self.id_lines())
        return hashlib.sha256(rows.encode("utf-8", "surrogateescape")).hexdigest()[:16]

    def id_lines(self) -> Sequence[str]:
        """A line for each sample: its id, and what it is labelled with."""
        return self.ids

    @property
    @abstractmethod
    def content_hash(self) -> str:
        """SHA-256 (16 hex digits) of what `hash_covers` says."""

    @abstractmethod
    def take(self, indices: NDArray[np.int64]) -> Self:
        """The samples at `indices`, in that order."""

    def limit(self, n: int, seed: int) -> Self:
        """At most n samples of each condition, spread as `spread` does, drawn with `seed`."""
        if n < 1:
            raise DataError(f"--limit: expected at least 1, got {n}")
        groups: dict[Cell, list[int]] = {}
        for index, cell in enumerate(self.conditions):
            groups.setdefault(cell, []).append(index)
        if all(len(group) <= n for group in groups.values()):
            return self
        chosen = np.concatenate([self.spread(np.array(group), n, seed) for group in groups.values()])
        return self.take(np.sort(chosen))

    def spread(self, group: NDArray[np.int64], n: int, seed: int) -> NDArray[np.int64]:
        """n of the samples numbered in `group`."""
        return group[np.random.default_rng(seed).permutation(len(group))][:n]

    def taken(self, indices: NDArray[np.int64]) -> dict[str, Any]:
        """Keyword arguments of the samples at `indices`."""
        conditions = [self.conditions[i] for i in indices]
        counts = dict.fromkeys(self.expected, 0) | {cell: conditions.count(cell) for cell in dict.fromkeys(conditions)}
        clusters = None if self.clusters is None else [self.clusters[i] for i in indices]
        return {"conditions": conditions, "expected": counts, "clusters": clusters, "ignored": self.ignored}
