"""Labelled images with stable ids: embedded sets, idx files, image folders."""

from __future__ import annotations

import gzip
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as TF

from robustkpca.errors import DataError, unknown
from robustkpca.settings import ModelSettings, Preprocessing

FASHION_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff")


class Samples(ABC):
    """Images, labels and ids. `labels[i]` counts in `classes`; `ids[i]` is unique and stable (a path or an index)."""

    hash_covers: str  # what `content_hash` is computed from

    def __init__(self, name: str, ids: Sequence[str], labels: NDArray[np.int64], classes: tuple[str, ...]) -> None:
        if len(ids) == 0:
            raise DataError(f"data {name}: no images found")
        if labels.min() < 0 or labels.max() >= len(classes):
            raise DataError(f"data {name}: expected labels from 0 to {len(classes) - 1}, got {labels.min()} to {labels.max()}")
        self.name, self.ids, self.labels, self.classes = name, list(ids), labels, classes

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def ids_hash(self) -> str:
        """SHA-256 (16 hex digits) of the ids and the names of their classes, in order."""
        rows = "\n".join(f"{i}\t{self.classes[label]}" for i, label in zip(self.ids, self.labels, strict=True))
        return hashlib.sha256(rows.encode("utf-8", "surrogateescape")).hexdigest()[:16]

    @property
    @abstractmethod
    def content_hash(self) -> str:
        """SHA-256 (16 hex digits) of what `hash_covers` says."""

    @abstractmethod
    def image(self, index: int, preprocessing: Preprocessing) -> Tensor:
        """One preprocessed image, float32 (C, S, S) in [0, 1], not normalised."""

    @abstractmethod
    def take(self, indices: NDArray[np.int64]) -> Samples:
        """The samples at `indices`, in that order."""

    def limit(self, n: int, seed: int) -> Samples:
        """At most n samples, spread over the classes as evenly as they allow, drawn with `seed`, in their old order."""
        if n < 1:
            raise DataError(f"--limit: expected at least 1, got {n}")
        if n >= len(self):
            return self
        order = np.random.default_rng(seed).permutation(len(self))
        rank = np.empty(len(self), dtype=np.int64)  # how many of its class were drawn before it
        seen: dict[int, int] = {}
        for index in order:
            label = int(self.labels[index])
            rank[index] = seen.get(label, 0)
            seen[label] = seen.get(label, 0) + 1
        chosen = order[np.argsort(rank[order], kind="stable")][:n]
        return self.take(np.sort(chosen))

    def labels_for(self, settings: ModelSettings) -> NDArray[np.int64]:
        """Labels counted as the model counts its logits: by class name, or by position when the model has no names."""
        if settings.classes:
            position = {name: i for i, name in enumerate(settings.classes)}
            strange = [name for name in self.classes if name not in position]
            if strange:
                raise DataError(
                    f"data {self.name}: {len(strange)} of its {len(self.classes)} classes are unknown to {settings.title} "
                    f"({', '.join(strange[:3])}); the model knows {', '.join(settings.classes[:3])}, ... ({settings.num_classes})"
                )
            return np.array([position[name] for name in self.classes], dtype=np.int64)[self.labels]
        if len(self.classes) != settings.num_classes:
            raise DataError(
                f"data {self.name}: it has {len(self.classes)} classes, {settings.title} has {settings.num_classes} "
                "and carries no class names to match them by"
            )
        return self.labels


class ArraySamples(Samples):
    """Images held in memory: uint8 (N, H, W) grey or (N, H, W, 3)."""

    hash_covers = "ids and pixels"

    def __init__(
        self,
        name: str,
        ids: Sequence[str],
        labels: NDArray[np.int64],
        classes: tuple[str, ...],
        pixels: NDArray[np.uint8],
    ) -> None:
        super().__init__(name, ids, labels, classes)
        self.pixels = pixels

    @cached_property
    def content_hash(self) -> str:
        digest = hashlib.sha256("\n".join(self.ids).encode())
        digest.update(np.ascontiguousarray(self.pixels).data)
        return digest.hexdigest()[:16]

    def image(self, index: int, preprocessing: Preprocessing) -> Tensor:
        pixels, size = self.pixels[index], preprocessing.img_size
        if pixels.shape == (size, size) and preprocessing.channels == 1 and preprocessing.crop_pct == 1.0:
            return torch.from_numpy(pixels)[None].float() / 255
        return preprocess(Image.fromarray(pixels), preprocessing)

    def take(self, indices: NDArray[np.int64]) -> ArraySamples:
        return ArraySamples(
            self.name, [self.ids[i] for i in indices], self.labels[indices], self.classes, self.pixels[indices]
        )


class FolderSamples(Samples):
    """One folder a class, images anywhere below it; ids are paths relative to the root."""

    hash_covers = "ids and file sizes"

    def __init__(
        self, name: str, ids: Sequence[str], labels: NDArray[np.int64], classes: tuple[str, ...], root: Path
    ) -> None:
        super().__init__(name, ids, labels, classes)
        self.root = root

    @cached_property
    def content_hash(self) -> str:
        rows = (f"{i}\t{(self.root / i).stat().st_size}" for i in self.ids)
        return hashlib.sha256("\n".join(rows).encode("utf-8", "surrogateescape")).hexdigest()[:16]

    def image(self, index: int, preprocessing: Preprocessing) -> Tensor:
        path = self.root / self.ids[index]
        try:
            with Image.open(path) as picture:
                return preprocess(picture, preprocessing)
        except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
            raise DataError(f"image {path}: cannot be decoded ({error}); mend or remove it") from None

    def take(self, indices: NDArray[np.int64]) -> FolderSamples:
        return FolderSamples(self.name, [self.ids[i] for i in indices], self.labels[indices], self.classes, self.root)


def preprocess(picture: Image.Image, to: Preprocessing) -> Tensor:
    """A picture as float32 (C, S, S) in [0, 1]: colours, short side to S / crop_pct, centre crop of S."""
    picture = picture.convert("RGB" if to.channels == 3 else "L")
    short = int(to.img_size / to.crop_pct)
    if min(picture.size) != short:
        picture = TF.resize(picture, [short], InterpolationMode(to.interpolation))
    if picture.size != (to.img_size, to.img_size):
        picture = TF.center_crop(picture, [to.img_size, to.img_size])
    return TF.pil_to_tensor(picture).float() / 255


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


def _idx(path: Path) -> NDArray[np.uint8]:
    """An idx file of unsigned bytes, packed or not."""
    packed = path.with_name(path.name + ".gz")
    try:
        raw = path.read_bytes() if path.is_file() else gzip.decompress(packed.read_bytes())
        dims = raw[3]
        shape = np.frombuffer(raw, ">i4", dims, offset=4)
        return np.frombuffer(raw, np.uint8, offset=4 + 4 * dims).reshape(shape).copy()  # writable, as torch wants it
    except (OSError, EOFError, IndexError, ValueError) as error:
        raise DataError(f"{path}[.gz]: expected an idx file of Fashion-MNIST ({error})") from None


def _fashion_folder(path: Path, split: str) -> Samples:
    """The four idx files of Fashion-MNIST, in `path` or where torchvision puts them below it."""
    nested = path / "FashionMNIST" / "raw"
    folder = nested if nested.is_dir() else path
    stem = "train" if split == "train" else "t10k"
    images, labels = _idx(folder / f"{stem}-images-idx3-ubyte"), _idx(folder / f"{stem}-labels-idx1-ubyte")
    if len(images) != len(labels):
        raise DataError(f"{folder}: {len(images)} images but {len(labels)} labels")
    ids = [f"{split}/{i:05d}" for i in range(len(images))]
    return ArraySamples("fashion-mnist", ids, labels.astype(np.int64), FASHION_CLASSES, images)


def _image_folder(path: Path, split: str) -> Samples:
    """DIR/class/image, or DIR/train and DIR/val (or test) with such folders; class names are the folder names."""
    for sub in ("train",) if split == "train" else ("val", "test"):
        if (path / sub).is_dir():
            path = path / sub
            break
    folders = sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
    ids: list[str] = []
    labels: list[int] = []
    classes: list[str] = []
    for folder in folders:
        found = sorted(
            p.relative_to(path).as_posix()
            for p in folder.rglob("*")
            if p.suffix.lower() in IMAGE_SUFFIXES and not p.name.startswith(".") and p.is_file()
        )
        if found:
            labels += [len(classes)] * len(found)
            ids += found
            classes.append(folder.name)
    if not ids:
        flat = sum(p.suffix.lower() in IMAGE_SUFFIXES for p in path.iterdir())
        hint = f"; {flat} images lie in it directly, without a class" if flat else ""
        raise DataError(f"data folder {path}: expected one folder a class with images in it, found none{hint}")
    return FolderSamples(f"folder:{path.name}", ids, np.array(labels, dtype=np.int64), tuple(classes), path)


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
        _fashion_folder,
    ),
    "digits": Source(
        "8x8 grey handwritten digits, 10 classes (UCI, CC BY 4.0, in scikit-learn): 1,347 training and 450 test images",
        _digits,
    ),
    "folder": Source("folder:DIR, one folder a class, named as the model names its classes", None, _image_folder),
}


def load_samples(spec: str, *, split: str = "test", limit: int | None = None, seed: int = 0) -> Samples:
    """Open `NAME` or `NAME:DIR` (see DATASETS). `split` is `test` or `train`; `limit` spreads over classes with `seed`."""
    name, colon, path = spec.partition(":")
    if name not in DATASETS:
        raise DataError(unknown("data", name, DATASETS))
    source = DATASETS[name]
    if not colon:
        if source.embedded is None:
            raise DataError(f"data {name}: expected {name}:DIR")
        samples = source.embedded(split)
    else:
        if source.folder is None:
            raise DataError(f"data {name}: it is embedded and takes no folder, got {path!r}")
        if not Path(path).is_dir():
            raise DataError(f"data {spec}: {path!r} is not a folder")
        samples = source.folder(Path(path), split)
    return samples if limit is None else samples.limit(limit, seed)


class Chunks(torch.utils.data.Dataset[tuple[Tensor, list[int]]]):
    """Batches of consecutive samples as a map-style data set, so that a DataLoader's workers can decode ahead."""

    def __init__(self, samples: Samples, preprocessing: Preprocessing, indices: Sequence[range]) -> None:
        self.samples, self.preprocessing, self.indices = samples, preprocessing, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, chunk: int) -> tuple[Tensor, list[int]]:
        chosen = list(self.indices[chunk])
        return torch.stack([self.samples.image(i, self.preprocessing) for i in chosen]), chosen
