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
from robustkpca.datasets.tree import IMAGE_SUFFIXES, Tree, printable, scan, split_folder
from robustkpca.errors import DataError, brief
from robustkpca.suites.cell import IN_DISTRIBUTION, OUT_OF_DISTRIBUTION, RELEASED, Cell

FASHION_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
LARGEST = 2**26  # bytes of an unpacked idx file; 60,000 images are 47 million


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
            with gzip.open(packed) as file:
                content = file.read(LARGEST + 1)
            if len(content) > LARGEST:
                raise ValueError(f"it unpacks to more than {LARGEST} bytes")
            plain.write_bytes(content)
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
    root, passed_over = split_folder(path, split)
    return _class_folders(f"folder:{printable(path.name)}", root, ignored=passed_over)


def imagenet(path: Path, split: str) -> Samples:
    """ImageNet's val as class folders (wnids): DIR/wnid/image, or DIR/val/wnid/image."""
    root, passed_over = split_folder(path, split)
    return _class_folders("imagenet", root, wnids=True, ignored=passed_over)


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
    inside_root, passed_over = split_folder(inside, "test")
    whole = _class_folders("imagenet", inside_root, wnids=True, ignored=passed_over)
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
    parts = {"out": out, "in": whole}
    conditions = [OUT_OF_DISTRIBUTION] * len(out) + [IN_DISTRIBUTION] * len(chosen)
    return FileSamples(
        "imagenet-o",
        [*(f"out/{i}" for i in out.ids), *(f"in/{whole.ids[i]}" for i in chosen)],
        np.array(labels, dtype=np.int64),
        classes,
        {"out": path, "in": inside_root},
        conditions=conditions,
        expected={OUT_OF_DISTRIBUTION: len(out), IN_DISTRIBUTION: len(chosen)},
        among=classes,
        ignored=[*out.ignored, *whole.ignored],
        paths={f"{first}/{i}": file for first, part in parts.items() for i, file in part.paths.items()},
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
    paths: dict[str, Path] = {}
    for corruption in present:
        for severity in range(1, 6):
            cell = Cell.parse(f"{RELEASED}/{corruption}", str(severity))
            folder = path / corruption / str(severity)
            tree = scan(folder) if folder.is_dir() else Tree()
            expected[cell] = len(tree.ids)
            ids += [f"{corruption}/{severity}/{i}" for i in tree.ids]
            names += tree.classes
            paths |= {f"{corruption}/{severity}/{i}": file for i, file in tree.paths.items()}
            conditions += [cell] * len(tree.ids)
            ignored += [f"{corruption}/{severity}/{s}" for s in tree.strays]
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
        paths=paths,
    )


def _class_folders(
    name: str, path: Path, *, wnids: bool = False, among: tuple[str, ...] = (), ignored: Sequence[str] = ()
) -> FileSamples:
    tree = scan(path)
    if not tree.ids:
        flat = sum(Path(s).suffix.lower() in IMAGE_SUFFIXES for s in tree.strays)
        hint = f"; {flat} images lie in it directly, without a class" if flat else ""
        raise DataError(f"data folder {path}: expected one folder a class with images in it, found none{hint}")
    classes = tuple(sorted(set(tree.classes)))
    if wnids and (strange := [c for c in classes if not (c.startswith("n") and c[1:].isdecimal())]):
        raise DataError(
            f"data {name}: expected folders named by WordNet ids such as n01440764 in {path}, got "
            f"{', '.join(strange[:3])}"
        )
    position = {c: i for i, c in enumerate(classes)}
    labels = np.array([position[c] for c in tree.classes], dtype=np.int64)
    strays = [*ignored, *tree.strays]
    return FileSamples(name, tree.ids, labels, classes, {"": path}, among=among, ignored=strays, paths=tree.paths)
