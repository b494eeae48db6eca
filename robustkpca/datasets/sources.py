"""Data by name: embedded sets, and sets of the wild by `NAME:DIR`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path

import numpy as np

from robustkpca.corruptions.registry import CORRUPTIONS, EXTRA_CORRUPTIONS
from robustkpca.datasets import files
from robustkpca.datasets.files import FASHION_CLASSES
from robustkpca.datasets.images import ArraySamples
from robustkpca.datasets.samples import Samples
from robustkpca.errors import DataError, unknown


def _embedded_fashion(split: str) -> Samples:
    if split != "test":
        raise DataError("data fashion-mnist: only 1,000 test images are embedded; for training give fashion-mnist:DIR")
    with np.load(str(resources.files("robustkpca") / "embedded" / "fashion-mnist-1000.npz")) as file:
        ids = [f"test/{i:05d}" for i in file["indices"]]
        return ArraySamples("fashion-mnist", ids, file["labels"].astype(np.int64), FASHION_CLASSES, file["images"])


def _digits(split: str) -> Samples:
    """scikit-learn's 8x8 digits (UCI): 1,347 training and 450 test images, stratified with seed 0."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    indices = train_test_split(np.arange(len(data.target)), test_size=450, random_state=0, stratify=data.target)
    chosen = np.sort(indices[0] if split == "train" else indices[1])
    pixels = np.round(data.images[chosen] * (255 / 16)).astype(np.uint8)
    ids = [f"{split}/{i:04d}" for i in chosen]
    return ArraySamples("digits", ids, data.target[chosen].astype(np.int64), tuple("0123456789"), pixels)


def _subset(name: str, path: Path, split: str) -> Samples:
    """ImageNet-A and -R; timm ships the lists of their 200 classes."""
    info = resources.files("timm.data") / "_info" / f"{name.replace('-', '_')}_synsets.txt"
    return files.imagenet_subset(name, path, tuple(info.read_text().split()))


def _released(path: Path, split: str) -> Samples:
    return files.imagenet_c(path, CORRUPTIONS + EXTRA_CORRUPTIONS)


@dataclass(frozen=True)
class Source:
    """A kind of data: what it is, and how it opens without a path and with one."""

    title: str
    embedded: Callable[[str], Samples] | None = None
    folder: Callable[[Path, str], Samples] | None = None


DATASETS: dict[str, Source] = {
    "fashion-mnist": Source(
        "Fashion-MNIST, 28x28 grey photographs of clothing, 10 classes (Zalando, MIT licence): 1,000 test images embedded; "
        "fashion-mnist:DIR reads the whole set",
        _embedded_fashion,
        files.fashion_mnist,
    ),
    "digits": Source(
        "8x8 grey handwritten digits, 10 classes (UCI, CC BY 4.0, in scikit-learn): 1,347 training and 450 test images",
        _digits,
    ),
    "imagenet": Source("imagenet:DIR, ImageNet's val as class folders named by WordNet ids", None, files.imagenet),
    "imagenet-c": Source(
        "imagenet-c:DIR, the released corruptions, DIR/corruption/severity/wnid; cropped, not resized", None, _released
    ),
    "imagenet-a": Source(
        "imagenet-a:DIR, class folders; answers among its 200 classes", None, partial(_subset, "imagenet-a")
    ),
    "imagenet-r": Source(
        "imagenet-r:DIR, class folders; answers among its 200 classes", None, partial(_subset, "imagenet-r")
    ),
    "imagenet-o": Source(
        "imagenet-o:DIR with --in-distribution imagenet:DIR, class folders; out-of-distribution detection"
    ),
    "cifar10": Source("cifar10:DIR, the python version that torchvision reads", None, files.cifar),
    "cifar100": Source(
        "cifar100:DIR, the python version that torchvision reads", None, partial(files.cifar, hundred=True)
    ),
    "folder": Source(
        "folder:DIR, one folder a class, named as the model names its classes", None, files.picture_folder
    ),
}


def load_samples(
    spec: str, *, split: str = "test", limit: int | None = None, seed: int = 0, in_distribution: str | None = None
) -> Samples:
    """Open `NAME` or `NAME:DIR` (see DATASETS). `split` is `test` or `train`; `limit` spreads over classes with `seed`.

    imagenet-o needs `in_distribution`, `imagenet:DIR`: the images it is told apart from.
    """
    name, colon, path = spec.partition(":")
    if name not in DATASETS:
        raise DataError(unknown("data", name, DATASETS))
    source = DATASETS[name]
    if in_distribution is not None and name != "imagenet-o":
        raise DataError(f"--in-distribution: it goes with imagenet-o, got data {name}")
    if not colon:
        if source.embedded is None:
            raise DataError(f"data {name}: expected {name}:DIR")
        samples = source.embedded(split)
    elif source.folder is None and name != "imagenet-o":
        raise DataError(f"data {name}: it is embedded and takes no folder, got {path!r}")
    elif not Path(path).is_dir():
        raise DataError(f"data {spec}: {path!r} is not a folder")
    elif source.folder is None:
        kind, _, inside = (in_distribution or "").partition(":")
        if kind != "imagenet" or not Path(inside).is_dir():
            raise DataError(
                f"data imagenet-o: expected --in-distribution imagenet:DIR with a folder, got {in_distribution}"
            )
        samples = files.imagenet_o(Path(path), Path(inside))
    else:
        samples = source.folder(Path(path), split)
    return samples if limit is None else samples.limit(limit, seed)
