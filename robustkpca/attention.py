"""Symmetric attention and RPC-Attention (principal attention pursuit, PAP).

Teo and Nguyen, "Unveiling the Hidden Structure of Self-Attention via Kernel Principal Component Analysis", NeurIPS 2024,
arXiv 2406.13762. Letters are the paper's: keys K = L + S with L low rank and S sparse, multiplier Y, penalty mu, weight lambda.
The functions are pure and take any float dtype and device; the modules hold the two linear layers and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F


class _SymmetricWithGradient(torch.autograd.Function):
    """softmax(K K^T / sqrt(D)) V with its backward by hand, for the CPU, where the fused kernel recomputes the weights.

    With P the weights and G the gradient of the output: dV = P^T G, dS = P * (G V^T - rowsum(G * O)), and since K stands on both
    sides of its product, dK = (dS + dS^T) K / sqrt(D): three products where autograd does four.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.matmul(k * k.shape[-1] ** -0.5, k.transpose(-2, -1)).softmax(-1)
        out = weights @ v
        ctx.save_for_backward(k, v, weights, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        k, v, weights, out = ctx.saved_tensors
        inner = (gradient * out).sum(-1, keepdim=True)
        scores = torch.matmul(gradient, v.transpose(-2, -1)).sub_(inner).mul_(weights)
        scores = (scores + scores.transpose(-2, -1)).mul_(k.shape[-1] ** -0.5)
        return scores @ k, weights.transpose(-2, -1) @ gradient


class _Clip(torch.autograd.Function):
    """clamp(x, -t, t) for a t of size one in the last two dimensions; its backward keeps one mask instead of six comparisons."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, t: Tensor) -> Tensor:
        out = torch.clamp(x, -t, t)
        ctx.save_for_backward(out, x.abs() <= t)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        out, inside = ctx.saved_tensors
        through = gradient * inside
        return through, ((gradient - through) * out.sign()).sum(dim=(-2, -1), keepdim=True)


def symmetric_attention(
    k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, is_causal: bool = False, dropout: float = 0.0
) -> Tensor:
    """softmax(K K^T / sqrt(D)) V: the keys are the queries.

    k, v: (B, H, N, D), any float dtype. Returns (B, H, N, D). `attn_mask` and `is_causal` mean what they mean to
    `torch.nn.functional.scaled_dot_product_attention`; `dropout` is the probability of dropping an attention weight.
    Fused attention, but for gradients on the CPU.
    """
    plain = attn_mask is None and not is_causal and dropout == 0.0
    if plain and k.device.type == "cpu" and torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
        return _SymmetricWithGradient.apply(k, v)
    return F.scaled_dot_product_attention(k, k, v, attn_mask=attn_mask, is_causal=is_causal, dropout_p=dropout)


# clamp(x, -t, t) = x - S with the gradient of `principal_attention`'s modes.
Gradient = Literal["full", "constant-sparse", "straight-through"]
_CLIPS: dict[Gradient, Callable[[Tensor, Tensor], Tensor]] = {
    "full": _Clip.apply,
    "constant-sparse": lambda x, t: x + (torch.clamp(x, -t, t) - x).detach(),
    "straight-through": lambda x, t: torch.clamp(x, -t, t).detach(),
}


def penalty(k: Tensor) -> Tensor:
    """mu = N C / (4 ||K||_1), one per image and head; C = H D is the model width. (B, H, N, D) -> (B, H, 1, 1).

    The norm is summed in at least float32 (bf16 sums lose digits). It carries gradient. Keys that are all zero give a huge
    mu, which leaves them zero, with gradient zero.
    """
    _, heads, tokens, head_dim = k.shape
    wide = torch.promote_types(k.dtype, torch.float32)
    norm = k.abs().sum(dim=(-2, -1), keepdim=True, dtype=wide)
    return tokens * heads * head_dim / (4.0 * norm.clamp_min(torch.finfo(wide).tiny))


def principal_attention(
    k: Tensor,
    v: Tensor,
    *,
    iterations: int,
    lam: float,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout: float = 0.0,
    gradient: Gradient = "full",
) -> Tensor:
    """RPC-Attention: n iterations of principal attention pursuit on the keys (algorithm PAP of the paper).

    Principal component pursuit of K (min ||L||_* + lambda ||S||_1, L + S = K) by ADMM, its singular-value step replaced by
    attention, the soft threshold at lambda * mu as in the authors' runs. With the scaled multiplier w = Y / mu and
    c = clamp(K - L + w, -t, t), t = lambda * mu, one has S = K - L + w - c. So the keys of an iteration are
    K - S - w = L + c - 2 w, the update w + K - L' - S is L - L' + c, and S itself is never formed. Gradients flow through
    every iteration, mu included.

    k, v: (B, H, N, D), any float dtype. `iterations` >= 1, `lam` > 0. Dropout acts in the last iteration only. `gradient` changes the
    backward pass alone, for attacks: `constant-sparse` holds S and mu constant (dS = 0), `straight-through` gives the soft threshold the
    derivative of the identity (dS = d(K - L + w); BPDA, Athalye et al. 2018, arXiv 1802.00420), which leaves the way through the values. The
    true derivative of the threshold is 0 where it is not passed and 1 where it is, so the two stand on either side of it. Returns L after the last iteration, (B, H, N, D).
    """
    if iterations < 1:
        raise ValueError(f"expected iterations >= 1, got {iterations}")
    threshold = (lam * penalty(k)).to(k.dtype)
    low: Tensor | None = None  # L; the first iteration needs no zeros
    w: Tensor | None = None  # Y / mu
    for step in range(1, iterations + 1):
        last = step == iterations
        residual = k if low is None or w is None else k - low + w
        clipped = _CLIPS[gradient](residual, threshold)
        keys = clipped if low is None or w is None else low + clipped - 2 * w
        new = symmetric_attention(keys, v, attn_mask=attn_mask, is_causal=is_causal, dropout=dropout if last else 0.0)
        if last:
            return new
        w = clipped - new if low is None else low - new + clipped
        low = new
    raise AssertionError("unreachable")


class SymmetricAttention(nn.Module):
    """Multi-head symmetric attention, a drop-in `attn_layer` of timm's VisionTransformer.

    One linear layer `qkv` of 2 * dim rows gives keys, then values; parameter names are timm's. (B, N, dim) -> (B, N, dim).
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        scale_norm: bool = False,
        proj_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        norm_layer: type[nn.Module] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"expected a width divisible by the number of heads, got {dim} and {num_heads}")
        if qk_norm or scale_norm:
            raise ValueError("symmetric attention is defined without qk_norm and scale_norm")
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.qkv = nn.Linear(dim, 2 * dim, bias=qkv_bias, device=device, dtype=dtype)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim, bias=proj_bias, device=device, dtype=dtype)
        self.proj_drop = nn.Dropout(proj_drop)

    def attend(self, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool, dropout: float) -> Tensor:
        """(B, H, N, D) keys and values to (B, H, N, D)."""
        return symmetric_attention(k, v, attn_mask=attn_mask, is_causal=is_causal, dropout=dropout)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        batch, tokens, dim = x.shape
        k, v = self.qkv(x).reshape(batch, tokens, 2, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        out = self.attend(k, v, attn_mask, is_causal, self.attn_drop.p if self.training else 0.0)
        return self.proj_drop(self.proj(out.transpose(1, 2).reshape(batch, tokens, dim)))


class RPCAttention(SymmetricAttention):
    """Symmetric attention computed by PAP: the same parameters, with `iterations` (n) and `lam` (lambda) as settings."""

    iterations: int
    lam: float

    @classmethod
    def of(cls, attention: SymmetricAttention, *, iterations: int, lam: float) -> RPCAttention:
        """RPC-Attention over the very parameters of `attention` (shared, not copied)."""
        new = cls(attention.num_heads * attention.head_dim, attention.num_heads, device="meta")
        new.qkv, new.proj = attention.qkv, attention.proj
        new.attn_drop, new.proj_drop = attention.attn_drop, attention.proj_drop
        new.iterations, new.lam = iterations, lam
        return new.train(attention.training)

    def attend(self, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool, dropout: float) -> Tensor:
        return principal_attention(
            k,
            v,
            iterations=self.iterations,
            lam=self.lam,
            attn_mask=attn_mask,
            is_causal=is_causal,
            dropout=dropout,
        )

    def extra_repr(self) -> str:
        return f"iterations={self.iterations}, lam={self.lam}"
