"""The 15 corruptions of ImageNet-C and its 4 extra ones, made on the fly (Hendrycks & Dietterich 2019, arXiv
1903.12261).

`corrupt(images, name, severity, ids)` works in batches on the device of the images. Parameters are the published ones
for 224 pixels. Lengths in pixels (radii, sigmas, displacements, trails) are multiplied by min(H, W) / 224 and may be
fractional; amplitudes, probabilities and ratios (noise, contrast, zoom, pixelate, JPEG quality) are not. The grain of
snow, frost and spatter is kept from falling below the pixel, so those are coarser on small images than a shrunk 224
image would show.

Every random draw is keyed by (seed, name, severity, sample id) and made on the CPU, so the result for a sample depends
neither on the batch it comes in nor on draws made before: bit for bit on the CPU. On another device arithmetic may
round otherwise, which can move a value by one step of 1/255.

These are not the released ImageNet-C files: frost is procedural, the images are not stored as JPEG, and some sequential
steps are done in parallel (each function says where it departs). State "generated" beside a score.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from robustkpca.corruptions import blur, digital, noise, weather
from robustkpca.corruptions.fields import Generators
from robustkpca.errors import SpecError, unknown
from robustkpca.runtime import keyed_random

__all__ = ["CORRUPTIONS", "EXTRA_CORRUPTIONS", "SMALLEST", "corrupt"]

CORRUPTIONS: tuple[str, ...] = (
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "defocus_blur",
    "glass_blur",
    "motion_blur",
    "zoom_blur",
    "snow",
    "frost",
    "fog",
    "brightness",
    "contrast",
    "elastic_transform",
    "pixelate",
    "jpeg_compression",
)
EXTRA_CORRUPTIONS: tuple[str, ...] = ("speckle_noise", "gaussian_blur", "spatter", "saturate")

Corruption = Callable[[Tensor, int, Generators], Tensor]  # (images, severity, generators) -> images, not yet clipped

_FUNCTIONS: dict[str, Corruption] = {
    "gaussian_noise": noise.gaussian_noise,
    "shot_noise": noise.shot_noise,
    "impulse_noise": noise.impulse_noise,
    "defocus_blur": blur.defocus_blur,
    "glass_blur": blur.glass_blur,
    "motion_blur": blur.motion_blur,
    "zoom_blur": blur.zoom_blur,
    "snow": weather.snow,
    "frost": weather.frost,
    "fog": weather.fog,
    "brightness": weather.brightness,
    "contrast": digital.contrast,
    "elastic_transform": digital.elastic_transform,
    "pixelate": digital.pixelate,
    "jpeg_compression": digital.jpeg_compression,
    "speckle_noise": noise.speckle_noise,
    "gaussian_blur": blur.gaussian_blur,
    "spatter": weather.spatter,
    "saturate": digital.saturate,
}

SMALLEST = 28  # pixels; below, a blur of a few pixels at 224 is nothing

# Values handled at once. On the CPU a part then stays in the cache; elsewhere it bounds the memory.
_PART = {"cpu": 2**17}
_PART_ELSEWHERE = 2**26


@torch.no_grad()
def corrupt(images: Tensor, name: str, severity: int, ids: Sequence[str], seed: int = 0) -> Tensor:
    """Corrupted copies of images.

    images: floating (B, C, H, W), values in [0, 1], C 1 (grey) or 3 (RGB), min(H, W) >= 28, any aspect ratio.
    name: one of CORRUPTIONS or EXTRA_CORRUPTIONS. severity: an int from 1 (mild) to 5.
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
        out[chosen] = (result.clamp(0, 1) * 255).round_() / 255
    return out


def _checked(images: Tensor, name: str, severity: int, ids: Sequence[str]) -> Corruption:
    """The function called `name`, once all arguments are found good; else SpecError."""
    if not isinstance(name, str) or name not in _FUNCTIONS:
        raise SpecError(unknown("corruption", str(name), _FUNCTIONS))
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
    return _FUNCTIONS[name]
