"""The columns that results have: every cell, the worst case of a suite of attacks,
the mean of a suite of corruptions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import pandas as pd

from robustkpca.runs.run import Run
from robustkpca.suites.budget import UNPERTURBED, Budget
from robustkpca.suites.cell import CLEAN_CELL, IN_DISTRIBUTION, OUT_OF_DISTRIBUTION, AttackId, Cell

WORST, MEAN = "worst case", "mean"


@dataclass(frozen=True)
class Column:
    """One column: how tables name it, and the cells it rests on. `how` they make one number of them."""

    suite: str  # "" for samples as they are
    attack: AttackId
    budget: Budget
    parts: tuple[Cell, ...]
    how: Literal["cell", "worst", "mean"] = "cell"

    @property
    def texts(self) -> tuple[str, str]:
        """`attack` and `budget` of tables."""
        return str(self.attack), str(self.budget)

    @property
    def clean(self) -> bool:
        return self.parts == (CLEAN_CELL,)

    @classmethod
    def of(cls, suite: str, cell: Cell) -> Column:
        return cls(suite, cell.attack, cell.budget, (cell,))


def columns_of(run: Run) -> list[Column]:
    """Every column of a run, in the order asked for."""
    # ImageNet-O has no accuracy: its images are of none of the classes.
    unperturbed = [cell for cell in run.conditions if cell not in (IN_DISTRIBUTION, OUT_OF_DISTRIBUTION)]
    columns = [Column.of("", cell) for cell in unperturbed]
    for suite in run.suites:
        columns += [Column.of(suite.name, cell) for cell in suite.cells]
        if suite.combination == "worst":
            for budget in suite.budgets:
                parts = tuple(Cell(attack, budget) for attack in suite.attacks)
                columns.append(Column(suite.name, AttackId(suite.name, WORST), budget, parts, "worst"))
    return columns


def compared_columns(run: Run) -> list[Column]:
    """Those in which models are compared: of a suite of several attacks the worst case, not its parts."""
    several = {suite.name for suite in run.suites if suite.combination == "worst"}
    return [column for column in columns_of(run) if column.suite not in several or column.how == "worst"]


def headline_columns(run: Run) -> list[Column]:
    """`compared_columns`, each suite of corruptions as one column, its mean."""
    averaged = {suite.name: suite for suite in run.suites if suite.combination == "mean"}
    columns = [column for column in compared_columns(run) if column.suite not in averaged]
    return columns + [mean_column(suite.name, suite.cells) for suite in averaged.values()]


def mean_column(suite: str, cells: Sequence[Cell]) -> Column:
    return Column(suite, AttackId(suite, MEAN), UNPERTURBED, tuple(cells), "mean")


def spelt_out(frame: pd.DataFrame) -> pd.DataFrame:
    """A table with columns attack, budget and perhaps suite, as it is handed out: an empty text, which readers of CSV
    take for a missing value, becomes a word. The suite of what belongs to none is its attack's first part, the budget
    of what has none its last: `clean` of clean samples, `mean` of the mean over corruptions."""
    parts = frame["attack"].astype(str).str.split("/")
    words = {"suite": parts.str[0], "budget": parts.str[-1]}
    return frame.assign(**{name: frame[name].where(frame[name] != "", words[name]) for name in words if name in frame})
