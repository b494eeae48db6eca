"""How much of the sparse part S there is in RPC-Attention: where it is zero, PAP is attention iterated."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from robustkpca.models.attention import Pursuit
from robustkpca.models.classifier import Classifier


@torch.no_grad()
def density(classifier: Classifier, images: Tensor, batch_size: int) -> dict[str, list[float]]:
    """The share of entries of S that are not zero, mean over images, by layer (its name in the network) for each
    iteration of PAP; empty for a model without RPC-Attention.

    images: (B, C, H, W) in [0, 1]; `batch_size` bounds the memory and changes nothing else.
    """
    layers = {name: m for name, m in classifier.network.named_modules() if isinstance(m, Pursuit)}
    seen: dict[str, list[Tensor]] = {name: [] for name in layers}
    parts: dict[str, list[Tensor]] = {name: [] for name in layers}
    for name, layer in layers.items():
        layer.watch = partial(_count, seen[name])
    try:
        with torch.compiler.set_stance("force_eager") if classifier.compiled else nullcontext():
            for part in images.split(batch_size) if layers else ():
                classifier(part)
                for name, shares in seen.items():
                    parts[name].append(torch.stack(shares)[:, : len(part)])  # not what a batch is filled up with
                    shares.clear()
    finally:
        for layer in layers.values():
            layer.watch = None
    return {name: torch.cat(shares, dim=1).mean(1).tolist() for name, shares in parts.items()}


def _count(shares: list[Tensor], x: Tensor, threshold: Tensor) -> None:
    shares.append((x.abs() > threshold).double().mean((1, 2, 3)))
