import csv
import io

import numpy as np
import pytest

from robustkpca.results import imagenet_c, imagenet_o

# ResNet-50's published top-1 accuracy (%) on each corruption and its CE
# (github.com/bethgelab/game-of-noise, Results/clean_results.txt).
RESNET50 = """gaussian_noise,29.29,79.77
shot_noise,27.03,81.58
impulse_noise,23.81,82.58
defocus_blur,38.75,74.71
glass_blur,26.79,88.61
motion_blur,38.67,78.03
zoom_blur,36.24,79.86
snow,32.53,77.83
frost,38.14,74.84
fog,45.83,66.11
brightness,68.02,56.64
contrast,39.06,71.43
elastic_transform,45.25,84.75
pixelate,44.79,76.92
jpeg_compression,53.41,76.82"""


def resnet50():
    return {name: 100 - float(accuracy) for name, accuracy, _ in csv.reader(io.StringIO(RESNET50))}


def test_published_resnet50():
    assert imagenet_c.mean_corruption_error(resnet50()) == pytest.approx(76.698, abs=5e-4)
    for name, accuracy, ce in csv.reader(io.StringIO(RESNET50)):
        assert imagenet_c.corruption_error(name, 100 - float(accuracy)) == pytest.approx(float(ce), abs=0.011)
    assert np.mean(list(imagenet_c.ALEXNET.values())) == pytest.approx(78.8993, abs=1e-3)


def test_mce_needs_exactly_the_fifteen():
    errors = resnet50()
    assert imagenet_c.mean_corruption_error({**errors, "speckle_noise": 99.0}) == pytest.approx(76.698, abs=5e-4)
    assert imagenet_c.mean_corruption_error({**errors, "fog": None}) is None
    del errors["fog"]
    assert imagenet_c.mean_corruption_error(errors) is None
    assert imagenet_c.corruption_error("speckle_noise", 50.0) is None


def test_detection_by_hand():
    found = imagenet_o.detection([0.1, 0.2, 0.3, 0.4], [0.35, 0.5])
    # ranked: 0.5 out, 0.4 in, 0.35 out, ...: precision 1 at recall 1/2, 2/3 at recall 1
    assert found.aupr == pytest.approx(0.5 * 1 + 0.5 * 2 / 3)
    assert found.auroc == pytest.approx(7 / 8)
    assert found.fpr95 == pytest.approx(1 / 4)
    assert (found.n_in, found.n_out) == (4, 2)
    swapped = imagenet_o.detection([0.35, 0.5], [0.1, 0.2, 0.3, 0.4])
    assert swapped.auroc == pytest.approx(1 / 8)


def test_the_false_positive_rate_is_that_of_95_percent_found():
    """100 outside at 1, 2, ..., 100, and one inside half a step below each.

    Detecting 95 of them takes all inside above 6, which are 94.
    """
    outside = np.arange(1, 101)
    assert imagenet_o.detection(outside - 0.5, outside).fpr95 == 0.94


def test_aupr_depends_on_the_ratio_and_auroc_does_not():
    draws = np.random.default_rng(0)
    inside, outside = draws.normal(0, 1, 20000), draws.normal(1, 1, 20000)
    even, few = imagenet_o.detection(inside, outside), imagenet_o.detection(inside, outside[:4000])
    assert even.aupr - few.aupr > 0.2
    assert even.auroc == pytest.approx(few.auroc, abs=0.01)


def test_scores_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="finite"):
        imagenet_o.detection([0.1, float("nan")], [0.2])
    with pytest.raises(ValueError, match="0 out"):
        imagenet_o.detection([0.1], [])
