"""Reading a run: one row for each model, perturbation, budget and sample, and what was asked for.

`Run.open` reads a folder, or one Parquet file that `Run.export` made of it; `Run.in_memory` takes rows as they are.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from robustkpca.errors import RunError, SpecError, brief
from robustkpca.files import MOST_BYTES, refuse_links, write_whole
from robustkpca.runs import format1
from robustkpca.runs.files import read_json, read_table, sealed_text, unsealed, write_table
from robustkpca.runs.folder import MARK, RunFolder, chunk_ranges
from robustkpca.runs.records import Record, Summary
from robustkpca.runs.request import FORMAT, Manifest, Request
from robustkpca.runs.schema import flags_of, invalid_flags, schema_of
from robustkpca.suites.cell import CLEAN, AttackId, Cell
from robustkpca.suites.suite import Suite
from robustkpca.tasks.base import Task
from robustkpca.tasks.registry import task_named

_METADATA = b"robustkpca"  # of an exported file: manifest and records


@dataclass(frozen=True)
class CellStatus:
    """How far one cell of one model came. `reason` says why it has no result, else ""."""

    model: str
    cell: Cell
    rows: int
    of: int
    reason: str = ""

    @property
    def text(self) -> str:
        """`complete`, `not run`, `incomplete 300/1000`, `missing from the data`, `failed: ...` or `invalid: ...`."""
        if self.reason:
            return self.reason
        if not self.of:
            return "missing from the data"
        if self.rows == self.of:
            return "complete"
        return f"incomplete {self.rows}/{self.of}" if self.rows else "not run"

    @property
    def complete(self) -> bool:
        return self.text == "complete"


@dataclass(frozen=True)
class Examples:
    """The first K images of a set as they are kept to be looked at: with 8 bits, at an attack's headline budget.

    `sample`: ids (K,). `image`: uint8 (K, C, H, W), 255 for a pixel of 1. `added`: what the attack added, int8
    (K, C, H, W), in units of `step` (K,), a pixel value: attacked = image / 255 + step * added. What a model answered
    to the unrounded images is in the rows.
    """

    sample: NDArray[Any]
    image: NDArray[np.uint8]
    added: NDArray[np.int8]
    step: NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Run:
    """A run as it was stored; nothing in it changes."""

    manifest: Manifest
    path: Path | None = None  # a folder, an exported file, or None in memory
    _records: tuple[Record, ...] = ()
    _given: pd.DataFrame | None = None

    # -- what it is

    @property
    def name(self) -> str:
        return "in memory" if self.path is None else str(self.path)

    @property
    def request(self) -> Request:
        return self.manifest.request

    @cached_property
    def task(self) -> Task:
        return task_named(self.request.task)

    @property
    def models(self) -> list[str]:
        """Labels, in the order asked for; the first is the baseline row."""
        return self.request.labels

    @property
    def suites(self) -> tuple[Suite, ...]:
        return self.request.suites

    @property
    def n(self) -> int:
        return self.request.data.n

    @property
    def conditions(self) -> dict[Cell, int]:
        return self.request.conditions

    @property
    def cells(self) -> list[Cell]:
        return self.request.cells

    @cached_property
    def summary(self) -> Summary:
        """Times, failures and health, over all chunks."""
        return Summary.of(self._records)

    @property
    def health(self) -> dict[str, dict[str, Any]]:
        """What `Task.health` returned, by model."""
        return self.summary.health

    # -- opening

    @classmethod
    def open(cls, path: Path | str, *, records: bool = True) -> Run:
        """A run folder, its run.json, or an exported Parquet file. Raises RunError when it is none of these, or was
        changed. Without `records` those of a folder are left aside, and so is what is wrong with them."""
        path = Path(path)
        path = path.parent if path.name == "run.json" else path
        try:
            if path.is_file():
                text = (pq.read_schema(path).metadata or {})[_METADATA]
                plain = unsealed(text[: MOST_BYTES + 1], f"run {path}")
            else:
                plain = read_json(path, path / "run.json")
            if plain.get("format") == 1:
                manifest, old = format1.manifest_of(plain, f"run {path}")
                return cls(manifest, path, tuple(old))
            stored = plain.pop("records", None)
            manifest = _manifest(plain, path)
            if stored is None:
                files = RunFolder(path, manifest.request).stored_records() if records else ()
                stored = [_record(path, model, file, manifest) for model, file in files]
            parsed = [Record.parse(record, f"run {path}") for record in stored if record is not None]
            return cls(manifest, path, tuple(parsed))
        except FileNotFoundError:
            raise RunError(f"run {path}: expected a run folder with run.json, or an exported .parquet file") from None
        except (OSError, pa.ArrowException, ArithmeticError, LookupError, TypeError, ValueError, AttributeError,
                RecursionError, MemoryError, SpecError) as error:  # fmt: skip
            raise RunError(f"run {path}: cannot be read, torn or not a run ({brief(error)})") from None

    @classmethod
    def in_memory(cls, request: Request, rows: pd.DataFrame, records: Iterable[Record] = ()) -> Run:
        """A run made of rows, for tests and notebooks; columns that are missing are null."""
        manifest = Manifest(fingerprint=request.fingerprint, request=request, environment={})
        run = cls(manifest, None, tuple(records))
        table = pa.Table.from_pandas(rows.reindex(columns=schema_of(run.task).names), schema_of(run.task))
        return cls(manifest, None, tuple(records), table.to_pandas().reset_index(drop=True))

    def export(self, path: Path) -> None:
        """All rows, the manifest and the records as one Parquet file, with checksums of all it says. Raises RunError
        where `path` is there and is anything else than an export."""
        if not _is_export(path):
            raise RunError(f"{path}: is there and is no exported run; move it, or choose another name")
        as_today = {"format": FORMAT, "fingerprint": self.request.fingerprint, "sealed": True}
        plain = self.manifest.model_copy(update=as_today).model_dump(mode="json", by_alias=True)
        plain["records"] = [record.model_dump(mode="json", exclude_none=True) for record in self._records]
        table = pa.Table.from_pandas(self.rows, schema_of(self.task), preserve_index=False)
        write_whole(path, lambda file: write_table(file, table, {_METADATA: sealed_text(plain)}))

    # -- reading

    @property
    def progress(self) -> tuple[int, int]:
        """Chunks that are there, and chunks that were asked for."""
        return sum(1 for _ in self._folder.stored_rows()), self._folder.chunks

    @property
    def _folder(self) -> RunFolder:
        if self.path is None:
            raise RunError("run in memory: it has no folder")
        return RunFolder(self.path, self.request)

    def _read(self) -> pa.Table:
        sealed = self.manifest.sealed
        if self.path is not None and self.path.is_file():
            most = len(self.models) * sum(self.conditions.get(cell, self.n) for cell in self.cells)
            table = read_table(self.path, most=most, sealed=sealed)
        else:
            tables = [
                self._chunk(attack, file)
                for model, attack, first, file in self._folder.stored_rows()
                if self._counts(model, attack, first)
            ]
            table = pa.concat_tables(tables) if tables else schema_of(self.task).empty_table()
        return format1.rows_of(table) if self.manifest.format == 1 and "attack" in table.column_names else table

    def _chunk(self, attack: AttackId, file: Path) -> pa.Table:
        refuse_links(self._folder.path, file)
        table = read_table(file, most=self._folder.most_rows(attack), sealed=self.manifest.sealed)
        ours = self.manifest.fingerprint.encode()
        if (table.schema.metadata or {}).get(MARK, ours) != ours:
            raise RunError(f"rows {file}: of another request; the command that made the run makes them again")
        return table.replace_schema_metadata()

    def _counts(self, model: str, attack: AttackId, first: int) -> bool:
        """Whether a chunk counts: where an attack failed, those after it do not, whoever ran them."""
        failure = self.summary.failures.get((model, str(attack)))
        return failure is None or first < failure.first

    @cached_property
    def rows(self) -> pd.DataFrame:
        """Every row, ordered by model, perturbation and budget as asked for, then by sample. Each may occur once."""
        if self._given is not None:
            return self._given
        where, names = f"run {self.name}", schema_of(self.task).names
        try:
            table = self._read()
            if set(table.column_names) != set(names):
                raise RunError(f"{where}: expected columns {names}, got {table.column_names}")
            frame = table.select(names).to_pandas()
        except (OSError, pa.ArrowException) as error:
            raise RunError(f"{where}: rows cannot be read, torn? ({brief(error)})") from None
        order = {cell.texts: i for i, cell in enumerate(self.cells)}
        attacks, attack_names = pd.factorize(frame["perturbation"], use_na_sentinel=False)
        budgets, budget_names = pd.factorize(frame["budget"], use_na_sentinel=False)
        known = [[order.get((attack, budget), np.nan) for budget in budget_names] for attack in attack_names]
        place = np.array(known).reshape(len(attack_names), len(budget_names))[attacks, budgets]
        ranks = frame["model"].map({m: i for i, m in enumerate(self.models)})
        if len(frame) and (np.isnan(place).any() or ranks.isna().any()):
            raise RunError(f"{where}: it holds rows that its run.json does not name")
        frame = frame.assign(_m=ranks, _c=place).sort_values(["_m", "_c"], kind="stable")
        frame = frame.drop(columns=["_m", "_c"]).reset_index(drop=True)
        if frame.duplicated(["model", "perturbation", "budget", "sample"]).any():
            raise RunError(f"{where}: some samples occur twice in one cell")
        return frame

    def cell_rows(self, model: str, cell: Cell) -> pd.DataFrame:
        """Rows of one cell, indexed by sample id."""
        return self._groups.get((model, *cell.texts), self._none)

    @cached_property
    def _none(self) -> pd.DataFrame:
        return self.rows.iloc[:0].set_index("sample")

    @cached_property
    def _groups(self) -> dict[tuple[str, str, str], pd.DataFrame]:
        groups = self.rows.set_index("sample").groupby(["model", "perturbation", "budget"], sort=False)
        return {(str(m), str(a), str(b)): frame for (m, a, b), frame in groups}

    def examples(self, model: str, attack: AttackId) -> Examples | None:
        """The images kept of one attack, in the order of the set; None where there are none, as in an exported file."""
        if self.path is None or self.path.is_file():
            return None
        chunks = chunk_ranges(self.n, self.request.batch_size)
        parts = [self._examples(self._folder.examples(model, attack, chunk.start)) for chunk in chunks]
        arrays = zip(*(part for part in parts if part is not None), strict=True)
        joined = [np.concatenate(part) for part in arrays]
        return Examples(*joined) if joined else None

    def _examples(self, file: Path) -> list[NDArray[Any]] | None:
        """The arrays of `Examples` of one chunk; None where there are none, or they are torn."""
        refuse_links(self.path or file, file)
        try:
            with zipfile.ZipFile(file) as packed:
                if sum(info.file_size for info in packed.infolist()) > 4 * MOST_BYTES:
                    return None
            with np.load(file, allow_pickle=False) as arrays:
                image, added, step, sample = (arrays[name] for name in ("image", "added", "step", "sample"))
        except (OSError, ValueError, TypeError, KeyError, EOFError, MemoryError, zlib.error, zipfile.BadZipFile):
            return None
        whole = image.ndim == 4 and image.shape == added.shape and step.shape == sample.shape == image.shape[:1]
        return [sample, image, added, step] if whole and image.dtype == np.uint8 and added.dtype == np.int8 else None

    # -- how far it came

    def status(self, model: str, cell: Cell) -> CellStatus:
        return self._statuses[model, cell]

    @property
    def statuses(self) -> list[CellStatus]:
        return list(self._statuses.values())

    @cached_property
    def _statuses(self) -> dict[tuple[str, Cell], CellStatus]:
        keys, known = ["model", "perturbation", "budget"], flags_of(self.task)
        raised = invalid_flags(self.rows, self.task)
        raised = raised[raised != ""]
        flagged = self.rows.loc[raised.index, keys].assign(flags=raised).groupby(keys, sort=False)["flags"]
        flags_by_cell = flagged.agg(list).to_dict()
        statuses = {}
        for model in self.models:
            for cell in self.cells:
                key = (model, *cell.texts)
                count, flags = len(self._groups.get(key, self._none)), flags_by_cell.get(key)
                failures = self.summary.failures  # of one attack, or of the whole model
                failure = failures.get((model, str(cell.attack))) or failures.get((model, CLEAN))
                reason = ""
                if failure:
                    reason = f"failed: {failure.reason}"
                elif flags:
                    names = sorted({name for row in flags for name in row.split(",")})
                    meanings = ", ".join(known.get(name, name) for name in names)
                    reason = f"invalid: {len(flags)} of {count} rows: {meanings}"
                of = self.conditions.get(cell, self.n)
                statuses[model, cell] = CellStatus(model, cell, count, of, reason)
        return statuses


def _is_export(path: Path) -> bool:
    """Whether there is nothing yet, or an exported run."""
    try:
        return path.stat().st_size == 0 or _METADATA in (pq.read_schema(path).metadata or {})
    except FileNotFoundError:
        return True
    except (OSError, ValueError, pa.ArrowException):
        return False


def _manifest(plain: dict[str, Any], path: Path) -> Manifest:
    if plain.get("format") != FORMAT:
        raise RunError(f"run {path}: expected format 1 or {FORMAT}, got {plain.get('format')}")
    manifest: Manifest = Manifest.parse(plain, f"run {path}")
    if manifest.fingerprint != manifest.request.fingerprint:
        raise RunError(f"run {path}: run.json was changed by hand, its fingerprint does not match its request")
    return manifest


def _record(path: Path, model: str, file: Path, manifest: Manifest) -> dict[str, Any] | None:
    """The content of a record; None where it is torn: what it is of is then made again."""
    try:
        record = read_json(path, file, sealed=manifest.sealed)
    except (OSError, ValueError):
        return None
    if record.get("model") != model:
        raise RunError(f"{file}: expected a record of {model}, got one of {record.get('model')!r:.80}")
    return record
