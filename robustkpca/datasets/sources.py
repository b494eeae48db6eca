"""Samples by name: embedded sets, sets in folders by `NAME:DIR`, and functions of other code by import path."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import cast

import numpy as np

from robustkpca.corruptions.registry import CORRUPTIONS, EXTRA_CORRUPTIONS
from robustkpca.datasets import files
from robustkpca.datasets.files import FASHION_CLASSES
from robustkpca.datasets.images import ArraySamples
from robustkpca.datasets.registry import Found, Opener, find
from robustkpca.datasets.sample_set import SampleSet
from robustkpca.datasets.samples import Samples
from robustkpca.errors import DataError, SpecError
from robustkpca.extensions import call_object


def embedded_fashion(split: str) -> Samples:
    if split != "test":
        raise DataError("data fashion-mnist: only 1,000 test images are embedded; for training give fashion-mnist:DIR")
    with np.load(str(resources.files("robustkpca") / "embedded" / "fashion-mnist-1000.npz")) as file:
        ids = [f"test/{i:05d}" for i in file["indices"]]
        return ArraySamples("fashion-mnist", ids, file["labels"].astype(np.int64), FASHION_CLASSES, file["images"])


def digits(split: str) -> Samples:
    """scikit-learn's 8x8 digits (UCI): 1,347 training and 450 test images, stratified with seed 0."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    indices = train_test_split(np.arange(len(data.target)), test_size=450, random_state=0, stratify=data.target)
    chosen = np.sort(indices[0] if split == "train" else indices[1])
    pixels = np.round(data.images[chosen] * (255 / 16)).astype(np.uint8)
    ids = [f"{split}/{i:04d}" for i in chosen]
    return ArraySamples("digits", ids, data.target[chosen].astype(np.int64), tuple("0123456789"), pixels)


def subset(path: Path, split: str, name: str) -> Samples:
    """ImageNet-A and -R; timm ships the lists of their 200 classes."""
    info = resources.files("timm.data") / "_info" / f"{name.replace('-', '_')}_synsets.txt"
    return files.imagenet_subset(name, path, tuple(info.read_text().split()))


def released_corruptions(path: Path, split: str) -> Samples:
    return files.imagenet_c(path, CORRUPTIONS + EXTRA_CORRUPTIONS)


def load_samples(
    spec: str, *, split: str = "test", limit: int | None = None, seed: int = 0, in_distribution: str | None = None
) -> SampleSet:
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
    found = find(spec, in_distribution)
    if found is None:
        samples: SampleSet = call_object(spec, split, what="data", expected=SampleSet)
    else:
        samples = _open(spec, found, split)
        if not isinstance(samples, SampleSet):  # what others registered may return anything
            raise SpecError(f"data {spec}: expected Samples, got {samples!r:.80}")
    return samples if limit is None else samples.limit(limit, seed)


def load_images(spec: str, *, split: str = "test", limit: int | None = None, seed: int = 0) -> Samples:
    """`load_samples` where only labelled images will do. Raises DataError for samples of another task."""
    samples = load_samples(spec, split=split, limit=limit, seed=seed)
    if not isinstance(samples, Samples):
        raise DataError(f"data {spec}: expected labelled images, got samples of the task {samples.task}")
    return samples


def _open(spec: str, found: Found, split: str) -> Samples:
    """The samples of a data set that was found."""
    source, folder, inside = found
    try:
        if inside is not None:
            return files.imagenet_o(cast(Path, folder), inside)
        if folder is not None:
            return cast(Opener, source.folder)(folder, split)
        return cast(Opener, source.embedded)(split)
    except OSError as error:  # whatever may not be read, or goes away meanwhile
        raise DataError(f"data {spec}: {error.filename or folder}: {error.strerror or error}") from None
