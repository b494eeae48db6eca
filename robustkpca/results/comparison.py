"""Paired comparisons of the models of a run, recomputed from rows."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import pandas as pd

from robustkpca.results.accuracy import results_of
from robustkpca.results.columns import compared_columns, spelt_out
from robustkpca.runs.run import Run
from robustkpca.statistics.proportions import holm

_made: WeakKeyDictionary[Run, dict[str, pd.DataFrame]] = WeakKeyDictionary()


def compare(run: Run, baseline: str | None = None) -> pd.DataFrame:
    """Every model against the baseline row (the first unless named) on the same samples, cell by cell.

    Columns: model, baseline, suite, attack, budget, n, difference (model minus baseline, in the score's unit: a share
    for an accuracy), low, high (its 95 % interval, of accuracies Bonett and Price's), gained, lost (of accuracies),
    p_value (of accuracies exact McNemar, two-sided), p_holm (Holm-adjusted over this table). Of a suite of several
    attacks the worst case is compared, not its parts. Cells that are not complete for both are left out. Suite and
    budget are words as in `accuracy_table`.
    """
    return spelt_out(compared(run, baseline))


def compared(run: Run, baseline: str | None = None) -> pd.DataFrame:
    """`compare`, with suite and budget as columns have them: empty for clean samples."""
    baseline = baseline or run.models[0]
    made = _made.setdefault(run, {})
    if baseline not in made:
        made[baseline] = _compare(run, baseline)
    return made[baseline].copy()


def _compare(run: Run, baseline: str) -> pd.DataFrame:
    results = results_of(run)
    records = []
    for model in run.models:
        if model == baseline:
            continue
        for column in compared_columns(run):
            if results.incomplete(model, column) or results.incomplete(baseline, column):
                continue
            pair = results.score.paired(results.rows(baseline, column), results.rows(model, column))
            attack, budget = column.texts
            records.append(
                {"model": model, "baseline": baseline, "suite": column.suite, "attack": attack, "budget": budget,
                 "n": pair.n, "difference": pair.difference, "low": pair.low, "high": pair.high, **pair.details,
                 "p_value": pair.p_value}
            )  # fmt: skip
    names = ["model", "baseline", "suite", "attack", "budget", "n", "difference", "low", "high",
             *results.score.pair_columns, "p_value"]  # fmt: skip
    frame = pd.DataFrame(records, columns=names)
    return frame.assign(p_holm=holm(frame["p_value"].to_numpy(float)))
