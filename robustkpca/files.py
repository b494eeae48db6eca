"""Files that are written whole or not at all, and folders that are written into for long."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any

from robustkpca.errors import OutputError, RunError

_PART = re.compile(r".+\.[0-9a-f]{8}\.part")
MOST_BYTES = 64 * 2**20  # of a text file that is read as a whole; ours are far smaller


def write_whole(path: Path, fill: Callable[[IO[bytes]], Any]) -> None:
    """Write under a temporary name, then rename: a file that has its name is whole, also after the power has gone.

    Args:
        path: the file; its folder is made where there is none. A link of that name is replaced, not followed.
        fill: writes the content to the open file that it is given.

    Raises OutputError, with one line that names `path`, where the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from None
    _write(path, fill)


def write_files(files: Mapping[Path, bytes]) -> None:
    """Each of several files with its content, see `write_whole`."""
    for path, content in files.items():
        write_whole(path, partial(_put, content))


def _put(content: bytes, file: IO[bytes]) -> None:
    file.write(content)


class Folder:
    """A folder that a command writes into for as long as it works. It is made here, and never a second time: where it
    is moved or removed in the meantime, the next write is an error, and no second half begins at the old place. No link
    below it is followed.
    """

    def __init__(self, path: Path) -> None:
        """Raises OutputError where the folder cannot be made."""
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            status = path.stat()
        except OSError as error:
            raise OutputError(f"cannot make {path}: {error.strerror or error}") from None
        self._identity = (status.st_dev, status.st_ino)

    def write(self, path: Path, fill: Callable[[IO[bytes]], Any]) -> None:
        """As `write_whole`, for a file below this folder. Raises RunError for a link, or a folder that was moved."""
        self.make(path.parent)
        _write(path, fill)

    def make(self, folder: Path) -> None:
        """Make a folder below this one. Raises as `write` does."""
        refuse_links(self.path, folder)
        try:
            status = self.path.stat()
            if (status.st_dev, status.st_ino) != self._identity:
                raise FileNotFoundError
            for part in reversed(_below(self.path, folder)):
                part.mkdir(exist_ok=True)
        except FileNotFoundError:
            raise RunError(
                f"{self.path} was moved or removed while it was written; what is complete is where it lies now, and "
                "the same command with that folder goes on"
            ) from None
        except OSError as error:
            raise OutputError(f"cannot make {folder}: {error.strerror or error}") from None


def refuse_links(root: Path, path: Path) -> None:
    """Raises RunError where `path`, or a folder on the way to it from `root`, is a link: it may lead anywhere."""
    for part in _below(root, path):
        if part.is_symlink():
            raise RunError(f"{part}: expected a file or folder of our own, got a link, which is not followed")


def is_part(name: str) -> bool:
    """Whether a file of this name is what a killed process left half written."""
    return _PART.fullmatch(name) is not None


def read_bounded(path: Path, most: int = MOST_BYTES) -> bytes:
    """The content of a file of at most so many bytes. Raises OSError, for a larger one as well."""
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"more than {most} bytes")
    return content


def _below(root: Path, path: Path) -> list[Path]:
    """`path` and the folders above it that lie below `root`, the deepest first."""
    return [path, *path.parents][: len(path.parts) - len(root.parts)]


def _write(path: Path, fill: Callable[[IO[bytes]], Any]) -> None:
    # The temporary name is this call's own: several processes may write one file at once, and the last to rename it
    # wins. It must not exist, so that nothing planted under it is followed or overwritten.
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    made = False
    try:
        with part.open("xb") as file:
            made = True
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
        made = False
    except Exception as error:
        # torch reports a full disk by an error of its own, in whose context the system's is.
        reason = error if isinstance(error, OSError) else error.__context__
        if not isinstance(reason, OSError):
            raise
        if isinstance(reason, FileNotFoundError) and path.exists():
            return  # another process wrote the same in the meantime, and has removed what was left half written
        raise OutputError(f"cannot write {path}: {reason.strerror or reason}") from None
    finally:
        if made:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
