"""Corruptions: the mean over severities, corruption errors and mCE, worked out here and nowhere else.
Errors are in per cent."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from robustkpca.errors import RunError
from robustkpca.results.columns import MEAN
from robustkpca.runs.run import Run
from robustkpca.suites.cell import RELEASED, Cell
from robustkpca.suites.suite import Suite

# AlexNet's top-1 error in %, mean over the five severities: what a corruption error (CE) is divided by (Hendrycks and
# Dietterich 2019).
ALEXNET: dict[str, float] = {
    "gaussian_noise": 88.6428,
    "shot_noise": 89.4468,
    "impulse_noise": 92.2640,
    "defocus_blur": 81.9880,
    "glass_blur": 82.6268,
    "motion_blur": 78.5948,
    "zoom_blur": 79.8360,
    "snow": 86.6816,
    "frost": 82.6572,
    "fog": 81.9324,
    "brightness": 56.4592,
    "contrast": 85.3204,
    "elastic_transform": 64.6056,
    "pixelate": 71.7840,
    "jpeg_compression": 60.6500,
}
SEVERITIES = (1, 2, 3, 4, 5)


def corruption_error(corruption: str, mean_error: float) -> float | None:
    """CE in %: the mean error (%) over the severities by AlexNet's;
    None for a corruption without a published AlexNet error."""
    return 100 * mean_error / ALEXNET[corruption] if corruption in ALEXNET else None


def mean_corruption_error(mean_errors: Mapping[str, float | None]) -> float | None:
    """mCE in %: the mean CE over exactly the 15 corruptions, each normalised first.
    None when one of them is missing."""
    values = {name: value for name in ALEXNET if (value := mean_errors.get(name)) is not None}
    if len(values) < len(ALEXNET):
        return None
    return float(np.mean([100 * value / ALEXNET[name] for name, value in values.items()]))


def corruption_table(run: Run) -> pd.DataFrame:
    """Errors of a run on released ImageNet-C: one row per model and corruption.

    Columns: model, corruption, status, severity_1 ... severity_5 (error %), mean_error, ce. A corruption with a
    severity missing or incomplete has the reason as its status, and neither mean nor CE: nothing is averaged over four.
    Severities that are whole keep their number.
    """
    names = list(dict.fromkeys(c.attack.attack for c in run.conditions if c.attack.suite == RELEASED))
    if not names:
        raise RunError(f"run {run.name}: its data are not released ImageNet-C (imagenet-c:DIR)")
    records = [_released(run, model, name) for model in run.models for name in names]
    columns = ["model", "corruption", "status", *(f"severity_{s}" for s in SEVERITIES), "mean_error", "ce"]
    frame = pd.DataFrame(records, columns=columns)
    return frame.astype(dict.fromkeys(columns[3:], "Float64"))


def _released(run: Run, model: str, corruption: str) -> dict[str, object]:
    record: dict[str, object] = {"model": model, "corruption": corruption, "status": "complete"}
    errors = []
    for severity in SEVERITIES:
        cell = Cell.parse(f"{RELEASED}/{corruption}", str(severity))
        status = run.status(model, cell)
        if status.complete:
            errors.append(100 * (1 - run.task.score.value(run.cell_rows(model, cell))))
            record[f"severity_{severity}"] = errors[-1]
        elif record["status"] == "complete":
            failed = status.text.startswith("failed")
            record["status"] = status.text if failed else f"incomplete: severity {severity} {status.text}"
    if record["status"] == "complete":
        record["mean_error"] = float(np.mean(errors))
        record["ce"] = corruption_error(corruption, float(np.mean(errors)))
    return record


def released_means(run: Run) -> pd.DataFrame:
    """Of a run on released ImageNet-C: model (index), mean_error over the 15 corruptions and mce, in %; NA unless all
    15 are complete."""
    table = corruption_table(run)
    records = []
    for model, rows in table.groupby("model", sort=False):
        means = {str(r.corruption): None if pd.isna(r.mean_error) else float(r.mean_error) for r in rows.itertuples()}
        mce = mean_corruption_error(means)
        mean = None if mce is None else float(np.mean([means[name] for name in ALEXNET]))
        records.append({"model": model, "mean_error": mean, "mce": mce})
    frame = pd.DataFrame(records, columns=["model", "mean_error", "mce"]).set_index("model")
    return frame.astype("Float64")


def generated_means(long: pd.DataFrame, suite: Suite) -> pd.DataFrame:
    """The mean over severities of each generated corruption, and over all of them.

    `long`: `Results.table` or `trainings.shown_table`. Columns: model, corruption (of the last row of each model MEAN),
    value (in the score's unit; NA unless everything below it is complete), status.
    """
    records = []
    for model in long["model"].unique():
        results = long[(long["model"] == model) & (long["suite"] == suite.name)]
        means: list[float] = []
        for spec in suite.specs:
            cells = results[results["attack"] == str(suite.attack_id(spec.name))]
            bad = cells.loc[cells["status"] != "complete", "status"]
            record = {"model": model, "corruption": spec.name, "status": "complete"}
            if bad.empty:
                means.append(float(cells["value"].mean()))
                record["value"] = means[-1]
            else:
                record["status"] = f"{bad.iloc[0]} ({len(bad)} of {len(cells)} severities)"
            records.append(record)
        whole = len(means) == len(suite.specs)
        mean = {"value": sum(means) / len(means), "status": "complete"} if whole else {"status": "not available"}
        records.append({"model": model, "corruption": MEAN, **mean})
    frame = pd.DataFrame(records, columns=["model", "corruption", "value", "status"])
    return frame.astype({"value": "Float64"})
