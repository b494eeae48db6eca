"""Where training broke: the first attention layer whose output, or whose gradient, is not finite."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def attention_modules(network: nn.Module) -> list[tuple[str, nn.Module]]:
    """Name and module of each attention layer, in order: timm's transformers call it `attn`."""
    return [(name, module) for name, module in network.named_modules() if name.rpartition(".")[2] == "attn"]


def broken_forward(network: nn.Module, forward: Callable[[], Any]) -> str:
    """Run `forward`, which runs `network`; say in which attention layer the first number that is not finite arose."""
    seen: list[tuple[int, str, bool, bool]] = []

    def look(number: int, name: str, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        seen.append((number, name, finite(args[0]), finite(output)))

    handles = [
        module.register_forward_hook(partial(look, number, name))
        for number, (name, module) in enumerate(attention_modules(network), start=1)
    ]
    try:
        with torch.no_grad():
            forward()
    finally:
        for handle in handles:
            handle.remove()
    for number, name, fine_before, fine in seen:
        if not fine_before:
            return f"it was not finite before the attention of layer {number} ({name})"
        if not fine:
            return f"the attention of layer {number} ({name}) broke first"
    return "the attention of all layers is finite"


def broken_backward(network: nn.Module) -> str:
    """Say where a gradient that is not finite arose: in which attention layer, last first, else of which parameter."""
    layers = attention_modules(network)
    for number, (name, module) in reversed(list(enumerate(layers, start=1))):
        if not all(finite(p.grad) for p in module.parameters() if p.grad is not None):
            return f"its gradient is not finite, backward, the attention of layer {number} ({name}) broke first"
    for name, parameter in network.named_parameters():
        if parameter.grad is not None and not finite(parameter.grad):
            return f"its gradient is not finite in {name}, and finite in the attention of all layers"
    return "every gradient is finite, but not the norm of all of them"


def finite(values: Tensor) -> bool:
    return bool(values.isfinite().all())
