"""What a rule is, and a run as rules see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import pandas as pd

from robustkpca.extensions import Registry
from robustkpca.models.settings import ModelSettings
from robustkpca.runs.run import Run
from robustkpca.statistics.proportions import Paired
from robustkpca.suites.attack import AttackSpec
from robustkpca.suites.budget import Budget
from robustkpca.suites.cell import CLEAN_CELL, AttackId, Cell
from robustkpca.suites.suite import Suite
from robustkpca.suites.threat import Ball, Threat

Level = Literal["pass", "warn", "fail"]
Seen = tuple[Level, str, str] | None  # level, what was seen, what it means and what to do; None: nothing to judge by
LEVEL = 0.01  # of the one-sided tests below
FEWEST = 7  # samples that must change, all in one direction, for the exact McNemar test to be significant
ENOUGH = 2 * FEWEST  # samples below which not even a difference of half of them shows
POINTS = 0.01  # a share of the samples too small to make a finding of, whatever its p value


@dataclass(frozen=True)
class Rule:
    """One reason not to believe a number. `tasks`: those it applies to; empty for all. `fewest`: samples that a pass
    needs; with less it is not judged, unless something is wrong."""

    name: str
    judge: Callable[[Model], Seen]
    tasks: tuple[str, ...]
    fewest: int = 0


RULES: Registry[Rule] = Registry("rule", "robustkpca.rules")


def rule(name: str, *tasks: str, fewest: int = 0) -> Callable[[Callable[[Model], Seen]], Callable[[Model], Seen]]:
    """Make a function a rule: it looks at one model of one run, and says pass, warn or fail, or None where the run does
    not hold what it needs. `tasks`: those it applies to; none for all. `fewest`: see `Rule`."""

    def add(judge: Callable[[Model], Seen]) -> Callable[[Model], Seen]:
        RULES.register(name)(Rule(name, judge, tasks, fewest))
        return judge

    return add


@dataclass(frozen=True)
class Measured:
    """One attack at one budget, whole: its rows, and which samples are still right, by id."""

    id: AttackId
    suite: Suite
    spec: AttackSpec
    budget: Budget
    rows: pd.DataFrame
    correct: pd.Series
    value: str  # of the score, as it is shown
    search: str | None  # of its method, see `robustkpca.attacks.registry.Method`
    rpc: bool  # whether the model has the attention that gradient paths go around

    @property
    def threat(self) -> Threat:
        return self.suite.threat

    @property
    def ball(self) -> Ball | None:
        return self.threat if isinstance(self.threat, Ball) else None

    @property
    def own(self) -> bool:
        """Whether it goes along the model's own gradient."""
        return self.search != "blind" and (self.spec.through == "full" or not self.rpc)

    @property
    def name(self) -> str:
        return f"{self.id} at {self.threat.budget_word} {self.budget}"

    @property
    def effort(self) -> float:
        """Gradient steps."""
        p = self.spec.parameters
        return float(p.get("steps", 1)) * float(p.get("restarts", p.get("n_restarts", 1)))

    @property
    def text(self) -> str:
        return f"{self.name} {self.value}"


class Model:
    """One model of a run, as the rules see it."""

    def __init__(self, run: Run, name: str) -> None:
        self.run, self.name, self.record = run, name, run.request.model(name)
        self.health: dict[str, Any] | None = run.health.get(name)
        self.clean = self.rows(CLEAN_CELL)

    @property
    def settings(self) -> ModelSettings | None:
        return self.record.vision

    def rows(self, cell: Cell) -> pd.DataFrame | None:
        """The rows of a cell; None where it is not complete."""
        asked_for = cell in self.run.cells and self.run.status(self.name, cell).complete
        return self.run.cell_rows(self.name, cell) if asked_for else None

    def right(self, rows: pd.DataFrame) -> pd.Series:
        return self.run.task.right(rows)

    def shown(self, rows: pd.DataFrame) -> str:
        """The score of rows with its unit."""
        score = self.run.task.score
        return f"{score.shown(score.value(rows))} {score.unit}".strip()

    def clearly_worse(self, first: pd.DataFrame, second: pd.DataFrame) -> bool:
        """Whether the second result is worse beyond chance and by more than a trifle."""
        score = self.run.task.score
        pair = score.paired(first, second)
        return score.worse(pair.difference) and abs(pair.difference) > score.trifle and pair.p_worse < LEVEL

    @cached_property
    def attacks(self) -> list[Measured]:
        """Attacks; not those of cascades, whose rows add up: none is an attack's alone."""
        rpc = bool(self.settings and self.settings.rpc)
        measured = []
        for suite in self.run.suites:
            for attack, spec in suite.attacks.items() if not suite.cascade else ():
                for budget in suite.budgets:
                    rows = self.rows(Cell(attack, budget))
                    if rows is not None:
                        right, search = self.right(rows), self.run.request.searches.get(spec.method)
                        value = self.shown(rows)
                        measured.append(Measured(attack, suite, spec, budget, rows, right, value, search, rpc))
        return measured

    @property
    def resolution(self) -> str:
        """What a comparison on so many samples can show."""
        points = 100 * FEWEST / self.run.n
        return f"nothing clear at n = {self.run.n}, where differences under {points:.0f} points do not show"

    def groups(self) -> Iterator[list[Measured]]:
        """Attacks within balls, of one threat model at one budget above 0."""
        balls = [m for m in self.attacks if m.ball and m.budget.value > 0]
        for key in dict.fromkeys((m.threat.family, m.budget) for m in balls):
            yield [m for m in balls if (m.threat.family, m.budget) == key]


def paired(first: pd.Series, second: pd.Series) -> Paired:
    """Which samples are right with the second and not the first, and the other way round."""
    return Paired.of(first.to_numpy(bool), second.reindex(first.index).to_numpy(bool))


def clearly_lower(pair: Paired) -> bool:
    """Whether the second is lower beyond chance and by more than a trifle."""
    return pair.difference < -POINTS and pair.p_worse < LEVEL


def compared(m: Model, seen: Sequence[Seen], passed: str) -> Seen:
    """`gravest` of comparisons: too few samples to see a difference of half of them pass nothing."""
    if m.run.n < ENOUGH and all(s is None for s in seen):
        return None
    return gravest(seen, f"{passed} ({m.resolution})")


def gravest(seen: Sequence[Seen], passed: str) -> Seen:
    """The gravest of what was seen; `passed` where there was something to look at and nothing was wrong."""
    for level in ("fail", "warn"):
        for s in seen:
            if s is not None and s[0] == level:
                return s
    return ("pass", passed, "") if seen else None
