"""Means and differences over independently trained models: training runs and samples both count as drawn."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from robustkpca.statistics.proportions import Paired, wilson

Bounds = tuple[float, float]
SHARES: Bounds = (0.0, 1.0)


def over_seeds(scores: ArrayLike, confidence: float = 0.95, bounds: Bounds = SHARES) -> tuple[float, float, float]:
    """Mean of a score over independently trained models, with an interval in which training runs and samples count as
    drawn.

    `scores`: (training runs >= 2, samples) within `bounds`, samples in one order. The variance is that of the mean over
    training runs plus that over samples of the score averaged over training runs, with Welch-Satterthwaite degrees of
    freedom (Welch 1947). What training runs and samples do together is counted twice, so the interval is a little too
    wide rather than too narrow. Cut to `bounds`. Where nothing varies: of shares Wilson's for the samples, else the
    mean alone. All of `bounds` for one sample.
    """
    values = _trainings(scores)
    mean = float(values.mean())
    if values.shape[1] == 1:
        return mean, *bounds
    reach, _ = _reach(mean, [values.mean(axis=1), values.mean(axis=0)], confidence)
    if reach is None and bounds != SHARES:
        return mean, mean, mean
    if reach is None:
        return mean, *wilson(round(mean * values.shape[1]), values.shape[1], confidence)
    return mean, max(bounds[0], mean - reach), min(bounds[1], mean + reach)


@dataclass(frozen=True)
class SeedDifference:
    """Two models of several training runs on the same samples: mean score of the second minus that of the first."""

    difference: float
    low: float
    high: float
    p_value: float

    @classmethod
    def of(
        cls,
        first: ArrayLike,
        second: ArrayLike,
        *,
        paired: bool = False,
        confidence: float = 0.95,
        bounds: Bounds = SHARES,
    ) -> SeedDifference:
        """From two arrays (training runs >= 2, samples) of scores within `bounds`, their samples in the same order.

        Interval and two-sided p as in `over_seeds`, of three variances: of each model's mean over its training runs,
        and of the difference over samples. `paired`: both hold the same training runs in the same order, used in two
        ways; one variance, of their differences, then stands for the first two. Where nothing varies, interval and p of
        shares are those of one training run of each; one sample says nothing.
        """
        a, b = _trainings(first), _trainings(second)
        if a.shape[1] != b.shape[1]:
            raise ValueError(f"expected scores of the same samples, got {a.shape[1]} and {b.shape[1]}")
        difference = float(b.mean() - a.mean())
        least, most = bounds[0] - bounds[1], bounds[1] - bounds[0]
        if a.shape[1] == 1:
            return cls(difference, least, most, 1.0)
        over = [b.mean(axis=1) - a.mean(axis=1)] if paired else [a.mean(axis=1), b.mean(axis=1)]
        reach, p = _reach(difference, [*over, b.mean(axis=0) - a.mean(axis=0)], confidence)
        if reach is None and bounds != SHARES:
            return cls(difference, difference, difference, 1.0 if difference == 0 else 0.0)
        if reach is None:
            n, moved = a.shape[1], round(abs(difference) * a.shape[1])
            same = Paired(n, moved, 0) if difference > 0 else Paired(n, 0, moved)
            return cls(difference, *same.interval(confidence), same.p_value)
        return cls(difference, max(least, difference - reach), min(most, difference + reach), p)


def _trainings(scores: ArrayLike) -> NDArray[np.float64]:
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 2 or len(values) < 2 or not values.size:
        raise ValueError(f"expected scores (trainings, samples) of at least 2 trainings, got shape {values.shape}")
    return values


def _reach(middle: float, draws: list[NDArray[np.float64]], confidence: float) -> tuple[float | None, float]:
    """How far the interval around `middle` reaches, and the two-sided p of its being 0, when its variance is the sum of
    those of the means of `draws`; None where they do not vary (beyond rounding)."""
    parts = [float(values.std(ddof=1) / math.sqrt(len(values))) ** 2 for values in draws]
    variance = sum(parts)
    if variance < 1e-24:
        return None, 1.0
    freedom = variance**2 / sum(v**2 / (len(values) - 1) for v, values in zip(parts, draws, strict=True))
    error = math.sqrt(variance)
    p = 2 * float(special.stdtr(freedom, -abs(middle) / error))
    return float(special.stdtrit(freedom, 0.5 + confidence / 2)) * error, p
