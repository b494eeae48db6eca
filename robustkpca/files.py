"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from robustkpca.errors import RobustKPCAError, RunError


def write_whole(path: Path, write: Callable[[Path], Any], *, error: type[RobustKPCAError] = RunError) -> None:
    """Write under a temporary name, then rename: a file that has its name is whole, also after the power has gone.

    Args:
        path: the file; its folder is made where there is none.
        write: called with the temporary name, which it fills.
        error: what is raised, with one line that names `path`, where the file cannot be written.
    """
    # The temporary name is this call's own: several processes may write one file at once, and the last to rename it
    # wins.
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(part)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as reason:
        if isinstance(reason, FileNotFoundError) and path.exists():
            return  # another process wrote the same in the meantime, and has removed what was left half written
        raise error(f"cannot write {path}: {reason.strerror or reason}") from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def write_files(files: Mapping[Path, bytes]) -> None:
    """Each of several files with its content, see `write_whole`."""
    for file, content in files.items():
        write_whole(file, partial(Path.write_bytes, data=content))
