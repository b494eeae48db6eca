"""Attention as kernel PCA against scikit-learn, against the definitions written out,
and on layers whose answer is known."""

import numpy as np
import pytest
import torch
from sklearn.decomposition import KernelPCA

from robustkpca.kpca import theory
from robustkpca.models.attention import penalty, principal_attention, symmetric_attention


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def plain_kernels(q, k):
    """kappa(q, k), g(q) and g(k) of one head as numpy arrays, exponentials and all."""
    q, k = q.numpy(), k.numpy()
    kappa = np.exp(q @ k.T / np.sqrt(k.shape[-1]))
    return kappa, kappa.sum(1), np.exp(k @ k.T / np.sqrt(k.shape[-1])).sum(1)


def plain_gram(k):
    """K_phi of one head."""
    kappa, g, _ = plain_kernels(k, k)
    return kappa / g[:, None] / g[None, :]


def true_scale(found):
    scale = found.log_scale.exp()
    return found.values * scale[..., None, None]


def test_eigenvalues_and_projections_are_those_of_scikit_learn():
    tokens, axes = 14, 5
    q, k = draw(9, 6, seed=1), draw(tokens, 6)
    gram = plain_gram(k)
    reference = KernelPCA(n_components=axes, kernel="precomputed", eigen_solver="dense").fit(gram)
    found = theory.spectrum(theory.centred_gram(k[None, None]))
    np.testing.assert_allclose(found.eigenvalues[0, 0, :axes] * tokens, reference.eigenvalues_, rtol=1e-9)

    # Axes of norm one as values: attention is the projection, up to the centring of the queries' features, one constant
    # an axis.
    kappa, g_q, g_k = plain_kernels(q, k)
    a = reference.eigenvectors_ / np.sqrt(reference.eigenvalues_)
    h = kappa / g_q[:, None] @ (a / g_k[:, None])
    wanted = reference.transform(kappa / g_q[:, None] / g_k[None, :])
    difference = h - wanted
    assert np.abs(difference - difference.mean(0)).max() < 1e-10 * np.abs(wanted).max()

    # And such values are recognised, whatever constant is added to them.
    v = torch.from_numpy(a / g_k[:, None] + np.arange(axes))[None, None]
    np.testing.assert_allclose(true_scale(theory.recover_axes(k[None, None], v))[0, 0], a, atol=1e-9 * np.abs(a).max())
    gamma = theory.gamma(k[None, None], v)
    assert gamma.cosine.min() > 1 - 1e-9


def eigen_values(k, axes):
    """Eigenvectors of K~ for the largest eigenvalues, (N, axes), and those eigenvalues, of one head; numpy's."""
    centre = np.eye(len(k)) - 1 / len(k)
    w, vectors = np.linalg.eigh(centre @ plain_gram(k) @ centre)
    return vectors[:, ::-1][:, :axes].copy(), w[::-1][:axes].copy()


@pytest.mark.parametrize("formula", ["exact", "the paper's"])
def test_values_that_hold_eigenvectors_give_a_constant_gamma(formula):
    tokens, axes = 20, 6
    k = draw(2, 3, tokens, axes)
    v, a, values = torch.empty_like(k), torch.empty_like(k), torch.empty(2, 3, axes, dtype=k.dtype)
    for b, h in np.ndindex(2, 3):
        vectors, w = eigen_values(k[b, h], axes)
        _, g, _ = plain_kernels(k[b, h], k[b, h])
        own = vectors / g[:, None]
        v[b, h] = torch.from_numpy(own if formula == "exact" else own - own.mean(0))
        a[b, h], values[b, h] = torch.from_numpy(vectors), torch.from_numpy(w / tokens)
    found = theory.gamma(k, v)
    gamma = true_scale(found)
    off = torch.where(found.kept, gamma / values[..., None, :] - 1, 0).abs().max()
    assert off < 1e-8
    assert found.kept.double().mean() > 0.9
    spread = theory.gamma_spread(gamma, found.kept)
    assert (spread.mean / values).max() < 1e-8
    assert (spread.std / values).max() < 1e-8
    torch.testing.assert_close(true_scale(theory.recover_axes(k, v)), a, rtol=0, atol=1e-9)

    other = theory.gamma(k, draw(2, 3, tokens, axes, seed=5))
    assert theory.gamma_spread(other.values, other.kept).relative.min() > 0.5
    assert other.cosine.max() < 0.99


def test_gamma_is_its_definition_for_any_values():
    tokens = 11
    k, v = draw(1, 1, tokens, 4), draw(1, 1, tokens, 4, seed=1)
    _, g, _ = plain_kernels(k[0, 0], k[0, 0])
    a = g[:, None] * v[0, 0].numpy()
    a = a - g[:, None] * a.sum(0) / g.sum()
    assert np.abs(a.sum(0)).max() < 1e-10
    centre = np.eye(tokens) - 1 / tokens
    projected = centre @ plain_gram(k[0, 0]) @ centre @ a
    found = theory.gamma(k, v, floor=0.0)
    assert found.kept.all()
    np.testing.assert_allclose(true_scale(found)[0, 0], projected / (tokens * a), rtol=1e-8)
    cosine = (projected * a).sum(0) / np.linalg.norm(projected, axis=0) / np.linalg.norm(a, axis=0)
    np.testing.assert_allclose(found.cosine[0, 0], cosine, rtol=1e-9)


def test_tokens_whose_a_vanishes_are_left_out():
    k = draw(1, 1, 12, 3)
    v = draw(1, 1, 12, 3, seed=1)
    weights = theory.log_normalizer(k, k).softmax(-1)[0, 0]
    v[0, 0, 4] = ((weights @ v[0, 0]) - weights[4] * v[0, 0, 4]) / (1 - weights[4])  # then its u is zero
    kept = theory.gamma(k, v).kept[0, 0]
    assert not kept[4].any()
    assert kept.sum() >= 3 * 10


def test_spread_is_that_of_all_pairs():
    values = draw(2, 1, 9, 4)
    kept = draw(2, 1, 9, 4, seed=3) > -0.7
    kept[1, 0, :, 0] = False
    kept[1, 0, 2, 0] = True  # a single token has no pair
    found = theory.gamma_spread(torch.where(kept, values, torch.nan), kept)
    for b, d in np.ndindex(2, 4):
        x = values[b, 0, :, d][kept[b, 0, :, d]].numpy()
        pairs = np.array([abs(x[i] - x[j]) for i in range(len(x)) for j in range(i)])
        if len(pairs) == 0:
            assert found.mean[b, 0, d].isnan()
            assert found.std[b, 0, d].isnan()
            continue
        wanted = [pairs.mean(), pairs.std(), pairs.mean() / np.abs(x).mean()]
        np.testing.assert_allclose([t[b, 0, d] for t in (found.mean, found.std, found.relative)], wanted, rtol=1e-9)
    constant = theory.gamma_spread(torch.zeros(1, 1, 5, 1), torch.ones(1, 1, 5, 1, dtype=torch.bool))
    assert float(constant.relative) == 0


def test_projection_loss_is_its_definition():
    q, k, v = draw(2, 2, 7, 5), draw(2, 2, 7, 5, seed=1), draw(2, 2, 7, 5, seed=2)
    found = theory.projection_loss(q.float(), k.float(), v.float())
    assert found.dtype == torch.float64
    q, k, v = (x.float().double() for x in (q, k, v))
    for b, h in np.ndindex(2, 2):
        kappa, g, _ = plain_kernels(q[b, h], k[b, h])
        own = np.exp((q[b, h].numpy() ** 2).sum(1) / np.sqrt(5))
        outputs = kappa @ v[b, h].numpy() / g[:, None]
        np.testing.assert_allclose(found[b, h], (own / g**2 - (outputs**2).sum(1)).mean(), rtol=1e-10)


def test_logarithms_carry_keys_whose_exponentials_do_not_fit():
    # Orthogonal keys of one length L: g = e^(L^2/sqrt D) + N - 1, K~ = c (I - 11^T/N): N - 1 equal eigenvalues, at any
    # length.
    tokens = 8
    for length in (0.1, 1.0, 30.0, 300.0):
        k = length * torch.eye(tokens, dtype=torch.float64)[None, None]
        gram = theory.centred_gram(k)
        found = theory.spectrum(gram)
        assert gram.values.isfinite().all()
        torch.testing.assert_close(found.effective_rank, torch.full((1, 1), tokens - 1.0, dtype=k.dtype))
        torch.testing.assert_close(found.participation_ratio, torch.full((1, 1), tokens - 1.0, dtype=k.dtype))
    # Then every a that sums to zero is an eigenvector, and so all values are.
    gamma = theory.gamma(k, draw(1, 1, tokens, tokens))
    assert theory.gamma_spread(gamma.values, gamma.kept).relative.max() < 1e-8
    # |phi|^2 = e^(-L^2/sqrt D) vanishes beside h = v, and log says how small it is.
    v = draw(1, 1, tokens, tokens)
    torch.testing.assert_close(theory.projection_loss(k, k, v), -v.square().sum(-1).mean(-1))
    expected = torch.full((1, 1, tokens), -(300.0**2) / tokens**0.5, dtype=k.dtype)
    torch.testing.assert_close(theory.log_feature_norm(k, k), expected)
    # Queries that no key is like have features beyond any float64.
    assert theory.projection_loss(k, 0 * k, v).isposinf().all()
    torch.testing.assert_close(theory.log_feature_norm(k, 0 * k), -expected - 2 * np.log(tokens))


def test_what_rotations_and_the_order_of_tokens_do_not_change():
    q, k, v = draw(1, 2, 10, 4), draw(1, 2, 10, 4, seed=1), draw(1, 2, 10, 4, seed=2)
    turn = torch.linalg.qr(draw(4, 4, seed=3)).Q
    order = torch.randperm(10, generator=torch.Generator().manual_seed(0))
    loss, spectrum = theory.projection_loss(q, k, v), theory.spectrum(theory.centred_gram(k))
    torch.testing.assert_close(theory.projection_loss(q @ turn, k @ turn, v), loss)
    torch.testing.assert_close(theory.projection_loss(q, k[..., order, :], v[..., order, :]), loss)
    torch.testing.assert_close(theory.spectrum(theory.centred_gram(k[..., order, :] @ turn)), spectrum)
    torch.testing.assert_close(
        true_scale(theory.gamma(k[..., order, :], v[..., order, :], 0.0)),
        true_scale(theory.gamma(k, v, 0.0))[..., order, :],
    )


def test_effective_rank_counts_groups_of_keys():
    two = draw(2, 5)[torch.tensor([0, 1, 1, 0, 1, 0, 0])][None, None]
    found = theory.spectrum(theory.centred_gram(two))
    assert (found.eigenvalues[0, 0] > 0).sum() == 1
    torch.testing.assert_close(found.effective_rank, torch.ones(1, 1, dtype=two.dtype))
    torch.testing.assert_close(found.participation_ratio, torch.ones(1, 1, dtype=two.dtype))
    none = theory.spectrum(theory.centred_gram(torch.ones(1, 1, 7, 5)))
    assert not any(t.any() for t in none)


@pytest.mark.parametrize(("n", "lam"), [(1, 4.0), (2, 0.05), (4, 0.3)])
def test_pursuit_is_the_attention_of_the_model_with_a_record(n, lam):
    k, v = draw(2, 3, 9, 4), draw(2, 3, 9, 4, seed=1)
    found = theory.pursuit_trace(k, v, iterations=n, lam=lam)
    torch.testing.assert_close(found.output, principal_attention(k, v, iterations=n, lam=lam), rtol=0, atol=1e-12)
    torch.testing.assert_close(symmetric_attention(found.keys, v), found.output, rtol=0, atol=1e-12)
    mu = penalty(k)
    low, y = torch.zeros_like(k), torch.zeros_like(k)
    for t in range(n):  # word for word, Y kept
        m = k - low + y / mu
        s = m.sign() * (m.abs() - lam * mu).clamp_min(0)
        low = symmetric_attention(k - s - y / mu, v)
        y = y + mu * (k - low - s)
        torch.testing.assert_close(found.sparse_norm[..., t], s.abs().sum((-2, -1)))
        torch.testing.assert_close(found.sparse_share[..., t], s.abs().sum((-2, -1)) / k.abs().sum((-2, -1)))
        torch.testing.assert_close(found.nonzero[..., t], (s != 0).double().mean((-2, -1)))
        torch.testing.assert_close(found.residual[..., t], (k - low - s).norm(dim=(-2, -1)) / k.norm(dim=(-2, -1)))
    torch.testing.assert_close(found.mu, mu[..., 0, 0])
    torch.testing.assert_close(found.threshold, lam * mu[..., 0, 0])
    assert not k.requires_grad
    plain = theory.pursuit_trace(k, v, iterations=n, lam=lam, gradients=False)
    assert plain.gradient.shape == (2, 3, 0)
    torch.testing.assert_close(plain.residual, found.residual)


def test_the_gradient_norm_is_that_of_the_jacobian_on_average():
    k, v = draw(1, 2, 4, 3), draw(1, 2, 4, 3, seed=1)
    seeds = range(150)
    norms = [theory.pursuit_trace(k, v, iterations=2, lam=0.3, seed=seed).gradient[0] for seed in seeds]
    measured = torch.stack(norms).square().mean(0)  # (H, n)
    for t in (1, 2):
        jacobian = torch.autograd.functional.jacobian(
            lambda x, t=t: principal_attention(x, v, iterations=t, lam=0.3), k
        )
        for h in range(2):
            exact = jacobian[0, h, :, :, 0, h].square().sum() / (4 * 3)
            assert measured[h, t - 1] == pytest.approx(float(exact), rel=0.25)


def test_no_iteration_is_refused():
    with pytest.raises(ValueError, match="iterations >= 1, got 0"):
        theory.pursuit_trace(draw(1, 1, 2, 2), draw(1, 1, 2, 2), iterations=0, lam=1.0)
