"""RPC-Attention put into networks of timm, over the weights that they have.

A module of timm computes attention of queries, keys and values (after its own norms, rotations and biases) by torch's
`scaled_dot_product_attention`. There PAP takes its place: it acts on the keys, the queries are kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from robustkpca.errors import SpecError
from robustkpca.models.attention import Pursuit
from robustkpca.models.settings import RPCSettings

_LISTED = 3  # names in a note


class _Instead(TorchFunctionMode):
    """Inside, `scaled_dot_product_attention` is `attend`, which gets its arguments."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attend = attend

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        function = self.attend if func is F.scaled_dot_product_attention else func
        return function(*args, **(kwargs or {}))


class _Pursuing(Pursuit):
    """Before a class of timm's: its forward pass with PAP."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _Instead(self._attend):
            return super().forward(*args, **kwargs)  # type: ignore[misc]

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,  # never: such a module is refused
    ) -> Tensor:
        if scale is not None:
            query = query * (scale * key.shape[-1] ** 0.5)
        return self.pursue(query, key, value, attn_mask, is_causal, dropout_p)


@functools.cache
def _pursuing(kind: Any) -> Any:
    return type(f"{kind.__name__}WithPAP", (_Pursuing, kind), {})


def attention_of(network: nn.Module, images: Tensor) -> dict[str, str]:
    """The modules of a network that compute attention of queries, keys and values by torch's function, by name, in the
    order of its forward pass on `images`; and why PAP cannot be put there, empty where it can."""
    found: dict[str, str] = {}
    running: list[str] = []

    def seen(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        reason = ""
        if kwargs.get("enable_gqa"):
            reason = "its heads share keys"
        elif key.dim() != 4:
            reason = "it has no dimension of heads"
        elif query.shape != key.shape:
            reason = f"its {query.shape[-2]} queries are not of its {key.shape[-2]} keys' tokens"
        elif value.shape != key.shape:
            reason = "its values are wider or narrower than its keys"
        name = running[-1] if running else ""
        found[name] = found.get(name) or reason
        return F.scaled_dot_product_attention(query, key, value, *args, **kwargs)

    with torch.no_grad(), _tracked(network, running), _Instead(seen):
        network(images)
    return found


@contextmanager
def _tracked(network: nn.Module, running: list[str]) -> Iterator[None]:
    """Inside, `running` holds the names of the modules whose forward pass is under way."""
    hooks = []
    for name, module in network.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda *_, name=name: running.append(name)))
        hooks.append(module.register_forward_hook(lambda *_: running.pop() and None))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def put_into(network: nn.Module, rpc: RPCSettings, images: Tensor, title: str) -> str:
    """Put PAP into attention layers of a network, counted in the order of its forward pass; the parameters and their
    names stay. Returns a note that says where. Raises SpecError where it cannot be put into a layer that was asked for.
    """
    found = attention_of(network, images)
    names = list(found)
    if not any(reason == "" for reason in found.values()):
        modules = {type(m).__name__ for m in network.modules()}
        kinds = sorted(kind for kind in modules if "attn" in kind.lower() or "attention" in kind.lower())
        has = _reasons(found) or ", ".join(kinds) or "none"
        raise SpecError(f"{title}: PAP can be put into attention of queries, keys and values only; it has {has}")
    chosen = [names[i] for i in rpc.indices(len(names))]
    refused = {name: found[name] for name in chosen if found[name]}
    if refused and rpc.layers != "all":
        raise SpecError(f"{title}: PAP cannot be put into {_reasons(refused)}")
    chosen = [name for name in chosen if name not in refused]
    for name in chosen:
        module: Any = network.get_submodule(name)
        kind: Any = type(module)
        module.__class__ = _pursuing(kind)
        module.iterations, module.lam = rpc.iterations, rpc.lam
    shown = ", ".join(chosen[:_LISTED]) + (", ..." if len(chosen) > _LISTED else "")
    left = f"; as it was: {_reasons(refused)}" if refused else ""
    where = f"{len(chosen)} of {len(names)} attention layers ({shown})"
    return f"RPC-Attention put into {where}, over weights trained without{left}"


def _reasons(refused: Mapping[str, str]) -> str:
    return "; ".join(f"{name} ({why})" for name, why in list(refused.items())[:_LISTED])
