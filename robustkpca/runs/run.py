"""Outcomes: one row per model, attack, budget and sample, and the folder they are kept in.

A run folder holds `run.json` (what was asked, where it ran, how far it came) and `rows/MODEL/ATTACK/CHUNK.parquet`. A chunk is
written to a temporary name and renamed, so a file that exists is whole. `Run.export` writes all of it as one Parquet file whose
metadata holds run.json; `Run.open` reads either.
"""

from __future__ import annotations

import contextlib
import json
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from robustkpca.errors import RunError, brief
from robustkpca.files import write_whole
from robustkpca.runs.files import locked, read_table, save_arrays, whole_json
from robustkpca.runs.request import differences, fingerprint
from robustkpca.runs.schema import FLAGS, FORMAT, SCHEMA
from robustkpca.suites.cell import CLEAN, Cell
from robustkpca.suites.suite import Suite

LOCK = ".lock"
_OURS = {LOCK, "run.json", "run.json.part", "rows", "examples"}
_MARK = b"robustkpca.run"  # the fingerprint of the request, in each chunk's metadata


@dataclass(frozen=True)
class CellStatus:
    """How far one cell of one model came. `reason` says why it has no figure, else ""."""

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


@dataclass(frozen=True)
class Examples:
    """A few samples at an attack's largest budget: images and what was added, float16 (K, C, H, W), in pixels; K labels and predictions."""

    budget: Any
    sample: NDArray[Any]
    image: NDArray[np.float16]
    added: NDArray[np.float16]
    label: NDArray[np.int64]
    clean_prediction: NDArray[np.int64]
    prediction: NDArray[np.int64]


class Run:
    """A stored run, open for reading; `start` opens one for writing."""

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path, self.manifest = path, manifest

    # -- what it is

    @property
    def request(self) -> dict[str, Any]:
        return self.manifest["request"]

    @property
    def models(self) -> list[str]:
        """Labels, in the order asked for; the first is the baseline row."""
        return [m["label"] for m in self.request["models"]]

    @cached_property
    def suites(self) -> list[Suite]:
        return [Suite.parse(suite, f"run {self.path}") for suite in self.request["suites"]]

    @property
    def probes(self) -> dict[str, dict[str, Any]]:
        """What `probes.probe` found, by model."""
        return self.manifest.setdefault("probes", {})

    @property
    def n(self) -> int:
        return self.request["data"]["n"]

    @cached_property
    def conditions(self) -> dict[Cell, int]:
        """The cells that need no attack (clean, or the conditions of a released set), and how many samples each has."""
        return {Cell(attack, budget): n for attack, budget, n in self.request["data"]["conditions"]}

    @property
    def cells(self) -> list[Cell]:
        """Every column asked for, unattacked first."""
        return [*self.conditions, *(cell for suite in self.suites for cell in suite.cells)]

    # -- opening

    @classmethod
    def open(cls, path: Path | str) -> Run:
        """A run folder, its run.json, or an exported Parquet file. Raises RunError when it is none of these."""
        path = Path(path)
        path = path.parent if path.name == "run.json" else path
        try:
            if path.is_file():
                metadata = pq.read_schema(path).metadata or {}
                text = metadata[b"robustkpca"].decode()
            else:
                text = (path / "run.json").read_text(encoding="utf-8")
            manifest = json.loads(text)
            if manifest["format"] != FORMAT:
                raise RunError(f"run {path}: expected format {FORMAT}, got {manifest['format']}")
            if manifest["fingerprint"] != fingerprint(manifest["request"]):
                raise RunError(f"run {path}: run.json was changed by hand, its fingerprint does not match its request")
        except FileNotFoundError:
            raise RunError(f"run {path}: expected a run folder with run.json, or an exported .parquet file") from None
        except (OSError, pa.ArrowException, KeyError, TypeError, ValueError) as error:
            raise RunError(f"run {path}: cannot be read, torn or not a run ({brief(error)})") from None
        return cls(path, manifest)

    @classmethod
    def start(cls, path: Path, request: dict[str, Any], environment: dict[str, Any]) -> Run:
        """Open a folder for this request: a new one, or one that an earlier call with the same request began."""
        mark = fingerprint(request)
        if whole_json(path / "run.json"):
            run = cls.open(path)
            if run.manifest["fingerprint"] != mark:
                lines = differences(request, run.request)
                more = f" and {len(lines) - 3} more" if len(lines) > 3 else ""
                raise RunError(f"run {path} holds another request ({'; '.join(lines[:3])}{more}); choose another --out")
            return run
        # Where run.json is lost or torn the chunks still say which request they are of.
        if path.exists() and (not path.is_dir() or {file.name for file in path.iterdir()} - _OURS):
            raise RunError(
                f"--out {path}: expected an empty or new folder, or a run to continue; it holds something else"
            )
        run = cls(
            path,
            {"format": FORMAT, "fingerprint": mark, "request": request, "environment": environment, "failures": {}},
        )
        run.save_manifest()
        return run

    # -- writing

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Be the only one to write here, see `storage.locked`."""
        with locked(self.path / LOCK, f"run {self.path}"):
            yield

    def save_manifest(self) -> None:
        text = json.dumps(self.manifest, indent=1, sort_keys=True, allow_nan=False)
        write_whole(self.path / "run.json", lambda part: part.write_text(text + "\n", encoding="utf-8"))

    def chunk_path(self, model: str, attack: str, first: int) -> Path:
        """Where the rows of the chunk that begins at sample number `first` lie."""
        return self.path / "rows" / str(self.models.index(model)) / attack.replace("/", "+") / f"{first:07d}.parquet"

    def read_chunk(self, model: str, attack: str, first: int, ids: Sequence[str]) -> pd.DataFrame | None:
        """The rows of the chunk that begins at sample number `first`, if it is there and whole: each of its samples `ids` once in each of the
        attack's cells, as this request asks for. None for a file that is torn or holds anything else, and has to be made again."""
        try:
            table = read_table(self.chunk_path(model, attack, first))
        except RunError:
            return None
        made_by = (table.schema.metadata or {}).get(_MARK, b"").decode()
        rows = table.to_pandas()
        if list(rows.columns) != SCHEMA.names or made_by not in ("", self.manifest["fingerprint"]):
            return None
        cells = list(zip(rows["attack"], rows["budget"], strict=True))
        budgets = next((s.budgets for s in self.suites if attack in s.attacks), None)
        if budgets is None:  # unattacked: each sample in a condition of the set's own
            whole = list(rows["sample"]) == list(ids) and {Cell(*cell) for cell in cells} <= self.conditions.keys()
        else:
            expected = [(attack, budget, sample) for budget in budgets for sample in ids]
            whole = [(*cell, sample) for cell, sample in zip(cells, rows["sample"], strict=True)] == expected
        sound = (rows["model"] == model).all() and (rows["correct"] == (rows["prediction"] == rows["label"])).all()
        return rows if whole and sound else None

    def write_chunk(self, model: str, attack: str, first: int, rows: pd.DataFrame) -> None:
        table = pa.Table.from_pandas(rows, SCHEMA, preserve_index=False)
        table = table.replace_schema_metadata({_MARK: self.manifest["fingerprint"]})
        target = self.chunk_path(model, attack, first)
        write_whole(target, lambda part: pq.write_table(table, part, compression="zstd", write_page_checksum=True))

    def write_examples(self, model: str, attack: str, examples: dict[str, Any]) -> None:
        """A few attacked images, see `Examples`."""
        write_whole(self._examples_path(model, attack), lambda part: save_arrays(part, examples))

    def examples(self, model: str, attack: str) -> Examples | None:
        """The images kept of one attack; None where there are none, as in an exported file."""
        try:
            with np.load(self._examples_path(model, attack), allow_pickle=False) as arrays:
                return Examples(**{name: arrays[name] for name in arrays.files})
        except (OSError, ValueError, TypeError, zipfile.BadZipFile):
            return None

    def _examples_path(self, model: str, attack: str) -> Path:
        return self.path / "examples" / str(self.models.index(model)) / f"{attack.replace('/', '+')}.npz"

    def fail(self, model: str, attack: str, reason: str) -> None:
        """Note that an attack could not be run on a model; `save_manifest` keeps it."""
        self.manifest["failures"][f"{model}\t{attack}"] = reason

    @contextlib.contextmanager
    def timed(self, model: str, attack: str, images: int) -> Iterator[None]:
        """Add the wall time of the block to what this attack took on this model, and `images` to how many it was for."""
        start = time.perf_counter()
        yield
        times = self.manifest.setdefault("times", {}).setdefault(f"{model}\t{attack}", [0.0, 0])
        times[0] = round(times[0] + time.perf_counter() - start, 4)
        times[1] += images

    def export(self, path: Path) -> None:
        """All rows and run.json as one Parquet file."""
        metadata = {"robustkpca": json.dumps(self.manifest, sort_keys=True, allow_nan=False)}
        table = pa.Table.from_pandas(self.rows, SCHEMA, preserve_index=False).replace_schema_metadata(metadata)
        write_whole(path, lambda part: pq.write_table(table, part, compression="zstd"))

    # -- reading

    @property
    def progress(self) -> tuple[int, int]:
        """Chunks that are there, and chunks that were asked for."""
        files = list(self._files())
        return sum(file.exists() for file in files), len(files)

    def _files(self) -> Iterator[Path]:
        """Where the chunks lie that were asked for, whether they are there or not; nothing else in the folder counts."""
        attacks = [CLEAN, *(label for suite in self.suites for label in suite.attacks)]
        for model in self.models:
            for attack in attacks:
                for chunk in chunk_ranges(self.n, self.request["batch_size"]):
                    yield self.chunk_path(model, attack, chunk.start)

    @cached_property
    def rows(self) -> pd.DataFrame:
        """Every row, ordered by model, attack and budget as asked for, then by sample. Each may occur once."""
        try:
            if self.path.is_file():
                frame = pq.ParquetFile(self.path).read().to_pandas()
            else:
                tables = [read_table(file).replace_schema_metadata() for file in self._files() if file.exists()]
                frame = pa.concat_tables(tables or [SCHEMA.empty_table()]).to_pandas()
        except (OSError, pa.ArrowException) as error:
            raise RunError(f"run {self.path}: rows cannot be read, torn? ({brief(error)})") from None
        if list(frame.columns) != SCHEMA.names:
            raise RunError(f"run {self.path}: expected columns {SCHEMA.names}, got {list(frame.columns)}")
        order = {(c.attack, c.budget): i for i, c in enumerate(self.cells)}
        place = [order.get(key, -1) for key in zip(frame["attack"], frame["budget"], strict=True)]
        if -1 in place or not set(frame["model"]) <= set(self.models):
            raise RunError(f"run {self.path}: it holds rows that its run.json does not name")
        ranks = {m: i for i, m in enumerate(self.models)}
        frame = frame.assign(_m=frame["model"].map(ranks), _c=place).sort_values(["_m", "_c"], kind="stable")
        frame = frame.drop(columns=["_m", "_c"]).reset_index(drop=True)
        if frame.duplicated(["model", "attack", "budget", "sample"]).any():
            raise RunError(f"run {self.path}: some samples occur twice in one cell")
        return frame

    def cell_rows(self, model: str, cell: Cell) -> pd.DataFrame:
        """Rows of one cell, indexed by sample id."""
        return self._groups.get((model, cell.attack, cell.budget), self._none)

    @cached_property
    def _none(self) -> pd.DataFrame:
        return self.rows.iloc[:0].set_index("sample")

    @cached_property
    def _groups(self) -> dict[tuple[str, str, str], pd.DataFrame]:
        groups = self.rows.set_index("sample").groupby(["model", "attack", "budget"], sort=False)
        return {(str(m), str(a), str(b)): frame for (m, a, b), frame in groups}

    def status(self, model: str, cell: Cell) -> CellStatus:
        failures = self.manifest["failures"]  # of one attack, or of the whole model
        reason = failures.get(f"{model}\t{cell.attack}", "") or failures.get(f"{model}\t{CLEAN}", "")
        rows = self.cell_rows(model, cell)
        flagged = rows.loc[rows["flags"] != "", "flags"]
        if reason:
            reason = f"failed: {reason}"
        elif len(flagged):
            names = sorted({name for flags in flagged for name in flags.split(",")})
            reason = f"invalid: {len(flagged)} of {len(rows)} rows: {', '.join(FLAGS.get(n, n) for n in names)}"
        return CellStatus(model, cell, len(rows), self.conditions.get(cell, self.n), reason)

    @property
    def statuses(self) -> list[CellStatus]:
        return [self.status(model, cell) for model in self.models for cell in self.cells]


def chunk_ranges(n: int, size: int) -> Sequence[range]:
    """Consecutive sample numbers in chunks of `size`; the last may be smaller."""
    return [range(first, min(first + size, n)) for first in range(0, n, size)]
