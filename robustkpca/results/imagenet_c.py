"""The figures of ImageNet-C and ImageNet-O, recomputed from rows. Errors are in per cent, areas are shares in [0, 1]."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from robustkpca.errors import RunError
from robustkpca.runs.run import Run
from robustkpca.suites.cell import RELEASED, Cell

# AlexNet's top-1 error in %, mean over the five severities: what a corruption error (CE) is divided by (Hendrycks and Dietterich 2019).
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
    """CE in %: the mean error (%) over the severities by AlexNet's; None for a corruption without a published AlexNet error."""
    return 100 * mean_error / ALEXNET[corruption] if corruption in ALEXNET else None


def mean_corruption_error(mean_errors: Mapping[str, float | None]) -> float | None:
    """mCE in %: the mean CE over exactly the 15 corruptions, each normalised first. None when one of them is missing."""
    values = [mean_errors.get(name) for name in ALEXNET]
    if any(value is None for value in values):
        return None
    return float(np.mean([100 * value / ALEXNET[name] for name, value in zip(ALEXNET, values, strict=True)]))  # type: ignore[operator]


def corruption_table(run: Run) -> pd.DataFrame:
    """Errors of a run on released ImageNet-C: one row per model and corruption.

    Columns: model, corruption, status, severity_1 ... severity_5 (error %), mean_error, ce. A corruption with a severity missing or
    incomplete has the reason as its status, and neither mean nor CE: nothing is averaged over four. Severities that are whole
    keep their figure.
    """
    names = list(dict.fromkeys(c.attack for c in run.conditions if c.attack.startswith(f"{RELEASED}/")))
    if not names:
        raise RunError(f"run {run.path}: its data are not released ImageNet-C (imagenet-c:DIR)")
    records = []
    for model in run.models:
        for attack in names:
            corruption = attack.removeprefix(f"{RELEASED}/")
            record: dict[str, object] = {"model": model, "corruption": corruption, "status": "complete"}
            errors = []
            for severity in SEVERITIES:
                status = run.status(model, Cell(attack, str(severity)))
                if status.text == "complete":
                    rows = run.cell_rows(model, status.cell)
                    errors.append(100 * (1 - float(rows["correct"].mean())))
                    record[f"severity_{severity}"] = errors[-1]
                elif record["status"] == "complete":
                    failed = status.text.startswith("failed")
                    record["status"] = status.text if failed else f"incomplete: severity {severity} {status.text}"
            if record["status"] == "complete":
                record["mean_error"] = float(np.mean(errors))
                record["ce"] = corruption_error(corruption, float(np.mean(errors)))
            records.append(record)
    columns = ["model", "corruption", "status", *(f"severity_{s}" for s in SEVERITIES), "mean_error", "ce"]
    frame = pd.DataFrame(records, columns=columns)
    return frame.astype(dict.fromkeys(columns[3:], "Float64"))
