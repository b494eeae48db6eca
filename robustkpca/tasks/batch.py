"""One chunk of samples on one model: perturb it, predict afresh, and measure what was done to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from robustkpca.runtime.keyed_random import seeded
from robustkpca.suites.budget import UNPERTURBED, Budget
from robustkpca.suites.cell import CLEAN_CELL, Cell
from robustkpca.tasks.base import Chunk, Task
from robustkpca.tasks.jobs import Job


class Batch(ABC):
    """Some samples on one model, with the predictions on them as they are.

    A task says what is recorded (`record`), which samples a cascade goes on with (`in_play`), and which are broken.
    """

    def __init__(self, chunk: Chunk) -> None:
        self.task: Task = chunk.task
        self.model, self.label, self.seed, self.portions = chunk.model, chunk.label, chunk.seed, chunk.portions
        self.ids = chunk.ids
        clusters = chunk.samples.clusters
        self.clusters = None if clusters is None else [clusters[i] for i in chunk.numbers]
        self.inputs = chunk.inputs.to(self.model.device, non_blocking=True)
        self.clean: pd.DataFrame | None = None  # the rows of the samples as they are, in their order
        self.examples: dict[str, dict[str, Any]] = {}  # by attack: samples to look at
        # By sample id: a flag of `Task.untried` where the perturbation in hand could not be tried, else "". One dict
        # for the batch and all parts of it.
        self.untried: dict[str, str] = {}

    # -- what a task says

    @abstractmethod
    def record(self, inputs: Tensor) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Predict on `inputs`: the task's own columns, and for each flag the samples that raise it, bool (B,)."""

    @abstractmethod
    def in_play(self, rows: pd.DataFrame) -> np.ndarray[Any, Any]:
        """The samples that a cascade still attacks after these rows, bool (B,)."""

    @abstractmethod
    def broken(self, columns: dict[str, Any]) -> Any:
        """The samples that a perturbation broke, by what `record` returned, bool (B,)."""

    def note_clean(self, rows: pd.DataFrame) -> None:
        """Take over the rows of the samples as they are."""
        self.clean = rows

    def attacked(self, targets: Any) -> dict[str, Any]:
        """Own columns that say what a perturbation drove away from; `targets` as `Perturbation.targets` gives them."""
        return {}

    def take(self, chosen: slice | Tensor) -> Self:
        """Some of the samples: a slice, or positions, int64."""
        part = object.__new__(type(self))
        part.__dict__.update(self.__dict__)
        positions = np.arange(len(self.ids))[chosen if isinstance(chosen, slice) else chosen.cpu().numpy()]
        part.ids = [self.ids[i] for i in positions]
        part.clusters = None if self.clusters is None else [self.clusters[i] for i in positions]
        part.inputs = self.inputs[chosen]
        part.clean = None if self.clean is None else self.clean.iloc[positions].reset_index(drop=True)
        part.examples = {}
        return part

    # -- rows

    def clean_rows(self, conditions: Sequence[Cell]) -> pd.DataFrame:
        """The rows of the samples as they are; `conditions` says which cell each belongs to."""
        rows = self.rows(self.inputs, CLEAN_CELL)
        rows["perturbation"], rows["budget"] = zip(*(c.texts for c in conditions), strict=True)
        self.note_clean(rows)
        return rows

    def perturbed_rows(self, job: Job, before: pd.DataFrame | None = None) -> pd.DataFrame:
        """The rows of one attack over all its budgets. In a cascade, `before` holds the rows of what was run before it:
        only samples that are in play there are attacked, the others keep the row that broke them."""
        parts = [self.perturbed(job, budget, before)[0] for budget in job.suite.budgets]
        return pd.concat(parts, ignore_index=True)

    def perturbed(
        self, job: Job, budget: Budget, before: pd.DataFrame | None = None, so_far: Tensor | None = None
    ) -> tuple[pd.DataFrame, Tensor]:
        """The rows of one attack at one budget, see `perturbed_rows`, and the perturbed inputs, (B, ...). Those of
        samples that a cascade does not attack any more are as in `so_far`, by default as they were without any
        attack."""
        if before is None:
            return self._perturbed(job, budget)
        earlier = before[before["budget"].isin([budget.text, UNPERTURBED.text])].reset_index(drop=True)
        alive = self.in_play(earlier)
        rows = earlier.assign(perturbation=str(job.id), budget=budget.text)
        rows["distance"] = rows["distance"].astype("float32").fillna(0.0)
        rows["broken"] = rows["broken"].astype("boolean").fillna(False).astype(bool)
        targets = job.perturbation_of(self.task).targets(self, job.suite.threat)
        rows = rows.assign(**self.attacked(targets))
        so_far = self.inputs if so_far is None else so_far
        if not alive.any():
            return rows, so_far
        chosen = torch.from_numpy(alive.nonzero()[0]).to(self.inputs.device)
        part = self.take(chosen)
        tried = [] if job.after == CLEAN_CELL.attack else self._tried(earlier[alive])
        attacked, inputs = part._perturbed(job, budget, tried)
        self.examples |= part.examples
        rows = pd.concat([rows[~alive], attacked]).set_index("sample").loc[self.ids].reset_index()
        return rows, so_far.index_copy(0, chosen, inputs)

    def _tried(self, rows: pd.DataFrame) -> list[str]:
        """The samples of these rows that a perturbation could be tried on."""
        untried = rows["flags"].str.split(",").map(lambda names: not self.task.untried.keys().isdisjoint(names))
        return list(rows["sample"][~untried.astype(bool)])

    def _perturbed(self, job: Job, budget: Budget, tried: Sequence[str] = ()) -> tuple[pd.DataFrame, Tensor]:
        """The rows of one attack at one budget, and the perturbed inputs; on the samples `tried` one before it could be
        tried."""
        perturbation, threat, label = job.perturbation_of(self.task), job.suite.threat, str(job.id)

        def apply(part: Batch) -> Tensor:
            return perturbation.apply(part, job.spec, threat, budget, label)

        self.untried.clear()
        if perturbation.decided_by_batch(job.spec):
            inputs = apply(self)
        else:
            inputs = self.portions(len(self.ids), lambda part: apply(self.take(part)))
        self.untried.update(dict.fromkeys(tried, ""))
        rows = self.rows(inputs, Cell(job.id, budget), job)
        if budget == threat.headline:
            examples = self.task.examples(self, threat, inputs)
            if examples is not None:
                self.examples[label] = examples
        return rows, inputs

    @torch.no_grad()
    def rows(self, inputs: Tensor, cell: Cell, job: Job | None = None) -> pd.DataFrame:
        """Predict afresh and measure how far the samples were moved: a perturbation's own word is not asked for."""
        attack, budget = cell.texts
        with seeded(self.seed, "score", attack, budget, self.ids[0]):
            columns, raised = self.record(inputs)
        distance, broken = None, None
        if job is not None:
            perturbation, threat = job.perturbation_of(self.task), job.suite.threat
            moved, violations = perturbation.measure(self, inputs, threat, cell.budget)
            raised = raised | violations
            distance = None if moved is None else moved.cpu().numpy()
            columns |= self.attacked(perturbation.targets(self, threat))
            broken = self.broken(columns)
        flags = torch.stack(list(raised.values()), dim=1).tolist() if raised else [[]] * len(self.ids)
        core: dict[str, Any] = {
            "model": self.label,
            "perturbation": attack,
            "budget": budget,
            "sample": self.ids,
            "cluster": self.clusters,
            "broken": broken,
            "distance": distance,
            "queries": None,
            "flags": [",".join(n for n, f in zip(raised, row, strict=True) if f) for row in flags],
        }
        rows = pd.DataFrame(core | columns)
        if job is not None and any(self.untried.values()):
            untried = pd.Series([self.untried.get(i, "") for i in self.ids]).where(self.in_play(rows), "")
            rows["flags"] = (rows["flags"] + "," + untried).str.strip(",")
        return rows
