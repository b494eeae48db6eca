"""Data by name: embedded sets, sets in folders by `NAME:DIR`, and functions of other code by import path.

One data set more is one Source, under a name that `DATASETS.register` gives it or as an entry point in the group
`robustkpca.datasets`, or one function `(split) -> Samples` that is named by its import path, `mypkg.data:pictures`.
"""

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
from robustkpca.errors import DataError, SpecError, unknown
from robustkpca.extensions import Registry, call_object, is_import_path


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
    """A kind of data.

    title: what it is, for `robustkpca datasets`.
    embedded: opens it without a path. Gets the split, "test" or "train".
    folder: opens it from an existing folder. Gets the folder and the split.

    Both raise DataError where the split or the files do not exist.
    """

    title: str
    embedded: Callable[[str], Samples] | None = None
    folder: Callable[[Path, str], Samples] | None = None


_BUILT_IN: dict[str, Source] = {
    "fashion-mnist": Source(
        "Fashion-MNIST, 28x28 grey photographs of clothing, 10 classes (Zalando, MIT licence): 1,000 test images "
        "embedded; "
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


class _Sources(Registry[Source]):
    def __getitem__(self, name: str) -> Source:
        """A function `(split) -> Samples` is a Source without a folder, titled by its docstring's first line."""
        item: object = super().__getitem__(name)
        if isinstance(item, Source):
            return item
        if not callable(item):
            raise SpecError(f"data {name}: expected a Source or a function (split) -> Samples, got {item!r:.80}")
        return Source((item.__doc__ or name).strip().splitlines()[0], item)


DATASETS = _Sources("data", "robustkpca.datasets")
for _name, _source in _BUILT_IN.items():
    DATASETS.register(_name)(_source)


def load_samples(
    spec: str, *, split: str = "test", limit: int | None = None, seed: int = 0, in_distribution: str | None = None
) -> Samples:
    """Labelled images by name.

    Args:
        spec: `NAME`, `NAME:DIR` (see DATASETS), or the import path `package.module:function` of a function that
            gets the split and returns Samples.
        split: `test` or `train`.
        limit: at most so many samples of each condition, at least 1, spread over the classes.
        seed: of the draw that `limit` makes.
        in_distribution: `imagenet:DIR`, the images that imagenet-o is told apart from; needed there and nowhere else.

    Raises:
        DataError: there is no such data set, or its files are missing or broken.
        SpecError: the import path leads to nothing, or to something that returns no Samples.
    """
    name, colon, path = spec.partition(":")
    if in_distribution is not None and name != "imagenet-o":
        raise DataError(f"--in-distribution: it goes with imagenet-o, got data {name}")
    if is_import_path(spec, DATASETS):
        samples: Samples = call_object(spec, split, what="data", expected=Samples)
    else:
        samples = _open(spec, name, path if colon else None, split, in_distribution)
        if not isinstance(samples, Samples):  # what others registered may return anything
            raise SpecError(f"data {name}: expected Samples, got {samples!r:.80}")
    return samples if limit is None else samples.limit(limit, seed)


def _open(spec: str, name: str, path: str | None, split: str, in_distribution: str | None) -> Samples:
    """The samples of a name, with a folder or (None) without."""
    if name not in DATASETS:
        raise DataError(unknown("data", name, DATASETS))
    source = DATASETS[name]
    if path is None:
        if source.embedded is None:
            raise DataError(f"data {name}: expected {name}:DIR")
        return source.embedded(split)
    if source.folder is None and name != "imagenet-o":
        raise DataError(f"data {name}: it is embedded and takes no folder, got {path!r}")
    if not Path(path).is_dir():
        raise DataError(f"data {spec}: {path!r} is not a folder")
    if source.folder is not None:
        return source.folder(Path(path), split)
    kind, _, inside = (in_distribution or "").partition(":")
    if kind != "imagenet" or not Path(inside).is_dir():
        raise DataError(
            f"data imagenet-o: expected --in-distribution imagenet:DIR with a folder, got {in_distribution}"
        )
    return files.imagenet_o(Path(path), Path(inside))
