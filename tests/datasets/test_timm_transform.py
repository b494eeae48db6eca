"""Pictures are preprocessed as timm does, whatever its configuration says."""

from functools import cache

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_data_config

from robustkpca.datasets.cache import PixelCache
from robustkpca.datasets.images import preprocess
from robustkpca.datasets.sources import load_samples
from robustkpca.errors import SpecError
from robustkpca.models import checkpoints
from robustkpca.models.checkpoints import load_classifier
from robustkpca.models.settings import Preprocessing


def picture(width, height, mode="RGB"):
    draws = np.random.default_rng(width)
    shape = (height, width, 3) if mode != "L" else (height, width)
    return Image.fromarray(draws.integers(0, 256, shape, np.uint8)).resize((width, height)).convert(mode)


@cache
def configurations():
    """(model, configuration) for each way of preprocessing among timm's classifiers of square images."""
    known = {}
    for name in sorted({*timm.list_models(), *timm.list_models(pretrained=True)}):
        own = timm.get_pretrained_cfg(name)
        if own is None or not own.num_classes:
            continue
        config = resolve_data_config(pretrained_cfg=own.to_dict())
        border = config["mean"] if config["crop_mode"] == "border" else None
        known[config["input_size"], config["crop_pct"], config["crop_mode"], config["interpolation"], border] = config
    return list(known.values())


def ours(config):
    height, width = config["input_size"][-2:]
    assert height == width
    taken = ("mean", "std", "crop_pct", "interpolation", "crop_mode")
    return Preprocessing(img_size=height, **{name: config[name] for name in taken})


def assert_equal(config, image):
    to = ours(config)
    mean, std = (torch.tensor(v).reshape(-1, 1, 1) for v in (to.mean, to.std))
    assert torch.equal((preprocess(image, to) - mean) / std, create_transform(**config)(image.convert("RGB"))), config


def test_every_configuration_of_timm_to_the_bit():
    image = picture(61, 37)
    assert {c["crop_mode"] for c in configurations()} >= {"center", "squash"}
    assert len(configurations()) > 80
    for config in configurations():
        assert_equal(config, image)


@pytest.mark.parametrize("mode", ["center", "squash", "border"])
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "lanczos", "box", "hamming"])
def test_odd_pictures_in_every_mode(mode, interpolation):
    shapes = [(600, 300), (31, 95), (64, 64), (63, 65), (7, 5), (1, 40)]
    for size, crop_pct in ((64, 1.0), (63, 0.9), (50, 1.15), (65, 0.875)):
        config = {"input_size": (3, size, size), "crop_pct": crop_pct, "crop_mode": mode, "mean": (0.5, 0.4, 0.31),
                  "interpolation": interpolation, "std": (0.2, 0.3, 0.25)}  # fmt: skip
        for width, height in shapes:
            assert_equal(config, picture(width, height))
    assert_equal(config, picture(40, 60, "L"))


def test_grey_pictures_with_a_border():
    to = Preprocessing(img_size=20, mean=(0.3,), std=(0.2,), crop_pct=1.0, crop_mode="border")
    image = preprocess(picture(40, 20, "L"), to)
    assert image.shape == (1, 20, 20)
    assert torch.equal(image[0, :5], torch.full((5, 20), round(0.3 * 255) / 255))
    assert torch.equal(image[0, -5:], image[0, :5])


def test_the_crop_mode_of_a_timm_model_is_taken_and_shown(tmp_path):
    network = timm.create_model("test_vit", num_classes=5)
    torch.save(network.state_dict(), tmp_path / "m.pth")
    assert load_classifier("timm:test_vit", tmp_path / "m.pth").settings.preprocessing.crop_mode == "center"
    network = timm.create_model("maxvit_tiny_tf_384.in1k", num_classes=5)
    torch.save(network.state_dict(), tmp_path / "m.pth")
    squash = load_classifier("timm:maxvit_tiny_tf_384.in1k", tmp_path / "m.pth").settings.preprocessing
    assert (squash.crop_mode, squash.crop_text) == ("squash", "squash, crop 1")


def test_settings_with_the_usual_crop_are_written_as_before():
    plain = Preprocessing(img_size=8, mean=(0.5,), std=(0.5,))
    assert plain.model_dump(mode="json") == {
        "img_size": 8, "mean": [0.5], "std": [0.5], "crop_pct": 0.875, "interpolation": "bicubic",
    }  # fmt: skip
    squash = plain.model_copy(update={"crop_mode": "squash"})
    assert squash.model_dump()["crop_mode"] == "squash"
    assert Preprocessing.model_validate(squash.model_dump(mode="json")) == squash
    with pytest.raises(SpecError, match="interpolation"):
        Preprocessing.parse({**plain.model_dump(), "interpolation": "random"}, "settings")


def test_the_pixel_cache_tells_crop_modes_and_borders_apart(tmp_path):
    (tmp_path / "pictures" / "c0").mkdir(parents=True)
    picture(50, 30).save(tmp_path / "pictures" / "c0" / "a.png")
    samples = load_samples(f"folder:{tmp_path / 'pictures'}")
    cache = PixelCache(tmp_path / "cache", limit=1e9)
    for mode in ("center", "squash", "border"):
        for grey in (0.2, 0.6):
            to = Preprocessing(img_size=24, mean=(grey,) * 3, std=(0.5,) * 3, crop_pct=1.0, crop_mode=mode)
            assert torch.equal(cache.reader(samples, to)(0), samples.image(0, to))
            assert torch.equal(cache.reader(samples, to)(0), samples.image(0, to))
    assert len(list((tmp_path / "cache").iterdir())) == 4


def test_released_corruptions_are_only_cropped():
    to = Preprocessing(img_size=24, mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=1.0, crop_mode="squash")
    image = picture(40, 30)
    cropped = np.asarray(image.crop((8, 3, 32, 27))).transpose(2, 0, 1)
    for mode in ("center", "squash", "border"):
        alone = preprocess(image, to.model_copy(update={"crop_mode": mode}), resized=False)
        np.testing.assert_array_equal((alone * 255).round().numpy(), cropped)


def test_images_that_are_not_square_are_refused_in_one_line(tmp_path, monkeypatch):
    network = timm.create_model("test_vit", num_classes=5)
    network.pretrained_cfg["input_size"] = (3, 160, 120)
    torch.save(network.state_dict(), tmp_path / "m.pth")
    monkeypatch.setattr(checkpoints, "_create_timm", lambda *_, **__: network)
    with pytest.raises(SpecError, match="expected a square input, timm's is 160x120"):
        load_classifier("timm:test_vit", tmp_path / "m.pth")
