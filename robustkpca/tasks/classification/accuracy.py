"""Accuracy: the share of samples that are right, of all samples of the set. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from robustkpca.statistics import proportions
from robustkpca.statistics.proportions import Paired
from robustkpca.tasks.score import Comparison, Score


class Accuracy(Score):
    """The share of right predictions, in [0, 1]; shown in per cent."""

    name: ClassVar[str] = "accuracy"
    title: ClassVar[str] = "Accuracy"
    unit: ClassVar[str] = "%"
    scale: ClassVar[float] = 100.0
    higher_is_better: ClassVar[bool] = True
    columns: ClassVar[tuple[str, ...]] = ("correct",)
    bounds: ClassVar[tuple[float, float]] = (0.0, 1.0)
    interval_name: ClassVar[str] = "95 % Wilson interval"
    comparison_name: ClassVar[str] = "95 % interval (Bonett and Price, paired); p: exact McNemar test"
    test_name: ClassVar[str] = "exact McNemar test"

    def value(self, rows: pd.DataFrame) -> float:
        return int(rows["correct"].sum()) / len(rows)

    def interval(self, rows: pd.DataFrame) -> tuple[float, float]:
        return proportions.wilson(int(rows["correct"].sum()), len(rows))

    def paired(self, first: pd.DataFrame, second: pd.DataFrame) -> Comparison:
        """Bonett and Price's interval and the exact McNemar test."""
        before = first["correct"]
        pair = Paired.of(before.to_numpy(bool), second["correct"].reindex(before.index).to_numpy(bool))
        low, high = pair.interval()
        share = (pair.both + pair.lost) / pair.n
        return Comparison(
            pair.n, share, share + pair.difference, pair.difference, low, high,
            pair.p_value, pair.p_worse, pair.p_better, {"gained": pair.gained, "lost": pair.lost},
        )  # fmt: skip

    def worst(self, parts: Sequence[pd.DataFrame]) -> pd.DataFrame:
        """Right only where all parts are."""
        return pd.concat([rows["correct"] for rows in parts], axis=1).all(axis=1).to_frame("correct")

    def contributions(self, rows: pd.DataFrame) -> pd.Series:
        return rows["correct"].astype(float)

    def details(self, rows: pd.DataFrame) -> dict[str, Any]:
        found: dict[str, Any] = {"correct": int(rows["correct"].sum())}
        if "correct_top5" in rows and rows["correct_top5"].notna().all():
            found["top5"] = float(rows["correct_top5"].astype(bool).mean())
        return found


ACCURACY = Accuracy()
TOP5_COLUMN = "correct_top5"


def success_rate(clean: pd.Series, correct: pd.Series) -> float | None:
    """The share of samples that were right when clean and are wrong now; None where no clean row says so."""
    before = clean.reindex(correct.index)
    if before.isna().any() or not before.astype(bool).any():
        return None
    return float(np.mean(~correct[before.astype(bool)]))
