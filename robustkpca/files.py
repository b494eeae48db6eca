"""Files that are written whole or not at all, and folders that are written into for long."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any

from robustkpca.errors import OutputError, RunError

_PART = re.compile(r".+\.[0-9a-f]{8}\.part")
MOST_BYTES = 64 * 2**20  # of a text file that is read as a whole; ours are far smaller


def no_file(path: Path) -> str | None:
    """Why there is no file to be read (`~` being the home folder), in words; None where there is one."""
    path = Path(os.path.expanduser(path))
    try:
        if path.is_file():
            return None
        return f"expected a file, found {'a folder' if path.is_dir() else 'nothing'} there"
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"


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
        self.check()
        try:
            for part in reversed(_below(self.path, folder)):
                part.mkdir(exist_ok=True)
        except OSError as error:
            raise OutputError(f"cannot make {folder}: {error.strerror or error}") from None

    def check(self) -> None:
        """Raises RunError where this is no longer the folder that it was."""
        with contextlib.suppress(OSError):
            status = self.path.stat()
            if (status.st_dev, status.st_ino) == self._identity:
                return
        raise RunError(
            f"{self.path} was moved or removed while it was written; what is complete is where it lies now, and the "
            "same command with that folder goes on"
        )


class Outputs(Folder):
    """The folder of what a command makes. A list in it, `MARKER`, names the files that were made there: those are
    replaced and removed, and no others."""

    MARKER = ".robustkpca"

    def __init__(self, path: Path) -> None:
        """Raises RunError for a folder that is neither new nor empty, and not of this kind."""
        try:
            if path.exists() and not path.is_dir():
                raise RunError(f"{path}: expected a folder, got a file")
            begun = path.exists() and any(path.iterdir())
        except OSError as error:
            raise OutputError(f"{path}: {error.strerror or error}") from None
        if begun and not (path / self.MARKER).is_file():
            raise RunError(
                f"{path}: expected a new or empty folder, or one with outputs of ours ({self.MARKER} lists "
                "them); it holds something else"
            )
        super().__init__(path)
        if not begun:
            self._write_list(())

    def replace(self, files: Mapping[Path, bytes]) -> None:
        """Write these files and remove those of earlier calls. Raises RunError before it writes anything where one of
        them is there and is not ours."""
        earlier = self._read_list()
        for file in {*files, *earlier}:
            refuse_links(self.path, file)
            if file in files and file not in earlier and file.exists():
                raise RunError(f"{file}: is there and was not made by this command; move it, or choose another folder")
        self._write_list({*files, *earlier})  # first, so that what an interruption leaves is known to be ours
        for file, content in files.items():
            self.write(file, partial(_put, content))
        for file in earlier - files.keys():
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
                file.parent.rmdir()  # where nothing is left in it
        self._write_list(files)

    def _read_list(self) -> set[Path]:
        try:
            refuse_links(self.path, self.path / self.MARKER)
            names = json.loads(read_bounded(self.path / self.MARKER))["files"]
            files = {self.path / name for name in names}
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            raise RunError(f"{self.path / self.MARKER}: torn; choose another folder") from None
        if outside := [file for file in files if not file.is_relative_to(self.path) or ".." in file.parts]:
            raise RunError(f"{self.path / self.MARKER}: expected files in this folder, got {outside[0]}")
        return files

    def _write_list(self, files: Iterable[Path]) -> None:
        names = sorted(str(file.relative_to(self.path)) for file in files)
        text = json.dumps({"made_by": "robustkpca", "files": names}, indent=1) + "\n"
        self.write(self.path / self.MARKER, partial(_put, text.encode()))


def refuse_used(path: Path) -> None:
    """Raises RunError for anything but a new or empty folder."""
    try:
        used = path.exists() and (not path.is_dir() or any(path.iterdir()))
    except OSError as error:
        raise OutputError(f"{path}: {error.strerror or error}") from None
    if used:
        raise RunError(f"{path}: expected a new or empty folder")


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
        raise OSError(errno.EFBIG, f"larger than {most} bytes")
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
