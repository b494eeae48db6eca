"""The regression check: a run against a baseline, cell by cell, on identical samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pandas as pd

from robustkpca import stats
from robustkpca.errors import SpecError
from robustkpca.outcomes import Run
from robustkpca.spec import OUT_OF_DISTRIBUTION, Cell

HOLDS, REGRESSED, NOT_COMPARABLE = 0, 1, 2  # exit codes
SUSPICIOUS = 20.0  # points; a gain that calls for a second look


@dataclass
class Verdict:
    """What check found. `code` is the exit code; `reasons` say why it is not 0; `notes` are worth a look."""

    code: int
    cells: pd.DataFrame  # model, attack, budget, n, baseline, now, change (points), p, verdict
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return {HOLDS: "holds", REGRESSED: "regressed", NOT_COMPARABLE: "not comparable"}[self.code]


def check(run: Run, baseline: Run, *, tolerance: float = 1.0, alpha: float = 0.05) -> Verdict:
    """Has accuracy dropped anywhere since the baseline?

    A cell regressed when its accuracy fell by more than `tolerance` points and the fall is significant: one-sided exact McNemar test
    on the same samples, Holm-adjusted over all cells, at level `alpha`. Every cell of the baseline must be there and whole; runs that
    differ in threat model, data, seed or dtype are not comparable, and neither is a run with broken rows.
    """
    if not (math.isfinite(tolerance) and 0 <= tolerance <= 100):
        raise SpecError(f"--tolerance: expected points from 0 to 100, got {tolerance}")
    if not 0 < alpha < 1:
        raise SpecError(f"--alpha: expected a level between 0 and 1, got {alpha}")
    pairs, reasons, notes = _comparable(run, baseline)
    if reasons:
        return Verdict(NOT_COMPARABLE, _frame([]), reasons, notes)
    records = []
    for theirs, ours in pairs.items():
        for cell in baseline.cells:
            before, now = baseline.cell_rows(theirs, cell), run.cell_rows(ours, cell)
            now = now.reindex(before.index)
            paired = stats.Paired.of(before["correct"].to_numpy(bool), now["correct"].to_numpy(bool))
            records.append(
                {
                    "model": ours, "attack": cell.attack, "budget": cell.budget, "n": paired.n,
                    "baseline": 100 * float(before["correct"].mean()), "now": 100 * float(now["correct"].mean()),
                    "change": 100 * paired.difference, "p": paired.p_worse,
                }
            )  # fmt: skip
    frame = _frame(records)
    frame["p"] = stats.holm(frame["p"].to_numpy(float))
    worse = (frame["change"] < -tolerance) & (frame["p"] < alpha)
    frame["verdict"] = worse.map({True: "regressed", False: "holds"})
    for row in frame[worse].itertuples():
        reasons.append(
            f"{row.model}, {_name(row.attack, row.budget)}: {row.baseline:.1f} -> {row.now:.1f} % "
            f"({row.change:+.1f} points, p = {row.p:.2g}, n = {row.n})"
        )
    for row in frame[frame["change"] > SUSPICIOUS].itertuples():
        notes.append(f"suspiciously better: {row.model}, {_name(row.attack, row.budget)}: {row.change:+.1f} points")
    return Verdict(REGRESSED if reasons else HOLDS, frame, reasons, notes)


def _frame(records: list[dict[str, object]]) -> pd.DataFrame:
    return pd.DataFrame(
        records, columns=["model", "attack", "budget", "n", "baseline", "now", "change", "p", "verdict"]
    )


def _name(attack: object, budget: object) -> str:
    return f"{attack} {budget}".strip()


def _comparable(run: Run, baseline: Run) -> tuple[dict[str, str], list[str], list[str]]:
    """Which model stands against which, why the runs may not be compared, and what differs harmlessly."""
    reasons, notes = [], []
    ours, theirs = run.request, baseline.request
    for key, what in (("seed", "seed"), ("dtype", "precision")):
        if ours[key] != theirs[key]:
            reasons.append(f"other {what}: {ours[key]} here, {theirs[key]} in the baseline")
    for key, what in (("n", "number of samples"), ("ids", "sample ids"), ("content", "image data")):
        if ours["data"][key] != theirs["data"][key]:
            reasons.append(f"other {what}: {ours['data'][key]} here, {theirs['data'][key]} in the baseline")
    if OUT_OF_DISTRIBUTION in baseline.conditions:
        reasons.append("ImageNet-O runs have no accuracy to compare; use `table --layout robustness`")
    here = {suite.name: suite for suite in run.suites}
    for suite in baseline.suites:
        if suite.name not in here:
            reasons.append(f"suite {suite.name} was not run; run were {', '.join(here)}")
        elif here[suite.name] != suite:
            reasons.append(f"other threat model or parameters in suite {suite.name}: [{here[suite.name].describe()}] here, "
                           f"[{suite.describe()}] in the baseline")  # fmt: skip
    if len(run.models) == len(baseline.models) == 1:
        pairs = {baseline.models[0]: run.models[0]}
        if run.models != baseline.models:
            notes.append(f"{run.models[0]} is compared with {baseline.models[0]}")
    else:
        pairs = {model: model for model in baseline.models}
        reasons += [f"model {m} was not run; run were {', '.join(run.models)}" for m in pairs if m not in run.models]
    if reasons:
        return {}, reasons, notes
    reasons += [f"in the baseline: {fault}" for fault in faults(baseline, pairs.keys(), baseline.cells)]
    reasons += [f"here: {fault}" for fault in faults(run, pairs.values(), baseline.cells)]
    if not reasons:
        for model, other in pairs.items():
            for cell in baseline.cells:
                left, right = baseline.cell_rows(model, cell), run.cell_rows(other, cell)
                if not left["label"].sort_index().equals(right["label"].sort_index()):
                    reasons.append(f"other samples or labels in {other}, {_name(cell.attack, cell.budget)}")
    for key in ("device", "software"):
        if ours[key] != theirs[key]:
            notes.append(f"other {key}: {ours[key]} here, {theirs[key]} in the baseline")
    return pairs, reasons, notes


def faults(run: Run, models: Iterable[str] | None = None, cells: Sequence[Cell] | None = None) -> list[str]:
    """Why figures of a run must not be believed: cells that are not complete or hold flagged rows, rows without a value."""
    models, cells = list(run.models if models is None else models), run.cells if cells is None else cells
    found = []
    for model in models:
        broken = [s for s in (run.status(model, cell) for cell in cells) if s.text != "complete"]
        found += [f"{model}, {_name(s.cell.attack, s.cell.budget)}: {s.text}" for s in broken[:3]]
        if len(broken) > 3:
            found.append(f"and {len(broken) - 3} more cells of {model}")
    if run.rows[["correct", "label", "prediction"]].isna().any(axis=None):
        found.append("rows without a value")
    return found
