import numpy as np
import pytest
from scipy import stats as scipy_stats

from robustkpca import stats


@pytest.mark.parametrize(("k", "n"), [(0, 10), (10, 10), (7, 10), (870, 1000), (1, 3)])
def test_wilson_against_its_formula(k, n):
    z, p = scipy_stats.norm.ppf(0.975), k / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    assert stats.wilson(k, n) == pytest.approx((max(0, centre - half), min(1, centre + half)), abs=1e-12)


def test_paired_counts_and_exact_mcnemar():
    mcnemar = pytest.importorskip("statsmodels.stats.contingency_tables").mcnemar
    draws = np.random.default_rng(0)
    first, second = draws.random(200) < 0.8, draws.random(200) < 0.7
    paired = stats.Paired.of(first, second)
    table = [[(first & second).sum(), (first & ~second).sum()], [(~first & second).sum(), (~first & ~second).sum()]]
    assert paired.p_value == pytest.approx(mcnemar(table, exact=True).pvalue, abs=1e-12)
    assert paired.difference == pytest.approx(second.mean() - first.mean())
    assert (paired.lost, paired.gained) == (table[0][1], table[1][0])


def test_one_sided_test_points_at_losses():
    worse, better = stats.Paired(100, gained=2, lost=20), stats.Paired(100, gained=20, lost=2)
    assert worse.p_worse < 0.001
    assert better.p_worse > 0.999
    assert stats.Paired(100, 0, 0).p_value == 1.0


def test_holm_against_statsmodels():
    multitest = pytest.importorskip("statsmodels.stats.multitest")
    p = np.array([0.01, 0.04, 0.03, 0.005, 0.5])
    np.testing.assert_allclose(stats.holm(p), multitest.multipletests(p, method="holm")[1])
    assert stats.holm([]).size == 0


def test_only_booleans_are_paired():
    with pytest.raises(ValueError, match="booleans"):
        stats.Paired.of(np.array([1.0, np.nan]), np.array([1.0, 0.0]))
    with pytest.raises(ValueError, match="one length"):
        stats.Paired.of(np.array([True]), np.array([True, False]))
