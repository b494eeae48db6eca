"""Plain data from TOML files: the base of all specifications, with one line for what is wrong in them."""

from __future__ import annotations

import os
import tomllib
import unicodedata
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from robustkpca.errors import SpecError, brief
from robustkpca.files import MOST_BYTES, read_bounded

_MOST_TOML = 2**18  # bytes; the largest of ours has a few thousand
_MOST_DOTS = 500  # in a line


class Frozen(BaseModel):
    """Base of all specs: immutable, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    @classmethod
    def parse(cls, data: dict[str, Any], what: str) -> Self:
        """Validate, with one line that names the first thing that is wrong."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            errors = error.errors()
            # A misspelt key first: it is why another one is missing.
            first = next((e for e in errors if e["type"] == "extra_forbidden"), errors[0])
            where = f"{what}: {'.'.join(map(str, first['loc'])) or 'the whole'}"
            if first["loc"] and what == "--" + str(first["loc"][0]).replace("_", "-"):
                where = what  # an option's name says where
            shown = repr(first["input"])
            got = "" if first["type"] == "missing" or len(shown) > 80 else f" (got {shown})"
            text = first["msg"].removeprefix("Value error, ")
            more = f" And {error.error_count() - 1} more." if error.error_count() > 1 else ""
            raise SpecError(f"{where}: {text}{got}.{more}") from None


def data_folder(packed: str, source: str) -> Path:
    """Data files of the package: `packed` inside a wheel, `source` at the top of a checkout."""
    here = Path(__file__).resolve().parent
    return here / packed if (here / packed).is_dir() else here.parent / source


def composed(text: str) -> str:
    """The text with composed letters (NFC): file systems and editors differ in how they write é."""
    return unicodedata.normalize("NFC", text)


def read_text(path: Path, most: int = MOST_BYTES) -> str:
    """The content of a UTF-8 file of at most so many bytes, `~` in its path being the home folder; some editors begin
    it with a byte-order mark, which is no part of it."""
    return read_bounded(Path(os.path.expanduser(path)), most).decode("utf-8-sig")


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The content of a TOML file, its letters composed (see `composed`).

    Raises:
        SpecError: one line that names the file, which cannot be read.
    """
    try:
        text = read_text(path, _MOST_TOML)
        if any(line.count(".") > _MOST_DOTS for line in text.splitlines()):  # for a key tomllib takes their square
            raise RecursionError
        return {composed(key): _composed_values(value) for key, value in tomllib.loads(text).items()}
    except OSError as error:
        raise SpecError(f"{what} {path}: {error.strerror or error}") from None
    except RecursionError:
        raise SpecError(f"{what} {path}: nested too deeply") from None
    except ValueError as error:  # of tomllib, of Unicode, or for a number of thousands of digits
        raise SpecError(f"{what} {path}: not TOML ({brief(error)})") from None


def _composed_values(value: Any) -> Any:
    """Names as they are compared; the path of a file that is there stays as it is written."""
    if isinstance(value, dict):
        return {composed(key): _composed_values(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_composed_values(item) for item in value]
    if not isinstance(value, str) or value.isascii() or os.path.exists(os.path.expanduser(value)):
        return value
    return composed(value)
