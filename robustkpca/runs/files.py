"""How a run is kept on disk: its tables, its records and its arrays, each with a checksum of what it says. What writes
files whole is in `robustkpca.files`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from robustkpca.errors import RunError, brief
from robustkpca.files import MOST_BYTES, read_bounded, refuse_links

_CHECKSUM = "checksum"  # of JSON: the key with the checksum of all others
_CONTENT = b"robustkpca.content"  # of a table: the checksum of its columns, in the metadata
_ROW_BYTES = 4096  # more than a row takes, whatever the names of samples


# -- tables


def write_table(file: IO[bytes], table: pa.Table, metadata: Mapping[bytes, str]) -> None:
    """Write a table as Parquet, with checksums of its pages and of its content."""
    marked = table.replace_schema_metadata({**metadata, _CONTENT: table_checksum(table)})
    pq.write_table(marked, file, compression="zstd", write_page_checksum=True)


def read_table(file: Path, *, most: int, sealed: bool = False) -> pa.Table:
    """A Parquet file of at most `most` rows whose content is what was written.

    A page checksum does not cover the file's table of contents, by which one column can be read as another: what
    `write_table` wrote has a checksum of the content as well, and with `sealed` it must. Raises RunError for any other.
    """
    try:
        parquet = pq.ParquetFile(file, page_checksum_verification=True)
        groups = [parquet.metadata.row_group(i) for i in range(parquet.metadata.num_row_groups)]
        rows = max(parquet.metadata.num_rows, sum(group.num_rows for group in groups))
        if rows > most or sum(group.total_byte_size for group in groups) > MOST_BYTES + _ROW_BYTES * most:
            raise RunError(f"rows {file}: expected at most {most} rows, got {rows}")
        table = parquet.read(use_threads=False)
        checksum = (table.schema.metadata or {}).get(_CONTENT)
        if checksum is None and not sealed:
            return table
        if (checksum or b"").decode("ascii", "replace") == table_checksum(table):
            return table
    except (OSError, ValueError, OverflowError, MemoryError, pa.ArrowException) as error:
        raise RunError(f"rows {file}: torn ({brief(error)}); the command that made the run makes them again") from None
    raise RunError(
        f"rows {file}: changed by hand or damaged, their checksum does not match; the command that made the run "
        "makes them again"
    )


def table_checksum(table: pa.Table) -> str:
    """SHA-256 (32 hex digits) of names, types and values, the same for any layout in chunks and pages."""
    digest = hashlib.sha256(f"{len(table)}".encode())
    for name in table.column_names:
        column = table[name].combine_chunks()
        digest.update(f"\n{name} {column.type} ".encode())
        digest.update(_bytes(pc.is_valid(column)))
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            texts = pc.fill_null(column, "").cast(pa.large_binary())
            digest.update(_bytes(pc.binary_length(texts)))
            digest.update(b"".join(texts.to_pylist()))
        elif not pa.types.is_null(column.type):
            digest.update(_bytes(pc.fill_null(column, pa.scalar(0).cast(column.type))))
    return digest.hexdigest()[:32]


def _bytes(values: pa.Array | pa.ChunkedArray) -> bytes:
    array = values.to_numpy(zero_copy_only=False) if isinstance(values, pa.Array) else values.to_numpy()
    return np.ascontiguousarray(array).tobytes()


# -- JSON


def sealed_text(plain: Mapping[str, Any], indent: int | None = None) -> str:
    """Plain data as JSON, with a checksum of all that it says."""
    sealed = {**plain, _CHECKSUM: _checksum(plain)}
    return json.dumps(sealed, indent=indent, sort_keys=True, allow_nan=False)


def unsealed(content: bytes | str, where: str, *, sealed: bool = False) -> dict[str, Any]:
    """What `sealed_text` was given. Without a checksum (older runs have none) only where `sealed` does not demand one.

    Raises RunError where the text was changed after it was written, ValueError where it is no JSON object.
    """
    try:
        plain = json.loads(content)
        if not isinstance(plain, dict):
            raise ValueError(f"expected an object, got {type(plain).__name__}")
        checksum = plain.pop(_CHECKSUM, None)
        sealed = sealed or bool(plain.get("sealed"))  # run.json says it of itself
        if (checksum is not None or sealed) and checksum != _checksum(plain):
            raise RunError(f"{where}: changed by hand or damaged, its checksum does not match")
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return plain


def read_json(root: Path, file: Path, *, sealed: bool = False) -> dict[str, Any]:
    """The JSON object in a file of the run in `root`, see `unsealed`. Raises OSError where it cannot be read."""
    refuse_links(root, file)
    return unsealed(read_bounded(file), str(file), sealed=sealed)


def whole_json(file: Path) -> bool:
    """Whether there is a file that is not torn, whatever it says."""
    try:
        read_json(file.parent, file)
    except (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError):
        return False
    except (OSError, ValueError):
        return True
    return True


def _checksum(plain: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:32]


# -- arrays


def save_arrays(file: IO[bytes], arrays: Mapping[str, Any]) -> None:
    """Arrays as a compressed .npz."""
    np.savez_compressed(file, **arrays)
