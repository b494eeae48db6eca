"""The generated corruptions against the usual code for one image, benchmarks/corruption_reference.py, at 224 pixels.

Frost is missing: the reference blends a photograph and ours a procedural texture; test_corruptions.py checks the
weights.
"""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from sklearn.datasets import load_sample_images

from robustkpca.corruptions.apply import corrupt
from robustkpca.corruptions.fields import draw_angle
from robustkpca.corruptions.registry import CORRUPTIONS
from robustkpca.runtime import keyed_random

pytest.importorskip("cv2")
pytest.importorskip("skimage")

SIZE = 224
SEVERITIES = (1, 2, 3, 4, 5)
BANDS = ((4, 12), (12, 36), (36, 80), (80, 112))  # periods a side; a few waves of large features decide what is below


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "corruption_reference.py"
    spec = importlib.util.spec_from_file_location("corruption_reference", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pixels() -> np.ndarray:
    """uint8 (8, 224, 224, 3): crops of the two photographs that come with scikit-learn."""
    rng = np.random.default_rng(0)
    crops = []
    for photograph in load_sample_images().images * 4:
        y, x = (rng.integers(0, length - SIZE) for length in photograph.shape[:2])
        crops.append(photograph[y : y + SIZE, x : x + SIZE])
    return np.stack(crops)


def sample(k: int) -> str:
    return f"crop/{k}"


def ours(pixels: np.ndarray, name: str, severity: int) -> np.ndarray:
    """(B, 224, 224, 3) float64, in levels."""
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255
    out = corrupt(images, name, severity, [sample(k) for k in range(len(pixels))])
    return np.round(out.permute(0, 2, 3, 1).double().numpy() * 255)


def theirs(reference: ModuleType, pixels: np.ndarray, name: str, severity: int) -> np.ndarray:
    rng = np.random.default_rng(severity)
    return np.stack([reference.CORRUPTIONS[name](image, severity, rng) for image in pixels]).astype(np.float64)


def test_the_reference_has_all_of_them(reference: ModuleType, pixels: np.ndarray) -> None:
    assert tuple(reference.CORRUPTIONS) == CORRUPTIONS
    frosted = reference.corrupt(pixels[0], "frost", 3, np.random.default_rng(0))
    assert frosted.dtype == np.uint8 and frosted.shape == (SIZE, SIZE, 3)


@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize(
    ("name", "largest"), [("brightness", 0.51), ("contrast", 0.51), ("pixelate", 0), ("jpeg_compression", 0)]
)
def test_equal_up_to_rounding(
    reference: ModuleType, pixels: np.ndarray, name: str, largest: float, severity: int
) -> None:
    pixels = pixels[:2]
    difference = np.abs(ours(pixels, name, severity) - theirs(reference, pixels, name, severity))
    assert difference.max() <= largest


@pytest.mark.parametrize("severity", SEVERITIES)
def test_defocus_blur_level_by_level(reference: ModuleType, pixels: np.ndarray, severity: int) -> None:
    """The reference's disk is one of whole pixels, so the smallest differ most."""
    pixels = pixels[:2]
    weights = reference.disk_kernel(*((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5))[severity - 1]).sum()
    difference = np.abs(
        ours(pixels, "defocus_blur", severity) - theirs(reference, pixels, "defocus_blur", severity) / weights
    )
    assert difference.mean() < 0.6 and np.percentile(difference, 99) < (4 if severity == 1 else 2)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_zoom_blur_level_by_level(reference: ModuleType, pixels: np.ndarray, severity: int) -> None:
    """The reference crops whole pixels, so its zooms are up to a pixel off centre."""
    pixels = pixels[:2]
    got, expected = ours(pixels, "zoom_blur", severity), theirs(reference, pixels, "zoom_blur", severity)
    difference = np.abs(got - expected).mean()
    assert difference < 2.5 and difference < np.abs(pixels - expected).mean() / 4


@pytest.mark.parametrize("severity", SEVERITIES)
def test_motion_blur_at_the_same_angle(reference: ModuleType, pixels: np.ndarray, severity: int) -> None:
    """The reference rounds each point of the trail to a pixel."""
    pixels = pixels[:4]
    trail = ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15))[severity - 1]
    gens = [keyed_random.generator(0, "corruption", "motion_blur", severity, sample(k)) for k in range(len(pixels))]
    angles = [math.degrees(draw_angle(gen, -45, 45)) for gen in gens]
    expected = np.stack([reference.motion_trail(x, *trail, angle) for x, angle in zip(pixels, angles, strict=True)])
    difference = np.abs(ours(pixels, "motion_blur", severity) - expected)
    assert difference.mean() < 2 < np.abs(pixels - expected).mean() / 4


def measures(out: np.ndarray, pixels: np.ndarray) -> np.ndarray:
    """Root mean square of the change: over all, where it was dark, where it was bright, in each band of frequencies."""
    change = out - pixels
    power = np.abs(np.fft.fft2(change, axes=(1, 2))) ** 2
    periods = np.hypot(*np.meshgrid(*2 * [np.fft.fftfreq(SIZE) * SIZE]))
    squares = [change**2, change[pixels < 64] ** 2, change[pixels > 160] ** 2]
    squares += [power[:, (periods >= low) & (periods < high)] for low, high in BANDS]
    return np.sqrt([part.mean() for part in squares])


@pytest.mark.parametrize(
    ("name", "severities", "crops", "level", "tolerance"),
    [  # of the mean change in levels, and of the measures, relative
        ("gaussian_noise", SEVERITIES, 4, 0.5, 0.04),
        ("shot_noise", SEVERITIES, 4, 0.5, 0.04),
        ("impulse_noise", SEVERITIES, 4, 0.5, 0.04),
        ("snow", SEVERITIES, 8, 5, 0.25),  # ours has a softer grain: the trail is interpolated, and of float values
        ("fog", SEVERITIES, 8, 15, 0.35),  # a few large features decide what is over bright and over dark places
        ("elastic_transform", (2,), 16, 8, 0.25),  # up to 49 px: what comes into the picture decides
        ("elastic_transform", (3, 4, 5), 16, 2, 0.2),  # ours is sampled once, so it is sharper
        ("glass_blur", (2, 4), 1, 1, 0.1),  # seconds an image
    ],
)
def test_changes_as_much_at_each_frequency(
    reference: ModuleType,
    pixels: np.ndarray,
    name: str,
    severities: tuple[int, ...],
    crops: int,
    level: float,
    tolerance: float,
) -> None:
    pixels = pixels[np.arange(crops) % len(pixels)]
    for severity in severities:
        got, expected = ours(pixels, name, severity), theirs(reference, pixels, name, severity)
        assert abs(got.mean() - expected.mean()) < level, severity
        assert measures(got, pixels) == pytest.approx(measures(expected, pixels), rel=tolerance), severity
