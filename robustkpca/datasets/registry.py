"""Data sets by name. No torch here: what opens one is imported when it is asked for.

One data set more is one Source: a row of `BUILT_IN`, or in other code a function `(split) -> Samples` with a decorator,

    @DATASETS.register("squares")
    def squares(split): ...

or an entry point in the group `robustkpca.datasets` that names such a function or a Source. A function can also be
named by its import path, `--data mypkg.data:squares`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from robustkpca.errors import DataError, SpecError, unknown
from robustkpca.extensions import Registry, is_import_path

if TYPE_CHECKING:
    from robustkpca.datasets.samples import Samples

Opener = Callable[..., "Samples"]


@dataclass(frozen=True)
class Source:
    """A kind of data.

    title: what it is, for `robustkpca datasets`.
    embedded: opens it without a path. Gets the split, "test" or "train".
    folder: opens it from an existing folder. Gets the folder and the split.
    conditioned: its images come perturbed, and are evaluated as they are.

    Both raise DataError where the split or the files do not exist.
    """

    title: str
    embedded: Callable[[str], Samples] | None = None
    folder: Callable[[Path, str], Samples] | None = None
    conditioned: bool = False


def _later(path: str, **settings: Any) -> Opener:
    """The function `module:function` of this folder, imported when it is called."""
    return partial(_called, path, settings)


def _called(path: str, settings: dict[str, Any], *args: Any) -> Samples:
    module, _, name = path.partition(":")
    function = getattr(import_module(f"robustkpca.datasets.{module}"), name)
    return cast("Samples", function(*args, **settings))


BUILT_IN: dict[str, Source] = {
    "fashion-mnist": Source(
        "Fashion-MNIST, 28x28 grey photographs of clothing, 10 classes (Zalando, MIT licence): 1,000 test images "
        "embedded; fashion-mnist:DIR reads the whole set",
        _later("sources:embedded_fashion"),
        _later("files:fashion_mnist"),
    ),
    "digits": Source(
        "8x8 grey handwritten digits, 10 classes (UCI, CC BY 4.0, in scikit-learn): 1,347 training and 450 test images",
        _later("sources:digits"),
    ),
    "imagenet": Source(
        "imagenet:DIR, ImageNet's val as class folders named by WordNet ids", None, _later("files:imagenet")
    ),
    "imagenet-c": Source(
        "imagenet-c:DIR, the released corruptions, DIR/corruption/severity/wnid; cropped, not resized",
        None,
        _later("sources:released_corruptions"),
        conditioned=True,
    ),
    "imagenet-a": Source(
        "imagenet-a:DIR, class folders; answers among its 200 classes",
        None,
        _later("sources:subset", name="imagenet-a"),
    ),
    "imagenet-r": Source(
        "imagenet-r:DIR, class folders; answers among its 200 classes",
        None,
        _later("sources:subset", name="imagenet-r"),
    ),
    "imagenet-o": Source(
        "imagenet-o:DIR with --in-distribution imagenet:DIR, class folders; out-of-distribution detection",
        conditioned=True,
    ),
    "cifar10": Source("cifar10:DIR, the python version that torchvision reads", None, _later("files:cifar")),
    "cifar100": Source(
        "cifar100:DIR, the python version that torchvision reads", None, _later("files:cifar", hundred=True)
    ),
    "folder": Source(
        "folder:DIR, one folder a class, named as the model names its classes", None, _later("files:picture_folder")
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
for _name, _source in BUILT_IN.items():
    DATASETS.register(_name)(_source)


class Found(NamedTuple):
    """A data set, and where it lies."""

    source: Source
    folder: Path | None  # None: embedded
    inside: Path | None  # of imagenet-o, the folder of the images that it is told apart from


def find(spec: str, in_distribution: str | None = None) -> Found | None:
    """The data set of `NAME` or `NAME:DIR`, before anything of it is opened; None for an import path.

    Raises:
        DataError: there is no such data set or folder, or `in_distribution` is missing or idle.
    """
    name, colon, path = spec.partition(":")
    if in_distribution is not None and name != "imagenet-o":
        raise DataError(f"--in-distribution: it goes with imagenet-o, got data {name}")
    if is_import_path(spec, DATASETS):
        return None
    if name not in DATASETS:
        raise DataError(unknown("data", name, DATASETS))
    source = DATASETS[name]
    if not colon:
        if source.embedded is None:
            raise DataError(f"data {name}: expected {name}:DIR")
        return Found(source, None, None)
    if name == "imagenet-o":
        kind, _, inside = (in_distribution or "").partition(":")
        if kind != "imagenet" or not inside:
            raise DataError(
                f"data imagenet-o: expected --in-distribution imagenet:DIR with a folder, got {in_distribution}"
            )
        about = f"imagenet-o: --in-distribution {in_distribution}"
        return Found(source, _folder(spec, path), _folder(about, inside))
    if source.folder is None:
        raise DataError(f"data {name}: it is embedded and takes no folder, got {path!r}")
    return Found(source, _folder(spec, path), None)


def _folder(spec: str, path: str) -> Path:
    """The folder that `path` names, `~` being the home folder."""
    try:
        folder = Path(path).expanduser()
        there = folder.is_dir()
    except RuntimeError as error:  # no such user
        raise DataError(f"data {spec}: {error}") from None
    except OSError as error:
        raise DataError(f"data {spec}: {path}: {error.strerror or error}") from None
    if not there:
        raise DataError(f"data {spec}: {str(folder)!r} is not a folder")
    return folder
