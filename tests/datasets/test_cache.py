"""What is decoded once stays the same to the bit, within its bound, and is made again when it is not whole."""

import os
import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from robustkpca.datasets.cache import PixelCache
from robustkpca.datasets.images import ArraySamples
from robustkpca.datasets.sources import load_samples
from robustkpca.errors import DataError
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


def repaint(path, shade):
    """Another picture at the path, of the same size and times."""
    stat = path.stat()
    Image.fromarray(np.full((40, 50, 3), shade, np.uint8)).save(path)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)


@pytest.mark.parametrize("hashed", [1000, 1])  # of all pictures, and of the last one alone
def test_a_picture_of_the_same_size_and_time_is_another_entry(tmp_path, monkeypatch, hashed):
    monkeypatch.setattr("robustkpca.datasets.images.READ", hashed)
    (tmp_path / "set" / "c0").mkdir(parents=True)
    for name in "abc":
        Image.fromarray(np.full((40, 50, 3), 10, np.uint8)).save(tmp_path / "set" / "c0" / f"{name}.bmp")

    def read():
        samples = load_samples(f"folder:{tmp_path / 'set'}")
        return PixelCache(tmp_path / "cache", limit=BIG).reader(samples, RGB)(1).max() * 255

    assert read() == read() == 10
    repaint(tmp_path / "set" / "c0" / "b.bmp", 200)
    assert read() == 200


def test_cache_and_content_hash_never_disagree(tmp_path):
    """Pictures that are replaced after the run took its hash are refused, not decoded under it, nor cached."""
    (tmp_path / "set" / "c0").mkdir(parents=True)
    path = tmp_path / "set" / "c0" / "a.bmp"
    Image.fromarray(np.full((40, 50, 3), 10, np.uint8)).save(path)
    samples = load_samples(f"folder:{path.parents[1]}")
    before = samples.content_hash
    repaint(path, 200)
    reader = PixelCache(tmp_path / "cache", limit=BIG).reader(samples, RGB)
    with pytest.raises(DataError, match="replaced while it was in use"):
        reader(0)
    repaint(path, 10)
    assert samples.content_hash == before
    assert reader(0).max() * 255 == 10
    repaint(path, 200)
    assert reader(0).max() * 255 == 10  # as the hash says
    assert samples.content_hash != before
    assert PixelCache(tmp_path / "cache", limit=BIG).reader(samples, RGB)(0).max() * 255 == 200


def test_a_file_cut_short_in_use_is_filled_again(pictures, tmp_path):
    samples = load_samples(f"folder:{pictures}")
    true = [samples.image(i, RGB) for i in range(len(samples))]
    reader = PixelCache(tmp_path / "cache", limit=BIG).reader(samples, RGB)
    for length in (None, 0, 5000):  # what the file is cut to; a map would end the process here
        (file,) = (tmp_path / "cache").iterdir()
        size = file.stat().st_size
        if length is not None:
            os.truncate(file, length)
        assert all(torch.equal(reader(i), image) for i, image in enumerate(true))
        assert file.stat().st_size == size
    reader.plain = None  # nothing is decoded any more
    assert all(torch.equal(reader(i), image) for i, image in enumerate(true))


def test_leftovers_of_a_killed_process_count_and_go_first(pictures, tmp_path):
    samples = load_samples(f"folder:{pictures}")
    size = len(samples) * (3 * 28 * 28 + 8)
    (tmp_path / "cache").mkdir()
    leftover = tmp_path / "cache" / "0123.pixels.4711"
    leftover.write_bytes(bytes(size))
    os.utime(leftover, (1, 1))
    PixelCache(tmp_path / "cache", limit=1.5 * size).reader(samples, RGB)
    (file,) = (tmp_path / "cache").iterdir()
    assert file.suffix == ".pixels"


def test_a_full_disk_leaves_nothing(pictures, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    said = []
    samples = load_samples(f"folder:{pictures}")
    reader = PixelCache(tmp_path / "cache", limit=BIG, on_notice=said.append).reader(samples, RGB)
    assert torch.equal(reader(0), samples.image(0, RGB))
    assert "No space left on device; going on without" in said[0]
    assert not list((tmp_path / "cache").iterdir())
    monkeypatch.undo()
    reader = PixelCache(tmp_path / "cache", limit=BIG).reader(samples, RGB)
    monkeypatch.setattr(os, "pwrite", full)  # later
    assert torch.equal(reader(0), samples.image(0, RGB))


def test_a_planted_link_is_not_written_through(pictures, tmp_path):
    samples = load_samples(f"folder:{pictures}")
    (tmp_path / "victim").write_bytes(b"x" * 100)
    PixelCache(tmp_path / "cache", limit=BIG).reader(samples, RGB)
    (file,) = (tmp_path / "cache").iterdir()
    file.unlink()
    file.symlink_to(tmp_path / "victim")
    reader = PixelCache(tmp_path / "cache", limit=BIG).reader(samples, RGB)
    assert torch.equal(reader(0), samples.image(0, RGB))
    assert (tmp_path / "victim").read_bytes() == b"x" * 100
    file.unlink()
    assert torch.equal(reader(1), samples.image(1, RGB))  # into the file that is open
    other = PixelCache(tmp_path / "cache", limit=BIG).reader(samples, RGB)
    file.unlink()
    assert torch.equal(other(1), samples.image(1, RGB))  # gone before it was opened


def test_images_finer_than_eight_bits_are_not_rounded(tmp_path):
    class Fine(ArraySamples):
        def image(self, index, preprocessing):
            return super().image(index, preprocessing) * 0.999

    pixels = np.arange(256, dtype=np.uint8).reshape(1, 16, 16)
    for kind in (ArraySamples, Fine):
        samples = kind("own", ["a"], np.zeros(1, np.int64), ("x",), pixels)
        to = Preprocessing(img_size=16, mean=(0.5,), std=(0.5,), crop_pct=1.0)
        reader = PixelCache(tmp_path / kind.__name__, limit=BIG).reader(samples, to)
        for _ in range(2):
            assert torch.equal(reader(0), samples.image(0, to))
