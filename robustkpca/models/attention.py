"""Symmetric attention and RPC-Attention (principal attention pursuit, PAP).

Teo and Nguyen, "Unveiling the Hidden Structure of Self-Attention via Kernel Principal Component Analysis", NeurIPS
2024, arXiv 2406.13762. Letters are the paper's: keys K = L + S with L low rank and S sparse, multiplier Y, penalty
mu, weight lambda. The functions are pure and take any float dtype and device; the modules hold the two linear layers
and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F


class _SymmetricWithGradient(torch.autograd.Function):
    """softmax(K K^T / sqrt(D)) V with its backward by hand, for the CPU, where the fused kernel recomputes the weights.

    With P the weights and G the gradient of the output: dV = P^T G, dS = P * (G V^T - rowsum(G * O)), and since K
    stands on both sides of its product, dK = (dS + dS^T) K / sqrt(D): three products where autograd does four. (M, N,
    D) twice -> (M, N, D).
    """

    @staticmethod
    def forward(ctx: FunctionCtx, k: Tensor, v: Tensor) -> Tensor:
        weights = _scaled_product(k, k.mT, k).softmax(-1)
        out = weights @ v
        ctx.save_for_backward(k, v, weights, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        k, v, weights, out = ctx.saved_tensors
        inner = (gradient * out).sum(-1, keepdim=True)
        scores = torch.bmm(gradient, v.mT).sub_(inner).mul_(weights)
        return _scaled_product(scores + scores.mT, k, k), weights.mT @ gradient


def _scaled_product(a: Tensor, b: Tensor, k: Tensor) -> Tensor:
    """A B / sqrt(D) in one go, D the width of the keys."""
    return torch.baddbmm(k.new_empty(()), a, b, beta=0, alpha=k.shape[-1] ** -0.5)


class _Clip(torch.autograd.Function):
    """clamp(x, -t, t), t > 0 of size one in the last dimension or the last two; its backward needs the result and t
    alone."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, t: Tensor) -> Tensor:
        out = torch.minimum(torch.maximum(x, -t), t)  # on the CPU faster than clamp with tensors as bounds
        ctx.save_for_backward(out, t)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        out, t = ctx.saved_tensors
        side = (out / t).trunc_()  # 1 or -1 where x was clipped, else 0
        outside = gradient * side
        dims = (-2, -1) if t.shape[-2] == 1 else (-1,)
        return torch.addcmul(gradient, outside, side, value=-1), outside.sum(dim=dims, keepdim=True)


def symmetric_attention(
    k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, is_causal: bool = False, dropout: float = 0.0
) -> Tensor:
    """softmax(K K^T / sqrt(D)) V: the keys are the queries.

    k, v: (B, H, N, D), any float dtype. Returns (B, H, N, D). `attn_mask` and `is_causal` mean what they mean to
    `torch.nn.functional.scaled_dot_product_attention`; rows that see nothing are zero. `dropout` is the probability of
    dropping an attention weight. Fused attention, but for gradients on the CPU.
    """
    if _by_hand(k, v, attn_mask, is_causal, dropout):
        out: Tensor = _SymmetricWithGradient.apply(k.flatten(0, 1), v.flatten(0, 1)).unflatten(0, k.shape[:2])
        return out
    return F.scaled_dot_product_attention(k, k, v, attn_mask=attn_mask, is_causal=is_causal, dropout_p=dropout)


def attention(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(Q K^T / sqrt(D)) V, (B, H, N, D) each; `symmetric_attention` where q is None."""
    if q is None:
        return symmetric_attention(k, v, attn_mask=attn_mask, is_causal=is_causal, dropout=dropout)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal, dropout_p=dropout)


def _by_hand(k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool, dropout: float) -> bool:
    """Whether the backward pass is the one by hand."""
    plain = attn_mask is None and not is_causal and dropout == 0.0
    return plain and k.device.type == "cpu" and torch.is_grad_enabled() and (k.requires_grad or v.requires_grad)


# clamp(x, -t, t) = x - S with the gradient of `principal_attention`'s modes.
Gradient = Literal["full", "constant-sparse", "straight-through"]
_CLIPS: dict[Gradient, Callable[[Tensor, Tensor], Tensor]] = {
    "full": _Clip.apply,
    "constant-sparse": lambda x, t: x + (torch.clamp(x, -t, t) - x).detach(),
    "straight-through": lambda x, t: torch.clamp(x, -t, t).detach(),
}


Scope = Literal["causal", "visible", "all"]
Watch = Callable[[Tensor, Tensor], object]  # gets K - L + w, (B, H, N, D), and the threshold, as `penalty` is shaped
HIDDEN = -1e4  # an additive mask of this or less hides a key; in half precision there is hardly more to subtract


def visible_keys(attn_mask: Tensor | None, is_causal: bool, tokens: int, device: torch.device) -> Tensor | None:
    """Which keys (last dimension) each row sees, bool, to be broadcast to (B, H, N, N); None: all.

    Of an additive mask, keys with HIDDEN or less are not seen.
    """
    if attn_mask is None:
        return torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril() if is_causal else None
    seen = attn_mask if attn_mask.dtype == torch.bool else attn_mask > HIDDEN
    return seen.reshape((1,) * (4 - seen.dim()) + seen.shape)


def penalty(
    k: Tensor, *, attn_mask: Tensor | None = None, is_causal: bool = False, scope: Scope | None = None
) -> Tensor:
    """mu = N C / (4 ||K||_1) over the keys in its scope, N of them; C = H D is the model width.

    scope `all`: every key, one mu per image and head, as the authors have it; under a mask it lets rows know of keys
    that they do not see. `visible`: for each row the keys that it sees. `causal`: for each row those up to itself.
    None: `causal` or `visible` as the mask is, `all` without one.

    k: (B, H, N, D); masks as in `principal_attention`. Returns (B, H, 1, 1), or (B, H, N, 1) where rows differ. The
    norm is summed in at least float32 (bf16 sums lose digits). It carries gradient. Keys that are all zero, or a row
    that sees none, give a huge mu, which leaves keys as they are, with gradient zero.
    """
    _, heads, tokens, head_dim = k.shape
    wide = torch.promote_types(k.dtype, torch.float32)
    scope = scope or ("causal" if is_causal else "all" if attn_mask is None else "visible")
    seen = visible_keys(attn_mask, is_causal, tokens, k.device) if scope == "visible" else None
    counts: Tensor | int = tokens
    if scope == "causal":
        norm = k.abs().sum(dim=-1, keepdim=True, dtype=wide).cumsum(-2)
        counts = torch.arange(1, tokens + 1, device=k.device, dtype=wide)[:, None]
    elif seen is not None:
        norm = seen.to(wide) @ k.abs().sum(dim=-1, keepdim=True, dtype=wide)
        counts = seen.sum(-1, keepdim=True).clamp_min(1)
    else:
        norm = k.abs().sum(dim=(-2, -1), keepdim=True, dtype=wide)
    return counts * heads * head_dim / (4.0 * norm.clamp_min(torch.finfo(wide).tiny))


def principal_attention(
    k: Tensor,
    v: Tensor,
    *,
    q: Tensor | None = None,
    iterations: int,
    lam: float,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout: float = 0.0,
    gradient: Gradient = "full",
    scope: Scope | None = None,
    watch: Watch | None = None,
) -> Tensor:
    """RPC-Attention: n iterations of principal attention pursuit on the keys (algorithm PAP of the paper).

    Principal component pursuit of K (min ||L||_* + lambda ||S||_1, L + S = K) by ADMM, its singular-value step
    replaced by attention, the soft threshold at lambda * mu as in the authors' runs. With the scaled multiplier w = Y
    / mu and c = clamp(K - L + w, -t, t), t = lambda * mu, one has S = K - L + w - c. So the keys of an iteration are
    K - S - w = L + c - 2 w, the update w + K - L' - S is L - L' + c, and S itself is never formed. Gradients flow
    through every iteration, mu included.

    k, v: (B, H, N, D), any float dtype. With queries `q` of the same shape the attention is softmax(Q K'^T / sqrt(D))
    V: PAP acts on the keys, the queries are kept. `iterations` >= 1, `lam` > 0. Dropout acts in the last iteration
    only. `gradient` changes the backward pass alone, for attacks: `constant-sparse` holds S and mu constant (dS = 0),
    `straight-through` gives the soft threshold the derivative of the identity (dS = d(K - L + w); BPDA, Athalye et
    al. 2018, arXiv 1802.00420), which leaves the way through the values. The true derivative of the threshold is 0
    where it is not passed and 1 where it is, so the two stand on either side of it. Returns L after the last
    iteration, (B, H, N, D).

    Masks mean what they mean to `torch.nn.functional.scaled_dot_product_attention`; an additive one hides keys at
    HIDDEN or less. Of all that PAP does only mu mixes tokens beside the attention: `scope` says over which keys it
    sums, see `penalty`. By default a row's output depends on no key that it does not see, directly or through others;
    rows that see nothing are zero. `watch` is told of every iteration what the threshold is applied to, and the
    threshold: entries above it are those of S.
    """
    if iterations < 1:
        raise ValueError(f"expected iterations >= 1, got {iterations}")
    if attn_mask is not None and attn_mask.is_floating_point():
        attn_mask = attn_mask.masked_fill(attn_mask <= HIDDEN, -torch.inf)

    def attend(keys: Tensor, last: bool) -> Tensor:
        return attention(q, keys, v, attn_mask=attn_mask, is_causal=is_causal, dropout=dropout if last else 0.0)

    def clipped(x: Tensor) -> Tensor:
        if watch is not None:
            watch(x, threshold)
        return _CLIPS[gradient](x, threshold)

    if q is None and _by_hand(k, v, attn_mask, is_causal, dropout):
        k, v = k.contiguous(), v.contiguous()  # as L is then: otherwise each iteration copies
    mu = penalty(k, attn_mask=attn_mask, is_causal=is_causal, scope=scope)
    threshold = (lam * mu).to(k.dtype)
    both = clipped(k)  # L + c; L and w are 0 at first
    low = attend(both, last=iterations == 1)
    for step in range(2, iterations + 1):
        w = both - low
        both = low + clipped((k - low).add_(w))
        low = attend(torch.sub(both, w, alpha=2), last=step == iterations)
    return low


class MultiHeadAttention(nn.Module):
    """Base of our attentions, drop-in `attn_layer`s of timm's VisionTransformer: two linear layers around `attend`.

    `qkv` gives `parts` tensors of width dim: queries, keys and values (3), or keys and values (2). Parameter names
    are timm's. (B, N, dim) -> (B, N, dim).
    """

    parts = 3

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
            raise ValueError(f"{type(self).__name__} is defined without qk_norm and scale_norm")
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.qkv = nn.Linear(dim, self.parts * dim, bias=qkv_bias, device=device, dtype=dtype)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim, bias=proj_bias, device=device, dtype=dtype)
        self.proj_drop = nn.Dropout(proj_drop)

    @classmethod
    def of(cls, attention: MultiHeadAttention, **settings: Any) -> Self:
        """Attention of this class over the very parameters of `attention` (shared, not copied)."""
        new = cls(attention.num_heads * attention.head_dim, attention.num_heads, device="meta", **settings)
        new.parts, new.qkv, new.proj = attention.parts, attention.qkv, attention.proj
        new.attn_drop, new.proj_drop = attention.attn_drop, attention.proj_drop
        return new.train(attention.training)

    def attend(
        self, q: Tensor | None, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool, dropout: float
    ) -> Tensor:
        """(B, H, N, D) queries (None where the keys are the queries), keys and values to (B, H, N, D)."""
        return attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal, dropout=dropout)

    def split(self, x: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        """Queries (None where there are none), keys and values of (B, N, dim), (B, H, N, D) each."""
        batch, tokens, _ = x.shape
        heads = self.qkv(x).reshape(batch, tokens, self.parts, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        *q, k, v = heads.unbind(0)
        return q[0] if q else None, k, v

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        out = self.attend(*self.split(x), attn_mask, is_causal, self.attn_drop.p if self.training else 0.0)
        projected: Tensor = self.proj_drop(self.proj(out.transpose(1, 2).flatten(2)))
        return projected


class AsymmetricAttention(MultiHeadAttention):
    """softmax(Q K^T / sqrt(D)) V, as timm's own, for models some of whose layers run PAP."""


class SymmetricAttention(MultiHeadAttention):
    """softmax(K K^T / sqrt(D)) V: the keys are the queries."""

    parts = 2


class Pursuit:
    """What modules with RPC-Attention have in common.

    iterations: n. lam: lambda. scope: under masks, see `penalty`. watch: see `principal_attention`. path: in place of
    PAP, for attacks.
    """

    iterations: int
    lam: float
    scope: Scope | None = None
    watch: Watch | None = None
    path: Callable[[Pursuit, Tensor | None, Tensor, Tensor, dict[str, Any]], Tensor] | None = None

    def pursue(
        self, q: Tensor | None, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool, dropout: float
    ) -> Tensor:
        """PAP on the keys, (B, H, N, D) each."""
        settings: dict[str, Any] = {"attn_mask": attn_mask, "is_causal": is_causal, "dropout": dropout}
        if self.path is not None:
            return self.path(self, q, k, v, settings)
        return principal_attention(
            k, v, q=q, iterations=self.iterations, lam=self.lam, scope=self.scope, watch=self.watch, **settings
        )


class RPCAttention(Pursuit, MultiHeadAttention):
    """Attention by PAP, over the parameters of (a)symmetric attention."""

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        iterations: int,
        lam: float,
        scope: Scope | None = None,
        **rest: Any,
    ) -> None:
        super().__init__(dim, num_heads, **rest)
        self.iterations, self.lam, self.scope = iterations, lam, scope

    def attend(
        self, q: Tensor | None, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool, dropout: float
    ) -> Tensor:
        return self.pursue(q, k, v, attn_mask, is_causal, dropout)

    def extra_repr(self) -> str:
        return f"iterations={self.iterations}, lam={self.lam}"


class _Scaled(MultiHeadAttention):
    """softmax(Q K^T / sqrt(D)) (I - S) V: attention to the values that `values` gives."""

    def values(self, k: Tensor, v: Tensor) -> Tensor:
        """(I - S) V."""
        raise NotImplementedError

    def attend(
        self, q: Tensor | None, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool, dropout: float
    ) -> Tensor:
        if attn_mask is not None or is_causal:
            raise ValueError(f"{type(self).__name__} is defined without masks")
        return attention(q, k, self.values(k, v), dropout=dropout)


class ScaledAttention(_Scaled):
    """Scaled Attention S: S a learned (H, N, N) that starts at 0. `tokens` is N, which is then fixed."""

    def __init__(self, dim: int, num_heads: int = 8, *, tokens: int, **rest: Any) -> None:
        super().__init__(dim, num_heads, **rest)
        self.S = nn.Parameter(torch.zeros(num_heads, tokens, tokens, dtype=rest.get("dtype")))

    def values(self, k: Tensor, v: Tensor) -> Tensor:
        return v - self.S @ v


class AlphaScaledAttention(_Scaled):
    """Scaled Attention alpha x Asym: S = s softmax(K K^T / sqrt(D)), s a learned number that starts at 0."""

    def __init__(self, dim: int, num_heads: int = 8, **rest: Any) -> None:
        super().__init__(dim, num_heads, **rest)
        self.s = nn.Parameter(torch.zeros((), dtype=rest.get("dtype")))

    def values(self, k: Tensor, v: Tensor) -> Tensor:
        return v - self.s * symmetric_attention(k, v)
