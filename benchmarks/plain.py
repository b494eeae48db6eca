"""Symmetric attention and PAP from their definitions (arXiv 2406.13762): ours is measured and tested against them."""

from __future__ import annotations

from torch import Tensor, zeros_like

from robustkpca.models.attention import RPCAttention, SymmetricAttention


def plain_symmetric(k: Tensor, v: Tensor) -> Tensor:
    """softmax(K K^T / sqrt(D)) V by two matrix products. k, v and the result: (B, H, N, D)."""
    return (k @ k.transpose(-2, -1) / k.shape[-1] ** 0.5).softmax(-1) @ v


def plain_pap(k: Tensor, v: Tensor, n: int, lam: float) -> Tensor:
    """PAP word for word: S, L and Y kept, the soft threshold by sign and relu, mu with its gradient. k, v and the
    result: (B, H, N, D).
    """
    _, heads, tokens, dim = k.shape
    mu = tokens * heads * dim / (4 * k.abs().sum((-2, -1), keepdim=True))
    low, y = zeros_like(k), zeros_like(k)
    for _ in range(n):
        m = k - low + y / mu
        s = m.sign() * (m.abs() - lam * mu).relu()
        low = plain_symmetric(k - s - y / mu, v)
        y = y + mu * (k - low - s)
    return low


class PlainSymmetric(SymmetricAttention):
    """`SymmetricAttention`, an `attn_layer` of timm, computed from the definition. No masks and no dropout."""

    def attend(
        self, q: None, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool, dropout: float
    ) -> Tensor:
        return plain_symmetric(k, v)


class PlainRPC(RPCAttention):
    """`RPCAttention` on symmetric attention computed from the definition. No masks and no dropout."""

    def attend(
        self, q: None, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool, dropout: float
    ) -> Tensor:
        return plain_pap(k, v, self.iterations, self.lam)
