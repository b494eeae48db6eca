"""The 15 corruptions of ImageNet-C as they are usually computed: one image at a time, with NumPy, scipy, OpenCV,
scikit-image and Pillow.

Written from the published definitions and parameters (Hendrycks & Dietterich 2019, arXiv 1903.12261). It is what the
speed of robustkpca.corruptions is measured against (corruptions.py) and the oracle of its values
(tests/test_corruption_reference.py), so nothing here is shared with it.

Each function takes a uint8 image (224, 224, 3), a severity 1..5 and a NumPy generator, and returns (224, 224, 3)
in levels from 0 to 255, not rounded unless Pillow makes the last step. Lengths are pixels at 224 and do not scale.

Departures from the usual code: motion is blurred by adding shifted images, as the imagecorruptions package does, not by
ImageMagick; frost blends a crop of a random image in place of a photograph, which it keeps instead of reading a file
each time; glass blur swaps pixels, where the usual line `x[a], x[b] = x[b], x[a]` on NumPy views overwrites one.
"""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Callable

import cv2
import numpy as np
from PIL import Image
from scipy import ndimage
from skimage.color import hsv2rgb, rgb2hsv
from skimage.filters import gaussian
from skimage.util import random_noise

Rng = np.random.Generator


def _levels(x: np.ndarray) -> np.ndarray:
    return np.clip(x, 0, 1) * 255


def gaussian_noise(image: np.ndarray, severity: int, rng: Rng) -> np.ndarray:
    std = (0.08, 0.12, 0.18, 0.26, 0.38)[severity - 1]
    x = image / 255.0
    return _levels(x + rng.normal(scale=std, size=x.shape))


def shot_noise(image: np.ndarray, severity: int, rng: Rng) -> np.ndarray:
    photons = (60, 25, 12, 5, 3)[severity - 1]
    return _levels(rng.poisson(image / 255.0 * photons) / photons)


def impulse_noise(image: np.ndarray, severity: int, rng: Rng) -> np.ndarray:
    share = (0.03, 0.06, 0.09, 0.17, 0.27)[severity - 1]
    return _levels(random_noise(image / 255.0, mode="s&p", amount=share, rng=rng))


def disk_kernel(radius: int, alias: float) -> np.ndarray:
    """Of radius 8 and 10 the disk touches the edge, which the blur reflects: the weights then sum to 1.01, as
    published.
    """
    reach, taps = (8, 3) if radius <= 8 else (radius, 5)
    y, x = np.mgrid[-reach : reach + 1, -reach : reach + 1]
    inside = (x**2 + y**2 <= radius**2).astype(np.float32)
    return cv2.GaussianBlur(inside / inside.sum(), ksize=(taps, taps), sigmaX=alias)


def defocus_blur(image: np.ndarray, severity: int, rng: Rng) -> np.ndarray:
    radius, alias = ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5))[severity - 1]
    kernel = disk_kernel(radius, alias)
    return _levels(np.stack([cv2.filter2D(channel, -1, kernel) for channel in np.moveaxis(image / 255.0, 2, 0)], 2))


def glass_blur(image: np.ndarray, severity: int, rng: Rng) -> np.ndarray:
    sigma, delta, rounds = ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2))[severity - 1]
    x = np.uint8(gaussian(image / 255.0, sigma=sigma, channel_axis=-1) * 255)
    height, width = x.shape[:2]
    for _ in range(rounds):
        for h in range(height - delta, delta, -1):
            for w in range(width - delta, delta, -1):
                dx, dy = rng.integers(-delta, delta, size=2)
                x[h, w], x[h + dy, w + dx] = x[h + dy, w + dx], x[h, w].copy()
    return _levels(gaussian(x / 255.0, sigma=sigma, channel_axis=-1))


def _shifted(image: np.ndarray, dy: int, dx: int) -> np.ndarray:
    """image(y - dy, x - dx), edges replicated."""
    out = np.roll(image, (dy, dx), axis=(0, 1))
    if dy < 0:
        out[dy:] = out[dy - 1]
    elif dy > 0:
        out[:dy] = out[dy]
    if dx < 0:
        out[:, dx:] = out[:, dx - 1 : dx]
    elif dx > 0:
        out[:, :dx] = out[:, dx : dx + 1]
    return out


def motion_trail(image: np.ndarray, radius: int, sigma: float, angle: float) -> np.ndarray:
    """Weighted sum of the image shifted by 0 .. 2 radius whole pixels along an angle in degrees."""
    weights = np.exp(-0.5 * (np.arange(2 * radius + 1) / sigma) ** 2)
    weights /= weights.sum()
    total = np.zeros(image.shape, dtype=np.float32)
    for t, weight in enumerate(weights):
        dy = -math.ceil(t * math.sin(math.radians(angle)) - 0.5)
        dx = -math.ceil(t * math.cos(math.radians(angle)) - 0.5)
        total += weight * _shifted(image, dy, dx)
    return total


def motion_blur(image: np.ndarray, severity: int, rng: Rng) -> np.ndarray:
    radius, sigma = ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15))[severity - 1]
    return np.clip(motion_trail(image, radius, sigma, rng.uniform(-45, 45)), 0, 255)


def _clipped_zoom(x: np.ndarray, factor: float) -> np.ndarray:
    """The middle of (H, W, C), enlarged by a factor to (H, W, C) with linear interpolation."""
    size = x.shape[0]
    crop = math.ceil(size / factor)
    top = (size - crop) // 2
    big = ndimage.zoom(x[top : top + crop, top : top + crop], (factor, factor, 1), order=1)
    cut = (big.shape[0] - size) // 2
    return big[cut : cut + size, cut : cut + size]


def zoom_blur(image: np.ndarray, severity: int, rng: Rng) -> np.ndarray:
    last, step = ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03))[severity - 1]
    factors = np.arange(1, last, step)
    x = (image / 255.0).astype(np.float32)
    total = np.zeros_like(x)
    for factor in factors:
        total += _clipped_zoom(x, factor)
    return _levels((x + total) / (len(factors) + 1))


def snow(image: np.ndarray, severity: int, rng: Rng) -> np.ndarray:
    mean, std, zoom, floor, radius, sigma, keep = (
        (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
        (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
        (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
        (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
    )[severity - 1]
    x = (image / 255.0).astype(np.float32)
    layer = _clipped_zoom(rng.normal(mean, std, size=(*x.shape[:2], 1)), zoom)[..., 0]
    layer[layer < floor] = 0
    layer = motion_trail(np.uint8(np.clip(layer, 0, 1) * 255), radius, sigma, rng.uniform(-135, -45)) / 255
    grey = cv2.cvtColor(x, cv2.COLOR_RGB2GRAY)[..., None]
    x = keep * x + (1 - keep) * np.maximum(x, grey * 1.5 + 0.5)
    return _levels(x + (layer + np.rot90(layer, 2))[..., None])


@functools.cache
def frost_image() -> np.ndarray:
    """uint8 (768, 1024, 3): what stands in for the photograph of frosted glass, made once."""
    rng = np.random.default_rng(0)
    field = ndimage.gaussian_filter(rng.normal(size=(768, 1024, 3)), (4, 4, 0))
    return np.uint8(np.clip(0.45 + 0.2 * field / field.std(), 0, 1) * 255)


def frost(image: np.ndarray, severity: int, rng: Rng) -> np.ndarray:
    keep, cover = ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75))[severity - 1]
    height, width = image.shape[:2]
    texture = frost_image()
    y, x = rng.integers(0, texture.shape[0] - height), rng.integers(0, texture.shape[1] - width)
    return np.clip(keep * image + cover * texture[y : y + height, x : x + width], 0, 255)


def plasma_fractal(size: int, decay: float, rng: Rng) -> np.ndarray:
    """Diamond-square height map (size, size) in [0, 1], periodic; size is a power of two."""
    heights = np.zeros((size, size))
    step, wibble = size, 100.0

    def wobbling(total: np.ndarray) -> np.ndarray:
        return total / 4 + wibble * rng.uniform(-wibble, wibble, total.shape)

    while step >= 2:
        half = step // 2
        corners = heights[::step, ::step]
        square = corners + np.roll(corners, -1, axis=0)
        heights[half::step, half::step] = wobbling(square + np.roll(square, -1, axis=1))
        middles = heights[half::step, half::step]
        below = middles + np.roll(middles, 1, axis=0)
        heights[::step, half::step] = wobbling(below + corners + np.roll(corners, -1, axis=1))
        beside = middles + np.roll(middles, 1, axis=1)
        heights[half::step, ::step] = wobbling(beside + corners + np.roll(corners, -1, axis=0))
        step, wibble = half, wibble / decay
    heights -= heights.min()
    return heights / heights.max()


def fog(image: np.ndarray, severity: int, rng: Rng) -> np.ndarray:
    amount, decay = ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4))[severity - 1]
    x = image / 255.0
    height, width = x.shape[:2]
    peak = x.max()
    x += amount * plasma_fractal(256, decay, rng)[:height, :width, None]
    return _levels(x * peak / (peak + amount))


def brightness(image: np.ndarray, severity: int, rng: Rng) -> np.ndarray:
    hsv = rgb2hsv(image / 255.0)
    hsv[..., 2] = np.clip(hsv[..., 2] + (0.1, 0.2, 0.3, 0.4, 0.5)[severity - 1], 0, 1)
    return _levels(hsv2rgb(hsv))


def contrast(image: np.ndarray, severity: int, rng: Rng) -> np.ndarray:
    factor = (0.4, 0.3, 0.2, 0.1, 0.05)[severity - 1]
    x = image / 255.0
    mean = x.mean(axis=(0, 1), keepdims=True)
    return _levels((x - mean) * factor + mean)


def elastic_transform(image: np.ndarray, severity: int, rng: Rng) -> np.ndarray:
    alpha, sigma, shift = (
        (244 * 2, 244 * 0.7, 244 * 0.1),
        (244 * 2, 244 * 0.08, 244 * 0.2),
        (244 * 0.05, 244 * 0.01, 244 * 0.02),
        (244 * 0.07, 244 * 0.01, 244 * 0.02),
        (244 * 0.12, 244 * 0.01, 244 * 0.02),
    )[severity - 1]
    x = (image / 255.0).astype(np.float32)
    height, width, channels = x.shape
    centre, q = np.float32([height, width]) // 2, min(height, width) // 3
    points = np.float32([centre + q, [centre[0] + q, centre[1] - q], centre - q])
    moved = points + rng.uniform(-shift, shift, size=points.shape).astype(np.float32)
    affine = cv2.getAffineTransform(points, moved)
    x = cv2.warpAffine(x, affine, (width, height), borderMode=cv2.BORDER_REFLECT_101)

    def displacement() -> np.ndarray:
        field = gaussian(rng.uniform(-1, 1, size=(height, width)), sigma, mode="reflect", truncate=3)
        return (field * alpha).astype(np.float32)[..., None]

    dx, dy = displacement(), displacement()
    row, column, channel = np.meshgrid(np.arange(height), np.arange(width), np.arange(channels), indexing="ij")
    where = (row + dy).reshape(-1), (column + dx).reshape(-1), channel.reshape(-1)
    return _levels(ndimage.map_coordinates(x, where, order=1, mode="reflect").reshape(x.shape))


def pixelate(image: np.ndarray, severity: int, rng: Rng) -> np.ndarray:
    ratio = (0.6, 0.5, 0.4, 0.3, 0.25)[severity - 1]
    height, width = image.shape[:2]
    small = Image.fromarray(image).resize((int(width * ratio), int(height * ratio)), Image.Resampling.BOX)
    return np.asarray(small.resize((width, height), Image.Resampling.BOX))


def jpeg_compression(image: np.ndarray, severity: int, rng: Rng) -> np.ndarray:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=(25, 18, 15, 10, 7)[severity - 1])
    return np.asarray(Image.open(file))


CORRUPTIONS: dict[str, Callable[[np.ndarray, int, Rng], np.ndarray]] = {
    function.__name__: function
    for function in (
        gaussian_noise,
        shot_noise,
        impulse_noise,
        defocus_blur,
        glass_blur,
        motion_blur,
        zoom_blur,
        snow,
        frost,
        fog,
        brightness,
        contrast,
        elastic_transform,
        pixelate,
        jpeg_compression,
    )
}


def corrupt(image: np.ndarray, name: str, severity: int, rng: Rng) -> np.ndarray:
    """A corrupted copy, uint8 (224, 224, 3), cut down to whole levels as the usual code does."""
    return np.uint8(CORRUPTIONS[name](image, severity, rng))
