"""Snow, frost, fog, brightness and spatter (ImageNet-C, arXiv 1903.12261).

Each function takes images (b, C, H, W) float32 in [0, 1], a severity 1..5 and one generator per sample, and returns
images of that shape, not yet clipped to [0, 1]. Lengths are given at 224 pixels and multiplied by min(H, W) / 224, but
the grain of a texture is never finer than the pixels can show. On grey images a colour acts through its luma.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from robustkpca.corruptions.blur import streak
from robustkpca.corruptions.fields import (
    Generators,
    draw_angle,
    gaussian_smooth,
    kernel_power,
    luma,
    normal,
    paint,
    pixel_grid,
    resample_axis,
    scale,
    smooth_field,
    uniform,
)

ICE = (0.9, 0.97, 1.0)  # tint of the frost
WATER = (175 / 255, 238 / 255, 238 / 255)  # pale turquoise
MUD = (63 / 255, 42 / 255, 20 / 255)


def snow(images: Tensor, severity: int, gens: Generators) -> Tensor:
    """Falling flakes over a whitened image: thresholded noise, enlarged, blurred along a trail, also upside down.

    A flake is at least 1.5 pixels wide, whatever the size. The published layer is rounded to 8 bits before the blur;
    not here.
    """
    mean, std, size, floor, radius, sigma, keep = (
        (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
        (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
        (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
        (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
    )[severity - 1]
    h, w = images.shape[-2:]
    pitch = max(1.5, size * scale(images))
    layer = normal(gens, [math.ceil((n - 1) / pitch) + 1 for n in (h, w)], images.device) * std + mean
    for axis, n in ((1, h), (2, w)):
        # From end to end, so that at a whole pitch the grid does not lie on the pixels, where nothing would be
        # averaged.
        layer = resample_axis(layer, torch.linspace(0, layer.shape[axis] - 1, n, dtype=torch.float64), axis)
    layer = torch.where(layer < floor, torch.zeros_like(layer), layer).clamp_(0, 1).unsqueeze(1)
    layer = streak(layer, radius, sigma, [draw_angle(g, -135, -45) for g in gens])
    white = torch.maximum(images, luma(images) * 1.5 + 0.5)
    return images * keep + white * (1 - keep) + (layer + layer.flip(2, 3))


def _lattice_noise(lattice: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """Bilinear interpolation of a periodic lattice (b, G, G), G a power of two, at u, v (b, h, w) in cells."""
    b, size, _ = lattice.shape
    # One more row and column: all four neighbours are then the same index into a shifted view.
    flat = F.pad(lattice.unsqueeze(1), (0, 1, 0, 1), mode="circular").view(b, -1)
    u0, v0 = u.floor(), v.floor()
    fu, fv = u - u0, v - v0
    index = ((u0.long() & (size - 1)) * (size + 1) + (v0.long() & (size - 1))).view(b, -1)

    def at(di: int, dj: int) -> Tensor:
        return flat[:, di * (size + 1) + dj :].gather(1, index).view(u.shape)

    low = at(0, 0).mul_(1 - fv).add_(at(0, 1).mul_(fv))
    high = at(1, 0).mul_(1 - fv).add_(at(1, 1).mul_(fv))
    return low.mul_(1 - fu).add_(high.mul_(fu))


def frost_texture(gens: Generators, h: int, w: int, device: torch.device) -> Tensor:
    """Procedural frost (b, h, w) in [0, 1]: grains with bundles of ice needles, in patches of thick and thin frost.

    Every pixel belongs to the grain of the nearest of 24 points; a grain has a direction, along which the ridges of two
    stretched noise lattices run as needles, with a third, finer one 60 degrees across as side branches.
    """
    unit = min(h, w) / 224
    centres = uniform(gens, (24, 2), device) * torch.tensor([h, w], dtype=torch.float32, device=device)
    heading = normal(gens, (24, 2), device)
    heading = heading / (heading * heading).sum(2, keepdim=True).sqrt().clamp_min(1e-6)
    lattices = uniform(gens, (3, 64, 64), device)
    thick = smooth_field(gens, h, w, 28 * unit, device)
    bend_y, bend_x = (smooth_field(gens, h, w, 14 * unit, device) * (1.5 * unit) for _ in range(2))

    row, column = pixel_grid(h, w, device)
    row, column = row + bend_y, column + bend_x
    least = torch.full_like(row, math.inf)
    nearest = torch.zeros_like(row)
    closer = torch.empty_like(row)
    for k in range(centres.shape[1]):
        square = (row - centres[:, k, 0].view(-1, 1, 1)).square_()
        square += (column - centres[:, k, 1].view(-1, 1, 1)).square_()
        torch.lt(square, least, out=closer)  # 0 or 1; k rises, so the last that was closer is the largest
        torch.maximum(nearest, closer.mul_(k), out=nearest)
        torch.minimum(least, square, out=least)
    grain = nearest.long().view(len(gens), -1)

    def of_grain(values: Tensor) -> Tensor:  # (b, 24) -> (b, h, w)
        return values.gather(1, grain).view(row.shape)

    dy, dx = row - of_grain(centres[..., 0]), column - of_grain(centres[..., 1])
    sin, cos = of_grain(heading[..., 0]), of_grain(heading[..., 1])

    half, root = 0.5, math.sqrt(0.75)  # cosine and sine of 60 degrees
    branch_cos, branch_sin = cos * half - sin * root, sin * half + cos * root
    texture = thick * 0.1 + 0.15
    cover = (thick * 0.25 + 0.75).clamp_(0.25, 1.3)
    for layer, (c, s, length, width, strength) in enumerate(
        ((cos, sin, 70, 6, 0.42), (cos, sin, 30, 2.5, 0.3), (branch_cos, branch_sin, 18, 3, 0.34))
    ):
        along, across = max(length * unit, 4.0), max(width * unit, 1.3)
        u = (dx * c).add_(dy * s).div_(along)
        v = (dy * c).sub_(dx * s).div_(across)
        ridge = _lattice_noise(lattices[:, layer], u, v).mul_(2).sub_(1).abs_().neg_().add_(1)
        ridge.square_().square_()
        texture += ridge.mul_(cover).mul_(strength)
    return texture.clamp_(0, 1)


def frost(images: Tensor, severity: int, gens: Generators) -> Tensor:
    """a x + b f with the published weights, a = 1 ... 0.6 and b = 0.4 ... 0.75.

    f is NOT one of the photographs of frosted glass that ImageNet-C blends in: they cannot be redistributed. It is a
    procedural texture (`frost_texture`), bluish white with crystals. Scores are therefore not comparable with those on
    released files.
    """
    keep, cover = ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75))[severity - 1]
    h, w = images.shape[-2:]
    texture = frost_texture(gens, h, w, images.device).unsqueeze(1)
    return images * keep + texture * paint(ICE, images) * cover


def plasma(gens: Generators, size: int, decay: float, device: torch.device) -> Tensor:
    """Diamond-square height map (b, size, size) in [0, 1], periodic; size is a power of two.

    As published the amplitude of a level is the square of a number that `decay` divides, so it falls by decay^2 per
    level.
    """
    b = len(gens)
    noise = uniform(gens, (size * size,), device, -1, 1)
    heights = torch.zeros(b, size, size, device=device)
    wibble, used, step = 100.0, 0, size
    while step > 1:
        half, m = step // 2, size // step
        draws = noise[:, used : used + 3 * m * m].view(b, 3, m, m) * (wibble * wibble)
        used += 3 * m * m
        corner = heights[:, ::step, ::step]
        right, below = corner.roll(-1, 2), corner.roll(-1, 1)
        middle = (corner + right + below + below.roll(-1, 2)) / 4 + draws[:, 0]
        heights[:, half::step, half::step] = middle
        heights[:, ::step, half::step] = (corner + right + middle + middle.roll(1, 1)) / 4 + draws[:, 1]
        heights[:, half::step, ::step] = (corner + below + middle + middle.roll(1, 2)) / 4 + draws[:, 2]
        step, wibble = half, wibble / decay
    low, high = heights.amin((1, 2), keepdim=True), heights.amax((1, 2), keepdim=True)
    return (heights - low) / (high - low)


def fog(images: Tensor, severity: int, gens: Generators) -> Tensor:
    """(x + c p) m / (m + c): a plasma fractal p, c = 1.5 to 3, m the largest value of the image.

    The map is the smallest power of two that covers the image, so its features grow and shrink with the image.
    """
    amount, decay = ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4))[severity - 1]
    h, w = images.shape[-2:]
    size = 2 ** math.ceil(math.log2(max(h, w)))
    peak = images.amax((1, 2, 3), keepdim=True)
    haze = plasma(gens, size, decay, images.device)[:, :h, :w].unsqueeze(1)
    return (images + haze * amount) * (peak / (peak + amount))


def brightness(images: Tensor, severity: int, gens: Generators) -> Tensor:
    """V + 0.1 to 0.5 in HSV, cut at 1; hue and saturation stay. On grey images the pixel value is V.

    With H and S fixed each channel is V times a constant, so the RGB values are scaled by V' / V; black becomes grey.
    """
    amount = (0.1, 0.2, 0.3, 0.4, 0.5)[severity - 1]
    value = images.amax(1, keepdim=True)
    brighter = (value + amount).clamp_max(1)
    safe = torch.where(value > 0, value, torch.ones_like(value))
    return torch.where(value > 0, images / safe * brighter, brighter)


def _neighbour(field: Tensor, dy: int, dx: int) -> Tensor:
    """Value of (b, 1, h, w) at (y + dy, x + dx), edges replicated; |dy|, |dx| <= 1."""
    h, w = field.shape[-2:]
    return F.pad(field, (1, 1, 1, 1), mode="replicate")[..., 1 + dy : 1 + dy + h, 1 + dx : 1 + dx + w]


def spatter(images: Tensor, severity: int, gens: Generators) -> Tensor:
    """Drops where a smooth random field passes a threshold: bright water at severity 1 to 3, opaque mud at 4 and 5.

    The field keeps the mean, deviation and threshold it has at 224, so the covered share does not depend on the size;
    drops shrink with the image but to no less than half their published width. The original shades water by edge
    detection, distance transform and histogram equalisation; here a drop is shaded by its height and by light from the
    top left.
    """
    mean, std, sigma, floor, strength = (
        (0.65, 0.3, 4, 0.69, 0.6),
        (0.65, 0.3, 3, 0.68, 0.6),
        (0.65, 0.3, 2, 0.68, 0.5),
        (0.65, 0.3, 1, 0.65, 1.5),
        (0.67, 0.4, 1, 0.65, 1.5),
    )[severity - 1]
    size = max(scale(images), 0.5)
    h, w = images.shape[-2:]
    threshold = (floor - mean) / (std * kernel_power(sigma))
    height = smooth_field(gens, h, w, sigma * size, images.device).unsqueeze(1) - threshold
    if severity > 3:
        cover = gaussian_smooth((height > 0).to(torch.float32), strength * size)
        cover = torch.where(cover < 0.8, torch.zeros_like(cover), cover)
        return images * (1 - cover) + paint(MUD, images) * cover
    drop = height.clamp(0, 1)
    slope = _neighbour(drop, 1, 1) - _neighbour(drop, -1, -1)
    shade = (drop * 0.6 + slope * (sigma * size * 0.35)).clamp_(0, 1)
    return images + paint(WATER, images) * (torch.where(height > 0, shade, torch.zeros_like(shade)) * strength)
