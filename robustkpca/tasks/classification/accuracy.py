"""Accuracy: the share of samples that are right, of all samples of the set. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

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
    trifle: ClassVar[float] = 0.01
    count_columns: ClassVar[tuple[str, ...]] = ("correct",)
    extra_columns: ClassVar[tuple[str, ...]] = ("top5", "success_rate")
    pair_columns: ClassVar[tuple[str, ...]] = ("gained", "lost")
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
        after = second["correct"] if second.index.equals(first.index) else second["correct"].reindex(first.index)
        pair = Paired.of(before.to_numpy(bool), after.to_numpy(bool))
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

    def details(self, rows: pd.DataFrame, clean: pd.DataFrame | None) -> dict[str, Any]:
        """`correct`; `top5`, where it was recorded; `success_rate`:
        of the samples right when clean, the share wrong now."""
        details: dict[str, Any] = {"correct": int(rows["correct"].sum())}
        if "correct_top5" in rows and rows["correct_top5"].notna().all():
            details["top5"] = float(rows["correct_top5"].astype(bool).mean())
        if clean is not None:
            before = clean["correct"].reindex(rows.index)
            if before.notna().all() and bool(before.any()):
                details["success_rate"] = float((~rows["correct"][before.astype(bool)]).mean())
        return details


ACCURACY = Accuracy()
