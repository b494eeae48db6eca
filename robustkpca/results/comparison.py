"""Paired comparisons of the models of a run, recomputed from rows."""

from __future__ import annotations

import pandas as pd

from robustkpca.results.accuracy import columns_of
from robustkpca.runs.run import Run
from robustkpca.statistics import proportions
from robustkpca.suites.cell import Cell


def compared_columns(run: Run) -> list[tuple[str, Cell, list[Cell]]]:
    """Those of `columns_of` in which models are compared: of a suite of several attacks the worst case, not its parts."""
    several = {s.name for s in run.suites if len(s.attack) > 1}
    return [column for column in columns_of(run) if column[0] not in several or len(column[2]) > 1]


def compare(run: Run, baseline: str | None = None) -> pd.DataFrame:
    """Every model against the baseline row (the first unless named) on the same samples, cell by cell.

    Columns: model, baseline, suite, attack, budget, n, difference (share, model minus baseline), low, high (its 95 % interval, Bonett and
    Price), gained, lost, p_value (exact McNemar, two-sided), p_holm (Holm-adjusted over this table). Of a suite of several attacks the
    worst case is compared, not its parts. Cells that are not complete for both are left out.
    """
    baseline = baseline or run.models[0]
    records = []
    for model in run.models:
        if model == baseline:
            continue
        for suite, cell, parts in compared_columns(run):
            if any(run.status(m, part).text != "complete" for m in (model, baseline) for part in parts):
                continue
            ours, theirs = (
                pd.concat([run.cell_rows(m, part)["correct"] for part in parts], axis=1).all(axis=1)
                for m in (model, baseline)
            )
            paired = proportions.Paired.of(theirs.to_numpy(bool), ours.reindex(theirs.index).to_numpy(bool))
            low, high = paired.interval()
            records.append(
                {
                    "model": model, "baseline": baseline, "suite": suite, "attack": cell.attack, "budget": cell.budget,
                    "n": paired.n, "difference": paired.difference, "low": low, "high": high, "gained": paired.gained, "lost": paired.lost,
                    "p_value": paired.p_value,
                }
            )  # fmt: skip
    names = ["model", "baseline", "suite", "attack", "budget", "n", "difference", "low", "high", "gained", "lost",
             "p_value"]  # fmt: skip
    frame = pd.DataFrame(records, columns=names)
    return frame.assign(p_holm=proportions.holm(frame["p_value"].to_numpy(float)))
