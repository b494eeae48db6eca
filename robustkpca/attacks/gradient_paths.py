"""Other ways through a model with RPC-Attention, for attacks that know it.

PAP is an unrolled iteration with a soft threshold: its own gradient can vanish, explode with the number of
iterations, or mislead. A surrogate shares the model's weights. All but `symvit` also share its answers and change the
gradient alone (backward pass differentiable approximation, Athalye et al. 2018, arXiv 1802.00420); `symvit` is the
model of the same weights without PAP, from which an attack transfers. On a model without RPC-Attention every
surrogate is the model itself, so that a suite gives it as many tries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from robustkpca.models.attention import Gradient, Pursuit, attention, principal_attention
from robustkpca.models.classifier import Classifier
from robustkpca.suites.attack import Through

# Of Pursuit.path: queries (None where keys are), keys and values (B, H, N, D), and mask and dropout by name.
Attend = Callable[[Pursuit, Tensor | None, Tensor, Tensor, dict[str, Any]], Tensor]


def _with(gradient: Gradient) -> Attend:
    def attend(a: Pursuit, q: Tensor | None, k: Tensor, v: Tensor, given: dict[str, Any]) -> Tensor:
        return principal_attention(
            k, v, q=q, iterations=a.iterations, lam=a.lam, scope=a.scope, gradient=gradient, **given
        )

    return attend


def _iterated(share: float) -> Attend:
    """The answer of all iterations, the gradient of a share of their number (of none: of plain attention)."""

    def attend(a: Pursuit, q: Tensor | None, k: Tensor, v: Tensor, given: dict[str, Any]) -> Tensor:
        n = int(share * a.iterations)
        settings = {"lam": a.lam, "scope": a.scope, **given}
        near = principal_attention(k, v, q=q, iterations=n, **settings) if n else attention(q, k, v, **given)
        fixed = None if q is None else q.detach()
        true = principal_attention(k.detach(), v.detach(), q=fixed, iterations=a.iterations, **settings)
        return near + (true - near).detach()

    return attend


SURROGATES: dict[Through, Attend] = {
    "constant-sparse": _with("constant-sparse"),
    "straight-through": _with("straight-through"),
    "half-iterations": _iterated(0.5),
    "double-iterations": _iterated(2),
    "symvit": lambda a, q, k, v, given: attention(q, k, v, **given),
}
_made: WeakKeyDictionary[Classifier, dict[Through, Classifier]] = WeakKeyDictionary()


def surrogate(classifier: Classifier, through: Through) -> Classifier:
    """The classifier as the attack sees it; the very classifier for `full` or where it has no RPC-Attention."""
    if through == "full" or not classifier.pursues:
        return classifier
    made = _made.setdefault(classifier, {})
    if through not in made:
        twin = classifier.twin()
        for module in twin.network.modules():
            if isinstance(module, Pursuit):
                module.path = SURROGATES[through]
        made[through] = twin
    return made[through]
