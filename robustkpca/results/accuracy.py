"""From rows to numbers: the score of every cell with its interval, and worst cases.
Every number is recomputed from rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from weakref import WeakKeyDictionary

import pandas as pd

from robustkpca.results.columns import Column, columns_of, spelt_out
from robustkpca.runs.run import CellStatus, Run
from robustkpca.runs.schema import raises, remarks_of
from robustkpca.suites.cell import CLEAN, CLEAN_CELL, Cell
from robustkpca.tasks.score import Score

VALUE = "value"  # the column of `Results.table` that holds the score


class Results:
    """What is computed from a run, once. `results_of(run)` gives the one of a run."""

    def __init__(self, run: Run) -> None:
        self.run = run

    @property
    def score(self) -> Score:
        return self.run.task.score

    @cached_property
    def table(self) -> pd.DataFrame:
        """The long form of every table: one row for each model and column, in the order asked for.

        Columns: model, suite, attack, budget, status, n, the score's counts, value, low, high, the score's extras.
        """
        score = self.score
        columns = columns_of(self.run)
        records = [self._record(model, column) for model in self.run.models for column in columns]
        names = ["model", "suite", "attack", "budget", "status", "n", *score.count_columns]
        numbers = [VALUE, "low", "high", *score.extra_columns]
        frame = pd.DataFrame(records, columns=[*names, *numbers])
        return frame.astype(dict.fromkeys(["n", *score.count_columns], "Int64") | dict.fromkeys(numbers, "Float64"))

    def _record(self, model: str, column: Column) -> dict[str, object]:
        attack, budget = column.texts
        record: dict[str, object] = {"model": model, "suite": column.suite, "attack": attack, "budget": budget}
        if bad := self.incomplete(model, column):
            return {**record, "status": bad[0].text}
        rows = self.rows(model, column)
        low, high = self.score.interval(rows)
        clean = None if column.clean else self.run.cell_rows(model, CLEAN_CELL)
        record |= {"status": "complete", "n": len(rows), VALUE: self.score.value(rows), "low": low, "high": high}
        return record | self.score.details(rows, clean)

    def incomplete(self, model: str, column: Column) -> list[CellStatus]:
        """Statuses of the cells that a column rests on and that have no result."""
        statuses = [self.run.status(model, part) for part in column.parts]
        return [status for status in statuses if not status.complete]

    def rows(self, model: str, column: Column) -> pd.DataFrame:
        """One row for each sample, indexed by sample id; of several cells the worst."""
        frames = self.parts(model, column)
        return frames[0] if column.how == "cell" else self.score.worst(frames)

    def parts(self, model: str, column: Column) -> list[pd.DataFrame]:
        """The rows of each cell that a column rests on."""
        return [self.run.cell_rows(model, part) for part in column.parts]

    def untried(self, model: str, column: Column) -> int:
        """How many samples are right in a column because no attack of it could be tried on them."""
        remarks = remarks_of(self.run.task)
        parts = [raises(rows, remarks) for rows in self.parts(model, column)]
        return int(pd.concat(parts, axis=1).fillna(False).all(axis=1).sum())

    @cached_property
    def broken(self) -> pd.DataFrame:
        """See `worst_case`; broken_by is empty when right."""
        frames = []
        for model in self.run.models:
            for suite in self.run.suites:
                for budget in suite.budgets if suite.combination == "worst" else ():
                    cells = [Cell(attack, budget) for attack in suite.attacks]
                    if all(self.run.status(model, cell).complete for cell in [CLEAN_CELL, *cells]):
                        frames.append(self._broken(model, suite.name, suite.cascade, cells))
        columns = ["model", "suite", "budget", "sample", "correct", "broken_by"]
        return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=columns)

    def _broken(self, model: str, suite: str, cascade: bool, cells: Sequence[Cell]) -> pd.DataFrame:
        task = self.run.task
        parts = [task.right(self.run.cell_rows(model, cell)) for cell in cells]
        right = pd.concat(parts, axis=1, keys=[str(cell.attack) for cell in cells]).astype(bool)
        clean = task.right(self.run.cell_rows(model, CLEAN_CELL)).reindex(right.index)
        names = [[label for label, ok in row.items() if not ok] for row in right.to_dict("records")]
        breakers = [by[:1] if cascade else by for by in names]
        by_whom = [",".join(map(str, by)) if ok else CLEAN for by, ok in zip(breakers, clean, strict=True)]
        return pd.DataFrame(
            {"model": model, "suite": suite, "budget": str(cells[0].budget), "sample": right.index,
             "correct": right.all(axis=1).to_numpy(), "broken_by": by_whom}
        )  # fmt: skip


_made: WeakKeyDictionary[Run, Results] = WeakKeyDictionary()


def results_of(run: Run) -> Results:
    """The results of a run, computed once for all who ask."""
    if run not in _made:
        _made[run] = Results(run)
    return _made[run]


def accuracy_table(run: Run) -> pd.DataFrame:
    """One row for each model and cell, in the order asked for; the long form of every table.

    Columns: model, suite, attack, budget, status ("complete", "not run", "incomplete k/n", "failed: ..."), n, correct,
    accuracy, low, high (95 % Wilson interval), top5, success_rate (of the samples that were right when clean, the share
    wrong now). Shares in [0, 1], empty (NA) unless the cell is complete: n then is the whole set. A suite of several
    attacks adds its worst case: a sample counts as right when it is right under every attack. For another task than
    classification the score's own name and columns stand in place of accuracy. Suite and budget of what was not
    perturbed are words, too (`clean` for clean samples), so that the table comes back whole from a CSV file.
    """
    results = results_of(run)
    return spelt_out(results.table.rename(columns={VALUE: results.score.name}))


def worst_case(run: Run) -> pd.DataFrame:
    """For suites of several attacks: whether each sample is right under all of them, and which attacks broke it.

    Columns: model, suite, budget, sample, correct, broken_by: "nothing" when right, "clean" when wrong without an
    attack, else the attacks that broke it, joined by commas, in the suite's order (in a cascade the first alone, as the
    others did not see it). Only what is complete.
    """
    broken = results_of(run).broken
    return broken.assign(broken_by=broken["broken_by"].where(broken["broken_by"] != "", "nothing"))


def breakers(run: Run) -> pd.DataFrame:
    """How many samples each attack of a suite of several broke, and how many no other did.

    Columns: model, suite, attack, budget, broken, alone.
    """
    samples = results_of(run).broken
    records = []
    for (model, suite_name, budget), part in samples.groupby(["model", "suite", "budget"], sort=False):
        suite = next(s for s in run.suites if s.name == suite_name)
        by = part["broken_by"].str.split(",")
        for attack in map(str, suite.attacks):
            broken = by.map(lambda names, attack=attack: attack in names)
            records.append(
                {"model": model, "suite": suite_name, "attack": attack, "budget": budget, "broken": int(broken.sum()),
                 "alone": int((broken & (by.map(len) == 1)).sum())}
            )  # fmt: skip
    return pd.DataFrame(records, columns=["model", "suite", "attack", "budget", "broken", "alone"])
