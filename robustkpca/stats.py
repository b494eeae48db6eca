"""Statistics of accuracies: intervals, and paired comparisons on the same samples. Shares are in [0, 1]."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats


def wilson(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a share (Wilson 1927). 0 <= successes <= n, n >= 1. (scipy's comes with a test that takes a hundred times as long.)"""
    if not 0 <= successes <= n or n < 1:
        raise ValueError(f"expected 0 <= successes <= n and n >= 1, got {successes} of {n}")
    z = float(stats.norm.ppf(0.5 + confidence / 2))
    share, weight = successes / n, 1 / (1 + z**2 / n)
    middle = weight * (share + z**2 / (2 * n))
    reach = weight * z * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    return (0.0 if successes == 0 else middle - reach), (1.0 if successes == n else middle + reach)


@dataclass(frozen=True)
class Paired:
    """Two models on the same samples: `gained` are right only with the second, `lost` only with the first, `both` with both."""

    n: int
    gained: int
    lost: int
    both: int = 0

    @classmethod
    def of(cls, first: ArrayLike, second: ArrayLike) -> Paired:
        """From two boolean vectors of "correct", sample by sample."""
        a, b = _bools(first), _bools(second)
        if a.shape != b.shape or a.ndim != 1:
            raise ValueError(f"expected two vectors of one length, got shapes {a.shape} and {b.shape}")
        return cls(len(a), int((~a & b).sum()), int((a & ~b).sum()), int((a & b).sum()))

    @property
    def difference(self) -> float:
        """Accuracy of the second minus that of the first."""
        return (self.gained - self.lost) / self.n

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Interval of the difference of two paired shares: Wald's after one pair is added to each discordant cell, the rest to the others
        (Bonett and Price, "Adjusted Wald confidence interval for a difference of binomial proportions based on paired data", 2012)."""
        n = self.n + 2
        gained, lost = (self.gained + 1) / n, (self.lost + 1) / n
        middle = gained - lost
        reach = float(stats.norm.ppf(0.5 + confidence / 2)) * math.sqrt((gained + lost - middle**2) / n)
        return max(-1.0, middle - reach), min(1.0, middle + reach)

    @property
    def p_value(self) -> float:
        """Exact two-sided McNemar test of "no difference" (McNemar 1947): a binomial test of the discordant pairs."""
        return self._binomial("two-sided")

    @property
    def p_worse(self) -> float:
        """The same, one-sided: small when the second model is worse."""
        return self._binomial("less")

    @property
    def p_better(self) -> float:
        """One-sided: small when the second model is better."""
        return self._binomial("greater")

    def _binomial(self, alternative: str) -> float:
        discordant = self.gained + self.lost
        if discordant == 0:
            return 1.0
        return float(stats.binomtest(self.gained, discordant, 0.5, alternative=alternative).pvalue)


def over_seeds(scores: ArrayLike, confidence: float = 0.95) -> tuple[float, float, float]:
    """Mean of a figure over independently trained models, with an interval in which trainings and samples both count as drawn.

    `scores`: (trainings >= 2, samples) in [0, 1], samples in one order. The variance is that of the mean over trainings plus that over samples
    of the score averaged over trainings, with Welch-Satterthwaite degrees of freedom (Welch 1947). What trainings and samples do together is
    counted twice, so the interval is a little too wide rather than too narrow. Cut to [0, 1]; where nothing varies, Wilson's for the samples; all
    of [0, 1] for one sample.
    """
    values = _trainings(scores)
    mean = float(values.mean())
    if values.shape[1] == 1:
        return mean, 0.0, 1.0
    reach, _ = _reach(mean, [values.mean(axis=1), values.mean(axis=0)], confidence)
    if reach is None:
        return mean, *wilson(round(mean * values.shape[1]), values.shape[1], confidence)
    return mean, max(0.0, mean - reach), min(1.0, mean + reach)


@dataclass(frozen=True)
class SeedDifference:
    """Two models of several trainings on the same samples: mean accuracy of the second minus that of the first, with its interval and p."""

    difference: float
    low: float
    high: float
    p_value: float

    @classmethod
    def of(
        cls, first: ArrayLike, second: ArrayLike, *, paired: bool = False, confidence: float = 0.95
    ) -> SeedDifference:
        """From two arrays (trainings >= 2, samples) of scores in [0, 1], their samples in the same order.

        Interval and two-sided p as in `over_seeds`, of three variances: of each model's mean over its trainings, and of the difference over samples.
        `paired`: both hold the same trainings in the same order, used in two ways; one variance, of their differences, then stands for the first two.
        Where nothing varies, interval and p are those of one training of each; one sample says nothing.
        """
        a, b = _trainings(first), _trainings(second)
        if a.shape[1] != b.shape[1]:
            raise ValueError(f"expected scores of the same samples, got {a.shape[1]} and {b.shape[1]}")
        difference = float(b.mean() - a.mean())
        if a.shape[1] == 1:
            return cls(difference, -1.0, 1.0, 1.0)
        over = [b.mean(axis=1) - a.mean(axis=1)] if paired else [a.mean(axis=1), b.mean(axis=1)]
        reach, p = _reach(difference, [*over, b.mean(axis=0) - a.mean(axis=0)], confidence)
        if reach is None:
            n, moved = a.shape[1], round(abs(difference) * a.shape[1])
            same = Paired(n, moved, 0) if difference > 0 else Paired(n, 0, moved)
            return cls(difference, *same.interval(confidence), same.p_value)
        return cls(difference, max(-1.0, difference - reach), min(1.0, difference + reach), p)


def _trainings(scores: ArrayLike) -> NDArray[np.float64]:
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 2 or len(values) < 2 or not values.size:
        raise ValueError(f"expected scores (trainings, samples) of at least 2 trainings, got shape {values.shape}")
    return values


def _reach(middle: float, draws: list[NDArray[np.float64]], confidence: float) -> tuple[float | None, float]:
    """How far the interval around `middle` reaches, and the two-sided p of its being 0, when its variance is the sum of those of the means of
    `draws`; None where they do not vary (beyond rounding)."""
    parts = [float(stats.sem(values)) ** 2 for values in draws]
    variance = sum(parts)
    if variance < 1e-24:
        return None, 1.0
    freedom = variance**2 / sum(v**2 / (len(values) - 1) for v, values in zip(parts, draws, strict=True))
    error = math.sqrt(variance)
    p = 2 * float(stats.t.sf(abs(middle) / error, freedom))
    return float(stats.t.ppf(0.5 + confidence / 2, freedom)) * error, p


def holm(p_values: ArrayLike) -> NDArray[np.float64]:
    """Holm's step-down adjustment (Holm 1979) of p values tested together, in their order."""
    p = np.asarray(p_values, dtype=np.float64)
    if p.size == 0:
        return p
    order = np.argsort(p)
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(p[order] * (p.size - np.arange(p.size))))
    return adjusted


def _bools(values: ArrayLike) -> NDArray[np.bool_]:
    array = np.asarray(values)
    if array.dtype != np.bool_:
        raise ValueError(f"expected booleans, got {array.dtype}")
    return array
