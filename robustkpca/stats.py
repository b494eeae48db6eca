"""Statistics of accuracies: intervals, and paired comparisons on the same samples. Shares are in [0, 1]."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats


def wilson(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a share (Wilson 1927). n >= 1."""
    interval = stats.binomtest(successes, n).proportion_ci(confidence, method="wilson")
    return float(interval.low), float(interval.high)


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


def over_seeds(shares: ArrayLike, confidence: float = 0.95) -> tuple[float, float, float]:
    """Mean and Student's t interval of one figure over independently trained models, at least 2; not cut to [0, 1]."""
    values = np.asarray(shares, dtype=np.float64)
    if values.ndim != 1 or len(values) < 2:
        raise ValueError(f"expected at least 2 figures, got shape {values.shape}")
    mean = float(values.mean())
    reach = float(stats.t.ppf(0.5 + confidence / 2, len(values) - 1) * stats.sem(values))
    return mean, mean - reach, mean + reach


@dataclass(frozen=True)
class SeedDifference:
    """Two models of several trainings on the same samples: mean accuracy of the second minus that of the first, with its interval and p."""

    difference: float
    low: float
    high: float
    p_value: float

    @classmethod
    def of(cls, first: ArrayLike, second: ArrayLike, confidence: float = 0.95) -> SeedDifference:
        """From two arrays (trainings >= 2, samples >= 2) of scores in [0, 1], their samples in the same order.

        Trainings and samples both count as drawn: the variance is the sum of that of each model's mean over its trainings and that of the
        mean over samples of the difference (averaged over trainings), with Welch-Satterthwaite degrees of freedom (Welch 1947). It counts
        what trainings and samples do together twice, so the interval is a little too wide rather than too narrow. Where nothing varies, nothing
        can be said: the interval is all of [-1, 1] and p is 1.
        """
        a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
        if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1] or min(*a.shape, *b.shape) < 2:
            raise ValueError(
                f"expected two arrays (at least 2, the same n of at least 2), got shapes {a.shape} and {b.shape}"
            )
        difference = float(b.mean() - a.mean())
        parts = [stats.sem(scores) ** 2 for scores in (a.mean(axis=1), b.mean(axis=1), b.mean(axis=0) - a.mean(axis=0))]
        variance = sum(parts)
        if variance == 0:
            return cls(difference, -1.0, 1.0, 1.0)
        freedom = variance**2 / sum(v**2 / (n - 1) for v, n in zip(parts, (len(a), len(b), a.shape[1]), strict=True))
        reach = float(stats.t.ppf(0.5 + confidence / 2, freedom)) * math.sqrt(variance)
        p = 2 * float(stats.t.sf(abs(difference) / math.sqrt(variance), freedom))
        return cls(difference, max(-1.0, difference - reach), min(1.0, difference + reach), p)


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
