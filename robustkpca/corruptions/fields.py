"""Ground for the corruptions: keyed draws, kernels, resampling.

Shapes: images are (b, C, H, W), fields are (b, H, W), both float32; lengths are pixels. Everything here gives the same
bits for a sample whatever else is in the batch. So there is no convolution, no matrix product and no transcendental
function over a batch, whose last bit may depend on the batch size or on the place in memory; only shifts, gathers, +,
-, *, / and comparisons.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

Generators = Sequence[torch.Generator]  # one per sample, each consumed in a fixed order

LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601


def scale(images: Tensor) -> float:
    """min(H, W) / 224: what a published length in pixels is multiplied by."""
    return min(images.shape[-2:]) / 224


def normal(gens: Generators, shape: Sequence[int], device: torch.device) -> Tensor:
    """Standard normal draws (b, *shape), made on the CPU and moved."""
    return torch.stack([torch.randn(*shape, generator=g) for g in gens]).to(device)


def uniform(gens: Generators, shape: Sequence[int], device: torch.device, low: float = 0, high: float = 1) -> Tensor:
    """Uniform draws in [low, high) of shape (b, *shape), made on the CPU and moved."""
    return (torch.stack([torch.rand(*shape, generator=g) for g in gens]) * (high - low) + low).to(device)


def draw_angle(gen: torch.Generator, low: float, high: float) -> float:
    """One angle in radians, uniform between two angles in degrees."""
    return math.radians(low + (high - low) * torch.rand((), generator=gen, dtype=torch.float64).item())


def luma(images: Tensor) -> Tensor:
    """(b, C, H, W) -> (b, 1, H, W); a grey image is its own luma."""
    if images.shape[1] == 1:
        return images
    r, g, b = images.split(1, dim=1)
    grey: Tensor = r * LUMA[0] + g * LUMA[1] + b * LUMA[2]
    return grey


def paint(rgb: Sequence[float], images: Tensor) -> Tensor:
    """A colour as (1, C, 1, 1) on the images' device: its luma when they are grey."""
    if images.shape[1] == 1:
        rgb = [sum(c * w for c, w in zip(rgb, LUMA, strict=True))]
    return torch.tensor(rgb, dtype=torch.float32, device=images.device).view(1, -1, 1, 1)


@functools.cache
def gaussian_kernel(sigma: float) -> tuple[float, ...]:
    """Half kernel [w0, w1, ...] of a sampled Gaussian, w0 + 2 (w1 + ...) = 1, cut at 4 sigma pixels.

    From sigma = 1 on this is scipy's kernel. Below, a sampled Gaussian loses variance and soon is the identity, so the
    exponent is solved for: the kernel's variance is sigma^2 for any sigma > 0.
    """
    radius = max(1, int(4 * sigma + 0.5))

    def half(width: float) -> tuple[float, ...]:
        w = [math.exp(-0.5 * (k / width) ** 2) for k in range(radius + 1)]
        total = w[0] + 2 * sum(w[1:])
        return tuple(v / total for v in w)

    if sigma >= 1:
        return half(sigma)
    low, high = 0.02, 2.0
    for _ in range(60):
        middle = (low + high) / 2
        variance = 2 * sum(k * k * v for k, v in enumerate(half(middle)))
        low, high = (middle, high) if variance < sigma * sigma else (low, middle)
    return half(low)


def kernel_power(sigma: float) -> float:
    """Factor by which smoothing white noise with a two-dimensional Gaussian multiplies its standard deviation."""
    half = gaussian_kernel(sigma)
    return half[0] ** 2 + 2 * sum(v * v for v in half[1:])


def smooth_axis(x: Tensor, half: Sequence[float], axis: int) -> Tensor:
    """Symmetric 1-D kernel along an axis, without padding: the axis shrinks by 2 * (len(half) - 1)."""
    radius = len(half) - 1
    n = x.shape[axis] - 2 * radius
    out = x.narrow(axis, radius, n) * half[0]
    pair = torch.empty_like(out)
    for k in range(1, radius + 1):
        torch.add(x.narrow(axis, radius - k, n), x.narrow(axis, radius + k, n), out=pair)
        out += pair.mul_(half[k])
    return out


def gaussian_smooth(images: Tensor, sigma: float) -> Tensor:
    """Gaussian blur of (b, C, H, W) with replicated edges, sigma in pixels."""
    half = gaussian_kernel(sigma)
    r = len(half) - 1
    images = smooth_axis(F.pad(images, (r, r, 0, 0), mode="replicate"), half, 3)
    return smooth_axis(F.pad(images, (0, 0, r, r), mode="replicate"), half, 2)


def shifted_sum(images: Tensor, taps: dict[tuple[int, int], float], mode: str) -> Tensor:
    """out(y, x) = sum over taps {(dy, dx): weight} of weight * in(y + dy, x + dx); `mode` is that of F.pad.

    Taps of equal weight are added before they are weighted, and what lies as far to the left as to the right with equal
    weight is added once for all rows: about a quarter of the passes for a disk.
    """
    h, w = images.shape[-2:]
    top, left = (-min(0, min(t[i] for t in taps)) for i in (0, 1))
    bottom, right = (max(0, max(t[i] for t in taps)) for i in (0, 1))
    padded = F.pad(images, (left, right, top, bottom), mode=mode)
    columns: dict[tuple[int, bool], Tensor] = {}

    def column(dx: int, mirrored: bool) -> Tensor:
        """All rows at x + dx, plus those at x - dx if mirrored."""
        if (dx, mirrored) not in columns:
            at = padded.narrow(-1, left + dx, w)
            columns[dx, mirrored] = at + padded.narrow(-1, left - dx, w) if mirrored else at
        return columns[dx, mirrored]

    groups: dict[float, list[Tensor]] = {}
    for (dy, dx), weight in taps.items():
        mirrored = dx != 0 and taps.get((dy, -dx)) == weight
        if dx > 0 or not mirrored:
            groups.setdefault(weight, []).append(column(dx, mirrored).narrow(-2, top + dy, h))
    out, total = torch.zeros_like(images), torch.empty_like(images)  # fresh memory for each sum costs more than the sum
    for weight, (first, *others) in groups.items():
        total.copy_(first)
        for view in others:
            total += view
        out += total.mul_(weight)
    return out


def take(x: Tensor, index: Tensor, axis: int) -> Tensor:
    """The lines of x with the numbers `index` (n,) along an axis."""
    if axis == x.ndim - 1:  # index_select copies lines: slow where a line is one value
        return x.gather(axis, index.expand(*x.shape[:-1], -1))
    return x.index_select(axis, index)


def resample_axis(x: Tensor, where: Tensor, axis: int) -> Tensor:
    """Linear interpolation along one axis at float64 CPU coordinates (n_out,) in pixels; clamped at the ends."""
    where = where.clamp(0, x.shape[axis] - 1)
    low = where.floor()
    shape = [1] * x.ndim
    shape[axis] = -1
    part = (where - low).to(torch.float32).to(x.device).view(shape)
    index = low.long().to(x.device)
    a = take(x, index, axis)
    b = take(x, (index + 1).clamp_(max=x.shape[axis] - 1), axis)
    return b.sub_(a).mul_(part).add_(a)


def smooth_field(gens: Generators, h: int, w: int, sigma: float, device: torch.device) -> Tensor:
    """Gaussian random field (b, h, w) of mean 0 and variance 1: white noise smoothed with a Gaussian of sigma pixels.

    Stationary up to the edges. A wide sigma is drawn on a grid of pitch sigma / 3 and interpolated.
    """
    pitch = max(1.0, sigma / 3)
    half = gaussian_kernel(sigma / pitch)
    margin = 2 * (len(half) - 1)
    gh, gw = (n if pitch == 1 else math.ceil((n - 1) / pitch) + 1 for n in (h, w))
    field = normal(gens, (gh + margin, gw + margin), device)
    field = smooth_axis(smooth_axis(field, half, 2), half, 1) * (1 / kernel_power(sigma / pitch))
    if pitch > 1:
        field = resample_axis(field, torch.arange(h, dtype=torch.float64) / pitch, 1)
        field = resample_axis(field, torch.arange(w, dtype=torch.float64) / pitch, 2)
    return field


def pixel_grid(h: int, w: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """y (h, 1) and x (1, w), float32, in pixels."""
    y = torch.arange(h, dtype=torch.float32, device=device).view(h, 1)
    return y, torch.arange(w, dtype=torch.float32, device=device).view(1, w)


def _mirror(where: Tensor, n: int) -> Tensor:
    """Fold coordinates into [0, n - 1] by reflection about the outer pixel centres."""
    period = 2.0 * (n - 1)
    turned = where - (where / period).floor_() * period
    return (n - 1) - (turned - (n - 1)).abs_()


def warp(images: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """Bilinear samples of (b, C, H, W) at y, x (b, H, W), in pixels of the input, reflected at the edges."""
    b, c, h, w = images.shape
    y, x = _mirror(y, h).clamp_(0, h - 1), _mirror(x, w).clamp_(0, w - 1)
    y0, x0 = y.floor(), x.floor()
    fy, fx = (y - y0).view(b, 1, -1), (x - x0).view(b, 1, -1)
    # One more row and column: all four neighbours are then the same index into a shifted view.
    flat = F.pad(images, (0, 1, 0, 1), mode="replicate").view(b, c, -1)
    index = (y0.long() * (w + 1) + x0.long()).view(b, 1, -1).expand(b, c, -1)

    def at(dy: int, dx: int) -> Tensor:
        return flat[..., dy * (w + 1) + dx :].gather(2, index)

    left = at(0, 0).mul_(1 - fy).add_(at(1, 0).mul_(fy))
    right = at(0, 1).mul_(1 - fy).add_(at(1, 1).mul_(fy))
    return left.mul_(1 - fx).add_(right.mul_(fx)).view(b, c, h, w)
