import numpy as np
import pytest
from scipy import stats as scipy_stats

from robustkpca.statistics import proportions


@pytest.mark.parametrize(("k", "n"), [(0, 10), (10, 10), (7, 10), (870, 1000), (1, 3)])
def test_wilson_against_its_formula(k, n):
    z, p = scipy_stats.norm.ppf(0.975), k / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    assert proportions.wilson(k, n) == pytest.approx((max(0, centre - half), min(1, centre + half)), abs=1e-12)


def test_paired_counts_and_exact_mcnemar():
    mcnemar = pytest.importorskip("statsmodels.stats.contingency_tables").mcnemar
    draws = np.random.default_rng(0)
    first, second = draws.random(200) < 0.8, draws.random(200) < 0.7
    paired = proportions.Paired.of(first, second)
    table = [[(first & second).sum(), (first & ~second).sum()], [(~first & second).sum(), (~first & ~second).sum()]]
    assert paired.p_value == pytest.approx(mcnemar(table, exact=True).pvalue, abs=1e-12)
    assert paired.difference == pytest.approx(second.mean() - first.mean())
    assert (paired.lost, paired.gained) == (table[0][1], table[1][0])


def test_one_sided_test_points_at_losses():
    worse, better = proportions.Paired(100, gained=2, lost=20), proportions.Paired(100, gained=20, lost=2)
    assert worse.p_worse < 0.001
    assert better.p_worse > 0.999
    assert proportions.Paired(100, 0, 0).p_value == 1.0


def test_holm_against_statsmodels():
    multitest = pytest.importorskip("statsmodels.stats.multitest")
    p = np.array([0.01, 0.04, 0.03, 0.005, 0.5])
    np.testing.assert_allclose(proportions.holm(p), multitest.multipletests(p, method="holm")[1])
    assert proportions.holm([]).size == 0


def test_only_booleans_are_paired():
    with pytest.raises(ValueError, match="booleans"):
        proportions.Paired.of(np.array([1.0, np.nan]), np.array([1.0, 0.0]))
    with pytest.raises(ValueError, match="one length"):
        proportions.Paired.of(np.array([True]), np.array([True, False]))


@pytest.mark.parametrize(("k", "n"), [(0, 10), (7, 10), (870, 1000)])
def test_wilson_against_statsmodels(k, n):
    proportion = pytest.importorskip("statsmodels.stats.proportion")
    assert proportions.wilson(k, n) == pytest.approx(proportion.proportion_confint(k, n, method="wilson"), abs=1e-12)


def test_paired_interval_against_its_formula_and_the_bootstrap():
    draws = np.random.default_rng(0)
    first = draws.random(400) < 0.7
    second = np.where(draws.random(400) < 0.15, ~first, first)
    paired = proportions.Paired.of(first, second)
    low, high = paired.interval()
    p12, p21 = (paired.gained + 1) / 402, (paired.lost + 1) / 402
    half = scipy_stats.norm.ppf(0.975) * np.sqrt((p12 + p21 - (p12 - p21) ** 2) / 402)
    assert (low, high) == pytest.approx((p12 - p21 - half, p12 - p21 + half), abs=1e-12)
    assert low < paired.difference < high
    difference = second.astype(float) - first
    boot = scipy_stats.bootstrap(
        (difference,), np.mean, n_resamples=2000, method="percentile", rng=1
    ).confidence_interval
    assert (low, high) == pytest.approx((boot.low, boot.high), abs=0.006)


@pytest.mark.parametrize(("gain", "loss", "n"), [(0.02, 0.05, 200), (0.10, 0.10, 100), (0.0, 0.03, 150)])
def test_paired_interval_covers(gain, loss, n):
    """95 % of intervals hold the true difference, over 4,000 simulated comparisons."""
    counts = np.random.default_rng(0).multinomial(n, [gain, loss, 1 - gain - loss], size=4000)
    inside = 0
    for gained, lost, _ in counts:
        low, high = proportions.Paired(n, int(gained), int(lost)).interval()
        inside += low <= gain - loss <= high
    assert 0.93 <= inside / 4000 <= 0.99
