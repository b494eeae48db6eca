import contextlib
import gzip
import os
import struct
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from robustkpca.datasets.files import FASHION_CLASSES
from robustkpca.datasets.images import ArraySamples, preprocess
from robustkpca.datasets.registry import DATASETS
from robustkpca.datasets.sources import load_samples
from robustkpca.errors import DataError, SpecError
from robustkpca.models.settings import Preprocessing
from tests.helpers.oracles import tiny_settings

RGB = Preprocessing(img_size=32, mean=(0.5,) * 3, std=(0.5,) * 3)


@pytest.fixture
def toyset(tmp_path):
    """Three class folders with 3, 2 and 4 pictures of different kinds."""
    draws = np.random.default_rng(0)
    for name, count in (("n01440764", 3), ("n01443537", 2), ("n02106662", 4)):
        (tmp_path / name).mkdir()
        for i in range(count):
            pixels = draws.integers(0, 256, (40, 50, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{i}.png")
    return tmp_path


def test_embedded_fashion_mnist():
    samples = load_samples("fashion-mnist")
    assert len(samples) == 1000
    assert (np.bincount(samples.labels) == 100).all()
    assert len(set(samples.ids)) == 1000
    assert samples.classes == FASHION_CLASSES
    image = samples.image(0, tiny_settings().preprocessing)
    assert image.shape == (1, 28, 28)
    assert image.dtype == torch.float32
    assert 0 <= image.min() < image.max() <= 1


def test_digits_are_split_without_overlap():
    test, train = load_samples("digits"), load_samples("digits", split="train")
    assert (len(train), len(test)) == (1347, 450)
    numbers = lambda s: {i.split("/")[1] for i in s.ids}  # noqa: E731
    assert not numbers(test) & numbers(train)
    assert test.pixels.max() == 255


def test_limit_spreads_over_classes_and_is_seeded():
    samples = load_samples("fashion-mnist")
    some = samples.limit(57, seed=3)
    assert set(np.bincount(some.labels)) == {5, 6}
    assert some.ids == samples.limit(57, seed=3).ids
    assert some.ids != samples.limit(57, seed=4).ids
    assert some.ids == sorted(some.ids)
    assert samples.limit(5000, seed=0) is samples
    assert samples.ids_hash != some.ids_hash
    with pytest.raises(DataError, match="at least 1"):
        samples.limit(0, seed=0)


def test_idx_files_packed_and_not(tmp_path):
    draws = np.random.default_rng(0)
    images, labels = draws.integers(0, 256, (5, 28, 28), dtype=np.uint8), np.array([3, 1, 4, 1, 5], dtype=np.uint8)
    files = {
        "t10k-images-idx3-ubyte": struct.pack(">BBBBiii", 0, 0, 8, 3, 5, 28, 28) + images.tobytes(),
        "t10k-labels-idx1-ubyte": struct.pack(">BBBBi", 0, 0, 8, 1, 5) + labels.tobytes(),
    }
    for name, raw in files.items():
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(raw))
    packed = load_samples(f"fashion-mnist:{tmp_path}")
    nested = tmp_path / "root" / "FashionMNIST" / "raw"
    nested.mkdir(parents=True)
    for name, raw in files.items():
        (nested / name).write_bytes(raw)
    plain = load_samples(f"fashion-mnist:{tmp_path / 'root'}")
    assert packed.content_hash == plain.content_hash
    np.testing.assert_array_equal(plain.pixels, images)
    np.testing.assert_array_equal(plain.labels, labels)
    (nested / "t10k-labels-idx1-ubyte").write_bytes(files["t10k-labels-idx1-ubyte"][:-1] + bytes([77]))
    with pytest.raises(DataError, match="expected labels from 0 to 9, got 1 to 77"):
        load_samples(f"fashion-mnist:{tmp_path / 'root'}")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "invalid literal"),
        (b"\x00\x00\x08", "begin as one"),
        (b"<html>not found</html>", "begin as one"),
        (struct.pack(">BBBBiii", 0, 0, 8, 3, 5, 28, 28) + bytes(900), "shape '.5, 28, 28.' is invalid"),
        (struct.pack(">BBBBiii", 0, 0, 8, 3, 1, 28, 28) + bytes(785), "shape '.1, 28, 28.' is invalid"),
        (struct.pack(">BBBBiii", 0, 0, 13, 3, 1, 2, 2) + bytes(16), "torch.uint8 instead of torch.float32"),
        (struct.pack(">BBBBi", 0, 0, 8, 1, 4) + bytes(4), "3 dimension instead of 1"),
    ],
)
def test_what_is_no_idx_file_is_one_clear_line(tmp_path, raw, message):
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(struct.pack(">BBBBi", 0, 0, 8, 1, 1) + b"\x03")
    for name, content in (("t10k-images-idx3-ubyte", raw), ("t10k-images-idx3-ubyte.gz", gzip.compress(raw))):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=f"t10k-images-idx3-ubyte.*idx file of Fashion-MNIST .*{message}") as error:
            load_samples(f"fashion-mnist:{tmp_path}")
        assert "\n" not in str(error.value)
        (tmp_path / name).unlink()
    (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(raw + bytes(99))[:30])
    with pytest.raises(DataError, match="idx file"):
        load_samples(f"fashion-mnist:{tmp_path}")


def test_a_folder_of_pictures(toyset):
    samples = load_samples(f"folder:{toyset}")
    assert samples.classes == ("n01440764", "n01443537", "n02106662")
    assert list(samples.labels) == [0, 0, 0, 1, 1, 2, 2, 2, 2]
    assert samples.ids[3] == "n01443537/0.png"
    assert samples.image(0, RGB).shape == (3, 32, 32)


def test_labels_go_by_name_not_by_folder_order(toyset):
    settings = tiny_settings(classes=4).model_copy(update={"classes": ("n02106662", "x", "n01440764", "n01443537")})
    assert list(load_samples(f"folder:{toyset}").labels_for(settings)) == [2, 2, 2, 3, 3, 0, 0, 0, 0]


def test_classes_the_model_does_not_have(toyset):
    settings = tiny_settings(classes=3)
    with pytest.raises(DataError, match=r"3 of its 3 classes are unknown"):
        load_samples(f"folder:{toyset}").labels_for(settings)
    nameless = settings.model_copy(update={"classes": ()})
    with pytest.raises(DataError, match="3 without names; say --classes FILE"):
        load_samples(f"folder:{toyset}").labels_for(nameless)


def test_stray_files_are_not_samples(toyset):
    before = load_samples(f"folder:{toyset}").ids
    (toyset / ".ipynb_checkpoints").mkdir()
    (toyset / ".ipynb_checkpoints" / "x.png").write_bytes(b"x")
    (toyset / "README").mkdir()
    (toyset / "n01440764" / "._0.png").write_bytes(b"x" * 4096)
    (toyset / "n01440764" / "Thumbs.db").write_bytes(b"x")
    assert load_samples(f"folder:{toyset}").ids == before


@pytest.mark.parametrize("spoil", [lambda raw: raw[: len(raw) // 2], lambda raw: b"", lambda raw: b"not a picture"])
def test_a_picture_that_cannot_be_decoded_names_itself(toyset, spoil):
    path = toyset / "n02106662" / "1.png"
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(DataError, match=r"1\.png: cannot be decoded"):
        load_samples(f"folder:{toyset}").image(6, RGB)


@pytest.mark.parametrize(
    ("spec", "message"),
    [("fashon-mnist", "Did you mean 'fashion-mnist'"), ("folder", "expected folder:DIR"),
     ("digits:x", "takes no folder"), ("folder:/does/not/exist", "not a folder")],
)  # fmt: skip
def test_data_that_does_not_exist(spec, message):
    with pytest.raises(DataError, match=message):
        load_samples(spec)


OWN = """
import numpy as np
from robustkpca.datasets.images import ArraySamples

def squares(split):
    "Grey squares."
    pixels = np.full((6, 8, 8), 7 if split == "test" else 9, dtype=np.uint8)
    return ArraySamples("squares", [str(i) for i in range(6)], np.arange(6) % 2, ("a", "b"), pixels)

def nothing(split):
    return split
"""


def test_data_by_import_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_data_of_a_test.py").write_text(OWN)
    samples = load_samples("own_data_of_a_test:squares", limit=2)
    assert (len(samples), samples.pixels.max()) == (2, 7)
    assert load_samples("own_data_of_a_test:squares", split="train").pixels.max() == 9
    with pytest.raises(SpecError, match="expected a SampleSet, got str from own_data_of_a_test:nothing"):
        load_samples("own_data_of_a_test:nothing")
    with pytest.raises(SpecError, match=r"unknown name 'squared'. Did you mean 'squares'"):
        load_samples("own_data_of_a_test:squared")


def test_data_that_others_register(tmp_path, monkeypatch):
    monkeypatch.setattr(DATASETS, "_registered", dict(DATASETS._registered))
    space = {}
    exec(OWN, space)
    DATASETS.register("squares")(space["squares"])
    DATASETS.register("nothing")(space["nothing"])
    DATASETS.register("number")(3)
    assert DATASETS["squares"].title == "Grey squares."
    assert len(load_samples("squares")) == 6
    with pytest.raises(DataError, match="it is embedded and takes no folder"):
        load_samples(f"squares:{tmp_path}")
    with pytest.raises(SpecError, match="data nothing: expected Samples, got 'test'"):
        load_samples("nothing")
    with pytest.raises(SpecError, match="data number: expected a Source or a function"):
        load_samples("number")


def test_folders_without_images(tmp_path):
    with pytest.raises(DataError, match="found none"):
        load_samples(f"folder:{tmp_path}")
    Image.new("RGB", (8, 8)).save(tmp_path / "flat.png")
    with pytest.raises(DataError, match="1 images lie in it directly"):
        load_samples(f"folder:{tmp_path}")


def test_training_data_is_not_embedded():
    with pytest.raises(DataError, match="fashion-mnist:DIR"):
        load_samples("fashion-mnist", split="train")


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK", "P", "RGBA", "1", "I;16"])
def test_every_mode_becomes_the_models_channels(mode):
    picture = Image.new(mode, (60, 40))
    assert preprocess(picture, RGB).shape == (3, 32, 32)
    grey = Preprocessing(img_size=32, mean=(0.5,), std=(0.5,))
    assert preprocess(picture, grey).shape == (1, 32, 32)


def test_short_side_resize_then_centre_crop():
    picture = Image.new("RGB", (400, 200))
    picture.paste((255, 0, 0), (0, 0, 90, 200))  # left of the crop: must not be seen
    picture.paste((0, 255, 0), (150, 0, 250, 200))
    plain = Preprocessing(img_size=100, mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=1.0)
    image = preprocess(picture, plain)
    assert image[0].max() == 0
    assert image[1, :, 40:60].min() == 1


def test_an_image_of_the_right_size_is_untouched():
    pixels = np.indices((32, 32)).sum(0) % 2 * 255
    picture = Image.fromarray(np.repeat(pixels[..., None], 3, 2).astype(np.uint8))
    image = preprocess(picture, RGB.model_copy(update={"crop_pct": 1.0}))
    np.testing.assert_array_equal(image[0].numpy() * 255, pixels)


def test_another_picture_of_the_same_size_is_other_data(tmp_path):
    (tmp_path / "c0").mkdir()
    for shade in (10, 200):
        Image.fromarray(np.full((8, 8, 3), shade, np.uint8)).save(tmp_path / "c0" / "a.bmp")
        samples = load_samples(f"folder:{tmp_path}")
        size = samples.path(0).stat().st_size
        if shade == 10:
            before, length = samples.content_hash, size
    assert size == length
    assert samples.content_hash != before
    assert samples.hash_covers == "ids, file sizes and content"


# -- pictures of all kinds: the same levels as with 8 bits, or a refusal that names the file

LEVELS = np.arange(256, dtype=np.uint16).reshape(16, 16)
PLAIN = Preprocessing(img_size=16, mean=(0.5,), std=(0.5,), crop_pct=1.0)


def one_picture(folder, name, write):
    """A set of one picture, which `write` puts at the path."""
    (folder / "c0").mkdir(exist_ok=True)
    write(folder / "c0" / name)
    return load_samples(f"folder:{folder}")


def grey16(path, **options):
    Image.fromarray(LEVELS * 257).save(path, **options)


def pgm16(path):
    path.write_bytes(b"P5 16 16 65535\n" + (LEVELS * 257).astype(">u2").tobytes())


def pgm10(path):
    path.write_bytes(b"P2 16 16 1020\n" + " ".join(map(str, (LEVELS * 4).ravel())).encode())


def ppm16(path):
    path.write_bytes(b"P6 16 16 65535\n" + np.repeat(LEVELS * 257, 3).astype(">u2").tobytes())


def big_endian_tiff(path):
    Image.frombytes("I;16B", (16, 16), (LEVELS * 257).astype(">u2").tobytes()).save(path)


@pytest.mark.parametrize(
    ("name", "write"),
    [("a.png", grey16), ("a.tif", grey16), ("a.ppm", pgm16), ("b.ppm", pgm10), ("c.ppm", ppm16),
     ("b.tiff", big_endian_tiff), ("png.jpg", lambda path: grey16(path, format="PNG"))],
)  # fmt: skip
@pytest.mark.parametrize("channels", [1, 3])
def test_sixteen_bits_are_the_picture_of_eight(tmp_path, name, write, channels):
    to = PLAIN if channels == 1 else Preprocessing(img_size=16, mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=1.0)
    samples = one_picture(tmp_path, name, write)
    image = samples.image(0, to)
    assert torch.equal(image, torch.from_numpy(LEVELS.astype(np.float32) / 255).expand(channels, 16, 16))
    assert np.array_equal(np.asarray(samples.picture(0, "L")), LEVELS)  # as training gets it


def tagged(path, tag, value):
    """A 16-bit TIFF with one tag changed in its bytes."""
    grey16(path)
    raw = path.read_bytes()
    at = raw.index(struct.pack("<HHI", tag, 3, 1)) + 8
    path.write_bytes(raw[:at] + struct.pack("<H", value) + raw[at + 2 :])


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("f.tif", lambda path: Image.fromarray((LEVELS / 255).astype(np.float32)).save(path)),
        ("i.tif", lambda path: Image.fromarray(LEVELS.astype(np.int32) * 257).save(path)),
        ("f.ppm", lambda path: path.write_bytes(b"Pf 16 16 -1.0\n" + (LEVELS / 255).astype("<f4").tobytes())),
        ("white-is-zero.tif", lambda path: tagged(path, 262, 0)),
        ("twelve-bits.tif", lambda path: tagged(path, 258, 12)),
    ],
)
def test_levels_without_an_agreed_white_are_refused(tmp_path, name, write):
    samples = one_picture(tmp_path, name, write)
    for read in (lambda: samples.image(0, PLAIN), lambda: samples.picture(0, "RGB")):
        with pytest.raises(DataError, match=rf"{name}: cannot be decoded \(levels of mode .* have no agreed white"):
            read()


@pytest.mark.parametrize("dtype", [np.uint16, np.float32, np.int64])
def test_pixels_in_memory_are_eight_bits_or_refused(dtype):
    pixels = np.zeros((2, 4, 4), dtype)
    with pytest.raises(DataError, match=r"data own: expected pixels as uint8 \(2, H, W\).*got .* \(2, 4, 4\)"):
        ArraySamples("own", ["a", "b"], np.zeros(2, np.int64), ("x",), pixels)
    for shape in ((3, 4, 4), (2, 4, 4, 4), (2, 4)):
        with pytest.raises(DataError, match="expected pixels as uint8"):
            ArraySamples("own", ["a", "b"], np.zeros(2, np.int64), ("x",), np.zeros(shape, np.uint8))


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 16 16\n%%EndComments\nshowpage\n"


@pytest.mark.parametrize(
    ("content", "format"), [(EPS, None), (b"%PDF-1.4\n", None), (None, "ICNS"), (None, "JPEG2000"), (None, "SGI")]
)
def test_formats_are_named_and_no_program_starts(tmp_path, monkeypatch, content, format):
    def write(path):
        path.write_bytes(content) if content else Image.new("RGB", (16, 16)).save(path, format=format)

    monkeypatch.setattr("subprocess.check_call", lambda *_, **__: pytest.fail("a program was started"))
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("a program was started"))
    samples = one_picture(tmp_path, "a.png", write)
    with pytest.raises(DataError, match=r"a\.png: cannot be decoded \(its content is none of BMP, .*WEBP\)"):
        samples.image(0, PLAIN)


def test_a_picture_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)  # 256 pixels are a bomb then
    samples = one_picture(tmp_path, "a.png", lambda path: Image.new("L", (16, 16)).save(path))
    for read in (lambda: samples.image(0, PLAIN), lambda: samples.picture(0, "RGB")):
        with pytest.raises(DataError, match=r"a\.png: cannot be decoded \(Image size \(256 pixels\) exceeds limit"):
            read()


def test_a_picture_that_may_not_be_read(toyset, monkeypatch):
    samples = load_samples(f"folder:{toyset}")
    locked, real = toyset / "n01443537" / "1.png", Path.open

    def refuse(self, *args, **kwargs):
        if self == locked:
            raise PermissionError(13, "Permission denied", str(self))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    reads = (lambda: samples.image(4, RGB), lambda: samples.picture(4, "RGB"), lambda: samples.content_hash)
    for read in reads:
        with pytest.raises(DataError, match=r"n01443537/1\.png: cannot be read \(Permission denied\)"):
            read()


def test_broken_pictures_of_every_format_are_one_line(tmp_path):
    """Bytes changed at random: what decoders raise then is a DataError, or a picture."""
    draws = np.random.default_rng(0)
    whole = Image.fromarray(draws.integers(0, 256, (16, 16, 3), dtype=np.uint8))
    samples = one_picture(tmp_path, "a.png", whole.save)
    for format in ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP"):
        whole.save(samples.path(0), format=format)
        raw = samples.path(0).read_bytes()
        for _ in range(40):
            spoilt = bytearray(raw)
            for at in draws.integers(0, min(len(raw), 200), 3):
                spoilt[at] = draws.integers(256)
            samples.path(0).write_bytes(spoilt)
            with contextlib.suppress(DataError), warnings.catch_warnings(action="ignore"):
                samples.picture(0, "RGB")


def test_a_picture_replaced_in_use_is_refused_and_hashed_anew(tmp_path):
    def write(shade):
        path = tmp_path / "c0" / "a.bmp"
        Image.fromarray(np.full((16, 16), shade, np.uint8)).save(path)
        os.utime(path, ns=(1, 1))  # same size, same time

    samples = one_picture(tmp_path, "a.bmp", lambda _: write(10))
    before = samples.content_hash
    assert samples.image(0, PLAIN).max() == 10 / 255
    write(200)
    with pytest.raises(DataError, match=r"a\.bmp: it was replaced while it was in use"):
        samples.image(0, PLAIN)
    assert samples.content_hash != before
    assert samples.image(0, PLAIN).max() == 200 / 255


def test_arrays_changed_in_place_are_other_data():
    samples = load_samples("digits").limit(3, seed=0)
    before = samples.content_hash, samples.ids_hash
    samples.pixels[0, 0, 0] += 1
    samples.labels = samples.labels[::-1].copy()
    assert samples.content_hash != before[0]
    assert samples.ids_hash != before[1]


def test_a_small_file_that_unpacks_to_a_large_one_is_refused(tmp_path):
    for name in ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"):
        with gzip.open(tmp_path / name, "wb") as file:
            for _ in range(65):
                file.write(bytes(2**20))
    with pytest.raises(
        DataError, match=r"expected an idx file of Fashion-MNIST .it unpacks to more than 67108864 bytes"
    ):
        load_samples(f"fashion-mnist:{tmp_path}")
