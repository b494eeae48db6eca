"""Self-attention read as kernel PCA: pure functions on the queries, keys and values of a layer.

Teo and Nguyen, "Unveiling the Hidden Structure of Self-Attention via Kernel Principal Component Analysis", NeurIPS
2024, arXiv 2406.13762, section 2. The letters are the paper's. q, k, v are (B, H, N, D) of any float dtype: B images,
H heads, N tokens, D = head width = number of principal axes. All computation is in float64, with logarithms wherever
an exponential could overflow.

    kernel          kappa(x, y) = exp(x.y / sqrt(D)),  g(x) = sum_j kappa(x, k_j)
    features        phi(x).phi(y) = kappa(x, y) / (g(x) g(y))
    Gram matrix     [K_phi]_ij = phi(k_i).phi(k_j),  K~ = C K_phi C,  C = I - 11^T / N
    principal axes  u_d = sum_j a_dj (phi(k_j) - mean phi),  K~ a_d = N lambda_d a_d
    attention       h_id = phi(q_i).u_d = sum_j [kappa(q_i, k_j) / g(q_i)] v_jd

What values have to do with axes. Written out, phi(q_i).u_d = sum_j [kappa(q_i, k_j) / g(q_i)] (a_dj - mean_j' a_dj')
/ g(k_j): the exact value is v_jd = (a_dj - mean a_d) / g(k_j). The paper's formula v_jd = a_dj / g(k_j) - (1/N)
sum_j' a_dj' / g(k_j') differs from it by a constant over the tokens where a_d sums to zero, and an eigenvector of K~
with a non-zero eigenvalue does: K~ 1 = 0. A constant added to v_d adds the same constant to h_d, since attention
weights sum to one, so it says nothing about axes. Hence, under either formula,

    a_dj = g(k_j) (v_jd - c_d),   c_d = sum_j g(k_j) v_jd / sum_j g(k_j),

c_d being the one constant with which a_d sums to zero. Every value vector has exactly one such a_d; what is in
question is whether it is an eigenvector. With u_d = v_d - c_d and P = softmax(K K^T / sqrt(D)), [K_phi a_d]_i = sum_j
kappa(k_i, k_j) u_jd / g(k_i) = [P u_d]_i, and C a_d = a_d, so K~ a_d = C P u_d: attention among the keys, centred.
That form needs no Gram matrix and cannot overflow.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from robustkpca.models.attention import attention, penalty


class Scaled(NamedTuple):
    """A tensor whose true values are `values * exp(log_scale)`: nothing in it overflows, ratios need no scale."""

    values: Tensor
    log_scale: Tensor  # (B, H)


class Spectrum(NamedTuple):
    """Eigenvalues lambda_d of the covariance of the centred features, and how many of them matter."""

    eigenvalues: Tensor  # (B, H, N), descending, in true scale
    effective_rank: Tensor  # (B, H), exp of the entropy of the eigenvalues' shares
    participation_ratio: Tensor  # (B, H), (sum lambda)^2 / sum lambda^2


class Gamma(NamedTuple):
    """The eigenvector test of value vectors, token by token."""

    values: Tensor  # (B, H, N, D), gamma / exp(log_scale)
    log_scale: Tensor  # (B, H)
    kept: Tensor  # (B, H, N, D), bool: where a_dj is far enough from zero for the quotient to mean anything
    cosine: Tensor  # (B, H, D), of the angle between K~ a_d and a_d: 1 for an eigenvector only


class Spread(NamedTuple):
    """|gamma_i - gamma_j| over all pairs of tokens, each (B, H, D); in the scale of gamma, but for `relative`."""

    mean: Tensor
    std: Tensor
    relative: Tensor  # mean / mean |gamma|, from 0 (constant) to 2


class Pursuit(NamedTuple):
    """What principal attention pursuit does in each of its n iterations."""

    mu: Tensor  # (B, H)
    threshold: Tensor  # (B, H), lambda * mu
    sparse_norm: Tensor  # (B, H, n), ||S||_1
    sparse_share: Tensor  # (B, H, n), ||S||_1 / ||K||_1
    nonzero: Tensor  # (B, H, n), share of S that is not zero, i.e. of entries over the threshold
    residual: Tensor  # (B, H, n), ||K - L - S||_F / ||K||_F
    gradient: Tensor  # (B, H, n), ||d<R, L> / dK||_F for a fixed R of norm one; (B, H, 0) when not asked for
    keys: Tensor  # (B, H, N, D), K - S - Y/mu of the last iteration: the keys of the attention that is the output
    output: Tensor  # (B, H, N, D), L of the last iteration


def log_kernel(x: Tensor, y: Tensor) -> Tensor:
    """log kappa(x_i, y_j) = x_i.y_j / sqrt(D) (arXiv 2406.13762, section 2).

    (B, H, N, D) twice -> (B, H, N, N) float64.
    """
    return x.double() @ y.double().transpose(-2, -1) / math.sqrt(x.shape[-1])


def log_normalizer(x: Tensor, k: Tensor) -> Tensor:
    """log g(x_i) = log sum_j kappa(x_i, k_j) (section 2), for queries or keys x.

    (B, H, N, D) twice -> (B, H, N) float64.
    """
    return log_kernel(x, k).logsumexp(-1)


def log_feature_norm(q: Tensor, k: Tensor) -> Tensor:
    """log ||phi(q_i)||^2 = q_i.q_i / sqrt(D) - 2 log g(q_i) (section 2). (B, H, N, D) twice -> (B, H, N) float64."""
    squares = q.double().square().sum(-1) / math.sqrt(q.shape[-1])
    return squares - 2 * log_normalizer(q, k)


def projection_loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """J = mean_i (||phi(q_i)||^2 - ||h_i||^2), the projection (reconstruction) loss of kernel PCA (section 2, check 1).

    h is attention's output of these values. The feature norms are averaged as logarithms, so that only a J that
    itself is beyond float64 becomes inf; `log_feature_norm` still says how large. J is negative where the values are
    longer than axes of norm one would be. (B, H, N, D) three times -> (B, H) float64.
    """
    features = (log_feature_norm(q, k).logsumexp(-1) - math.log(q.shape[-2])).exp()
    projected = log_kernel(q, k).softmax(-1) @ v.double()
    return features - projected.square().sum(-1).mean(-1)


def centred_gram(k: Tensor) -> Scaled:
    """K~ = (I - 11^T/N) K_phi (I - 11^T/N), [K_phi]_ij = kappa(k_i, k_j) / (g(k_i) g(k_j)) (section 2).

    The entries are exponentials of differences of logarithms, divided by the largest of them, which K_phi as a
    positive semi-definite matrix has on its diagonal. Eigenvectors, effective rank and whether gamma is constant do
    not depend on that scale. (B, H, N, D) -> values (B, H, N, N) float64, symmetric, rows summing to zero.
    """
    logs = log_kernel(k, k)
    g = logs.logsumexp(-1)
    logs = logs - g[..., :, None] - g[..., None, :]
    largest = logs.amax((-2, -1))
    gram = (logs - largest[..., None, None]).exp()
    rows = gram.mean(-1, keepdim=True)
    gram = gram - rows - rows.transpose(-2, -1) + rows.mean(-2, keepdim=True)
    return Scaled((gram + gram.transpose(-2, -1)) / 2, largest)


def spectrum(gram: Scaled) -> Spectrum:
    """Eigenvalues lambda_d, K~ a_d = N lambda_d a_d (section 2), descending, and their effective rank.

    Effective rank: exp(-sum p log p), p the eigenvalues' shares of their sum (Roy and Vetterli, "The effective rank:
    a measure of effective dimensionality", EUSIPCO 2007). Participation ratio: (sum lambda)^2 / sum lambda^2, which
    follows the largest ones more. Both are 0 where all eigenvalues are (equal keys). Eigenvalues below rounding, N *
    2.2e-16 of the largest entry of K_phi, are 0.
    """
    tokens = gram.values.shape[-1]
    values = torch.linalg.eigvalsh(gram.values).flip(-1)
    values = torch.where(values > tokens * torch.finfo(values.dtype).eps, values, torch.zeros_like(values))
    total = values.sum(-1)
    some = total > 0
    shares = values / total.where(some, torch.ones_like(total))[..., None]
    entropy = -torch.special.xlogy(shares, shares).sum(-1)
    concentration = shares.square().sum(-1).where(some, torch.ones_like(total))
    eigenvalues = values / tokens * gram.log_scale.exp()[..., None]
    return Spectrum(eigenvalues, entropy.exp() * some, some / concentration)


def _centred_values(log_g: Tensor, v: Tensor) -> Tensor:
    """u_d = v_d - c_d, c_d the mean of v_d weighted by g(k_j) (see the module).

    (B, H, N) and (B, H, N, D) -> (B, H, N, D).
    """
    v = v.double()
    return v - log_g.softmax(-1)[..., None, :] @ v


def recover_axes(k: Tensor, v: Tensor) -> Scaled:
    """a_dj = g(k_j) (v_jd - c_d), the coefficients in the values v_jd = a_dj / g(k_j) + c_d (section 2, check 2).

    The constant c_d is lost in attention's output and fixed by sum_j a_dj = 0, which every eigenvector of K~ with a
    non-zero eigenvalue fulfils (derivation in the module's docstring). Divided by the largest g. (B, H, N, D) twice
    -> values (B, H, N, D) float64.
    """
    log_g = log_normalizer(k, k)
    largest = log_g.amax(-1)
    return Scaled((log_g - largest[..., None]).exp()[..., None] * _centred_values(log_g, v), largest)


def gamma(k: Tensor, v: Tensor, floor: float = 1e-3) -> Gamma:
    """gamma_dj = [K~ a_d]_j / (N a_dj): lambda_d for all tokens j if a_d is an eigenvector (section 2, check 2).

    Computed as [C P u_d]_j / (N g(k_j) u_jd) (see the module's docstring), divided by the largest 1 / g. The quotient
    says nothing where a_dj vanishes, and its mean over random values would not even exist. Since g > 0, a_dj vanishes
    with u_jd: tokens with |u_jd| <= floor * (root mean square of u_d over the tokens) are not `kept` (`floor` 0 keeps
    all but exact zeros). The cosine uses all tokens.
    """
    logs = log_kernel(k, k)
    log_g = logs.logsumexp(-1)
    u = _centred_values(log_g, v)
    numerator = logs.softmax(-1) @ u
    numerator = numerator - numerator.mean(-2, keepdim=True)
    kept = u.abs() > floor * u.square().mean(-2, keepdim=True).sqrt()
    smallest = log_g.amin(-1)
    inverse_g = (smallest[..., None] - log_g).exp()[..., None]
    quotient = inverse_g * numerator / (u.shape[-2] * torch.where(kept, u, torch.ones_like(u)))
    a = (log_g - log_g.amax(-1, keepdim=True)).exp()[..., None] * u
    # Each scaled by its largest entry first, whose squares neither overflow nor vanish.
    scaled = [x / x.abs().amax(-2, keepdim=True) for x in (numerator, a)]
    cosine = (scaled[0] * scaled[1]).sum(-2) / (scaled[0].norm(dim=-2) * scaled[1].norm(dim=-2))
    return Gamma(torch.where(kept, quotient, torch.nan), -smallest, kept, cosine)


def gamma_spread(values: Tensor, kept: Tensor) -> Spread:
    """Mean and standard deviation of |gamma_i - gamma_j| over all pairs of kept tokens, per axis (section 2, check 2).

    With gamma sorted, the sum over pairs is sum_r (2 r - n + 1) gamma_(r), r = 0..n-1, and that of squares n sum
    gamma^2 - (sum gamma)^2 about any centre: N log N instead of N^2. `relative` divides by mean |gamma|, which makes
    it free of scale and bounds it by 2. values (B, H, N, D), kept likewise -> (B, H, D); nan where fewer than two
    tokens are kept.
    """
    n = kept.sum(-2)
    pairs = n * (n - 1) / 2
    pairs = torch.where(pairs > 0, pairs, torch.nan)
    magnitude = torch.where(kept, values.abs(), 0).sum(-2) / n
    centre = torch.where(kept, values, 0).sum(-2, keepdim=True) / n[..., None, :]
    ordered = torch.where(kept, values - centre, torch.inf).sort(dim=-2).values
    rank = torch.arange(values.shape[-2], device=values.device, dtype=values.dtype)[:, None]
    inside = rank < n[..., None, :]
    ordered = torch.where(inside, ordered, 0)
    mean = ((2 * rank - n[..., None, :] + 1) * ordered).sum(-2) / pairs
    squares = (n * ordered.square().sum(-2) - ordered.sum(-2).square()) / pairs
    # Pairs of equal numbers have no spread, which the quotient of two zeros would hide.
    relative = torch.where(mean == 0, mean, mean / magnitude)
    return Spread(mean, (squares - mean.square()).clamp_min(0).sqrt(), relative)


def pursuit_trace(
    k: Tensor,
    v: Tensor,
    *,
    q: Tensor | None = None,
    iterations: int,
    lam: float,
    gradients: bool = True,
    seed: int = 0,
) -> Pursuit:
    """Principal attention pursuit (section 3, algorithm PAP) with a record of every iteration, in float64.

    The same iteration as `robustkpca.models.attention.principal_attention`, S kept: S = soft_threshold(K - L + Y/mu,
    lambda * mu), keys K - S - Y/mu, L = softmax attention of those keys (and of the queries `q`, where they are
    others), then Y/mu grows by K - L - S; the residual is that of the new L.

    `gradient` of iteration t is the norm of d<R, L_t>/dK through all t iterations, mu included, per image and head; R
    has entries of one size with random signs (drawn with `seed`, the same for every image) and norm one. Its mean
    square over draws is ||dL_t/dK||_F^2 / (N D), so numbers that grow with t say that unrolling amplifies. `mu`
    carries gradient only to K of its own image and head.
    """
    if iterations < 1:
        raise ValueError(f"expected iterations >= 1, got {iterations}")
    k, v = k.detach().double(), v.detach().double()
    q = None if q is None else q.detach().double()
    batch, heads, tokens, dim = k.shape
    tiny = torch.finfo(k.dtype).tiny
    norm, total = k.norm(dim=(-2, -1)).clamp_min(tiny), k.abs().sum((-2, -1))
    signs = torch.randint(2, (heads, tokens, dim), generator=torch.Generator().manual_seed(seed))
    direction = ((2.0 * signs - 1) / math.sqrt(tokens * dim)).to(k)
    record: dict[str, list[Tensor]] = {
        name: [] for name in ("sparse_norm", "sparse_share", "nonzero", "residual", "gradient")
    }
    with torch.set_grad_enabled(gradients):
        k.requires_grad_(gradients)
        mu = penalty(k)
        threshold = lam * mu
        low, w = torch.zeros_like(k), torch.zeros_like(k)  # L and Y / mu
        for _ in range(iterations):
            inner = k - low + w
            sparse = inner - torch.clamp(inner, -threshold, threshold)
            keys = k - sparse - w
            low = attention(q, keys, v)
            gap = k - low - sparse
            w = w + gap
            size = sparse.detach().abs().sum((-2, -1))
            record["sparse_norm"].append(size)
            record["sparse_share"].append(size / total.clamp_min(tiny))
            record["nonzero"].append((inner.detach().abs() > threshold.detach()).double().mean((-2, -1)))
            record["residual"].append(gap.detach().norm(dim=(-2, -1)) / norm)
            if gradients:
                (slope,) = torch.autograd.grad((direction * low).sum(), k, retain_graph=True)
                record["gradient"].append(slope.norm(dim=(-2, -1)))
    stacked = {n: torch.stack(t, -1) if t else k.new_zeros(batch, heads, 0).detach() for n, t in record.items()}
    one = mu.detach()[..., 0, 0]
    return Pursuit(mu=one, threshold=lam * one, keys=keys.detach(), output=low.detach(), **stacked)
