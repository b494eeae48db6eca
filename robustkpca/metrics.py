"""The figures of ImageNet-C and ImageNet-O, recomputed from rows. Errors are in per cent, areas are shares in [0, 1]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from robustkpca.errors import RunError
from robustkpca.outcomes import Run
from robustkpca.spec import IN_DISTRIBUTION, OUT_OF_DISTRIBUTION, RELEASED, Cell

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


@dataclass(frozen=True)
class Detection:
    """How well a score tells out-of-distribution samples (the positive class) from in-distribution ones."""

    aupr: float
    auroc: float
    fpr95: float  # share of in-distribution samples taken for OOD at the threshold that finds 95 % of the OOD ones
    n_in: int
    n_out: int


def detection(score_in: ArrayLike, score_out: ArrayLike) -> Detection:
    """Areas and FPR95 of a score that is high for out-of-distribution samples.

    AUPR depends on the ratio of the two counts, which is why both are kept. Computed by scikit-learn: average precision, area under the
    ROC curve, and the smallest false positive rate with a true positive rate of at least 0.95.
    """
    from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

    inside, outside = np.asarray(score_in, dtype=np.float64), np.asarray(score_out, dtype=np.float64)
    if not len(inside) or not len(outside) or not np.isfinite(inside).all() or not np.isfinite(outside).all():
        raise ValueError(
            f"expected finite scores on both sides, got {len(inside)} in and {len(outside)} out of distribution"
        )
    positive = np.concatenate([np.zeros(len(inside)), np.ones(len(outside))])
    scores = np.concatenate([inside, outside])
    false_rate, true_rate, _ = roc_curve(positive, scores, drop_intermediate=False)
    return Detection(
        float(average_precision_score(positive, scores)),
        float(roc_auc_score(positive, scores)),
        float(false_rate[true_rate >= 0.95].min()),
        len(inside),
        len(outside),
    )


def detection_table(run: Run) -> pd.DataFrame:
    """ImageNet-O: one row per model. The score is minus the largest softmax probability; top-1 accuracy means nothing here.

    Columns: model, status, aupr, auroc, fpr95 (shares), n_in, n_out.
    """
    if OUT_OF_DISTRIBUTION not in run.conditions:
        raise RunError(f"run {run.path}: its data are not ImageNet-O (imagenet-o:DIR)")
    records = []
    for model in run.models:
        statuses = [run.status(model, cell) for cell in (IN_DISTRIBUTION, OUT_OF_DISTRIBUTION)]
        bad = [s.text for s in statuses if s.text != "complete"]
        scores = [-run.cell_rows(model, s.cell)["confidence"].to_numpy(np.float64) for s in statuses]
        if not bad and not all(np.isfinite(s).all() for s in scores):
            bad = ["failed: some logits were not finite"]
        record: dict[str, object] = {"model": model, "status": bad[0] if bad else "complete"}
        if not bad:
            found = detection(*scores)
            record |= {
                "aupr": found.aupr,
                "auroc": found.auroc,
                "fpr95": found.fpr95,
                "n_in": found.n_in,
                "n_out": found.n_out,
            }
        records.append(record)
    frame = pd.DataFrame(records, columns=["model", "status", "aupr", "auroc", "fpr95", "n_in", "n_out"])
    return frame.astype({**dict.fromkeys(["aupr", "auroc", "fpr95"], "Float64"), "n_in": "Int64", "n_out": "Int64"})
