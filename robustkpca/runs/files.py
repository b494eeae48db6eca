"""How a run is kept on disk: its tables and its arrays. What writes files whole is in `robustkpca.files`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from robustkpca.errors import RunError, brief


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
