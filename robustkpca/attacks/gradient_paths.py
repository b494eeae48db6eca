"""Other ways through a model with RPC-Attention, for attacks that know it.

PAP is an unrolled iteration with a soft threshold: its own gradient can vanish, explode with the number of
iterations, or mislead. A surrogate shares the model's weights. All but `symvit` also share its answers and change the
gradient alone (backward pass differentiable approximation, Athalye et al. 2018, arXiv 1802.00420); `symvit` is the
model of the same weights without PAP, from which an attack transfers. On a model without RPC-Attention every
surrogate is the model itself, so that a suite gives it as many tries.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

from torch import Tensor

from robustkpca.models.attention import Gradient, MultiHeadAttention, RPCAttention, attention, principal_attention
from robustkpca.models.classifier import Classifier
from robustkpca.suites.attack import Through

Attend = Callable[[RPCAttention, Tensor | None, Tensor, Tensor], Tensor]


def _with(gradient: Gradient) -> Attend:
    def attend(a: RPCAttention, q: Tensor | None, k: Tensor, v: Tensor) -> Tensor:
        return principal_attention(k, v, q=q, iterations=a.iterations, lam=a.lam, gradient=gradient)

    return attend


def _iterated(a: RPCAttention, q: Tensor | None, k: Tensor, v: Tensor, iterations: int) -> Tensor:
    """The answer of all iterations, the gradient of `iterations` (0: of plain attention)."""
    near = principal_attention(k, v, q=q, iterations=iterations, lam=a.lam) if iterations else attention(q, k, v)
    fixed = None if q is None else q.detach()
    true = principal_attention(k.detach(), v.detach(), q=fixed, iterations=a.iterations, lam=a.lam)
    return near + (true - near).detach()


SURROGATES: dict[Through, Attend] = {
    "constant-sparse": _with("constant-sparse"),
    "straight-through": _with("straight-through"),
    "half-iterations": lambda a, q, k, v: _iterated(a, q, k, v, a.iterations // 2),
    "double-iterations": lambda a, q, k, v: _iterated(a, q, k, v, 2 * a.iterations),
    "symvit": lambda a, q, k, v: attention(q, k, v),
}


class _Through(MultiHeadAttention):
    """An RPCAttention's layers with another `attend`; in eval mode, without mask."""

    def __init__(self, attention: RPCAttention, attend: Attend) -> None:
        super().__init__(attention.num_heads * attention.head_dim, attention.num_heads, device="meta")
        self.parts, self.qkv, self.proj = attention.parts, attention.qkv, attention.proj
        self.attention, self.by = [attention], attend  # in a list: not a submodule a second time

    def attend(
        self, q: Tensor | None, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool, dropout: float
    ) -> Tensor:
        return self.by(self.attention[0], q, k, v)


_made: WeakKeyDictionary[Classifier, dict[Through, Classifier]] = WeakKeyDictionary()


def surrogate(classifier: Classifier, through: Through) -> Classifier:
    """The classifier as the attack sees it; the very classifier for `full` or where it has no RPC-Attention."""
    if through == "full" or not classifier.pursues:
        return classifier
    made = _made.setdefault(classifier, {})
    if through not in made:
        twin = classifier.twin()
        for module in list(twin.network.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, RPCAttention):
                    setattr(module, name, _Through(child, SURROGATES[through]))
        made[through] = twin.eval()
    return made[through]
