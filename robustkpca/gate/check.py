"""The regression check: a run against a baseline, cell by cell, on identical samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import Field, field_validator, model_validator

from robustkpca.config import Frozen, read_toml
from robustkpca.diagnosis.findings import findings
from robustkpca.errors import SpecError
from robustkpca.runs.names import names
from robustkpca.runs.request import ModelRecord, differences
from robustkpca.runs.run import Run
from robustkpca.statistics.proportions import holm
from robustkpca.suites.budget import eps_text, parse_eps
from robustkpca.suites.cell import OUT_OF_DISTRIBUTION, Cell
from robustkpca.tasks.score import Comparison, Score

HOLDS, REGRESSED, INVALID = 0, 1, 2  # exit codes
COLUMNS = ["model", "attack", "budget", "n", "baseline", "now", "change", "low", "high", "p", "tolerance", "verdict"]


class CellTolerance(Frozen):
    """Other limits for the cells whose model, attack and budget match these patterns (`*`, `?`, `[...]`)."""

    model: str = "*"
    attack: str = "*"
    budget: str = "*"
    tolerance: float | None = Field(default=None, ge=0, le=100, allow_inf_nan=False, strict=True)
    gain: float | None = Field(default=None, ge=0, le=100, allow_inf_nan=False, strict=True)

    @model_validator(mode="after")
    def _limits_something(self) -> CellTolerance:
        if self.tolerance is None and self.gain is None:
            raise ValueError("expected tolerance or gain")
        return self

    @field_validator("budget")
    @classmethod
    def _as_rows_have_it(cls, budget: str) -> str:
        """0.0313725 is 8/255; patterns and severities stay as they are."""
        try:
            return eps_text(parse_eps(budget))
        except SpecError:
            return budget

    def matches(self, model: str, cell: Cell) -> bool:
        attack, budget = cell.texts
        pairs = ((model, self.model), (attack, self.attack), (budget, self.budget))
        return all(fnmatchcase(value, pattern) for value, pattern in pairs)

    def describe(self) -> str:
        return f"model {self.model!r}, attack {self.attack!r}, budget {self.budget!r}"


class Tolerances(Frozen):
    """How many points a cell may lose, and how many it may gain before that is suspicious. Of the [[cell]] tables that
    match, the last decides."""

    tolerance: float = Field(default=1.0, ge=0, le=100, allow_inf_nan=False, strict=True)
    gain: float = Field(default=20.0, ge=0, le=100, allow_inf_nan=False, strict=True)
    cell: tuple[CellTolerance, ...] = ()

    @field_validator("cell", mode="before")
    @classmethod
    def _tables(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise ValueError("expected [[cell]] tables, in double brackets")
        return value

    @classmethod
    def load(cls, path: Path) -> Tolerances:
        """From a TOML file; an unknown key is an error."""
        return cls.parse(read_toml(path, "tolerances"), f"tolerances {path}")

    def of(self, model: str, cell: Cell) -> tuple[float, float]:
        """(tolerance, gain) of one cell."""
        tolerance, gain = self.tolerance, self.gain
        for rule in self.cell:
            if rule.matches(model, cell):
                tolerance = tolerance if rule.tolerance is None else rule.tolerance
                gain = gain if rule.gain is None else rule.gain
        return tolerance, gain


@dataclass
class Verdict:
    """What check found. `code` is the exit code; `reasons` say what regressed, or why nothing could be compared;
    `doubts` why the run is not to be believed; `notes` are worth a look. `cells` has COLUMNS (figures in per cent,
    changes in points), empty where nothing was compared."""

    code: int
    cells: pd.DataFrame
    reasons: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def invalid(cls, reasons: list[str], notes: Sequence[str] = ()) -> Verdict:
        """Nothing could be compared."""
        return cls(INVALID, pd.DataFrame(columns=COLUMNS), reasons, notes=list(notes))

    @property
    def text(self) -> str:
        if self.code == INVALID:
            return "not comparable" if self.reasons else "not to be believed"
        return {HOLDS: "holds", REGRESSED: "regressed"}[self.code]

    @property
    def lines(self) -> list[str]:
        """Reasons and doubts, each with what it is."""
        word = "regressed" if self.code == REGRESSED else "not comparable"
        return [f"{word}: {r}" for r in self.reasons] + [f"not to be believed: {d}" for d in self.doubts]


def check(
    run: Run, baseline: Run, *, tolerance: float = 1.0, alpha: float = 0.05, tolerances: Tolerances | None = None
) -> Verdict:
    """Has accuracy dropped anywhere since the baseline?

    A cell regressed when its accuracy fell by more than its tolerance (points) and the fall is significant: one-sided
    exact McNemar test on the same samples, Holm-adjusted over all cells, at level `alpha`. Likewise a gain beyond
    `Tolerances.gain` is suspicious. Every cell of the baseline must be there and whole; runs that differ in threat
    model, data, seed or dtype are not comparable; and a run with broken rows or a finding of level fail is not to be
    believed. `tolerances` replaces `tolerance` and gives cells limits of their own.
    """
    if not (math.isfinite(tolerance) and 0 <= tolerance <= 100):
        raise SpecError(f"--tolerance: expected points from 0 to 100, got {tolerance}")
    if not 0 < alpha < 1:
        raise SpecError(f"--alpha: expected a level between 0 and 1, got {alpha}")
    limits = tolerances or Tolerances(tolerance=tolerance)
    pairs, reasons, notes = _comparable(run, baseline)
    for rule in limits.cell:
        if pairs and not any(rule.matches(ours, cell) for ours in pairs.values() for cell in baseline.cells):
            reasons.append(f"tolerances: no cell matches {rule.describe()}")
    if reasons:
        return Verdict.invalid(reasons, notes)
    score = run.task.score
    frame = _judged(_pairs(run, baseline, pairs), score, limits, alpha)
    regressed, suspicious = (frame[frame["verdict"] == v] for v in ("regressed", "suspicious"))
    reasons += [_changed(row, score) for row in regressed.itertuples()]
    doubts = [f"suspiciously better: {_changed(row, score)}" for row in suspicious.itertuples()]
    doubts += failures(run)
    code = REGRESSED if reasons else INVALID if doubts else HOLDS
    return Verdict(code, frame, reasons, doubts, notes)


def failures(run: Run) -> list[str]:
    """The findings of level fail, in words."""
    return [f"{f.rule}, {f.model}: {f.message}. {f.advice}" for f in findings(run) if f.level == "fail"]


def _pairs(run: Run, baseline: Run, pairs: dict[str, str]) -> dict[tuple[str, Cell], Comparison]:
    """Before and now for each model of the run and each cell of the baseline, sample by sample."""
    score = run.task.score
    return {
        (ours, cell): score.paired(baseline.cell_rows(theirs, cell), run.cell_rows(ours, cell))
        for theirs, ours in pairs.items()
        for cell in baseline.cells
    }


def _judged(pairs: dict[tuple[str, Cell], Comparison], score: Score, limits: Tolerances, alpha: float) -> pd.DataFrame:
    """The frame of a Verdict, in the units that are shown."""
    worse = holm([p.p_worse for p in pairs.values()])
    better = holm([p.p_better for p in pairs.values()])
    records: list[list[Any]] = []
    for ((model, cell), pair), p_worse, p_better in zip(pairs.items(), worse, better, strict=True):
        tolerance, gain = limits.of(model, cell)
        change = score.scale * pair.difference
        improvement = change if score.higher_is_better else -change
        verdict, p = "holds", p_worse
        if improvement < -tolerance and p_worse < alpha:
            verdict = "regressed"
        elif improvement > gain and p_better < alpha:
            verdict, p = "suspicious", p_better
        before = score.scale * pair.first
        low, high = score.scale * pair.low, score.scale * pair.high
        records.append([model, *cell.texts, pair.n, before, before + change, change, low, high, p, tolerance, verdict])
    return pd.DataFrame(records, columns=COLUMNS)


def _changed(row: Any, score: Score) -> str:
    unit, d = f" {score.unit}" if score.unit else "", score.decimals
    return (
        f"{row.model}, {_name(row.attack, row.budget)}: {row.baseline:.{d}f} -> {row.now:.{d}f}{unit} "
        f"({row.change:+.{d}f} {score.difference_unit}, {row.low:+.{d}f} to {row.high:+.{d}f}; p = {row.p:.2g}, "
        f"n = {row.n})"
    )


def _name(attack: object, budget: object) -> str:
    return f"{attack} {budget}".strip()


def _comparable(run: Run, baseline: Run) -> tuple[dict[str, str], list[str], list[str]]:
    """Which model stands against which, why the runs may not be compared, and what differs harmlessly."""
    reasons, notes = _differences(run, baseline)
    pairs, alone, noted = _same_models(run, baseline)
    reasons, notes = reasons + alone, notes + noted
    for before, now in pairs.items():
        here, there = (r.request.model(label).dtype or r.request.dtype for r, label in ((run, now), (baseline, before)))
        if here != there and run.request.dtype == baseline.request.dtype:
            reasons.append(f"other precision of {now}: {here} here, {there} in the baseline")
    if reasons:
        return {}, reasons, notes
    reasons += [f"in the baseline: {fault}" for fault in faults(baseline, pairs.keys(), baseline.cells)]
    reasons += [f"here: {fault}" for fault in faults(run, pairs.values(), baseline.cells)]
    if not reasons:
        columns = list(run.task.ground_truth)
        for model, other in pairs.items():
            for cell in baseline.cells:
                left, right = baseline.cell_rows(model, cell), run.cell_rows(other, cell)
                if not _same(left, right, columns):
                    reasons.append(f"other samples or labels in {other}, {cell}")
    return pairs, reasons, notes


def _same_models(run: Run, baseline: Run) -> tuple[dict[str, str], list[str], list[str]]:
    """(pairs, reasons, notes): for each model of the baseline, by its label, that of the run; why one has none; what is
    worth a look. Models are the same by their names, which paths tell apart and the order of files does not
    (`robustkpca.runs.names`), else by their weights and settings. One model each need not have one name."""
    ours, theirs = ({model.label: model for model in r.request.models} for r in (run, baseline))
    if len(ours) == len(theirs) == 1:
        pairs = dict(zip(theirs, ours, strict=True))
        notes = [f"{now} is compared with {before}" for before, now in pairs.items() if before != now]
        return pairs, [], notes + _otherwise(ours, theirs, pairs)
    named = dict(zip(names(list(ours.values())), ours, strict=True))
    pairs = {
        label: named[name] for label, name in zip(theirs, names(list(theirs.values())), strict=True) if name in named
    }
    reasons, notes = [], []
    for label, model in theirs.items():
        if label in pairs:
            continue
        alike = [
            o.label for o in ours.values() if o.usable and (o.weights, o.settings) == (model.weights, model.settings)
        ]
        free = [other for other in alike if other not in pairs.values()]
        if len(free) == 1:
            pairs[label] = free[0]
            notes.append(f"{free[0]} is compared with {label}, which has its weights")
        elif free:
            reasons.append(f"model {label} may be any of {', '.join(free)}, which all have its weights")
        else:
            reasons.append(f"model {label} was not run; run were {', '.join(ours)}")
    return pairs, reasons, notes + _otherwise(ours, theirs, pairs)


def _otherwise(ours: Mapping[str, ModelRecord], theirs: Mapping[str, ModelRecord], pairs: dict[str, str]) -> list[str]:
    """Where the settings of a model differ from those it had in the baseline, as notes."""
    notes = []
    for before, now in pairs.items():
        plain = [m.model_dump(mode="json", by_alias=True)["settings"] for m in (ours[now], theirs[before])]
        if lines := differences(*plain):
            notes.append(f"other settings of {now}: {'; '.join(lines[:3])}")
    return notes


def _same(left: pd.DataFrame, right: pd.DataFrame, columns: Sequence[str]) -> bool:
    """Whether two frames hold the same samples and the same values in `columns`, in whatever order."""
    if not left.index.equals(right.index):  # sorting takes most of the time of a check
        left, right = left.sort_index(), right.sort_index()
    same: bool = left.index.equals(right.index) and all(left[c].equals(right[c]) for c in columns)
    return same


def _differences(run: Run, baseline: Run) -> tuple[list[str], list[str]]:
    """Where the requests differ: why the runs may not be compared, and what differs harmlessly."""
    reasons, notes = [], []
    ours, theirs = run.request, baseline.request
    wanted = [
        ("task", ours.task, theirs.task),
        ("seed", ours.seed, theirs.seed),
        ("precision", ours.dtype, theirs.dtype),
        ("choice of answers", ours.data.argmax, theirs.data.argmax),
        ("way of resizing", ours.data.resized, theirs.data.resized),
        ("number of samples", ours.data.n, theirs.data.n),
        ("sample ids", ours.data.ids, theirs.data.ids),
        ("image data", ours.data.content, theirs.data.content),
    ]
    decided = {*ours.batch_decides, *theirs.batch_decides}
    if any(attack.method in decided for suite in baseline.suites for attack in suite.attack):
        wanted.append(("batch size, which decides results", ours.batch_size, theirs.batch_size))
    reasons += [f"other {what}: {here} here, {there} in the baseline" for what, here, there in wanted if here != there]
    if OUT_OF_DISTRIBUTION in baseline.conditions:
        reasons.append("ImageNet-O runs have no accuracy to compare; use `table --layout robustness`")
    here = {suite.name: suite for suite in run.suites}
    for suite in baseline.suites:
        if suite.name not in here:
            reasons.append(f"suite {suite.name} was not run; run were {', '.join(here)}")
        elif here[suite.name] != suite:
            reasons.append(
                f"other threat model or parameters in suite {suite.name}: "
                f"[{here[suite.name].describe()}] here, [{suite.describe()}] in the baseline"
            )
    harmless = [("device", ours.device, theirs.device), ("software", ours.software, theirs.software)]
    notes += [f"other {what}: {here} here, {there} in the baseline" for what, here, there in harmless if here != there]
    if run.path is not None and not run.manifest.sealed:
        notes.append(f"run {run.name} was begun before records had checksums: whether it was changed cannot be told")
    return reasons, notes


def faults(run: Run, models: Iterable[str] | None = None, cells: Sequence[Cell] | None = None) -> list[str]:
    """Why numbers of a run must not be believed: cells that are not complete or hold flagged rows, models whose health
    was not recorded, rows without a value."""
    models, cells = list(run.models if models is None else models), run.cells if cells is None else cells
    reasons = []
    for model in models:
        broken = [s for s in (run.status(model, cell) for cell in cells) if not s.complete]
        reasons += [f"{model}, {s.cell}: {s.text}" for s in broken[:3]]
        if len(broken) > 3:
            reasons.append(f"and {len(broken) - 3} more cells of {model}")
        if run.task.health_samples and run.request.model(model).usable and not run.health.get(model):
            reasons.append(f"{model}: no record of its health; the command that made the run makes it again")
    return reasons + run.task.sound(run.rows, {model.label: model.vision for model in run.request.models})
