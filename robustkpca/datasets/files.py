"""Sets that come as files: idx, CIFAR, and folders of pictures."""

from __future__ import annotations

import gzip
import tempfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from robustkpca.datasets.images import ArraySamples, FileSamples
from robustkpca.datasets.samples import Samples
from robustkpca.errors import DataError, brief
from robustkpca.suites.cell import IN_DISTRIBUTION, OUT_OF_DISTRIBUTION, RELEASED, Cell

FASHION_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff")


def fashion_mnist(path: Path, split: str) -> Samples:
    """The four idx files of Fashion-MNIST, packed or not, in `path` or where torchvision puts them below it."""
    from torchvision.datasets import mnist

    nested = path / "FashionMNIST" / "raw"
    folder = nested if nested.is_dir() else path
    stem = "train" if split == "train" else "t10k"
    images = _idx(folder / f"{stem}-images-idx3-ubyte", mnist.read_image_file)
    labels = _idx(folder / f"{stem}-labels-idx1-ubyte", mnist.read_label_file)
    if len(images) != len(labels):
        raise DataError(f"{folder}: {len(images)} images but {len(labels)} labels")
    ids = [f"{split}/{i:05d}" for i in range(len(images))]
    return ArraySamples("fashion-mnist", ids, labels, FASHION_CLASSES, images)


def _idx(path: Path, read: Callable[[str], Tensor]) -> NDArray[Any]:
    """An idx file of unsigned bytes, packed or not, through one of torchvision's readers, which take plain files."""
    packed = path.with_name(path.name + ".gz")
    try:
        if path.is_file():
            return read(str(path)).numpy()
        with tempfile.TemporaryDirectory() as folder:
            plain = Path(folder) / path.name
            plain.write_bytes(gzip.decompress(packed.read_bytes()))
            return read(str(plain)).numpy()
    except (OSError, EOFError, zlib.error, AssertionError, KeyError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else "it does not begin as one"
        raise DataError(f"{path}[.gz]: expected an idx file of Fashion-MNIST ({reason})") from None


def cifar(path: Path, split: str, hundred: bool = False) -> Samples:
    """CIFAR-10 or CIFAR-100 in the python format that torchvision reads (its MD5 sums are checked)."""
    from torchvision.datasets import CIFAR10, CIFAR100

    kind, name = (CIFAR100, "cifar100") if hundred else (CIFAR10, "cifar10")
    root = path.parent if path.name == kind.base_folder else path
    try:
        data = kind(str(root), train=split == "train", download=False)
    except (RuntimeError, OSError, KeyError) as error:
        raise DataError(f"data {name}: expected {kind.base_folder}/ in {root} ({brief(error)})") from None
    ids = [f"{split}/{i:05d}" for i in range(len(data.targets))]
    return ArraySamples(name, ids, np.array(data.targets, dtype=np.int64), tuple(data.classes), data.data)


def picture_folder(path: Path, split: str) -> Samples:
    """DIR/class/image, or DIR/train and DIR/val (or test) with such folders; class names are the folder names."""
    return _class_folders(f"folder:{path.name}", _with_split(path, split))


def imagenet(path: Path, split: str) -> Samples:
    """ImageNet's val as class folders (wnids): DIR/wnid/image, or DIR/val/wnid/image."""
    return _class_folders("imagenet", _with_split(path, split), wnids=True)


def imagenet_subset(name: str, path: Path, among: tuple[str, ...]) -> Samples:
    """ImageNet-A or -R: DIR/wnid/image, of 200 classes; answers are taken among those 200 (`among`)."""
    samples = _class_folders(name, path, wnids=True, among=among)
    if strange := sorted(set(samples.classes) - set(among)):
        raise DataError(
            f"data {name}: {len(strange)} folders are not of its {len(among)} classes ({', '.join(strange[:3])})"
        )
    return samples


def imagenet_o(path: Path, inside: Path) -> Samples:
    """ImageNet-O beside the images of the same classes in ImageNet's val: two conditions, answers among O's classes.

    A folder of ImageNet-O names the ImageNet class that its images, of none of the 1,000 classes, are mistaken for.
    """
    out = _class_folders("imagenet-o", path, wnids=True)
    whole = imagenet(inside, "test")
    classes = out.classes
    position = {name: i for i, name in enumerate(classes)}
    names = [whole.classes[label] for label in whole.labels]
    chosen = [i for i, name in enumerate(names) if name in position]
    if absent := sorted(set(classes) - set(names)):
        raise DataError(
            f"--in-distribution {inside}: {len(absent)} of the {len(classes)} classes of ImageNet-O have no images "
            "there "
            f"({', '.join(absent[:3])})"
        )
    labels = [*out.labels.tolist(), *(position[names[i]] for i in chosen)]
    conditions = [OUT_OF_DISTRIBUTION] * len(out) + [IN_DISTRIBUTION] * len(chosen)
    return FileSamples(
        "imagenet-o",
        [*(f"out/{i}" for i in out.ids), *(f"in/{whole.ids[i]}" for i in chosen)],
        np.array(labels, dtype=np.int64),
        classes,
        {"out": path, "in": _with_split(inside, "test")},
        conditions=conditions,
        expected={OUT_OF_DISTRIBUTION: len(out), IN_DISTRIBUTION: len(chosen)},
        among=classes,
        ignored=[*out.ignored, *whole.ignored],
    )


def imagenet_c(path: Path, corruptions: Sequence[str]) -> Samples:
    """Released ImageNet-C: DIR/corruption/severity/wnid/image. Cropped, never resized.

    Every corruption that is there should have severities 1 to 5; one without images counts as missing, not as nothing.
    """
    present = [name for name in corruptions if (path / name).is_dir()]
    if not present:
        raise DataError(
            f"data imagenet-c:{path}: expected the root of the tree, DIR/corruption/severity/wnid/image with "
            "corruptions such as "
            f"{', '.join(corruptions[:3])}; it holds "
            f"{', '.join(sorted(p.name for p in path.iterdir())[:5]) or 'nothing'}"
        )
    ids: list[str] = []
    names: list[str] = []
    conditions: list[Cell] = []
    ignored = [f"{p.name}/" for p in sorted(path.iterdir()) if p.name not in present]
    expected: dict[Cell, int] = {}
    for corruption in present:
        for severity in range(1, 6):
            cell = Cell(f"{RELEASED}/{corruption}", str(severity))
            folder = path / corruption / str(severity)
            pairs, strays = _scan(folder) if folder.is_dir() else ([], [])
            expected[cell] = len(pairs)
            ids += [f"{corruption}/{severity}/{i}" for i, _ in pairs]
            names += [name for _, name in pairs]
            conditions += [cell] * len(pairs)
            ignored += [f"{corruption}/{severity}/{s}" for s in strays]
    classes = tuple(sorted(set(names)))
    position = {name: i for i, name in enumerate(classes)}
    labels = np.array([position[name] for name in names], dtype=np.int64)
    return FileSamples(
        "imagenet-c",
        ids,
        labels,
        classes,
        {"": path},
        resized=False,
        conditions=conditions,
        expected=expected,
        ignored=ignored,
    )


def _with_split(path: Path, split: str) -> Path:
    for sub in ("train",) if split == "train" else ("val", "test"):
        if (path / sub).is_dir():
            return path / sub
    return path


def _scan(path: Path) -> tuple[list[tuple[str, str]], list[str]]:
    """(id, class) of every picture in the class folders of `path`, and what is no sample there."""
    pairs: list[tuple[str, str]] = []
    strays: list[str] = []
    for folder in sorted(path.iterdir()):
        if not folder.is_dir() or folder.name.startswith("."):
            strays.append(folder.name + ("/" if folder.is_dir() else ""))
            continue
        pictures = 0
        for file in sorted(folder.rglob("*")):
            hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
            if not file.is_file():
                continue
            if file.suffix.lower() in IMAGE_SUFFIXES and not hidden:
                pairs.append((file.relative_to(path).as_posix(), folder.name))
                pictures += 1
            else:
                strays.append(file.relative_to(path).as_posix())
        if not pictures:
            strays.append(f"{folder.name}/")
    return pairs, strays


def _class_folders(name: str, path: Path, *, wnids: bool = False, among: tuple[str, ...] = ()) -> FileSamples:
    pairs, strays = _scan(path)
    if not pairs:
        flat = sum(Path(s).suffix.lower() in IMAGE_SUFFIXES for s in strays)
        hint = f"; {flat} images lie in it directly, without a class" if flat else ""
        raise DataError(f"data folder {path}: expected one folder a class with images in it, found none{hint}")
    classes = tuple(sorted({c for _, c in pairs}))
    if wnids and (strange := [c for c in classes if not (c.startswith("n") and c[1:].isdecimal())]):
        raise DataError(
            f"data {name}: expected folders named by WordNet ids such as n01440764 in {path}, got "
            f"{', '.join(strange[:3])}"
        )
    position = {c: i for i, c in enumerate(classes)}
    labels = np.array([position[c] for _, c in pairs], dtype=np.int64)
    return FileSamples(name, [i for i, _ in pairs], labels, classes, {"": path}, among=among, ignored=strays)
