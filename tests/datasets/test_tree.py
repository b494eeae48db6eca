"""Folders as they are found: names of splits, what may not be read, links, and names that are no plain text."""

import os
import socket
import unicodedata

import numpy as np
import pytest
from PIL import Image

from robustkpca.datasets.sources import load_samples
from robustkpca.errors import DataError
from robustkpca.models.settings import Preprocessing
from tests.helpers.oracles import tiny_settings

GREY = Preprocessing(img_size=8, mean=(0.5,), std=(0.5,), crop_pct=1.0)


def draw(root, *names):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8), 7, np.uint8)).save(path, format="PNG")
    return f"folder:{root}"


def classes(spec, split):
    return load_samples(spec, split=split).classes


# -- splits


@pytest.mark.parametrize(
    ("train", "test"),
    [("train", "val"), ("Training", "Testing"), ("train", "valid"), ("TRAIN", "Test"), ("train2017", "val2017"),
     ("training_set", "test-set"), ("train", "Validation"), ("Train Images", "evaluation")],
)  # fmt: skip
def test_usual_names_of_splits(tmp_path, train, test):
    spec = draw(tmp_path, f"{train}/cat/0.png", f"{train}/dog/0.png", f"{test}/cat/1.png", f"{test}/dog/1.png")
    assert load_samples(spec, split="train").ids == ["cat/0.png", "dog/0.png"]
    assert load_samples(spec, split="test").ids == ["cat/1.png", "dog/1.png"]


def test_a_split_that_is_not_there_is_no_class(tmp_path):
    spec = draw(tmp_path, "Testing/cat/1.png", "val/dog/1.png")
    with pytest.raises(DataError, match=r"expected a folder for train \(train, training\), found Testing/, val/"):
        load_samples(spec, split="train")
    spec = draw(tmp_path / "other", "training/cat/1.png")
    with pytest.raises(DataError, match=r"expected a folder for test \(val, valid, .*\), found training/"):
        load_samples(spec)


def test_val_goes_before_test_which_is_listed(tmp_path):
    samples = load_samples(draw(tmp_path, "test/cat/1.png", "val/cat/2.png", "train/cat/3.png"))
    assert samples.ids == ["cat/2.png"]
    assert samples.ignored == ["test/ (another split than val/)"]


def test_two_folders_for_one_split(tmp_path):
    spec = draw(tmp_path, "train/cat/0.png", "Training/cat/0.png", "val/cat/1.png")
    with pytest.raises(DataError, match="expected one split for train, found Training/, train/; give folder:"):
        load_samples(spec, split="train")
    assert len(load_samples(spec)) == 1


def test_classes_that_are_called_like_splits(tmp_path):
    spec = draw(tmp_path, "bus/0.png", "train/0.png", "test/0.png")
    assert classes(spec, "train") == classes(spec, "test") == ("bus", "test", "train")
    draw(tmp_path, "train/steam/0.png")  # is it the split now, or still a class?
    for split in ("train", "test"):
        with pytest.raises(DataError, match=rf"found both: train/ .* beside bus/; .* into a folder named {split}"):
            load_samples(spec, split=split)
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "train").mkdir()
    for name in ("bus", "train", "test"):
        (tmp_path / name).rename(tmp_path / "all" / "train" / name)  # as the message says
    assert classes(f"folder:{tmp_path / 'all'}", "train") == ("bus", "test", "train")


def test_what_lies_beside_splits_without_pictures(tmp_path):
    spec = draw(tmp_path, "train/cat/0.png", "val/cat/0.png")
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations" / "a.json").write_text("{}")
    draw(tmp_path / "train", ".thumbnails/0.png")
    assert classes(spec, "train") == classes(spec, "test") == ("cat",)


def test_splits_without_classes_are_no_classes(tmp_path):
    spec = draw(tmp_path, "Training/0.png", "Testing/0.png", "Testing/1.png")
    with pytest.raises(DataError, match=r"Testing: expected one folder a class .* 2 images lie in it directly"):
        load_samples(spec)


@pytest.mark.parametrize(
    "names", [("cat/train/0.png", "cat/test/1.png"), ("archive/Training/a/0.png", "archive/val/a/1.png")]
)
def test_splits_inside_classes_are_refused(tmp_path, names):
    with pytest.raises(DataError, match="expected splits above classes, as in train/cat/, found them inside: "):
        load_samples(draw(tmp_path, "dog/0.png", *names), split="train")


# -- what cannot be read, and what is no file


@pytest.mark.parametrize("locked", ["", "cat", "cat/deep", "dog"])
def test_a_folder_that_may_not_be_read_is_an_error(tmp_path, monkeypatch, locked):
    spec = draw(tmp_path / "set", "cat/0.png", "cat/deep/1.png", "dog/0.png")
    locked, real, listed = tmp_path / "set" / locked, os.scandir, os.listdir

    def refusing(function):
        def call(path="."):
            if os.fspath(path) == str(locked):
                raise PermissionError(13, "Permission denied", str(path))
            return function(path)

        return call

    monkeypatch.setattr(os, "scandir", refusing(real))
    monkeypatch.setattr(os, "listdir", refusing(listed))  # of Path.iterdir
    with pytest.raises(DataError, match=f"{locked}: Permission denied"):
        load_samples(spec)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_folders_and_pictures_without_permission(tmp_path):
    spec = draw(tmp_path / "set", "cat/0.png", "cat/deep/1.png")
    (tmp_path / "set" / "cat" / "0.png").chmod(0)
    with pytest.raises(DataError, match=r"0\.png: cannot be read \(Permission denied\)"):
        _ = load_samples(spec).content_hash
    for folder in (tmp_path / "set" / "cat" / "deep", tmp_path / "set"):
        folder.chmod(0)
        with pytest.raises(DataError, match=f"{folder}.*Permission denied"):
            load_samples(spec)
        folder.chmod(0o700)


def test_links_and_what_is_no_file_are_counted_and_listed(tmp_path, monkeypatch):
    spec = draw(tmp_path / "set", "cat/0.png", "cat/1.png", "dog/0.png")
    draw(tmp_path, "elsewhere/2.png", "bird/0.png")
    cat = tmp_path / "set" / "cat"
    (cat / "gone.png").symlink_to(tmp_path / "nowhere.png")
    (cat / "loop.png").symlink_to(cat / "loop.png")
    (cat / "more").symlink_to(tmp_path / "elsewhere")
    (cat / "round").symlink_to(cat)
    (cat / "good.png").symlink_to(tmp_path / "elsewhere" / "2.png")
    (tmp_path / "set" / "bird").symlink_to(tmp_path / "bird")  # a class folder may lie elsewhere
    (tmp_path / "set" / "lost").symlink_to(tmp_path / "nowhere")
    os.mkfifo(cat / "pipe.png")  # opening it would wait for ever
    with socket.socket(socket.AF_UNIX) as made:
        monkeypatch.chdir(cat)  # names of sockets are short
        made.bind("s.png")
    samples = load_samples(spec)
    assert samples.ids == ["bird/0.png", "cat/0.png", "cat/1.png", "cat/good.png", "dog/0.png"]
    assert sorted(samples.ignored) == [
        "cat/gone.png (a link to nothing)",
        "cat/loop.png (a link to nothing)",
        "cat/more/ (a link to a folder)",
        "cat/pipe.png (neither file nor folder)",
        "cat/round/ (a link to a folder)",
        "cat/s.png (neither file nor folder)",
        "lost (a link to nothing)",
    ]


# -- names


def test_names_that_are_no_plain_text(tmp_path):
    """Ids are text that any file takes; pictures are opened by their own names."""
    spec = draw(tmp_path / "caf\udce9", "cat/a\nb.png", "cat/\udcff\udc80.png", "cat/tab\t.png", "hé\x1b[1m/0.png")
    samples = load_samples(spec)
    assert samples.name == r"folder:caf\xe9"
    assert samples.ids == [r"cat/a\nb.png", r"cat/tab\t.png", r"cat/\xff\x80.png", r"hé\x1b[1m/0.png"]
    assert samples.classes == ("cat", r"hé\x1b[1m")
    for part in (samples, samples.limit(1, seed=0), samples.take(np.array([2]))):
        part.content_hash.encode()
        "\n".join([*part.ids, *part.ignored]).encode()  # no surrogates
        assert (part.image(len(part) - 1, GREY) * 255 == 7).all()


def test_names_that_are_printed_alike_are_refused(tmp_path):
    spec = draw(tmp_path, "cat/\udce9.png", r"cat/\xe9.png")
    with pytest.raises(DataError, match="two files whose names are printed alike"):
        load_samples(spec)


@pytest.mark.parametrize("on_disk", ["NFC", "NFD"])
@pytest.mark.parametrize("in_model", ["NFC", "NFD"])
def test_composed_and_decomposed_letters_are_one_name(tmp_path, on_disk, in_model):
    folder = unicodedata.normalize(on_disk, "Mantél")
    spec = draw(tmp_path, f"{folder}/é.png".replace("é.", unicodedata.normalize(on_disk, "é.")), "Ärmel/0.png")
    samples = load_samples(spec)
    assert samples.classes == ("Mantél", "Ärmel")
    names = tuple(unicodedata.normalize(in_model, name) for name in ("Ärmel", "Hut", "Mantél"))
    settings = tiny_settings(classes=3).model_copy(update={"classes": names})
    assert samples.labels_for(settings).tolist() == [2, 0]
    assert samples.image(0, GREY).shape == (1, 8, 8)


def test_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    draw(tmp_path / "set", "cat/0.png")
    assert len(load_samples("folder:~/set")) == 1
    with pytest.raises(DataError, match=f"data folder:~/none: '{tmp_path}/none' is not a folder"):
        load_samples("folder:~/none")
    with pytest.raises(DataError, match="data folder:~nobody-of-that-name/x: "):
        load_samples("folder:~nobody-of-that-name/x")
    with pytest.raises(DataError, match=r"--in-distribution imagenet:~/none.*is not a folder"):
        load_samples("imagenet-o:~/set", in_distribution="imagenet:~/none")
