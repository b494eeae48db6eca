"""Defocus, glass, motion, zoom and Gaussian blur (ImageNet-C, arXiv 1903.12261).

Each function takes images (b, C, H, W) float32 in [0, 1], a severity 1..5 and one generator per sample, and returns
images of that shape, not yet clipped to [0, 1]. Lengths are given at 224 pixels and multiplied by min(H, W) / 224.
Kernels are defined for fractional lengths: a weight that falls between pixels is shared out as bilinear interpolation
would.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from robustkpca.corruptions.fields import Generators, draw_angle, gaussian_smooth, resample_axis, scale, shifted_sum

# (step, count) of the published ranges, as numpy's arange rounds them: from 1 to 1.11, 1.15, 1.20, 1.24, 1.30.
ZOOMS = ((0.01, 12), (0.01, 16), (0.02, 11), (0.02, 13), (0.03, 11))


def _splat(points: Iterable[tuple[float, float, float]]) -> dict[tuple[int, int], float]:
    """Points (y, x, weight) -> taps {(dy, dx): weight} that sum to 1; each point is shared among its four pixels."""
    taps: dict[tuple[int, int], float] = {}
    total = 0.0
    for y, x, weight in points:
        y0, x0 = math.floor(y), math.floor(x)
        for dy, wy in ((y0, 1 - (y - y0)), (y0 + 1, y - y0)):
            for dx, wx in ((x0, 1 - (x - x0)), (x0 + 1, x - x0)):
                if wy * wx > 0:
                    taps[dy, dx] = taps.get((dy, dx), 0.0) + weight * wy * wx
        total += weight
    return {at: weight / total for at, weight in taps.items()}


@functools.cache  # pure, and dear enough to be the most of the work on small images
def disk_kernel(radius: float, alias: float) -> dict[tuple[int, int], float]:
    """Taps of a uniform disk of any radius > 0 (pixels), softened by a sampled Gaussian of sigma `alias`."""
    per_pixel = max(12, math.ceil(24 / radius))
    n = math.ceil(radius * per_pixel)
    grid = [(k + 0.5) / per_pixel for k in range(-n, n)]
    disk = _splat((y, x, 1.0) for y in grid for x in grid if y * y + x * x <= radius * radius)
    half = [math.exp(-0.5 * (k / alias) ** 2) for k in range(max(2, math.ceil(3 * alias)) + 1)]
    norm = half[0] + 2 * sum(half[1:])
    soft: dict[tuple[int, int], float] = {}
    for (y, x), weight in disk.items():
        for dy in range(1 - len(half), len(half)):
            for dx in range(1 - len(half), len(half)):
                at = y + dy, x + dx
                soft[at] = soft.get(at, 0.0) + weight * half[abs(dy)] * half[abs(dx)] / norm**2
    # The disk is symmetric; rounding makes equal weights equal to the last bit, so that they can be added first.
    rounded = {at: round(weight, 8) for at, weight in soft.items() if weight > 1e-6}
    total = sum(rounded.values())
    return {at: weight / total for at, weight in rounded.items()}


def defocus_blur(images: Tensor, severity: int, gens: Generators) -> Tensor:
    """Mean over a disk (a lens out of focus) of radius 3 to 10 px; edges are reflected about the outer pixels."""
    radius, alias = ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5))[severity - 1]
    s = scale(images)
    return shifted_sum(images, disk_kernel(radius * s, alias * s), mode="reflect")


def gaussian_blur(images: Tensor, severity: int, gens: Generators) -> Tensor:
    """Gaussian of sigma 1 to 6 px with replicated edges."""
    return gaussian_smooth(images, (1, 2, 3, 4, 6)[severity - 1] * scale(images))


def line_kernel(radius: float, sigma: float, angle: float, s: float) -> dict[tuple[int, int], float]:
    """Taps of a one-sided trail: weight exp(-t^2 / 2 sigma^2) at distance t s, t = 0 .. 2 radius; angle in radians."""
    parts = math.ceil(s)  # above 224 pixels the points would lie more than a pixel apart
    steps = (k / parts for k in range(2 * int(radius) * parts + 1))
    return _splat((t * s * math.sin(angle), t * s * math.cos(angle), math.exp(-0.5 * (t / sigma) ** 2)) for t in steps)


def streak(images: Tensor, radius: float, sigma: float, angles: Iterable[float]) -> Tensor:
    """Trail of each sample along its own angle, edges replicated; radius and sigma in pixels at 224."""
    s = scale(images)
    kernels = [line_kernel(radius, sigma, angle, s) for angle in angles]
    # One kernel a sample: shifted views of one sample are cheaper than gathers over the batch.
    return torch.cat([shifted_sum(x, k, "replicate") for x, k in zip(images.split(1), kernels, strict=True)])


def motion_blur(images: Tensor, severity: int, gens: Generators) -> Tensor:
    """One-sided trail, half-Gaussian of sigma 3 to 15 px cut at twice the radius (10 to 20 px), within 45 degrees of
    the horizontal. ImageMagick, which the original calls, rounds each point to a pixel; here it is interpolated."""
    radius, sigma = ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15))[severity - 1]
    return streak(images, radius, sigma, [draw_angle(g, -45, 45) for g in gens])


def zoom_blur(images: Tensor, severity: int, gens: Generators) -> Tensor:
    """Mean of the image and its enlargements about the centre by factors up to 1.11 ... 1.30 (linear interpolation).

    A zoom is a ratio, so it does not scale. The original crops whole pixels before it enlarges; here the centre is
    exact.
    """
    step, count = ZOOMS[severity - 1]
    factors = [1 + step * k for k in range(1, count)]
    total = images * 2  # the image itself, and its enlargement by 1
    h, w = images.shape[-2:]
    y, x = (torch.arange(n, dtype=torch.float64) - (n - 1) / 2 for n in (h, w))
    for factor in factors:
        rows = resample_axis(images, y / factor + (h - 1) / 2, 2)
        total += resample_axis(rows, x / factor + (w - 1) / 2, 3)
    return total / (count + 1)


def step_chances(square: float) -> list[float]:
    """P(d = k), k = -K .. K, of a symmetric step with mean square `square` (pixels^2).

    Up to 1/2 a step is -1, 0 or 1. Above, it is a number uniform in [-reach, reach] rounded at random to a neighbour.
    """
    if square <= 0.5:
        return [square / 2, 1 - square, square / 2]

    def below(t: float) -> float:  # integral of the unit tent up to t
        t = min(1.0, max(-1.0, t))
        return 0.5 * (1 + t) ** 2 if t < 0 else 1 - 0.5 * (1 - t) ** 2

    def chances(reach: float) -> list[float]:
        last = math.ceil(reach)
        return [(below(reach - k) - below(-reach - k)) / (2 * reach) for k in range(-last, last + 1)]

    def mean_square(p: list[float]) -> float:
        return sum(v * (k - len(p) // 2) ** 2 for k, v in enumerate(p))

    low, high = 1.0, 2 + 2 * math.sqrt(square)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_square(chances(middle)) < square else (low, middle)
    return chances(high)


def swap_pixels(h: int, w: int, dy: Tensor, dx: Tensor, reach: int, order: Tensor) -> Tensor:
    """Index (b, h*w) after swapping every pixel with the one at (dy, dx) from it, one after the other.

    dy, dx: int64 (b, h*w), at most `reach`. A step out of the picture is no swap. The picture is cut into tiles of k =
    2 reach + 1 pixels a side; order (b, k*k), a permutation of the places in a tile, says when their turn is. Pixels at
    the same place of two tiles have no partner in common, so their swaps are done together: exactly the sequential
    result.
    """
    b, n, k = len(dy), h * w, 2 * reach + 1
    down, across = math.ceil(h / k), math.ceil(w / k)
    y = torch.arange(down * k, device=dy.device).view(-1, 1)
    x = torch.arange(across * k, device=dy.device)
    beyond = (0, across * k - w, 0, down * k - h)
    to_y, to_x = (at + F.pad(step.view(b, h, w), beyond) for at, step in ((y, dy), (x, dx)))
    inside = (y < h) & (x < w) & (to_y >= 0) & (to_y < h) & (to_x >= 0) & (to_x < w)

    def turns(place: Tensor) -> tuple[Tensor, ...]:  # (b, tiles) for each turn
        place = torch.where(inside, place, n)  # n: a place of its own, where what is no swap swaps with itself
        tiles = place.view(b, down, k, across, k).permute(0, 2, 4, 1, 3).reshape(b, k * k, -1)
        return tiles.gather(1, order.unsqueeze(2).expand_as(tiles)).unbind(1)

    out = torch.arange(n + 1, device=dy.device).repeat(b, 1)
    for source, target in zip(turns(y * w + x), turns(to_y * w + to_x), strict=True):
        here, there = out.gather(1, source), out.gather(1, target)
        out.scatter_(1, source, there)
        out.scatter_(1, target, here)
    return out[:, :n]


def glass_blur(images: Tensor, severity: int, gens: Generators) -> Tensor:
    """Gaussian blur, swaps of every pixel with a near one (up to 1 - 4 px away, 1 to 3 times over), Gaussian blur.

    The original swaps in scan order, with steps from -delta to delta - 1. Here the order is that of `swap_pixels` with
    turns drawn at random, and the steps are symmetric; their root mean square is the published one times
    min(H, W) / 224, so on small images most steps are 0.
    """
    sigma, delta, rounds = ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2))[severity - 1]
    s = scale(images)
    b, c, h, w = images.shape
    device = images.device
    chances = torch.tensor(step_chances((2 * delta**2 + 1) / 6 * s * s), dtype=torch.float64)
    reach = len(chances) // 2
    ends = (chances.cumsum(0) * 2**16).round().long()
    # Steps by a draw of 16 bits: each as often as its chance says. A table is quicker than a search.
    table = torch.arange(-reach, reach + 1).repeat_interleave(ends.diff(prepend=ends.new_zeros(1))).to(device)
    images = gaussian_smooth(images, sigma * s).view(b, c, h * w)
    for _ in range(rounds):
        bits = torch.stack([torch.randint(2**32, (h * w,), generator=g) for g in gens]).to(device)
        order = torch.stack([torch.randperm((2 * reach + 1) ** 2, generator=g) for g in gens]).to(device)
        dy, dx = (table.index_select(0, half.view(-1)).view(b, -1) for half in (bits >> 16, bits & (2**16 - 1)))
        index = swap_pixels(h, w, dy, dx, reach, order)
        images = images.gather(2, index.view(b, 1, -1).expand(b, c, -1))
    return gaussian_smooth(images.view(b, c, h, w), sigma * s)
