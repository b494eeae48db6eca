"""Out-of-distribution detection, recomputed from rows. Areas are shares in [0, 1]."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from robustkpca.errors import RunError
from robustkpca.runs.run import Run
from robustkpca.suites.cell import IN_DISTRIBUTION, OUT_OF_DISTRIBUTION


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

    AUPR depends on the ratio of the two counts, which is why both are kept. Computed by scikit-learn: average
    precision, area under the ROC curve, and the smallest false positive rate with a true positive rate of at least
    0.95.
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
    """ImageNet-O: one row per model. The score is minus the largest softmax probability; top-1 accuracy means nothing
    here.

    Columns: model, status, aupr, auroc, fpr95 (shares), n_in, n_out.
    """
    if OUT_OF_DISTRIBUTION not in run.conditions:
        raise RunError(f"run {run.name}: its data are not ImageNet-O (imagenet-o:DIR)")
    records = []
    for model in run.models:
        statuses = [run.status(model, cell) for cell in (IN_DISTRIBUTION, OUT_OF_DISTRIBUTION)]
        bad = [s.text for s in statuses if not s.complete]
        scores = [-run.cell_rows(model, s.cell)["confidence"].to_numpy(np.float64) for s in statuses]
        if not bad and not all(np.isfinite(s).all() for s in scores):
            bad = ["failed: some logits were not finite"]
        record: dict[str, object] = {"model": model, "status": bad[0] if bad else "complete"}
        if not bad:
            result = detection(*scores)
            record |= {
                "aupr": result.aupr,
                "auroc": result.auroc,
                "fpr95": result.fpr95,
                "n_in": result.n_in,
                "n_out": result.n_out,
            }
        records.append(record)
    frame = pd.DataFrame(records, columns=["model", "status", "aupr", "auroc", "fpr95", "n_in", "n_out"])
    return frame.astype({**dict.fromkeys(["aupr", "auroc", "fpr95"], "Float64"), "n_in": "Int64", "n_out": "Int64"})
