"""Statistics of ratios of sums over clustered samples: perplexity (sums per article), IoU (per image), accuracy of
nodes (per graph).

Clusters are taken as drawn independently, the samples within one are not. Everything after `cluster_sums` works on
the sums per cluster.

Several classes: numerators and denominators (C, K) stand for the mean of K ratios, such as mIoU. The mean is over the
classes with a positive denominator in the whole set, and in each resample over those with one there. A class that
only one cluster holds adds nothing to the variance.

A transform turns the ratio into what is reported: "exp" (perplexity, from the sum of negative log-likelihoods over
tokens) or "log".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

Array = NDArray[np.float64]
Transform = Literal["exp", "log"]
RESAMPLES = 9999
UNBOUNDED = (-math.inf, math.inf)
_CHUNK = 2**17  # numbers in one (resamples, clusters) block: 1 MB, small enough for a cache
_FEW_COLUMNS = 4  # up to here sums of products are cheaper than going through the clusters
_ROUNDING = 1e-12  # relative: below this, differences are rounding
# The function, increasing, and its derivative.
_TRANSFORMS: dict[Transform | None, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {
    None: (lambda x: x, np.ones_like),
    "exp": (np.exp, np.exp),
    "log": (np.log, lambda x: 1 / x),
}


def cluster_sums(numerator: ArrayLike, denominator: ArrayLike, cluster: ArrayLike | None = None) -> tuple[Array, Array]:
    """Sums per cluster, in the order in which the clusters first appear: two arrays (C,), or (C, K) for K classes.

    `numerator`, `denominator`: (n,) or (n, K), finite, denominators >= 0. `cluster`: n labels; a sample without one
    (None or NaN) is a cluster of its own, and so is every sample where `cluster` is None. ValueError for anything
    else.
    """
    num, den = _columns(numerator, denominator)
    labels = [None] * len(num) if cluster is None else np.asarray(cluster).tolist()
    if not isinstance(labels, list) or len(labels) != len(num):
        raise ValueError(f"expected {len(num)} cluster labels, one a sample, got shape {np.shape(labels)}")
    codes: dict[object, int] = {}
    rows = [
        codes.setdefault((i,) if label is None or label != label else label, len(codes))
        for i, label in enumerate(labels)
    ]
    sums = np.zeros((2, len(codes), num.shape[1]))
    np.add.at(sums[0], rows, num)
    np.add.at(sums[1], rows, den)
    if np.ndim(numerator) == 1:
        return sums[0, :, 0], sums[1, :, 0]
    return sums[0], sums[1]


def ratio(num: ArrayLike, den: ArrayLike, *, transform: Transform | None = None) -> float:
    """Sum of `num` over sum of `den`, transformed; for (C, K), the mean of such ratios over the classes with a
    positive denominator.

    ValueError where there is none, or where the transformed value is not finite.
    """
    return _value(*_sums(num, den), transform)


def influence(num: ArrayLike, den: ArrayLike, *, transform: Transform | None = None) -> Array:
    """What each cluster contributes, linearised (delta method): R + (num_c - R den_c) / mean(den), whose mean over
    clusters is R exactly.

    Returns (C,). With a transform f: f(R) + f'(R) times the same deviation; with classes: the mean of their
    deviations. The variance of the mean of these numbers is that of the ratio to first order, so that a ratio can
    enter statistics made for means over samples.
    """
    top, bottom = _sums(num, den)
    value = _value(top, bottom, transform)
    return value + len(top) * _Part.of(top, bottom, transform).deviations()


def bootstrap_interval(
    num: ArrayLike,
    den: ArrayLike,
    *,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
    transform: Transform | None = None,
    bounds: tuple[float, float] = UNBOUNDED,
) -> tuple[float, float]:
    """Interval of `ratio(num, den, transform=transform)` from sums per cluster: the studentised cluster bootstrap
    (Efron 1982; Hall 1988).

    Clusters are drawn with replacement; t* = (R* - R) / se*, with the standard error of `influence`; the interval is
    R - se (quantiles of t*). Simulated coverage at 95 %, 30 and 60 clusters of unequal sizes with skewed values: 94.5
    to 96.5 %; where sizes have a very long tail (log-normal, sigma 1) 93 %. Percentile intervals covered 88 to 94.5 %
    of the same kinds of sets, BCa 87 to 94 %, which is why this one was chosen. Two guards for few clusters: se*
    takes in one cluster's worth of se, so that resamples in which nothing varies stay finite, and the interval holds
    Student's with C - 1 degrees of freedom.

    `bounds`: what the ratio can be, before the transform ([0, 1] for IoU); the interval is cut to it. One cluster
    tells nothing of the others: the interval is `bounds`. Where several clusters agree exactly, width 0 would be
    dishonest: a share q = 1 - (alpha / 2)^(1/C) of all clusters may still differ as far as the bounds allow (Clopper
    and Pearson 1934, 0 of C), so that it is [R - q (R - low), R + q (high - R)], and infinite for infinite bounds.
    Clusters of zeros only do not count. Deterministic for a seed.
    """
    _check_options(confidence, resamples, bounds)
    top, bottom = _sums(num, den)
    _value(top, bottom, transform)  # refuses what cannot be transformed
    low, high = _studentised([_Part.of(top, bottom, None)], bounds, (confidence, resamples, seed))
    function = _TRANSFORMS[transform][0]
    if transform == "log":
        low, high = max(low, 0.0), max(high, 0.0)
    with np.errstate(divide="ignore", over="ignore"):
        return float(function(np.asarray(low))), float(function(np.asarray(high)))


@dataclass(frozen=True)
class Comparison:
    """Two models on the same clusters: the ratio of the second minus that of the first, with its interval and p
    values.

    `p_value` is two-sided; `p_less` is small where the second's ratio is the lower one, `p_greater` where it is the
    higher one. Which of them means "worse" is up to the score: `p_less` for accuracy or IoU, `p_greater` for
    perplexity.
    """

    difference: float
    low: float
    high: float
    p_value: float
    p_less: float
    p_greater: float

    @classmethod
    def of(
        cls,
        first: tuple[ArrayLike, ArrayLike],
        second: tuple[ArrayLike, ArrayLike],
        *,
        confidence: float = 0.95,
        resamples: int = RESAMPLES,
        seed: int = 0,
        transform: Transform | None = None,
        bounds: tuple[float, float] = UNBOUNDED,
    ) -> Comparison:
        """From (numerators, denominators) of each, sums per cluster, (C,) or (C, K), the clusters in one order.

        The difference is of what the transform gives: None compares ratios (for negative log-likelihoods the log of
        the quotient of two perplexities), "exp" perplexities, "log" the logs of ratios.

        Interval: as `bootstrap_interval`, with the same clusters drawn for both. `bounds` are those of one ratio,
        before the transform.

        p values: the paired randomisation test (Fisher 1935). Within each cluster, the two models' sums change places
        or do not; exact over all 2^C ways if these are no more than `resamples`, else (1 + count) / (1 + resamples).
        Two-sided: twice the smaller one, at most 1. The null is that within a cluster the models are exchangeable.
        With C clusters no one-sided p is below 2^-C.
        """
        _check_options(confidence, resamples, bounds)
        a, b = _sums(*first), _sums(*second)
        if a[0].shape != b[0].shape:
            raise ValueError(f"expected sums of the same clusters and classes, got {a[0].shape} and {b[0].shape}")
        difference = _value(*b, transform) - _value(*a, transform)
        span = _difference_bounds(bounds, transform)
        low, high = _studentised(
            [_Part.of(*a, transform, sign=-1), _Part.of(*b, transform)], span, (confidence, resamples, seed)
        )
        less, greater = _randomisation(a, b, transform, resamples, seed)
        return cls(difference, low, high, min(1.0, 2 * min(less, greater)), less, greater)


def _columns(num: ArrayLike, den: ArrayLike) -> tuple[Array, Array]:
    """Both as (n, K) of finite float64, denominators >= 0."""
    top, bottom = np.asarray(num, dtype=np.float64), np.asarray(den, dtype=np.float64)
    if top.shape != bottom.shape or top.ndim not in (1, 2) or not top.size:
        raise ValueError(
            "expected numerators and denominators of one shape, (n,) or (n, classes), "
            f"got {top.shape} and {bottom.shape}"
        )
    for name, values in (("numerators", top), ("denominators", bottom)):
        if not np.isfinite(values).all():
            raise ValueError(f"expected finite {name}, got {values[~np.isfinite(values)][0]}")
    if (bottom < 0).any():
        raise ValueError(f"expected denominators >= 0, got {bottom.min()}")
    return top.reshape(len(top), -1), bottom.reshape(len(top), -1)


def _sums(num: ArrayLike, den: ArrayLike) -> tuple[Array, Array]:
    """The same, with at least one positive sum of denominators, and numerators of 0 where that sum is 0."""
    top, bottom = _columns(num, den)
    empty = bottom.sum(axis=0) == 0
    if empty.all():
        raise ValueError(f"expected a positive sum of denominators, got 0 over {len(top)} clusters")
    if top[:, empty].any():
        raise ValueError("expected numerators of 0 where all denominators of a class are 0, got others")
    return top, bottom


def _check_options(confidence: float, resamples: int, bounds: tuple[float, float]) -> None:
    if not 0 < confidence < 1 or resamples < 1 or not bounds[0] < bounds[1]:
        raise ValueError(
            f"expected 0 < confidence < 1, resamples >= 1 and low < high, got {confidence}, {resamples} and {bounds}"
        )


def _value(num: Array, den: Array, transform: Transform | None) -> float:
    plain = float(_mean_ratio(num.sum(axis=0), den.sum(axis=0)))
    if transform == "log" and plain <= 0:
        raise ValueError(f"expected a ratio above 0 to take its log, got {plain}")
    with np.errstate(over="ignore"):
        value = float(_TRANSFORMS[transform][0](np.asarray(plain)))
    if not math.isfinite(value):
        raise ValueError(f"expected a ratio whose {transform} is finite, got {plain}")
    return value


def _mean_ratio(num: Array, den: Array) -> Array:
    """Mean over the last axis of num / den where den > 0; NaN where there is none."""
    present = den > 0
    ratios = np.divide(num, den, out=np.zeros_like(num), where=present)
    with np.errstate(invalid="ignore"):
        return np.asarray(ratios.sum(axis=-1) / present.sum(axis=-1))


@dataclass(frozen=True)
class _Part:
    """One signed ratio, or mean of ratios, of a statistic: what the bootstrap needs to know of it."""

    # (C, K): num_c - R den_c. Around R, so that no digits are lost where variances are taken from sums of products.
    residuals: Array
    den: Array  # (C, K)
    ratios: Array  # (K,), 0 for a class without denominators
    transform: Transform | None
    sign: int

    @classmethod
    def of(cls, num: Array, den: Array, transform: Transform | None, sign: int = 1) -> _Part:
        totals = den.sum(axis=0)
        ratios = np.divide(num.sum(axis=0), totals, out=np.zeros(len(totals)), where=totals > 0)
        return cls(num - ratios * den, den, ratios, transform, sign)

    @property
    def columns(self) -> Array:
        return np.hstack([self.residuals, self.den])

    def linearised(self, sums: Array) -> tuple[Array, Array]:
        """From the sums of `columns` over each of B resamples (B, 2K): the values (B,), and weights (B, 2K) of the
        columns with which these make up each cluster's deviation. The deviations of the clusters drawn sum to 0;
        their squares sum to the variance of the value, to first order."""
        residuals, dens = np.hsplit(sums, 2)
        present = dens > 0
        function, derivative = _TRANSFORMS[self.transform]
        with np.errstate(all="ignore"):
            moved = np.where(present, residuals / dens, 0.0)
            classes = present.sum(axis=1)
            plain = np.where(present, self.ratios + moved, 0.0).sum(axis=1) / classes
            weights = np.where(present, 1 / dens, 0.0) * (self.sign * derivative(plain) / classes)[:, None]
            return self.sign * function(plain), np.hstack([weights, -weights * moved])

    @property
    def scale(self) -> float:
        """Size of the value, against which rounding is judged."""
        return abs(float(self.linearised(self.columns.sum(axis=0, keepdims=True))[0][0]))

    def deviations(self) -> Array:
        """Of the clusters, in the set as it is (C,)."""
        _, weights = self.linearised(self.columns.sum(axis=0, keepdims=True))
        return np.asarray(self.columns @ weights[0])


def _values_and_variances(
    counts: Array, parts: list[_Part], columns: Array, products: Array | None
) -> tuple[Array, Array]:
    """Of the sum of the parts, in resamples that hold cluster c counts[:, c] times (B, C). `columns`: those of all
    parts (C, M); `products`: theirs, pair by pair (C, M M), or None where going through the clusters is cheaper."""
    clusters, m = columns.shape
    results = [part.linearised(sums) for part, sums in zip(parts, np.hsplit(counts @ columns, len(parts)), strict=True)]
    values, weights = sum(value for value, _ in results), np.hstack([weight for _, weight in results])
    with np.errstate(invalid="ignore", over="ignore"):
        if products is None:
            squares = np.einsum("bc,bc->b", counts, (weights @ columns.T) ** 2)
        else:
            squares = np.einsum("bij,bi,bj->b", (counts @ products).reshape(-1, m, m), weights, weights)
    return np.asarray(values), np.maximum(squares, 0.0) * clusters / (clusters - 1)


def _resampled(clusters: int, resamples: int, seed: int, widest: int) -> Iterator[Array]:
    """How often each cluster is drawn, (b, clusters) at a time: the same draws whatever the chunk."""
    draws = np.random.default_rng([seed, 0])
    rows = max(1, _CHUNK // max(clusters, widest))
    for start in range(0, resamples, rows):
        b = min(rows, resamples - start)
        picks = draws.integers(0, clusters, (b, clusters)) + clusters * np.arange(b)[:, None]
        yield np.bincount(picks.ravel(), minlength=b * clusters).reshape(b, clusters).astype(np.float64)


def _studentised(
    parts: list[_Part], bounds: tuple[float, float], options: tuple[float, int, int]
) -> tuple[float, float]:
    """Studentised interval of the sum of signed ratios; `options`: (confidence, resamples, seed)."""
    confidence, resamples, seed = options
    tail = (1 - confidence) / 2
    columns = np.hstack([part.columns for part in parts])
    columns = columns[(columns != 0).any(axis=1)]
    clusters, m = columns.shape
    if clusters == 1:
        return bounds
    whole = np.ones((1, clusters))
    (value,), (variance,) = _values_and_variances(whole, parts, columns, None)
    error = math.sqrt(variance)
    if error <= _ROUNDING * max(part.scale for part in parts):
        share = 1 - tail ** (1 / clusters)
        return float(value - share * (value - bounds[0])), float(value + share * (bounds[1] - value))
    products = None
    # Sums of products lose the difference of two models that are nearly the same.
    if m <= _FEW_COLUMNS and variance > 1e-6 * max(float((part.deviations() ** 2).sum()) for part in parts):
        products = (columns[:, :, None] * columns[:, None, :]).reshape(clusters, m * m)
    drawn = []
    for counts in _resampled(clusters, resamples, seed, m):
        values, variances = _values_and_variances(counts, parts, columns, products)
        with np.errstate(invalid="ignore"):
            drawn.append((values - value) / np.sqrt((clusters * variances + variance) / (clusters + 1)))
    t = np.concatenate(drawn)
    left, right = np.quantile(t[~np.isnan(t)], [tail, 1 - tail], method="weibull")  # NaN: no denominator
    student = float(special.stdtrit(clusters - 1, 1 - tail))
    low, high = value - max(right, student) * error, value - min(left, -student) * error
    return max(bounds[0], float(low)), min(bounds[1], float(high))


def _difference_bounds(bounds: tuple[float, float], transform: Transform | None) -> tuple[float, float]:
    low, high = bounds
    if transform == "log":
        low = max(low, 0.0)
    with np.errstate(divide="ignore", over="ignore"):
        function = _TRANSFORMS[transform][0]
        span = float(np.diff(function(np.array([low, high])))[0])
    return -span, span


def _swaps(clusters: int, resamples: int, seed: int, widest: int) -> Iterator[NDArray[np.uint8]]:
    """Which clusters change places (1) or not (0), (b, clusters) at a time: all 2^clusters ways if `resamples` allows
    them, else drawn."""
    draws = np.random.default_rng([seed, 1])
    exact = _exact(clusters, resamples)
    total = 2**clusters if exact else resamples
    rows = max(1, _CHUNK // max(clusters, widest))
    for start in range(0, total, rows):
        b = min(rows, total - start)
        if exact:
            yield ((np.arange(start, start + b)[:, None] >> np.arange(clusters)) % 2).astype(np.uint8)
        else:
            # Whole words of 32 bits a row: the same draws whatever the chunk.
            width = 4 * math.ceil(clusters / 32)
            bits = np.frombuffer(draws.bytes(b * width), dtype=np.uint8).reshape(b, width)
            yield np.unpackbits(bits, axis=1, count=clusters)


def _exact(clusters: int, resamples: int) -> bool:
    return clusters < 63 and 2**clusters <= resamples


def _randomisation(
    a: tuple[Array, Array], b: tuple[Array, Array], transform: Transform | None, resamples: int, seed: int
) -> tuple[float, float]:
    """One-sided p values (less, greater) of the difference b - a under swaps within clusters."""
    function = _TRANSFORMS[transform][0]
    first, second = np.hstack(a), np.hstack(b)  # (C, 2K)
    classes = a[0].shape[1]
    total = first.sum(axis=0) + second.sum(axis=0)
    moved = second - first

    def values(sums: Array) -> Array:
        # What a subtraction leaves of a denominator that should be 0 is rounding.
        dens = np.where(sums[:, classes:] <= _ROUNDING * total[classes:], 0.0, sums[:, classes:])
        with np.errstate(all="ignore"):
            return function(_mean_ratio(sums[:, :classes], dens))

    ends = values(np.stack([first.sum(axis=0), second.sum(axis=0)]))
    observed = ends[1] - ends[0]
    tie = _ROUNDING * np.abs(ends).max()
    less = greater = count = 0
    for swaps in _swaps(len(first), resamples, seed, 2 * classes):
        shift = swaps.astype(np.float64) @ moved
        with np.errstate(invalid="ignore"):
            differences = values(second.sum(axis=0) - shift) - values(first.sum(axis=0) + shift)
        # A swap without a value (no denominator left, no log) counts against both sides.
        less += int((~(differences > observed + tie)).sum())
        greater += int((~(differences < observed - tie)).sum())
        count += len(differences)
    extra = 0 if _exact(len(first), resamples) else 1
    return (less + extra) / (count + extra), (greater + extra) / (count + extra)
