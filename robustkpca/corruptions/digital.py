"""Contrast, elastic transform, pixelate, JPEG compression and saturate (ImageNet-C, arXiv 1903.12261).

Each function takes images (b, C, H, W) float32 in [0, 1], a severity 1..5 and one generator per sample, and returns
images of that shape, not yet clipped to [0, 1]. Only the elastic transform has lengths: given at 224 pixels, they are
multiplied by min(H, W) / 224. Pixelate and JPEG act on the image rounded to 8 bits, as on a file.
"""

from __future__ import annotations

import io
import math

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from robustkpca.corruptions.fields import Generators, kernel_power, pixel_grid, scale, smooth_field, take, uniform, warp


def _exact_mean(images: Tensor) -> Tensor:
    """Mean over the pixels of each channel (b, C, 1, 1), summed in integers of 2^-30, so in no order and exactly."""
    h, w = images.shape[-2:]
    total = (images.double() * 2**30).round().long().sum((2, 3), keepdim=True)
    return (total.double() / (h * w * 2**30)).to(images.dtype)


def contrast(images: Tensor, severity: int, gens: Generators) -> Tensor:
    """m + c (x - m), m the mean of each channel over the image, c = 0.4 to 0.05."""
    factor = (0.4, 0.3, 0.2, 0.1, 0.05)[severity - 1]
    mean = _exact_mean(images)
    return (images - mean) * factor + mean


def elastic_transform(images: Tensor, severity: int, gens: Generators) -> Tensor:
    """A random affine map, then a smooth random displacement; bilinear, reflected at the edges.

    Published: three points of the image move by up to `shift` px on each axis; a uniform random field is smoothed with
    sigma and multiplied by alpha. Here the displacement is the Gaussian field with the standard deviation, in px at
    224, that this gives, because scaling alpha and sigma alone would not scale the displacement; both maps are composed
    and sampled once; the random affine map leads from the output to the input. As published, severity 1 and 2 are
    mainly large affine maps, 3 to 5 small local ones: they are ordered within each group only. The lengths are
    multiples of 244, a known slip of the original.
    """
    alpha, sigma, shift = (
        (244 * 2, 244 * 0.7, 244 * 0.1),
        (244 * 2, 244 * 0.08, 244 * 0.2),
        (244 * 0.05, 244 * 0.01, 244 * 0.02),
        (244 * 0.07, 244 * 0.01, 244 * 0.02),
        (244 * 0.12, 244 * 0.01, 244 * 0.02),
    )[severity - 1]
    s = scale(images)
    h, w = images.shape[-2:]
    device = images.device
    # of the points (q, q), (-q, q) and (-q, -q), given as (y, x) from the centre
    moved = uniform(gens, (3, 2), device, -shift * s, shift * s)
    q = min(h, w) // 3
    std = alpha * kernel_power(sigma) / math.sqrt(3) * s
    bend_y, bend_x = (smooth_field(gens, h, w, sigma * s, device) * std for _ in range(2))

    row, column = pixel_grid(h, w, device)
    y, x = row + bend_y, column + bend_x
    centre_y, centre_x = h // 2, w // 2
    per_y, per_x = (moved[:, 0] - moved[:, 1]) / (2 * q), (moved[:, 1] - moved[:, 2]) / (2 * q)
    offset = (moved[:, 0] + moved[:, 2]) / 2

    def affine(axis: int) -> Tensor:
        a, b, c = (t[:, axis].view(-1, 1, 1) for t in (per_y, per_x, offset))
        return (y - centre_y) * a + (x - centre_x) * b + c

    return warp(images, y + affine(0), x + affine(1))


def _box_windows(n: int, size: int) -> list[list[int]]:
    """For each of `size` equal windows over n pixels, the pixels with their centre in it.

    Pillow's arithmetic, step by step, so that a centre on the border of two windows falls where it does there.
    """
    width = n / size
    windows = []
    for k in range(size):
        centre = (k + 0.5) * width
        near = range(max(0, int(centre - 0.5 * width + 0.5)), min(n, int(centre + 0.5 * width + 0.5)))
        windows.append([x for x in near if -0.5 < (x - centre + 0.5) * (1 / width) <= 0.5])
    return windows


def _box_shrink(images: Tensor, size: int, axis: int) -> Tensor:
    """Mean of 8-bit levels (0 to 255, as floats) over `size` windows along an axis, rounded half up as Pillow's BOX."""
    windows = _box_windows(images.shape[axis], size)
    shape = [1] * images.ndim
    shape[axis] = size

    def column(values: list[int]) -> Tensor:
        return torch.tensor(values, device=images.device)

    total = torch.zeros_like(images.narrow(axis, 0, size))
    for k in range(max(map(len, windows))):
        index = column([window[min(k, len(window) - 1)] for window in windows])
        total += take(images, index, axis) * column([int(k < len(window)) for window in windows]).view(shape)
    return (total / column([len(window) for window in windows]).view(shape) + 0.5).floor_()


def pixelate(images: Tensor, severity: int, gens: Generators) -> Tensor:
    """Box-filtered down to int(0.6 ... 0.25 * size) pixels a side, and up again by nearest pixel."""
    ratio = (0.6, 0.5, 0.4, 0.3, 0.25)[severity - 1]
    out = (images * 255).round_()
    for axis in (3, 2):
        out = _box_shrink(out, int(images.shape[axis] * ratio), axis)
    for axis in (3, 2):
        n, size = images.shape[axis], out.shape[axis]
        index = torch.tensor([int((k + 0.5) * size / n) for k in range(n)], device=images.device)
        out = take(out, index, axis)
    return out / 255


def _through_jpeg(pixels: np.ndarray, quality: int) -> np.ndarray:
    """uint8 (H, W, C) -> file -> uint8 (H, W, C)."""
    file = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).save(file, "JPEG", quality=quality)
    with Image.open(file) as decoded:
        return np.asarray(decoded).reshape(pixels.shape)


def jpeg_compression(images: Tensor, severity: int, gens: Generators) -> Tensor:
    """Through Pillow's encoder and decoder (4:2:0 chroma) at quality 25 to 7, sample by sample on the CPU."""
    quality = (25, 18, 15, 10, 7)[severity - 1]
    pixels = (images * 255).round_().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
    decoded = np.stack([_through_jpeg(p, quality) for p in pixels])
    return torch.from_numpy(decoded).to(images.device).permute(0, 3, 1, 2) / 255


def saturate(images: Tensor, severity: int, gens: Generators) -> Tensor:
    """S' = a S + b in HSV, cut to [0, 1]; hue and value stay: a, b = (0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (20, 0.2).

    A channel c of a pixel with value V and smallest channel m is V (1 - S' (V - c) / (V - m)). A colourless pixel of an
    RGB image has hue 0, so at severity 4 and 5 it turns reddish, as published. A grey image has S = 0 and no channel
    but V, which stays: it comes back unchanged.
    """
    factor, offset = ((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (20, 0.2))[severity - 1]
    if images.shape[1] == 1:
        return images.clone()
    value, least = images.amax(1, keepdim=True), images.amin(1, keepdim=True)
    spread = value - least
    coloured = spread > 0
    ones = torch.ones_like(value)
    saturation = spread / torch.where(value > 0, value, ones)
    red = torch.tensor([0.0, 1.0, 1.0], device=images.device).view(1, 3, 1, 1)
    share = torch.where(coloured, (value - images) / torch.where(coloured, spread, ones), red)
    return value * (1 - (saturation * factor + offset).clamp_(0, 1) * share)
