"""Files that are whole or not there: how a run is kept on disk."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from robustkpca.errors import RunError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


@contextlib.contextmanager
def locked(file: Path, what: str) -> Iterator[None]:
    """Be the only process inside; the system lets go of the lock when the process ends, however it ends. Raises RunError where another is.

    Where the file system knows no locks, or the system has none of this kind, nobody is kept out.
    """
    try:
        handle = file.open("a")
    except OSError as error:
        raise RunError(f"cannot write {file}: {error.strerror or error}") from None
    with handle:
        if fcntl is not None:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunError(
                    f"{what} is being written by another process: wait for it, or choose another --out"
                ) from None
            except OSError:
                pass
        yield


def brief(error: Exception) -> str:
    """The first line of an error."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def read_table(file: Path) -> pa.Table:
    """A Parquet file whose pages are what was written. Raises RunError for any other."""
    try:
        return pq.ParquetFile(file, page_checksum_verification=True).read(use_threads=False)
    except (OSError, pa.ArrowException) as error:
        raise RunError(f"rows {file}: torn ({brief(error)}); the command that made the run makes them again") from None


def whole_json(file: Path) -> bool:
    """Whether there is a file with JSON in it."""
    try:
        json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def save_arrays(path: Path, arrays: dict[str, Any]) -> None:
    """Arrays as a compressed .npz, whatever the name ends in."""
    with path.open("wb") as file:  # a name would be given the suffix .npz
        np.savez_compressed(file, **arrays)


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Write under a temporary name, then rename: a file that has its name is whole, also after the power has gone.

    The temporary name is this call's own, so several processes may write one file at once: the last to rename it wins.
    """
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(part)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and path.exists():
            return  # another process wrote the same in the meantime, and has removed what was left half written
        raise RunError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def write_files(files: Mapping[Path, bytes]) -> None:
    """Each of several files with its content, see `write_whole`."""
    for file, content in files.items():
        write_whole(file, partial(Path.write_bytes, data=content))
