"""Scores that are ratios of sums over samples that come in clusters: perplexity, IoU, a mean error. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pandas as pd

from robustkpca.statistics import ratios
from robustkpca.tasks.score import Comparison, Score


class RatioScore(Score):
    """sum(numerator) / sum(denominator), its cluster the one of the rows. A subclass names the columns and the words.

    `transform` turns the ratio into what is reported ("exp" for a perplexity of negative log-likelihoods). Intervals
    are studentised cluster bootstraps, comparisons paired randomisation tests over clusters
    (`robustkpca.statistics.ratios`).
    """

    numerator: ClassVar[str]
    denominator: ClassVar[str]
    transform: ClassVar[ratios.Transform | None] = None
    scale: ClassVar[float] = 1.0
    decimals: ClassVar[int] = 3
    difference_unit: ClassVar[str] = "units"
    ratio_bounds: ClassVar[tuple[float, float]] = (-np.inf, np.inf)  # of the ratio before the transform
    interval_name: ClassVar[str] = "95 % interval (studentised bootstrap over clusters)"
    comparison_name: ClassVar[str] = "95 % interval (paired bootstrap over clusters); p: paired randomisation test"
    test_name: ClassVar[str] = "paired randomisation test"

    def value(self, rows: pd.DataFrame) -> float:
        return ratios.ratio(*self._sums(rows), transform=self.transform)

    def interval(self, rows: pd.DataFrame) -> tuple[float, float]:
        return ratios.bootstrap_interval(*self._sums(rows), transform=self.transform, bounds=self.ratio_bounds)

    def paired(self, first: pd.DataFrame, second: pd.DataFrame) -> Comparison:
        second = second.loc[first.index]
        before, after = self._sums(first), self._sums(second)
        pair = ratios.Comparison.of(before, after, transform=self.transform, bounds=self.ratio_bounds)
        worse, better = pair.p_less, pair.p_greater
        if not self.higher_is_better:
            worse, better = better, worse
        return Comparison(
            len(first), self.value(first), self.value(second), pair.difference, pair.low, pair.high,
            pair.p_value, worse, better,
        )  # fmt: skip

    def worst(self, parts: Sequence[pd.DataFrame]) -> pd.DataFrame:
        """Of each sample the row whose own ratio is worst."""
        index = parts[0].index
        frames = [rows.loc[index, ["cluster", self.numerator, self.denominator]] for rows in parts]
        ratios = np.stack([frame[self.numerator] / frame[self.denominator].where(lambda d: d > 0) for frame in frames])
        ratios = np.where(np.isnan(ratios), np.inf if self.higher_is_better else -np.inf, ratios)
        chosen = ratios.argmin(axis=0) if self.higher_is_better else ratios.argmax(axis=0)
        worst = frames[0].copy()
        for column in (self.numerator, self.denominator):
            worst[column] = np.stack([frame[column] for frame in frames])[chosen, np.arange(len(index))]
        return worst

    def contributions(self, rows: pd.DataFrame) -> pd.Series:
        labels = self._clusters(rows)
        names = list(dict.fromkeys(labels))
        return pd.Series(ratios.influence(*self._sums(rows), transform=self.transform), index=names)

    def _clusters(self, rows: pd.DataFrame) -> list[str]:
        """The cluster of each row, the sample itself where it has none."""
        alone = pd.Series(rows.index, index=rows.index)
        return list(rows["cluster"].astype(object).where(rows["cluster"].notna(), alone))

    def _sums(self, rows: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
        ordered = rows.sort_index()  # the same draws for the same samples in any order
        return ratios.cluster_sums(ordered[self.numerator], ordered[self.denominator], self._clusters(ordered))
