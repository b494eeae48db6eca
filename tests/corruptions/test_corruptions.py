"""The 19 corruptions against outside oracles: Pillow, colorsys, scipy, closed forms, sequential re-implementations."""

from __future__ import annotations

import colorsys
import io
import itertools
import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import fft, ndimage, stats

from robustkpca.corruptions import apply
from robustkpca.corruptions.apply import corrupt
from robustkpca.corruptions.blur import step_chances, swap_pixels
from robustkpca.corruptions.fields import Generators, gaussian_kernel, normal, smooth_field
from robustkpca.corruptions.registry import CORRUPTIONS, EXTRA_CORRUPTIONS, METHODS
from robustkpca.corruptions.weather import frost_texture, plasma
from robustkpca.errors import SpecError
from robustkpca.runtime import keyed_random

ALL = CORRUPTIONS + EXTRA_CORRUPTIONS
SEVERITIES = (1, 2, 3, 4, 5)
# Published severities that do not all rise in pixel distance.
ORDERED = {
    "elastic_transform": [(1, 2), (3, 4, 5)],  # large affine maps, then small local ones
    "saturate": [(1, 2), (3, 4, 5)],  # colour taken away, then added
    "snow": [(1, 2, 4, 5), (1, 3, 4, 5)],  # larger flakes at 3 than at 2, not more snow
    "frost": [(1, 2, 3), (4, 5)],  # weights 0.7, 0.7 then 0.65, 0.7: the sum gets darker again
    "fog": [(1, 2, 3), (4, 5)],  # as much fog at 4 as at 3, only rougher
    "pixelate": [(1, 3, 4), (2, 5)],  # blocks of whole pixels, and of mixed size where the ratio is not 1 / n
}
UNCOLOURED = {"saturate"}  # does nothing to grey images


def scenes(n: int, channels: int, h: int, w: int, seed: int = 0) -> torch.Tensor:
    """Natural-looking 8-bit images: smooth fields, boxes with edges, fine texture."""
    rng = np.random.default_rng(seed)
    out = np.zeros((n, channels, h, w))
    for image in out:
        base = ndimage.gaussian_filter(rng.normal(size=(h, w)), min(h, w) / 8)
        image += 0.45 + 0.15 * base / base.std()
        for _ in range(5):
            y, x = rng.integers(0, h - h // 4), rng.integers(0, w - w // 4)
            height, width = rng.integers(h // 6, h // 2), rng.integers(w // 6, w // 2)
            image[:, y : y + height, x : x + width] = rng.uniform(0.1, 0.9, (channels, 1, 1))
        image += 0.04 * ndimage.gaussian_filter(rng.normal(size=(channels, h, w)), (0, 1, 1))
    return torch.from_numpy(np.round(out.clip(0, 1) * 255) / 255).float()


def names(n: int) -> list[str]:
    return [f"test/{k:05d}" for k in range(n)]


def levels(image: torch.Tensor) -> np.ndarray:
    return np.round(image.double().numpy() * 255)


def agree(got: torch.Tensor, expected: np.ndarray, slack: float = 0.01) -> None:
    """Each value is the exact one rounded to the 8-bit grid: half a level off at most, plus `slack` for float32."""
    assert torch.equal(got, (got * 255).round() / 255)
    error = np.abs(got.double().numpy() - np.clip(expected, 0, 1)) * 255
    assert error.max() <= 0.5 + slack, error.max()


def to_pil(image: torch.Tensor) -> Image.Image:
    array = levels(image).astype(np.uint8)
    return Image.fromarray(array[0] if len(array) == 1 else array.transpose(1, 2, 0))


def from_pil(image: Image.Image) -> np.ndarray:
    array = np.asarray(image, dtype=np.float64) / 255
    return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)


def per_pixel(images: torch.Tensor, change: Callable[[float, float, float], tuple[float, float, float]]) -> np.ndarray:
    """Apply (h, s, v) -> (h, s, v) to every pixel of (B, 3, H, W) with colorsys, in double precision."""
    flat = images.double().permute(0, 2, 3, 1).reshape(-1, 3).tolist()
    done = np.array([colorsys.hsv_to_rgb(*change(*colorsys.rgb_to_hsv(*rgb))) for rgb in flat])
    b, _, h, w = images.shape
    return done.reshape(b, h, w, 3).transpose(0, 3, 1, 2)


def colours() -> torch.Tensor:
    """Random colours, among them black, white, greys and pure hues."""
    image = torch.rand(1, 3, 28, 28, generator=torch.Generator().manual_seed(3))
    image = (image * 255).round() / 255
    image[0, :, 0, :] = torch.arange(0, 28) * 9 / 255
    image[0, :, 1, :8] = torch.tensor([[0, 1, 1, 0, 0, 1, 1, 0], [0, 1, 0, 1, 0, 1, 0, 1], [0, 1, 0, 0, 1, 0, 1, 1.0]])
    return image


def test_names_are_the_published_ones() -> None:
    assert len(CORRUPTIONS) == 15 and CORRUPTIONS[0] == "gaussian_noise" and CORRUPTIONS[-1] == "jpeg_compression"
    assert set(EXTRA_CORRUPTIONS) == {"speckle_noise", "gaussian_blur", "spatter", "saturate"}
    assert not set(CORRUPTIONS) & set(EXTRA_CORRUPTIONS)
    assert tuple(METHODS) == ALL


# --- what holds for all of them


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    "shape", [(2, 1, 28, 28), (2, 3, 32, 32), (1, 3, 128, 200), (1, 1, 200, 128), (1, 3, 224, 224)]
)
def test_shape_range_and_grid(name: str, shape: tuple[int, int, int, int]) -> None:
    images = scenes(*shape)
    before = images.clone()
    out = corrupt(images, name, 3, names(shape[0]))
    assert out.shape == images.shape and out.dtype == torch.float32
    assert out.min() >= 0 and out.max() <= 1
    assert torch.equal(out, (out * 255).round() / 255)
    assert torch.equal(images, before)  # not written to
    if shape[1] == 3 or name not in UNCOLOURED:
        assert not torch.equal(out, images)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", ALL)
def test_a_sample_does_not_depend_on_its_batch(name: str, channels: int) -> None:
    n, severity = 64, 4
    images = torch.rand(n, channels, 28, 28, generator=torch.Generator().manual_seed(1))
    ids = names(n)
    whole = corrupt(images, name, severity, ids)
    for size in (1, 7):
        parts = [corrupt(images[k : k + size], name, severity, ids[k : k + size]) for k in range(0, n, size)]
        assert torch.equal(whole, torch.cat(parts)), size
    order = torch.randperm(n, generator=torch.Generator().manual_seed(2))
    assert torch.equal(whole[order], corrupt(images[order], name, severity, [ids[k] for k in order]))


@pytest.mark.parametrize("name", ALL)
def test_large_images_do_not_depend_on_their_batch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    images, ids = scenes(3, 3, 70, 101), names(3)
    alone = torch.cat([corrupt(images[k : k + 1], name, 2, ids[k : k + 1]) for k in range(3)])
    monkeypatch.setitem(apply._PART, "cpu", 2**26)  # all three at once
    assert torch.equal(alone, corrupt(images, name, 2, ids))


RANDOM = sorted(
    set(ALL)
    - {
        "defocus_blur",
        "zoom_blur",
        "brightness",
        "contrast",
        "pixelate",
        "jpeg_compression",
        "gaussian_blur",
        "saturate",
    }
)


@pytest.mark.parametrize("name", RANDOM)
def test_draws_depend_on_seed_and_id(name: str) -> None:
    image = scenes(1, 3, 32, 32).expand(2, -1, -1, -1)
    severity = 2 if name == "spatter" else 3
    one, two = corrupt(image, name, severity, ["a", "b"])
    assert not torch.equal(one, two)
    assert torch.equal(one, corrupt(image[:1], name, severity, ["a"])[0])
    assert not torch.equal(one, corrupt(image[:1], name, severity, ["a"], seed=1)[0])


@pytest.mark.parametrize("name", ALL)
def test_global_generator_is_neither_read_nor_moved(name: str) -> None:
    image = scenes(1, 3, 32, 32)
    torch.manual_seed(1)
    first = corrupt(image, name, 3, ["a"])
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert torch.equal(first, corrupt(image.requires_grad_(), name, 3, ["a"]))
    assert torch.equal(state, torch.get_rng_state())
    assert not first.requires_grad


def assert_ordered(images: torch.Tensor, name: str) -> None:
    if name == "elastic_transform":  # the affine part, of like size in 3 to 5, is averaged out
        images = images.repeat(6, 1, 1, 1)
    ids = names(len(images))
    distance = {
        s: (corrupt(images, name, s, ids) - images).square().mean((1, 2, 3)).sqrt().mean().item() for s in SEVERITIES
    }
    if images.shape[1] == 1 and name in UNCOLOURED:
        assert set(distance.values()) == {0.0}
        return
    assert min(distance.values()) > 1 / 255 / 4, distance  # more than a trace
    for group in ORDERED.get(name, [SEVERITIES]):
        values = [distance[s] for s in group]
        assert all(b > a for a, b in itertools.pairwise(values)), (name, distance)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("shape", [(48, 1, 28, 28), (24, 3, 32, 32), (6, 3, 112, 140)])
def test_distance_grows_with_severity(name: str, shape: tuple[int, int, int, int]) -> None:
    assert_ordered(scenes(*shape, seed=4), name)


PHOTOS = Path(os.environ.get("ROBUSTKPCA_SHARED", "/nonexistent")) / "data" / "imagenet_samples"


@pytest.mark.skipif(not PHOTOS.is_dir(), reason="no photographs: set ROBUSTKPCA_SHARED")
@pytest.mark.parametrize("name", ALL)
def test_distance_grows_with_severity_on_photographs(name: str) -> None:
    files = [f for f in sorted(PHOTOS.rglob("*")) if f.suffix.lower() in {".jpg", ".jpeg", ".png"}][:40:5]
    opened = [Image.open(f).convert("RGB").resize((112, 112), Image.Resampling.BICUBIC) for f in files]
    assert_ordered(torch.stack([torch.from_numpy(from_pil(p)).float() for p in opened]), name)


# --- noise


def grey(value: float, n: int = 4) -> torch.Tensor:
    return torch.full((n, 3, 64, 64), value)


@pytest.mark.parametrize(("severity", "std"), [(1, 0.08), (2, 0.12), (3, 0.18)])
def test_gaussian_noise_moments(severity: int, std: float) -> None:
    noise = (corrupt(grey(0.5), "gaussian_noise", severity, names(4)) - 0.5).double()
    assert abs(noise.mean()) < 4 * std / noise.numel() ** 0.5
    clipped = math.sqrt(stats.norm.expect(lambda t: np.clip(t * std, -0.5, 0.5) ** 2))
    assert noise.std().item() == pytest.approx(clipped, rel=0.02)
    flat = noise.flatten(1)
    assert abs(torch.corrcoef(flat)[0, 1]) < 0.04 and abs(torch.corrcoef(noise[0].flatten(1))[0, 1]) < 0.07


@pytest.mark.parametrize(("severity", "std"), [(1, 0.15), (2, 0.2), (3, 0.35)])
def test_speckle_noise_is_proportional(severity: int, std: float) -> None:
    for value in (0.2, 0.4):
        noise = corrupt(grey(value), "speckle_noise", severity, names(4)).double() - value
        assert abs(noise.mean()) < 5 * std * value / noise.numel() ** 0.5 + 0.2 / 255
        assert noise.std().item() == pytest.approx(std * value, rel=0.02)
    assert corrupt(grey(0.0), "speckle_noise", 5, names(4)).abs().max() == 0


@pytest.mark.parametrize(("severity", "photons"), [(1, 60), (2, 25), (3, 12), (4, 5), (5, 3)])
def test_shot_noise_has_the_moments_of_a_clipped_poisson(severity: int, photons: int) -> None:
    value = 0.3
    out = corrupt(grey(value), "shot_noise", severity, names(4)).double()
    counts = np.arange(0, 200)
    chance = stats.poisson.pmf(counts, value * photons)
    seen = np.minimum(counts / photons, 1)
    mean = (chance * seen).sum()
    assert out.mean().item() == pytest.approx(mean, abs=0.004)
    assert out.var().item() == pytest.approx((chance * (seen - mean) ** 2).sum(), rel=0.04)
    if photons >= 12:  # hardly clipped
        assert out.var().item() == pytest.approx(value / photons, rel=0.05)


@pytest.mark.parametrize(("severity", "share"), [(1, 0.03), (2, 0.06), (3, 0.09), (4, 0.17), (5, 0.27)])
def test_impulse_noise_share(severity: int, share: float) -> None:
    out = corrupt(grey(0.6), "impulse_noise", severity, names(4))
    error = 4 * (share / out.numel()) ** 0.5
    assert (out == 0).double().mean().item() == pytest.approx(share / 2, abs=error)
    assert (out == 1).double().mean().item() == pytest.approx(share / 2, abs=error)
    assert ((out == 0) | (out == 1) | (out == 0.6)).all()


# --- blur


@pytest.mark.parametrize(("severity", "sigma"), [(1, 1), (2, 2), (3, 3), (4, 4), (5, 6)])
@pytest.mark.parametrize("shape", [(224, 224), (448, 500)])
def test_gaussian_blur_is_scipys(severity: int, sigma: float, shape: tuple[int, int]) -> None:
    images = scenes(1, 1, *shape)
    scaled = sigma * min(shape) / 224
    expected = ndimage.gaussian_filter(images[0, 0].double().numpy(), scaled, mode="nearest", truncate=4.0)
    agree(corrupt(images, "gaussian_blur", severity, ["a"])[0, 0], expected)


@pytest.mark.parametrize("sigma", [0.09, 0.125, 0.3, 0.5, 0.75, 0.99, 1.0, 2.5, 6.0])
def test_gaussian_kernel_has_the_variance_asked_for(sigma: float) -> None:
    half = gaussian_kernel(sigma)
    assert half[0] + 2 * sum(half[1:]) == pytest.approx(1, abs=1e-12)
    assert 2 * sum(k * k * v for k, v in enumerate(half)) == pytest.approx(sigma**2, rel=2e-3)  # cut at 4 sigma


def disk_oracle(radius: float, alias: float, taps: int) -> np.ndarray:
    """Mean over a disk of bilinear weights, by direct evaluation, then a Gaussian cut to `taps` taps."""
    reach = math.ceil(radius) + 3
    sub = (np.arange(-int(radius * 20) - 1, int(radius * 20) + 1) + 0.5) / 20
    y, x = np.meshgrid(sub, sub, indexing="ij")
    inside = (y**2 + x**2 <= radius**2).astype(float)
    offsets = np.arange(-reach, reach + 1)
    tent = np.maximum(0, 1 - np.abs(offsets[:, None] - sub[None]))
    kernel = tent @ inside @ tent.T
    line = np.exp(-0.5 * (np.arange(-(taps // 2), taps // 2 + 1) / alias) ** 2)
    kernel = ndimage.convolve(kernel, np.outer(line, line), mode="constant")
    return kernel / kernel.sum()


@pytest.mark.parametrize("severity", SEVERITIES)
def test_defocus_blur_is_a_disk(severity: int) -> None:
    radius, alias = ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5))[severity - 1]
    images = scenes(1, 1, 224, 224, seed=8)
    kernel = disk_oracle(radius, alias, 5)
    expected = ndimage.convolve(images[0, 0].double().numpy(), kernel, mode="mirror")
    agree(corrupt(images, "defocus_blur", severity, ["a"])[0, 0], expected, slack=0.2)  # the rim is sampled
    spot = torch.zeros(1, 1, 224, 224)
    spot[0, 0, 112, 112] = 1
    y, x = torch.nonzero(corrupt(spot, "defocus_blur", 1, ["a"])[0, 0], as_tuple=True)
    assert len(y) > 20 and ((y - 112) ** 2 + (x - 112) ** 2).max() <= (3 + math.sqrt(2)) ** 2


def test_defocus_blur_of_less_than_a_pixel() -> None:
    spot = torch.zeros(1, 1, 29, 29)
    spot[0, 0, 14, 14] = 1
    peaks = [corrupt(spot, "defocus_blur", s, ["a"])[0, 0, 14, 14].item() for s in SEVERITIES]
    assert 0.5 < peaks[0] < 0.8 and all(b < a for a, b in itertools.pairwise(peaks))


@pytest.mark.parametrize(
    ("severity", "last", "count"), [(1, 1.11, 12), (2, 1.15, 16), (3, 1.2, 11), (4, 1.24, 13), (5, 1.3, 11)]
)
def test_zoom_blur_is_a_mean_of_zooms(severity: int, last: float, count: int) -> None:
    images = scenes(1, 1, 90, 120, seed=6)
    x = images[0, 0].double().numpy()
    centre = (np.array(x.shape) - 1) / 2
    total = x.copy()
    for factor in np.linspace(1, last, count):
        total += ndimage.affine_transform(x, np.eye(2) / factor, centre * (1 - 1 / factor), order=1, mode="nearest")
    agree(corrupt(images, "zoom_blur", severity, ["a"])[0, 0], total / (count + 1))


@pytest.mark.parametrize("severity", SEVERITIES)
def test_motion_blur_is_a_one_sided_trail(severity: int) -> None:
    radius, sigma = ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15))[severity - 1]
    spot = torch.zeros(8, 1, 224, 224)
    spot[:, 0, 112, 112] = 1
    out = corrupt(spot, "motion_blur", severity, names(8))[:, 0].double()
    t = np.arange(2 * radius + 1)
    weight = np.exp(-0.5 * (t / sigma) ** 2)
    expected = (t * weight).sum() / weight.sum()
    angles = []
    for image in out:
        mass = image.sum().item()
        assert mass == pytest.approx(1, abs=0.12)  # weights are rounded to 1/255
        y, x = torch.nonzero(image, as_tuple=True)
        away = ((y - 112) ** 2 + (x - 112) ** 2).double().sqrt()
        assert away.max() <= 2 * radius + 1.5 and (x <= 113).all()
        dy, dx = (((at - 112) * image[y, x]).sum().item() / mass for at in (y, x))
        assert math.hypot(dy, dx) == pytest.approx(expected, rel=0.08)
        angles.append(math.degrees(math.atan2(dy, -dx)))
        across = (y - 112) * dx - (x - 112) * dy
        assert (across.abs() / math.hypot(dy, dx)).max() < 1.5  # thin
    assert max(map(abs, angles)) <= 46 and max(angles) - min(angles) > 20


def test_motion_blur_length_scales() -> None:
    spot = torch.zeros(1, 1, 28, 28)
    spot[0, 0, 14, 14] = 1
    y, x = torch.nonzero(corrupt(spot, "motion_blur", 5, ["a"])[0, 0], as_tuple=True)
    reach = ((y - 14) ** 2 + (x - 14) ** 2).max().item() ** 0.5
    assert 3 < reach <= 2 * 20 / 8 + 1.5


def test_parallel_swaps_are_the_sequential_ones() -> None:
    rng = np.random.default_rng(0)
    h, w, b, reach = 13, 17, 3, 2
    k = 2 * reach + 1
    dy, dx = rng.integers(-reach, reach + 1, (2, b, h * w))
    order = np.stack([rng.permutation(k * k) for _ in range(b)])
    got = swap_pixels(h, w, *(torch.from_numpy(v) for v in (dy, dx)), reach, torch.from_numpy(order))
    place = np.add.outer(np.arange(h) % k * k, np.arange(w) % k).ravel()  # of a pixel in its tile
    for sample in range(b):
        content = np.arange(h * w)
        turn = np.argsort(order[sample])[place]
        for at in np.argsort(turn):
            y, x = at // w + dy[sample, at], at % w + dx[sample, at]
            if 0 <= y < h and 0 <= x < w:
                content[[at, y * w + x]] = content[[y * w + x, at]]
        assert np.array_equal(got[sample].numpy(), content)


@pytest.mark.parametrize("square", [0.008, 0.3, 0.5, 0.7, 1.5, 3.1666, 5.5])
def test_steps_of_glass_blur(square: float) -> None:
    chances = np.array(step_chances(square))
    d = np.arange(len(chances)) - len(chances) // 2
    assert chances.sum() == pytest.approx(1) and (chances >= 0).all()
    assert np.allclose(chances, chances[::-1], atol=1e-12)
    assert (chances * d**2).sum() == pytest.approx(square)


@pytest.mark.parametrize("delta", [1, 2, 3, 4])
def test_steps_of_glass_blur_reach_as_far_as_published(delta: int) -> None:
    chances = step_chances((np.arange(-delta, delta) ** 2).mean())
    assert len(chances) // 2 == delta and chances[0] == pytest.approx(1 / (4 * delta), rel=1e-6)


def test_glass_blur_moves_as_far_as_the_scan_of_the_original() -> None:
    size, delta = 64, 3
    rng = np.random.default_rng(1)
    content = np.arange(size * size).reshape(size, size)
    for y in range(size - delta - 1, delta, -1):
        for x in range(size - delta - 1, delta, -1):
            other = y + rng.integers(-delta, delta), x + rng.integers(-delta, delta)
            content[y, x], content[other] = content[other], content[y, x]

    def spread(index: np.ndarray) -> float:
        dy, dx = index // size - np.arange(size)[:, None], index % size - np.arange(size)
        inner = (slice(8, -8), slice(8, -8))
        return float(np.sqrt((dy[inner] ** 2 + dx[inner] ** 2).mean()))

    chances, n = step_chances((2 * delta**2 + 1) / 6), size * size
    dy, dx = (torch.from_numpy(rng.choice(np.arange(-delta, delta + 1), (1, n), p=chances)) for _ in range(2))
    order = torch.from_numpy(rng.permutation((2 * delta + 1) ** 2)[None])
    ours = swap_pixels(size, size, dy, dx, delta, order)[0]
    assert sorted(ours.tolist()) == list(range(n))  # nothing is lost
    assert spread(ours.view(size, size).numpy()) == pytest.approx(spread(content), rel=0.15)


def test_glass_blur_moves_little_on_small_images() -> None:
    images = torch.rand(8, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    moved = (corrupt(images, "glass_blur", 1, names(8)) - images).abs() > 10 / 255  # the blur itself: about a level
    # mean square step 0.5 / 64 on each axis, one swap as proposer and one as partner, twice over: about 6 %
    assert 0.03 < moved.double().mean() < 0.1


def test_glass_blur_keeps_the_mean_and_stays_local() -> None:
    images = scenes(2, 3, 224, 224)
    out = corrupt(images, "glass_blur", 5, names(2))
    assert torch.allclose(out.mean((2, 3)), images.mean((2, 3)), atol=2 / 255)
    step = torch.zeros(1, 1, 224, 224)
    step[..., 112:] = 1
    out = corrupt(step, "glass_blur", 1, ["a"])[0, 0]
    assert (out[:, :96] == 0).all() and (out[:, 128:] == 1).all() and out[:, 110:114].std() > 0.2


# --- weather


def test_snow_on_black() -> None:
    keep = (0.8, 0.7, 0.7, 0.65, 0.55)
    for severity in SEVERITIES:
        out = corrupt(torch.zeros(4, 1, 96, 96), "snow", severity, names(4))
        assert torch.equal(out, out.flip(2, 3))  # the layer and its half turn
        background = 0.5 * (1 - keep[severity - 1]) * 255  # max(x, 1.5 grey + 0.5), weighted
        assert levels(out).min() == pytest.approx(background, abs=0.51)
        flakes = (levels(out) > background + 5).mean()
        assert 0.05 < flakes < 0.999


def test_frost_is_a_weighted_sum() -> None:
    weights = ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75))
    for severity, (keep, cover) in enumerate(weights, 1):
        black = corrupt(torch.zeros(6, 1, 64, 64), "frost", severity, names(6))
        dark = corrupt(torch.full((6, 1, 64, 64), 0.2), "frost", severity, names(6))
        free = dark < 1
        assert ((dark - black)[free] - 0.2 * keep).abs().max() < 1.1 / 255
        gens = [keyed_random.generator(0, "corruption", "frost", severity, sample) for sample in names(6)]
        texture = frost_texture(gens, 64, 64, torch.device("cpu")).unsqueeze(1) * (0.299 * 0.9 + 0.587 * 0.97 + 0.114)
        agree(black, texture.double().numpy() * cover)
        assert 0.3 < texture.mean() < 0.55 and 0.12 < texture.std() < 0.3 and texture.max() < 1.01


@pytest.mark.parametrize(("severity", "amount"), [(1, 1.5), (2, 2.0), (3, 2.5), (4, 2.5), (5, 3.0)])
def test_fog_fills_its_range(severity: int, amount: float) -> None:
    out = corrupt(torch.full((4, 1, 32, 32), 0.5), "fog", severity, names(4)).double()
    fade = 0.5 / (0.5 + amount)
    assert out.amin((1, 2, 3)).numpy() == pytest.approx(0.5 * fade, abs=1 / 255)
    assert out.amax((1, 2, 3)).numpy() == pytest.approx((0.5 + amount) * fade, abs=1 / 255)


def test_fog_gets_rougher_as_the_decay_falls() -> None:
    def roughness(severity: int) -> float:
        out = corrupt(torch.full((16, 1, 64, 64), 0.5), "fog", severity, names(16)).double()
        return ((out[..., 1:] - out[..., :-1]).std() / out.std()).item()

    rising = [roughness(severity) for severity in (2, 3, 4, 5)]  # decay 2, 1.7, 1.5, 1.4
    assert all(b > 1.05 * a for a, b in itertools.pairwise(rising)), rising
    for decay, severity in ((2, 2), (1.4, 5)):  # independent: one level of diamond-square adds noise of decay^-2k
        size = 64
        field = np.random.default_rng(0).normal(size=(16, 2, 2))
        amplitude = 1.0
        while field.shape[1] < size:
            amplitude /= decay**2
            field = ndimage.zoom(field, (1, 2, 2), order=1, mode="grid-wrap", grid_mode=True)
            field = field + amplitude * np.random.default_rng(field.shape[1]).normal(size=field.shape)
        expected = np.diff(field).std() / field.std()
        assert 0.4 < roughness(severity) / expected < 2.5


def test_plasma_draws_every_point_for_itself() -> None:
    heights = plasma([keyed_random.generator(0, k) for k in range(8)], 64, 1.4, torch.device("cpu")).double().numpy()
    around = sum(np.roll(heights, step, axis) for step in (-1, 1) for axis in (1, 2)) / 4
    rest = heights - around  # what the last level added to the mean of the four neighbours
    across, down = rest[:, ::2, 1::2].ravel(), rest[:, 1::2, ::2].ravel()
    assert across.std() == pytest.approx(down.std(), rel=0.05)
    assert abs(np.corrcoef(across, down)[0, 1]) < 0.06 and abs(np.corrcoef(across[1:], across[:-1])[0, 1]) < 0.06


@pytest.mark.parametrize("severity", SEVERITIES)
def test_brightness_raises_the_value_in_hsv(severity: int) -> None:
    images = colours()
    expected = per_pixel(images, lambda h, s, v: (h, s, min(1.0, v + severity / 10)))
    agree(corrupt(images, "brightness", severity, ["a"]), expected)
    one = images[:, :1]
    agree(corrupt(one, "brightness", severity, ["a"]), one.double().numpy() + severity / 10)


@pytest.mark.parametrize(("severity", "sigma"), [(1, 4), (2, 3), (3, 2)])
def test_spatter_of_water(severity: int, sigma: float) -> None:
    floor, strength = ((0.69, 0.6), (0.68, 0.6), (0.68, 0.5))[severity - 1]
    images = torch.full((12, 3, 224, 224), 0.2)
    added = corrupt(images, "spatter", severity, names(12)) - images
    assert added.min() >= 0 and added.max() <= strength * 238 / 255 + 1 / 255
    line = np.exp(-0.5 * (np.arange(-30, 31) / sigma) ** 2)
    std = 0.3 * (line / line.sum() @ (line / line.sum()))  # of smoothed white noise of deviation 0.3
    expected = stats.norm.sf((floor - 0.65) / std)
    wet = (added.amax(1) > 1.5 / 255).double().mean().item()
    assert 0.5 * expected < wet < 1.15 * expected


def test_spatter_of_mud() -> None:
    images = torch.ones(4, 3, 224, 224)
    share = []
    for severity in (4, 5):
        out = corrupt(images, "spatter", severity, names(4))
        touched = out.amin(1) < 1
        # at least four fifths mud wherever there is any
        assert (
            levels(out).transpose(0, 2, 3, 1)[touched.numpy()] <= 255 - 0.8 * (255 - np.array([63, 42, 20])) + 1
        ).all()
        share.append(touched.double().mean().item())
    # the original: binary noise, smoothed, kept above 0.8
    rng = np.random.default_rng(0)
    for got, (mean, std) in zip(share, ((0.65, 0.3), (0.67, 0.4)), strict=True):
        liquid = ndimage.gaussian_filter(rng.normal(mean, std, (448, 448)), 1)
        mud = ndimage.gaussian_filter((liquid > 0.65).astype(float), 1.5) > 0.8
        assert got == pytest.approx(mud.mean(), rel=0.2)


@pytest.mark.parametrize("sigma", [0.3, 1.0, 2.0, 5.0, 40.0])
def test_smooth_field_has_unit_variance_and_the_right_correlation(sigma: float) -> None:
    gens = [keyed_random.generator(0, k) for k in range(48)]
    field = smooth_field(gens, 96, 64, sigma, torch.device("cpu")).double()
    assert field.shape == (48, 96, 64)
    assert field.square().mean().item() == pytest.approx(1, rel=0.1 if sigma < 10 else 0.3)
    if sigma >= 1:  # smoothing white noise with sigma correlates it with sqrt(2) sigma
        lag = round(sigma)
        together = (field[:, lag:] * field[:, :-lag]).mean() / field.square().mean()
        assert together.item() == pytest.approx(math.exp(-(lag**2) / (4 * sigma**2)), abs=0.06)


# --- digital


@pytest.mark.parametrize(("severity", "factor"), [(1, 0.4), (2, 0.3), (3, 0.2), (4, 0.1), (5, 0.05)])
def test_contrast_is_about_the_mean_of_each_channel(severity: int, factor: float) -> None:
    images = scenes(2, 3, 40, 50)
    x = images.double().numpy()
    mean = x.mean((2, 3), keepdims=True)
    agree(corrupt(images, "contrast", severity, names(2)), (x - mean) * factor + mean)


def ramps(size: int) -> torch.Tensor:
    """Two samples: value y / (size - 1) and value x / (size - 1)."""
    line = torch.arange(size) / (size - 1)
    return torch.stack([line.view(-1, 1).expand(size, size), line.expand(size, size)]).unsqueeze(1)


@pytest.mark.parametrize(("severity", "alpha"), [(3, 0.05), (4, 0.07), (5, 0.12)])
@pytest.mark.parametrize("size", [112, 224])
def test_elastic_transform_displaces_as_far_as_published(severity: int, alpha: float, size: int) -> None:
    out = corrupt(ramps(size), "elastic_transform", severity, ["a", "a"])[:, 0].double().numpy() * (size - 1)
    y, x = np.mgrid[:size, :size].astype(float)
    inner = (slice(size // 8, -size // 8), slice(size // 8, -size // 8))
    design = np.stack([np.ones_like(y[inner]).ravel(), y[inner].ravel(), x[inner].ravel()], 1)
    smooth = ndimage.gaussian_filter(np.random.default_rng(0).uniform(-1, 1, (224, 224)), 2.44) * 244 * alpha
    for moved, start in zip(out, (y, x), strict=True):
        shift = (moved - start)[inner].ravel()
        fit = design @ np.linalg.lstsq(design, shift, rcond=None)[0]
        # three points, moved by at most 4.88 px at 224, give the affine part: at most 3.4 times that at the corners
        assert np.abs(fit).max() <= 3.4 * 4.88 * size / 224
        rounding = (size - 1) / 255 / math.sqrt(12)
        local = math.sqrt((shift - fit).var() - rounding**2)
        assert local == pytest.approx(smooth.std() * size / 224, rel=0.12)


@pytest.mark.parametrize(("severity", "shift", "local"), [(1, 24.4, 0.5), (2, 48.8, 4.1), (3, 4.88, 0.8)])
def test_elastic_transform_moves_the_centre_as_published(severity: int, shift: float, local: float) -> None:
    images = ramps(112).repeat_interleave(64, 0)
    moved = corrupt(images, "elastic_transform", severity, names(64) * 2)[:, 0, 56, 56].double() * 111 - 56
    # the centre moves by half the sum of two uniform steps in [-shift, shift]
    assert moved.square().mean().sqrt().item() == pytest.approx(math.hypot(shift / 6**0.5, local) / 2, rel=0.2)


def test_elastic_transform_at_severity_one_is_nearly_affine() -> None:
    out = corrupt(ramps(224), "elastic_transform", 1, ["c", "c"])[:, 0].double().numpy() * 223
    y, x = np.mgrid[:224, :224].astype(float)
    inner = (slice(80, -80), slice(80, -80))
    design = np.stack([np.ones_like(y[inner]).ravel(), y[inner].ravel(), x[inner].ravel()], 1)
    for moved, start in zip(out, (y, x), strict=True):
        shift = (moved - start)[inner].ravel()
        rest = shift - design @ np.linalg.lstsq(design, shift, rcond=None)[0]
        assert 1 < np.abs(shift).max() < 3.4 * 24.4 and rest.std() < 0.6


@pytest.mark.parametrize(
    "name", ["elastic_transform", "glass_blur", "motion_blur", "zoom_blur", "defocus_blur", "pixelate"]
)
def test_a_constant_image_is_left_alone(name: str) -> None:
    image = torch.full((1, 3, 50, 37), 0.4)
    assert torch.equal(corrupt(image, name, 5, ["a"]), image)


@pytest.mark.parametrize(("severity", "ratio"), [(1, 0.6), (2, 0.5), (3, 0.4), (4, 0.3), (5, 0.25)])
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (3, 61, 99), (3, 224, 224)])
def test_pixelate_is_pillows(severity: int, ratio: float, shape: tuple[int, int, int]) -> None:
    images = scenes(1, *shape)
    h, w = shape[1:]
    small = to_pil(images[0]).resize((int(w * ratio), int(h * ratio)), Image.Resampling.BOX)
    expected = from_pil(small.resize((w, h), Image.Resampling.BOX))
    assert np.array_equal(levels(corrupt(images, "pixelate", severity, ["a"])[0]), expected * 255)


@pytest.mark.parametrize(("severity", "quality"), [(1, 25), (2, 18), (3, 15), (4, 10), (5, 7)])
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (3, 61, 99)])
def test_jpeg_is_pillows(severity: int, quality: int, shape: tuple[int, int, int]) -> None:
    images = scenes(1, *shape)
    file = io.BytesIO()
    to_pil(images[0]).save(file, "JPEG", quality=quality)
    expected = from_pil(Image.open(file))
    assert np.array_equal(levels(corrupt(images, "jpeg_compression", severity, ["a"])[0]), np.round(expected * 255))


@pytest.mark.parametrize(("severity", "quality"), [(1, 25), (2, 18), (3, 15), (4, 10), (5, 7)])
def test_jpeg_quantises_the_cosine_transform_as_the_standard_says(severity: int, quality: int) -> None:
    """With the first column of the luminance table of the JPEG standard (annex K), scaled for a quality below 50."""
    table = np.array([16, 12, 14, 14, 18, 24, 49, 72]) * (5000 // quality)
    steps = np.clip((table + 50) // 100, 1, 255)
    smooth = ndimage.gaussian_filter(np.random.default_rng(0).normal(size=(64, 64)), 2)
    images = torch.from_numpy(0.5 + 0.08 * smooth / smooth.std()).float().clamp(0.2, 0.8)[None, None]
    out = levels(corrupt(images, "jpeg_compression", severity, ["a"]))[0, 0] - 128
    blocks = out.reshape(8, 8, 8, 8).transpose(0, 2, 1, 3)
    units = fft.dctn(blocks, axes=(2, 3), norm="ortho")[..., :, 0] / steps
    assert np.abs(units - np.round(units)).max() < 2 / steps.min()  # rounding of pixels to whole levels
    assert np.abs(np.round(units)).max() >= 1


@pytest.mark.parametrize(("severity", "a", "b"), [(1, 0.3, 0), (2, 0.1, 0), (3, 2, 0), (4, 5, 0.1), (5, 20, 0.2)])
def test_saturate_changes_the_saturation_in_hsv(severity: int, a: float, b: float) -> None:
    images = colours()
    expected = per_pixel(images, lambda h, s, v: (h, min(1.0, max(0.0, s * a + b)), v))
    agree(corrupt(images, "saturate", severity, ["a"]), expected)
    assert torch.equal(corrupt(images[:, :1], "saturate", severity, ["a"]), images[:, :1])  # no colour to act on


# --- what is refused


@pytest.mark.parametrize("severity", [0, 6, -1, "3", True, 2.5, None])
def test_severity_out_of_range(severity: object) -> None:
    with pytest.raises(SpecError, match="severity") as error:
        corrupt(torch.zeros(1, 3, 32, 32), "fog", severity, ["a"])  # type: ignore[arg-type]
    assert repr(severity) in str(error.value) and "\n" not in str(error.value)


def test_a_corruption_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(METHODS, "_registered", {})

    @METHODS.register("dimmed")
    def dimmed(images: torch.Tensor, severity: int, gens: Generators) -> torch.Tensor:
        return images * 2 if severity == 5 else images[:, :, ::severity] - normal(gens, (1, 1, 1), images.device)

    images = torch.full((2, 3, 32, 32), 0.4)
    assert corrupt(images, "dimmed", 5, ["a", "b"]).unique().tolist() == pytest.approx([204 / 255])
    first = corrupt(images, "dimmed", 1, ["a", "b"])
    assert not torch.equal(first[0], first[1])  # draws of its own for each sample
    assert torch.equal(corrupt(images[1:], "dimmed", 1, ["b"]), first[1:])
    with pytest.raises(SpecError, match=r"dimmed: expected images of shape \(2, 3, 32, 32\), got \(2, 3, 16, 32\)"):
        corrupt(images, "dimmed", 2, ["a", "b"])
    assert "dimmed" not in CORRUPTIONS + EXTRA_CORRUPTIONS  # mCE is a mean over the published ones


def test_unknown_name() -> None:
    with pytest.raises(SpecError, match=r"'fogg'.*Did you mean 'fog'.*jpeg_compression.*saturate"):
        corrupt(torch.zeros(1, 3, 32, 32), "fogg", 1, ["a"])


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.zeros(1, 3, 32, 32, dtype=torch.uint8), "uint8"),
        (torch.zeros(1, 3, 32, 32, dtype=torch.int64), "int64"),
        (np.zeros((1, 3, 32, 32), np.float32), "ndarray"),
        (torch.full((1, 3, 32, 32), 255.0), "255"),
        (torch.full((1, 3, 32, 32), -0.01), "-0.01"),
        (torch.full((1, 3, 32, 32), math.nan), "nan"),
        (torch.zeros(1, 3, 32, 32).index_fill(3, torch.tensor([4]), math.nan), "nan"),
        (torch.full((1, 3, 32, 32), math.inf), "inf"),
        (torch.zeros(3, 32, 32), r"\(3, 32, 32\)"),
        (torch.zeros(1, 2, 32, 32), r"\(1, 2, 32, 32\)"),
        (torch.zeros(1, 32, 32, 3), r"\(1, 32, 32, 3\)"),
        (torch.zeros(0, 3, 32, 32), r"\(0, 3, 32, 32\)"),
        (torch.zeros(1, 3, 27, 64), "27"),
    ],
)
def test_unusable_images(images: torch.Tensor, message: str) -> None:
    with pytest.raises(SpecError, match=message) as error:
        corrupt(images, "contrast", 1, ["a"])
    assert "\n" not in str(error.value) and "expected" in str(error.value)


@pytest.mark.parametrize("ids", [[], ["a", "b"], "a", [3], [None]])
def test_ids_that_do_not_fit(ids: list[str]) -> None:
    with pytest.raises(SpecError, match="ids"):
        corrupt(torch.zeros(1, 3, 32, 32), "contrast", 1, ids)


def test_other_floating_types_are_taken() -> None:
    images = scenes(1, 3, 32, 32)
    assert torch.equal(corrupt(images.double(), "fog", 2, ["a"]), corrupt(images, "fog", 2, ["a"]))
    assert corrupt(images.half(), "fog", 2, ["a"]).dtype == torch.float32
