"""Statistics of accuracies: intervals, and paired comparisons on the same samples. Shares are in [0, 1]."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special  # scipy.stats takes a second to import


def wilson(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a share (Wilson 1927). 0 <= successes <= n, n >= 1.

    (scipy's comes with a test that takes a hundred times as long.)
    """
    if not 0 <= successes <= n or n < 1:
        raise ValueError(f"expected 0 <= successes <= n and n >= 1, got {successes} of {n}")
    z = float(special.ndtri(0.5 + confidence / 2))
    share, weight = successes / n, 1 / (1 + z**2 / n)
    middle = weight * (share + z**2 / (2 * n))
    reach = weight * z * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    return (0.0 if successes == 0 else middle - reach), (1.0 if successes == n else middle + reach)


@dataclass(frozen=True)
class Paired:
    """Two models on the same samples: correct with the second only (`gained`), the first only (`lost`), or `both`."""

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
        """Interval of the difference of two paired shares: Wald's after one pair is added to each discordant cell,
        the rest to the others (Bonett and Price, "Adjusted Wald confidence interval for a difference of binomial
        proportions based on paired data", 2012).
        """
        n = self.n + 2
        gained, lost = (self.gained + 1) / n, (self.lost + 1) / n
        middle = gained - lost
        reach = float(special.ndtri(0.5 + confidence / 2)) * math.sqrt((gained + lost - middle**2) / n)
        return max(-1.0, middle - reach), min(1.0, middle + reach)

    @property
    def p_value(self) -> float:
        """Exact two-sided McNemar test of "no difference" (McNemar 1947): a binomial test of the discordant pairs."""
        return min(1.0, 2 * min(self.p_worse, self.p_better))  # the null distribution is symmetric

    @property
    def p_worse(self) -> float:
        """The same, one-sided: small when the second model is worse."""
        return self._tail(self.lost)

    @property
    def p_better(self) -> float:
        """One-sided: small when the second model is better."""
        return self._tail(self.gained)

    def _tail(self, count: int) -> float:
        """The chance of `count` or more heads in as many throws of a coin as there are discordant pairs."""
        discordant = self.gained + self.lost
        return float(special.betainc(count, discordant - count + 1, 0.5)) if count else 1.0


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
