"""A hash of the code that a network runs, where it is not a library's: weights alone do not decide what it answers."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor, nn

# Whose code is named by the versions in a request.
LIBRARIES = ("robustkpca", "torch", "timm", "torchvision", "transformers")


def code_hash(network: nn.Module) -> str | None:
    """SHA-256 (16 hex digits) of the functions of a network's modules; None where all are of LIBRARIES.

    Of their bytecode, so of what runs and not of what stands in a file by now: another version of Python gives another
    hash. Functions put into single modules count, and those that decorators wrap; functions that are merely called do
    not.
    """
    lines: set[str] = set()
    for name, module in network.named_modules():
        for place, function in _functions(module):
            if (function.__module__ or "").partition(".")[0] not in LIBRARIES:
                where = name if place == "" else place  # those of a class stand once, however many modules are of it
                lines.add(f"{where}.{function.__name__}: {_function(function, set())}")
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16] if lines else None


def _functions(module: nn.Module) -> Iterator[tuple[str, FunctionType]]:
    """The functions of a module, each with the class that it stands in, "" for one of this module alone."""
    for kind in type(module).__mro__:
        for value in vars(kind).values():
            function = getattr(value, "__func__", getattr(value, "fget", value))  # of methods of all kinds, properties
            if isinstance(function, FunctionType):
                yield kind.__qualname__, function
    for value in vars(module).values():
        if inspect.isfunction(value) or inspect.ismethod(value):
            yield "", inspect.unwrap(getattr(value, "__func__", value))


def _function(function: FunctionType, seen: set[int]) -> str:
    seen.add(id(function))
    held = [cell.cell_contents for cell in function.__closure__ or () if cell != type(cell)()]
    wrapped = [_function(f, seen) for f in held if isinstance(f, FunctionType) and id(f) not in seen]
    values = [*held, *(function.__defaults__ or ()), *sorted((function.__kwdefaults__ or {}).items())]
    return f"{_code(function.__code__)} {wrapped} {[_value(v) for v in values]}"


def _code(code: CodeType) -> str:
    constants = [_code(c) if isinstance(c, CodeType) else _value(c) for c in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {constants}"


def _value(value: Any) -> str:
    """What is the same in every process."""
    if isinstance(value, frozenset):
        return str(sorted(map(_value, value)))
    if isinstance(value, tuple):
        return str([*map(_value, value)])
    plain = value is None or isinstance(value, bool | int | float | complex | str | bytes)
    return repr(value) if plain else f"tensor {value.tolist()}" if isinstance(value, Tensor) else type(value).__name__
