"""Scores: how rows become a number, how sure it is, and how two of them compare. No torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from robustkpca.statistics import training_runs
from robustkpca.statistics.training_runs import SeedDifference


@dataclass(frozen=True)
class Comparison:
    """A second result against a first on the same samples. All in the score's own unit (an accuracy in [0, 1]).

    `p_value` is two-sided; `p_worse` is small when the second is worse, `p_better` when it is better. `details` holds
    further columns of the table of comparisons.
    """

    n: int
    first: float
    second: float
    difference: float  # second minus first
    low: float
    high: float
    p_value: float
    p_worse: float
    p_better: float
    details: Mapping[str, Any] = field(default_factory=dict)


class Score(ABC):
    """A number made of rows. Each row holds the sufficient statistics of one sample, so any set of rows has a value.

    Rows are data frames indexed by sample id, one row a sample. Values are in the score's own unit; `scale` brings them
    to the one that is shown (an accuracy in [0, 1] is shown in per cent: scale 100, unit "%").
    """

    name: ClassVar[str]  # the column of tables, e.g. "accuracy"
    title: ClassVar[str]  # in words, e.g. "Accuracy"
    unit: ClassVar[str] = ""
    difference_unit: ClassVar[str] = "points"  # of differences between shown values
    scale: ClassVar[float] = 1.0
    decimals: ClassVar[int] = 1
    higher_is_better: ClassVar[bool]
    columns: ClassVar[tuple[str, ...]]  # of the rows, which it reads
    bounds: ClassVar[tuple[float, float]] = (-np.inf, np.inf)  # of its values
    trifle: ClassVar[float] = 0.0  # a difference too small to make a finding of, whatever its p value
    count_columns: ClassVar[tuple[str, ...]] = ()  # whole numbers that tables show beside n
    extra_columns: ClassVar[tuple[str, ...]] = ()  # further numbers of tables
    pair_columns: ClassVar[tuple[str, ...]] = ()  # counts in the `details` of a Comparison
    interval_name: ClassVar[str]  # how the interval is worked out, e.g. "95 % Wilson interval"
    comparison_name: ClassVar[str]  # the test and the interval of a comparison, for notes under tables
    test_name: ClassVar[str]  # the test alone, e.g. "exact McNemar test"

    @abstractmethod
    def value(self, rows: pd.DataFrame) -> float:
        """The number of at least one row."""

    @abstractmethod
    def interval(self, rows: pd.DataFrame) -> tuple[float, float]:
        """Its 95 % interval, in which samples (or the clusters they come in) count as drawn."""

    @abstractmethod
    def paired(self, first: pd.DataFrame, second: pd.DataFrame) -> Comparison:
        """Two results on the same samples; the rows of both have the same ids, in any order."""

    @abstractmethod
    def worst(self, parts: Sequence[pd.DataFrame]) -> pd.DataFrame:
        """For each sample the worst of several rows, in the columns of this score; `parts` have the same ids."""

    @abstractmethod
    def contributions(self, rows: pd.DataFrame) -> pd.Series:
        """What each sample (or cluster) adds: a series whose mean is the value
        and whose spread is its sampling error."""

    def details(self, rows: pd.DataFrame, clean: pd.DataFrame | None) -> dict[str, Any]:
        """Values of `count_columns` and `extra_columns` for one cell; `clean`: the rows of the samples as they are."""
        return {}

    # -- several rows for each sample

    def mean(self, parts: Sequence[pd.DataFrame]) -> float:
        """The mean of the values of several parts, such as the severities of a corruption."""
        return float(np.mean([self.value(rows) for rows in parts]))

    def mean_contributions(self, parts: Sequence[pd.DataFrame]) -> NDArray[np.float64]:
        """What each sample adds to `mean`, samples in the order of their ids."""
        columns = [self.contributions(rows) for rows in parts]
        values: NDArray[np.float64] = pd.concat(columns, axis=1).sort_index().mean(axis=1).to_numpy(np.float64)
        return values

    # -- several training runs of one model

    def over_training_runs(self, contributions: NDArray[np.float64]) -> tuple[float, float, float]:
        """Mean over training runs with its 95 % interval, from contributions (training runs, samples)."""
        return training_runs.over_seeds(contributions, bounds=self.bounds)

    def compare_training_runs(
        self, first: NDArray[np.float64], second: NDArray[np.float64], *, paired: bool
    ) -> SeedDifference:
        """Two models of several training runs; `paired`: the same training runs, used in two ways."""
        return SeedDifference.of(first, second, paired=paired, bounds=self.bounds)

    # -- how it is written

    @property
    def arrow(self) -> str:
        return "↑" if self.higher_is_better else "↓"

    def shown(self, value: float) -> str:
        """A value as tables show it, without its unit."""
        return f"{self.scale * value:.{self.decimals}f}"

    def shown_difference(self, difference: float) -> str:
        """A difference of values with its sign; never minus zero."""
        text = f"{self.scale * difference:+.{self.decimals}f}"
        return text if float(text) else f"+{0.0:.{self.decimals}f}"

    def worse(self, difference: float) -> bool:
        """Whether a value that changed by this much got worse."""
        return difference < 0 if self.higher_is_better else difference > 0
