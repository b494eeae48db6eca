"""Corrupted copies of images, in batches, with draws keyed by sample."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from robustkpca.corruptions.registry import METHODS, SMALLEST, Corruption
from robustkpca.errors import SpecError, unknown
from robustkpca.runtime import keyed_random

# Values handled at once. On the CPU a part then stays in the cache; elsewhere it bounds the memory.
_PART = {"cpu": 2**17}
_PART_ELSEWHERE = 2**26


@torch.no_grad()
def corrupt(images: Tensor, name: str, severity: int, ids: Sequence[str], seed: int = 0) -> Tensor:
    """Corrupted copies of images.

    images: floating (B, C, H, W), values in [0, 1], C 1 (grey) or 3 (RGB), min(H, W) >= 28, any aspect ratio.
    name: one of `registry.METHODS`. severity: an int from 1 (mild) to 5.
    ids: one string per sample; the same id, seed, name and severity give the same draws.

    Returns float32 (B, C, H, W) on the same device, clipped to [0, 1] and rounded to the nearest multiple of 1/255,
    because a corrupted image is an image file. Raises SpecError for anything else than the above.
    """
    function = _checked(images, name, severity, ids)
    out = torch.empty(images.shape, dtype=torch.float32, device=images.device)
    part = max(1, _PART.get(images.device.type, _PART_ELSEWHERE) // images[0].numel())
    for start in range(0, len(images), part):
        chosen = slice(start, start + part)
        gens = [keyed_random.generator(seed, "corruption", name, severity, sample) for sample in ids[chosen]]
        result = function(images[chosen].to(torch.float32).contiguous(), severity, gens)
        if result.shape != images[chosen].shape:  # of a function that somebody else registered
            raise SpecError(
                f"{name}: expected images of shape {tuple(images[chosen].shape)}, got {tuple(result.shape)}"
            )
        out[chosen] = (result.clamp(0, 1) * 255).round_() / 255
    return out


def _checked(images: Tensor, name: str, severity: int, ids: Sequence[str]) -> Corruption:
    """The function called `name`, once all arguments are found good; else SpecError."""
    if not isinstance(name, str) or name not in METHODS:
        raise SpecError(unknown("corruption", str(name), METHODS))
    if not isinstance(severity, int) or isinstance(severity, bool) or not 1 <= severity <= 5:
        raise SpecError(f"{name}: expected severity 1, 2, 3, 4 or 5 (an int), got {severity!r}")
    if not isinstance(images, Tensor) or not images.is_floating_point():
        kind = images.dtype if isinstance(images, Tensor) else type(images).__name__
        raise SpecError(f"{name}: expected a floating-point tensor of images with values in [0, 1], got {kind}")
    shape = tuple(images.shape)
    if len(shape) != 4 or shape[0] < 1 or shape[1] not in (1, 3):
        raise SpecError(f"{name}: expected images of shape (B, C, H, W) with B >= 1 and C 1 or 3, got {shape}")
    if min(shape[2:]) < SMALLEST:
        raise SpecError(f"{name}: expected images of at least {SMALLEST} x {SMALLEST} pixels, got {shape[2:]}")
    if isinstance(ids, str) or not all(isinstance(sample, str) for sample in ids):
        raise SpecError(f"{name}: expected ids to be a sequence of {shape[0]} strings, got {ids!r:.60}")
    if len(ids) != shape[0]:
        raise SpecError(f"{name}: expected {shape[0]} ids, one per image, got {len(ids)}")
    low, high = images.amin().item(), images.amax().item()
    if not (low >= 0 and high <= 1):  # also catches nan, which both reductions pass on
        raise SpecError(f"{name}: expected finite values in [0, 1], got values from {low:g} to {high:g}")
    return METHODS[name]
