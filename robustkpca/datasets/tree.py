"""Folders of pictures: which subfolder is the split, which files are samples, and what is passed over, and why."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from robustkpca.config import composed
from robustkpca.errors import DataError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff")
# Words for a split, in any case, also with an ending as in `training_set` and `val2017`.
SPLITS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_ENDING = re.compile(r"[ _-]?(set|split|data|images|\d{4})$")
# What is evaluated where there is more than one split that could be; the first that is there.
KINDS = {"train": ("train",), "test": ("val", "test")}


@dataclass
class Tree:
    """Class folders.

    ids: of each picture, its path below the root, as text that any file and terminal takes (see `printable`).
    classes: of each picture, the name of its class folder, its letters composed (NFC).
    paths: where pictures lie whose id is not their path.
    strays: what is no sample.
    """

    ids: list[str] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    paths: dict[str, Path] = field(default_factory=dict)
    strays: list[str] = field(default_factory=list)


def printable(name: str) -> str:
    r"""A file's name with bytes that are not UTF-8, line ends and other control characters written as \xe9, \n."""

    def written(letter: str) -> str:
        if "\udc80" <= letter <= "\udcff":  # a byte that is not UTF-8, as Python holds it
            return f"\\x{ord(letter) - 0xDC00:02x}"
        if unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp"):
            return letter.encode("unicode_escape").decode()
        return letter

    return name if name.isprintable() else "".join(map(written, name))


def split_folder(path: Path, split: str) -> tuple[Path, list[str]]:
    """The folder below `path` that holds the classes of a split, or `path` itself; and splits that are passed over.

    Raises:
        DataError: the split is not there or there twice; folders of splits lie among classes.
    """
    folders = _folders(path)
    splits = [f for f in folders if _kind(f.name)]
    if not splits:
        return path, []
    with_classes = [
        f for f in splits if any(c.is_dir() and not _hidden(c.name) and _has_pictures(c) for c in f.iterdir())
    ]
    classes = [f for f in folders if f not in splits and _has_pictures(f)]
    if classes and not with_classes:
        return path, []  # classes that are called so
    if classes:
        raise DataError(
            f"data folder {path}: expected splits or classes, found both: {_listed(with_classes)} with folders inside, "
            f"beside {_listed(classes)}; give folder:{with_classes[0]}, or put all classes into a folder named {split}"
        )
    for kind in KINDS[split]:
        of_kind = [f for f in splits if _kind(f.name) == kind]
        if len(of_kind) > 1:
            raise DataError(
                f"data folder {path}: expected one split for {split}, found {_listed(of_kind)}; "
                f"give folder:{of_kind[0]} or the other"
            )
        if of_kind:
            rivals = [f for f in splits if _kind(f.name) in KINDS[split] and f not in of_kind]
            return of_kind[0], [f"{printable(f.name)}/ (another split than {of_kind[0].name}/)" for f in rivals]
    words = ", ".join(word for kind in KINDS[split] for word in SPLITS[kind])
    raise DataError(f"data folder {path}: expected a folder for {split} ({words}), found {_listed(splits)}")


def scan(path: Path) -> Tree:
    """The pictures in the class folders of `path`, in the order of their paths.

    Raises:
        OSError: a folder cannot be read.
        DataError: class folders that hold splits; two files whose names are printed alike.
    """
    tree = Tree()
    for folder in sorted(path.iterdir()):
        if not folder.is_dir() or _hidden(folder.name):
            note = "" if folder.is_dir() else _note(folder)
            tree.strays.append(_stray(folder, path, note))
            continue
        before = len(tree.ids)
        for file in sorted(_entries(folder)):
            note = _note(file)
            hidden = any(_hidden(part) for part in file.relative_to(folder).parts)
            if note or hidden or file.suffix.lower() not in IMAGE_SUFFIXES:
                tree.strays.append(_stray(file, path, note))
                continue
            name = file.relative_to(path).as_posix()
            tree.ids.append(printable(name))
            tree.classes.append(composed(printable(folder.name)))
            if tree.ids[-1] != name:
                tree.paths[tree.ids[-1]] = file
        if len(tree.ids) == before:
            tree.strays.append(f"{printable(folder.name)}/")
    if len(set(tree.ids)) < len(tree.ids):
        twice = next(i for i in tree.paths if tree.ids.count(i) > 1)
        raise DataError(f"data folder {path}: two files whose names are printed alike, {twice}; rename one")
    _refuse_splits_in_classes(path, tree.ids)
    return tree


def _folders(path: Path) -> list[Path]:
    return [f for f in sorted(path.iterdir()) if f.is_dir() and not _hidden(f.name)]


def _entries(folder: Path) -> Iterator[Path]:
    """All that lies in a folder at any depth but folders; hidden folders and links to folders are not entered."""
    waiting = [folder]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False) and not _hidden(entry.name):
                    waiting.append(Path(entry.path))
                else:
                    yield Path(entry.path)


def _note(file: Path) -> str:
    """Why an entry is no sample whatever its name; empty for files, and for links to files."""
    if file.is_file():
        return ""
    if file.is_dir():
        return "a link to a folder" if file.is_symlink() else ""
    return "a link to nothing" if file.is_symlink() else "neither file nor folder"


def _stray(entry: Path, root: Path, note: str) -> str:
    name = printable(entry.relative_to(root).as_posix()) + ("/" if entry.is_dir() else "")
    return f"{name} ({note})" if note else name


def _hidden(name: str) -> bool:
    return name.startswith(".") or name == "lost+found"


def _kind(name: str) -> str | None:
    """Which split a folder's name stands for."""
    word = _ENDING.sub("", name.lower())
    return next((kind for kind, words in SPLITS.items() if word in words), None)


def _has_pictures(folder: Path) -> bool:
    return any(f.suffix.lower() in IMAGE_SUFFIXES and f.is_file() for f in _entries(folder) if not _hidden(f.name))


def _listed(folders: Iterable[Path]) -> str:
    names = [f"{printable(f.name)}/" for f in folders]
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _refuse_splits_in_classes(path: Path, ids: Iterable[str]) -> None:
    """A class folder with a training and a test folder in it: both would be taken for either."""
    inside: dict[str, dict[str, str]] = {}
    for name in ids:
        first, *middle = name.split("/")[:-1]
        if middle and (kind := _kind(middle[0])):
            inside.setdefault(first, {})[kind] = f"{first}/{middle[0]}/"
    for kinds in inside.values():
        if len(kinds) > 1:
            raise DataError(
                f"data folder {path}: expected splits above classes, as in train/cat/, found them inside: "
                f"{', '.join(kinds.values())}"
            )
