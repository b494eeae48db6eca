"""What is decoded once stays the same to the bit, within its bound, and is made again when it is not whole."""

import os
import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from robustkpca.datasets.cache import PixelCache
from robustkpca.datasets.sources import load_samples
from robustkpca.evaluation.loop import evaluate
from robustkpca.models.settings import Preprocessing
from robustkpca.suites.suite import load_suite
from tests.helpers.oracles import tiny

RGB = Preprocessing(img_size=28, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), crop_pct=0.875)
GREY = Preprocessing(img_size=28, mean=(0.5,), std=(0.5,), crop_pct=0.875)
BIG = 2**30


@pytest.fixture
def pictures(tmp_path):
    draws = np.random.default_rng(0)
    for label in range(10):
        (tmp_path / "pictures" / f"c{label}").mkdir(parents=True)
        for i in range(2):
            pixels = draws.integers(0, 256, (40, 50, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "pictures" / f"c{label}" / f"{i}.jpg")
    return tmp_path / "pictures"


def test_a_cached_image_is_the_image_to_the_bit(pictures, tmp_path, monkeypatch):
    samples = load_samples(f"folder:{pictures}")
    for preprocessing in (RGB, GREY):
        true = [samples.image(i, preprocessing) for i in range(len(samples))]
        for _ in range(2):  # while it is filled, and when it is full
            reader = PixelCache(tmp_path / "cache", limit=BIG).reader(samples, preprocessing)
            reader = pickle.loads(pickle.dumps(reader))  # as a worker gets it
            assert all(torch.equal(reader(i), image) for i, image in enumerate(true))
    full = PixelCache(tmp_path / "cache", limit=BIG).reader(samples, GREY)
    monkeypatch.setattr(full, "plain", None)  # nothing is decoded any more
    assert all(torch.equal(full(i), image) for i, image in enumerate(true))


@pytest.mark.slow
def test_figures_do_not_depend_on_cache_or_workers(pictures, tmp_path):
    samples, suites = load_samples(f"folder:{pictures}"), [load_suite("pgd").with_steps(2)]
    rows = []
    for workers in (0, 1, 4):
        for cache in (None, PixelCache(tmp_path / "cache", limit=BIG)):
            out = tmp_path / f"run{len(rows)}"
            rows.append(evaluate([tiny()], samples, suites, out, batch_size=3, workers=workers, cache=cache).rows)
    for other in rows[1:]:
        pd.testing.assert_frame_equal(other, rows[0])
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_another_picture_is_another_entry(pictures, tmp_path):
    def read():
        return PixelCache(tmp_path / "cache", limit=BIG).reader(load_samples(f"folder:{pictures}"), RGB)(0)

    before = read()
    path = pictures / "c0" / "0.jpg"
    stat = path.stat()
    Image.fromarray(np.full((40, 50, 3), 7, np.uint8)).save(path)
    content = path.read_bytes()
    path.write_bytes(content.ljust(stat.st_size, b"\0")[: max(stat.st_size, len(content))])  # no shorter than it was
    after = read()
    assert not torch.equal(before, after)
    assert after.max() < 20 / 255


def test_a_torn_entry_is_decoded_again(pictures, tmp_path):
    samples = load_samples(f"folder:{pictures}")
    true = [samples.image(i, RGB) for i in range(len(samples))]

    def read():
        reader = PixelCache(tmp_path / "cache", limit=BIG).reader(samples, RGB)
        return [reader(i) for i in range(len(samples))]

    read()
    (file,) = (tmp_path / "cache").iterdir()
    with file.open("r+b") as open_file:
        open_file.seek(8 * len(samples) + 5 * 3 * 28 * 28 + 100)
        open_file.write(b"\x01\x02\x03\x04")
    assert all(torch.equal(a, b) for a, b in zip(read(), true, strict=True))
    file.write_bytes(file.read_bytes()[:-1000])
    assert all(torch.equal(a, b) for a, b in zip(read(), true, strict=True))


def test_the_bound_holds_and_the_oldest_goes_first(pictures, tmp_path):
    samples = load_samples(f"folder:{pictures}")
    size = len(samples) * (3 * 28 * 28 + 8)
    said = []

    def fill(side):
        cache = PixelCache(tmp_path / "cache", limit=2.5 * size, on_notice=said.append)
        return cache.reader(samples, RGB.model_copy(update={"img_size": side}))(0)

    fill(28)
    first = next((tmp_path / "cache").iterdir())
    os.utime(first, (1, 1))
    fill(27)
    fill(26)
    held = list((tmp_path / "cache").iterdir())
    assert first not in held
    assert len(held) == 2
    assert sum(f.stat().st_size for f in held) <= 2.5 * size
    assert not said
    assert fill(56).shape == (3, 56, 56)  # larger than all of it
    assert "more than the limit" in said[0]
    assert sorted((tmp_path / "cache").iterdir()) == sorted(held)


def test_a_folder_that_cannot_be_used_is_done_without(pictures, tmp_path):
    (tmp_path / "file").write_text("")
    said = []
    reader = PixelCache(tmp_path / "file", limit=BIG, on_notice=said.append).reader(
        load_samples(f"folder:{pictures}"), RGB
    )
    assert reader(0).shape == (3, 28, 28)
    assert "going on without" in said[0]
