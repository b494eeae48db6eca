"""What others add: registries of named objects, entry points of other packages, and objects by import path.

There are three ways in, and none of them needs a change of this package:

- a decorator, `@REGISTRY.register("name")`, for code that is imported anyway;
- an entry point, `mine = "mypkg.attacks:Mine"` in the group `robustkpca.attacks`, for a package that is installed;
- an import path, `mypkg.attacks:Mine`, for code in the working directory that is not installed.

Whatever goes wrong in code of others is one SpecError line that names the code, with the exception as its cause.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import keyword
import os
import sys
import sysconfig
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from types import CodeType, ModuleType, TracebackType
from typing import Any, Generic, TypeVar, cast

from robustkpca.errors import RobustKPCAError, SpecError, unknown

T = TypeVar("T")
F = TypeVar("F")

PREFIXES = ("timm", "hf-hub", "own")  # words before a colon that name a family of models, never a module
_LISTED = 20  # names of a module that a message lists
_LONGEST = 300  # characters of a foreign exception's message
_LIBRARIES = tuple(
    os.path.join(os.path.realpath(sysconfig.get_path(n)), "") for n in ("stdlib", "platstdlib", "purelib", "platlib")
)
_PASSED_OVER = (  # this package and the import machinery, in tracebacks
    os.path.join(os.path.dirname(os.path.realpath(__file__)), ""),
    os.path.join(os.path.dirname(os.path.realpath(importlib.__file__)), ""),
)
_path_lock = threading.RLock()  # sys.path belongs to the whole process


class Registry(Mapping[str, T], Generic[T]):
    """Objects by name: built-ins, what the decorator adds, and entry points of other packages, in this order.

    Listing names (iteration, `len`, `in`, `keys`) imports nothing. `registry[name]` imports that one object; `values`
    and `items` import all. A built-in or registered name is never replaced by an entry point of another package: that
    one is left out, with a warning when the name is asked for.

    Args:
        kind: the word in messages, such as "attack method".
        group: entry-point group, such as "robustkpca.attacks", read again when sys.path has changed.
        lazy: name -> "package.module:object" of built-ins, imported when they are asked for.
    """

    def __init__(self, kind: str, group: str | None = None, lazy: Mapping[str, str] | None = None) -> None:
        self.kind = kind
        self.group = group
        self._lazy = dict(lazy or {})
        self._registered: dict[str, T] = {}
        self._loaded: dict[str, T] = {}  # package.module:object -> object, of what was asked for
        self._points: dict[str, list[metadata.EntryPoint]] = {}
        self._points_of: tuple[str, ...] | None = None  # the sys.path that `_points` was read from

    def register(self, name: str) -> Callable[[F], F]:
        """A decorator that adds what it decorates under `name`, and returns it unchanged.

        The same definition may come again (a reloaded module, a notebook cell that is run twice) and replaces itself.

        Raises:
            SpecError: the name belongs to something else already; the message names both.
        """
        if not isinstance(name, str) or not name:
            raise SpecError(f'{self.kind}: expected a name, as in @register("name"), got {name!r}')

        def add(item: F) -> F:
            home = _home(item)
            taken = _home(self._registered[name]) if name in self._registered else self._lazy.get(name, home)
            # With no qualified name, or a local one, an equal home does not mean an equal definition.
            again = taken == home and hasattr(item, "__qualname__") and "<" not in home
            if taken != home or (name in self._registered and self._registered[name] is not item and not again):
                raise SpecError(f"{self.kind} {name!r}: the name is given twice, by {taken} and by {home}")
            self._registered[name] = cast(T, item)
            return item

        return add

    def __getitem__(self, name: str) -> T:
        """The object of that name.

        Raises:
            SpecError: there is no such name; or it is an entry point that cannot be loaded, or that two packages have.
        """
        points = self._entry_points().get(name, [])
        if name in self._registered:
            home = _home(self._registered[name])
        elif name in self._lazy:
            home = self._lazy[name]
        elif not points:
            names = list(self)
            text = unknown(self.kind, str(name), names) if names else f"unknown {self.kind} {name!r}. None is available"
            raise SpecError(text)
        else:
            return self._from_entry_point(name, points)
        for point in points:
            if not _same(point.value, home):
                warnings.warn(f"{self.kind} {name!r} is {home}; {_describe(point)} is left out", stacklevel=2)
        if name in self._registered:
            return self._registered[name]
        if home not in self._loaded:
            self._loaded[home] = metadata.EntryPoint(name, home, self.kind).load()  # imports module:object
        return self._loaded[home]

    def get(self, name: str, default: Any = None) -> Any:
        """The object of that name, or `default` where there is no such name; what cannot be loaded is an error."""
        return self[name] if name in self else default  # noqa: SIM401 (it is what this method is)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._lazy, *self._registered, *self._entry_points()]))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return name in self._lazy or name in self._registered or name in self._entry_points()

    def _entry_points(self) -> dict[str, list[metadata.EntryPoint]]:
        """Entry points of the group by name: a list of one, unless two packages use the same name."""
        if self.group is not None and self._points_of != tuple(sys.path):
            by_name: dict[str, list[metadata.EntryPoint]] = {}
            for point in _entry_points_of(self.group):
                same = by_name.setdefault(point.name, [])
                if all(point.value != other.value for other in same):
                    same.append(point)
            self._points, self._points_of = by_name, tuple(sys.path)
        return self._points

    def _from_entry_point(self, name: str, points: list[metadata.EntryPoint]) -> T:
        if len(points) > 1:
            both = " and by ".join(map(_describe, points))
            raise SpecError(f"{self.kind} {name!r}: the name is given twice, by {both}")
        (point,) = points
        if point.value not in self._loaded:
            with _one_line(f"{self.kind} {name!r}: loading {_describe(point)}", point.value):
                item = point.load()
            if name in self._registered:  # its module used the decorator as well
                return self[name]
            self._loaded[point.value] = item
        return self._loaded[point.value]


def is_import_path(text: str, reserved: Collection[str] = ()) -> bool:
    """Whether `text` is of the form `package.module:attribute`, and so cannot mean `timm:NAME` or `NAME:DIR`.

    Three things must hold:

    1. Both sides of the one colon are Python names, joined by dots. `hf-hub:x/y`, `imagenet:/data` and `C:\\x` are not.
    2. The part before the colon is none of PREFIXES and none of `reserved`, the names that have a meaning of their own
       before a colon (data sets, say). `timm:vit_tiny` is not an import path; `timm.models:create_model` is.
    3. The part before the colon has a dot, or a module of that name is in the working directory, installed or imported.
       A folder without `__init__.py` is no such module: beside a folder `pictures`, `pictures:val` is none.

    Nothing is imported.
    """
    module, colon, attribute = text.partition(":")
    if not (colon and _dotted(module) and _dotted(attribute)) or module in PREFIXES or module in reserved:
        return False
    if "." in module:
        return True
    try:
        with _working_directory_first():
            spec = importlib.util.find_spec(module)
    except ValueError:  # imported without a spec, as __main__ is
        return True
    return spec is not None and (spec.origin is not None or spec.submodule_search_locations is None)


def import_object(path: str, *, what: str) -> Any:
    """The object at `package.module:attribute`, from the working directory first, then from what is installed.

    The working directory is on sys.path only while the module is imported; afterwards sys.path is as before. A module
    of that name that is imported already is used as it is.

    Args:
        path: `package.module:attribute`; the attribute may be dotted.
        what: the word in messages, such as "model" or "--model".

    Raises:
        SpecError: the form is wrong; the module does not exist, raises or calls sys.exit; the attribute does not exist.
    """
    name, colon, attribute = path.partition(":")
    if not (colon and _dotted(name) and _dotted(attribute)):
        raise SpecError(f"{what}: expected package.module:object, got {path!r}")
    with _working_directory_first() as folder:
        with _one_line(f"{what} {path}: importing {name}", path):
            try:
                module = importlib.import_module(name)
            except ModuleNotFoundError as error:
                if not _absent(error, name):
                    raise
                raise SpecError(f"{what} {path}: {_no_module(str(error.name), folder)}") from error
        item: Any = module
        for part in attribute.split("."):
            with _one_line(f"{what} {path}: looking up {part}", path):
                try:
                    item = getattr(item, part)
                except AttributeError as error:
                    raise SpecError(f"{what} {path}: {_no_attribute(item, part, module)}") from error
    return item


def call_object(path: str, /, *args: Any, what: str, expected: type | tuple[type, ...], **kwargs: Any) -> Any:
    """What the object at `path` returns when it is called, or the object itself where it is an `expected` already.

    The working directory is first on sys.path during the call as well, for imports within functions. An object that is
    taken as it is gets no arguments.

    Args:
        path: `package.module:attribute`, see `import_object`.
        what: the word in messages, such as "model".
        expected: the type that must come out, or several of them.
        *args, **kwargs: what the object is called with.

    Raises:
        SpecError: as in `import_object`; or the call raises, or returns something else. KeyboardInterrupt and a
            RobustKPCAError of the called code pass through.
    """
    item = import_object(path, what=what)
    if isinstance(item, expected):
        return item
    types = expected if isinstance(expected, tuple) else (expected,)
    wanted = " or ".join(f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}" for name in map(_type_name, types))
    if not callable(item):
        raise SpecError(f"{what} {path}: expected {wanted}, or a function that returns one, got {_got(item)}")
    code = getattr(item, "__code__", getattr(item.__init__, "__code__", None))
    with _working_directory_first(), _one_line(f"{what} {path}: the call", path, code):
        result = item(*args, **kwargs)
    if not isinstance(result, expected):
        raise SpecError(f"{what}: expected {wanted}, got {_got(result)} from {path}")
    return result


def _dotted(text: str) -> bool:
    return all(part.isidentifier() and not keyword.iskeyword(part) for part in text.split("."))


@contextmanager
def _working_directory_first() -> Iterator[str]:
    """The working directory first on sys.path; then the same list as before, whatever code within did to it."""
    try:
        folder = os.getcwd()
    except OSError:
        raise SpecError("the working directory does not exist any more") from None
    with _path_lock:
        path = sys.path
        before = list(path)
        path.insert(0, folder)
        importlib.invalidate_caches()  # a module that was written a moment ago
        try:
            yield folder
        finally:
            path[:] = before
            sys.path = path


@contextmanager
def _one_line(subject: str, path: str, code: CodeType | None = None) -> Iterator[None]:
    """What foreign code raises within, sys.exit included, becomes one SpecError line; KeyboardInterrupt passes."""
    try:
        yield
    except RobustKPCAError:
        raise
    except (Exception, SystemExit) as error:
        raise SpecError(f"{subject} raised {_raised(error, path, code)}") from error


def _entry_points_of(group: str) -> list[metadata.EntryPoint]:
    """A package whose metadata cannot be read is passed over, and hides nobody else's entry points."""
    try:
        return list(metadata.entry_points(group=group))
    except Exception:  # a malformed entry_points.txt; which one, importlib does not say
        points: list[metadata.EntryPoint] = []
        for distribution in metadata.distributions():
            try:
                points += distribution.entry_points.select(group=group)
            except Exception:
                continue
        return points


def _describe(point: metadata.EntryPoint) -> str:
    try:
        owner = f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown package"
    except Exception:  # a package without readable metadata
        owner = "an unknown package"
    return f"the entry point {point.name} = {point.value} of {owner}"


def _home(item: object) -> str:
    name = getattr(item, "__qualname__", None)
    if name is None:
        return f"an object of {type(item).__module__}:{type(item).__qualname__}"
    return f"{getattr(item, '__module__', None) or '?'}:{name}"


def _same(value: str, home: str) -> bool:
    """Whether an entry point is what is registered: the same name of the same package, though it may be re-exported."""
    (module, _, name), (other, _, other_name) = value.partition(":"), home.partition(":")
    return name == other_name and module.partition(".")[0] == other.partition(".")[0]


def _absent(error: ModuleNotFoundError, name: str) -> bool:
    """Whether the asked module or a package above it is missing, rather than something that its code imports."""
    asked = error.name is not None and (name == error.name or name.startswith(f"{error.name}."))
    return asked and not any(True for _ in _foreign_frames(error.__traceback__))


def _no_module(name: str, folder: str) -> str:
    message = f"there is no module {name} (looked in {folder}, then among the installed packages)"
    parent = sys.modules.get(name.rpartition(".")[0])
    if parent is None:
        return message
    where = getattr(parent, "__file__", None) or ", ".join(getattr(parent, "__path__", ()))
    return f"{message}; {parent.__name__} is {where}"


def _no_attribute(item: object, name: str, module: ModuleType) -> str:
    """The closest name, then what `item` defines (what it only imports, where that is nothing), then the file."""
    names = list(getattr(item, "__all__", ()))
    if not names:
        public = {n: v for n, v in getattr(item, "__dict__", {}).items() if not n.startswith("_")}
        public = {n: v for n, v in public.items() if not isinstance(v, ModuleType)}
        defined = [n for n, v in public.items() if getattr(v, "__module__", module.__name__) == module.__name__]
        names = defined or list(public)
    where = getattr(module, "__file__", None) or module.__name__
    if not names:
        return f"unknown name {name!r}; nothing is defined in {where}"
    listed = list(dict.fromkeys([*difflib.get_close_matches(name, names, n=1), *names]))
    more = f" and {len(listed) - _LISTED} more" if len(listed) > _LISTED else ""
    return f"{unknown('name', name, listed[:_LISTED])}{more} (in {where})"


def _raised(error: BaseException, path: str, code: CodeType | None = None) -> str:
    """`Type: message, at file:line`, the deepest line of the user's code; that of `code` where none was reached."""
    try:
        text = str(error.msg if isinstance(error, SyntaxError) else error)
    except Exception:  # an exception that cannot print itself
        text = ""
    text = " ".join(text.split())
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
    reason = f"{type(error).__name__}: {text}" if text else type(error).__name__
    place = (code.co_filename, code.co_firstlineno) if code else None
    frames = list(_foreign_frames(error.__traceback__))
    if isinstance(error, SyntaxError) and error.filename and error.lineno and os.path.isfile(error.filename):
        place = os.path.realpath(error.filename), error.lineno
    elif frames:
        root = path.partition(":")[0].partition(".")[0]
        users = [f for f in frames if not f[0].startswith(_LIBRARIES) or f[2].partition(".")[0] == root]
        place = (users or frames)[-1][:2]
    return f"{reason}, at {_short(place[0])}:{place[1]}" if place else reason


def _foreign_frames(traceback: TracebackType | None) -> Iterator[tuple[str, int, str]]:
    """File, line and module of each frame, outermost first, without this package's and the import machinery's."""
    while traceback is not None:
        frame = traceback.tb_frame
        file = frame.f_code.co_filename
        real = os.path.realpath(file)
        if not file.startswith("<frozen ") and not real.startswith(_PASSED_OVER):
            yield real, traceback.tb_lineno, str(frame.f_globals.get("__name__", ""))
        traceback = traceback.tb_next


def _short(file: str) -> str:
    try:
        return file.removeprefix(os.path.join(os.path.realpath(os.curdir), ""))
    except OSError:  # there is no working directory any more
        return file


def _type_name(kind: type) -> str:
    """As users import it: `Classifier` for ours, `int` for Python's, else with the shortest module that has it."""
    if kind.__module__ == "builtins" or kind.__module__.partition(".")[0] == "robustkpca":
        return kind.__qualname__
    parts = kind.__module__.split(".")
    for count in range(1, len(parts)):
        module = sys.modules.get(".".join(parts[:count]))
        if module is not None and vars(module).get(kind.__name__) is kind:
            return f"{module.__name__}.{kind.__name__}"
    return f"{kind.__module__}.{kind.__qualname__}"


def _got(item: object) -> str:
    if isinstance(item, type):
        return f"the class {_type_name(item)}"
    return "None" if item is None else _type_name(type(item))
