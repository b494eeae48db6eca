"""Writing a run: chunks of rows and small records, each whole or not there, by any number of processes at once."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from robustkpca.errors import RobustKPCAError, RunError, SpecError
from robustkpca.files import Folder, is_part, refuse_links
from robustkpca.runs.files import read_json, read_table, save_arrays, sealed_text, whole_json, write_table
from robustkpca.runs.folder import MARK, OURS, RunFolder
from robustkpca.runs.records import Record
from robustkpca.runs.request import FORMAT, Manifest, Request, differences
from robustkpca.runs.run import Run
from robustkpca.runs.schema import schema_of
from robustkpca.runtime.claims import Claims
from robustkpca.suites.cell import AttackId
from robustkpca.tasks.base import Task
from robustkpca.tasks.registry import task_named


class RunStore:
    """The folder of a run, open for writing. A chunk of rows is written once; one that is torn counts as not there.

    What several processes write is the same, so the last to rename a file into place changes nothing.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = RunFolder(path, manifest.request), manifest
        self._own = Folder(path)
        self._whole: set[Path] = set()  # chunks this process has read or written

    @classmethod
    def start(cls, path: Path, request: Request, environment: dict[str, Any]) -> RunStore:
        """Open a folder for this request: a new one, or one that an earlier call with the same request began.

        Raises RunError for a folder that holds anything else, or another request.
        """
        file = path / "run.json"
        if whole_json(file):
            run = Run.open(path, records=False)  # one that was changed is made again
            if run.manifest.format != FORMAT:
                raise RunError(
                    f"run {path} was made in format {run.manifest.format}: it can be read, compared and reported, "
                    "not continued; choose another --out"
                )
            if run.manifest.fingerprint != request.fingerprint:
                lines = differences(request.plain, run.request.plain)
                more = f" and {len(lines) - 3} more" if len(lines) > 3 else ""
                raise RunError(f"run {path} holds another request ({'; '.join(lines[:3])}{more}); choose another --out")
            store = cls(path, run.manifest)
            store._remove_damaged()
            return store
        # Where run.json is lost or torn the chunks still say which request they are of.
        if path.exists() and (not path.is_dir() or _strange(path)):
            raise RunError(
                f"--out {path}: expected an empty or new folder, or a run to continue; it holds something else"
            )
        manifest = Manifest(fingerprint=request.fingerprint, request=request, environment=environment, sealed=True)
        text = sealed_text(manifest.model_dump(mode="json", by_alias=True), indent=1) + "\n"
        folder = Folder(path)
        # Another process may begin the same run, or another one, in the same moment: the one that holds the claim
        # writes, the others read what it wrote.
        with Claims(path / "claims") as claims:
            for _ in claims.units([file.name], lambda _: whole_json(file), wait=True):
                folder.write(file, lambda open_file: open_file.write(text.encode()))
        return cls.start(path, request, environment)

    @cached_property
    def task(self) -> Task:
        return task_named(self.manifest.request.task)

    @property
    def request(self) -> Request:
        return self.manifest.request

    # -- rows

    def has_rows(self, model: str, attack: AttackId, first: int, ids: Sequence[str]) -> bool:
        """Whether a chunk is there and whole. Its file is read once."""
        return (
            self.folder.rows(model, attack, first) in self._whole
            or self.read_rows(model, attack, first, ids) is not None
        )

    def read_rows(self, model: str, attack: AttackId, first: int, ids: Sequence[str]) -> pd.DataFrame | None:
        """The rows of the chunk that begins at sample number `first`, if it is there and whole: each of its samples
        `ids` once in each of the attack's cells, as this request asks for. None for a file that is torn or holds
        anything else, and has to be made again."""
        file = self.folder.rows(model, attack, first)
        try:
            refuse_links(self.folder.path, file)
            table = read_table(file, most=self.folder.most_rows(attack), sealed=self.manifest.sealed)
        except RunError:
            return None
        made_by = (table.schema.metadata or {}).get(MARK, b"").decode("utf-8", "replace")
        if table.column_names != schema_of(self.task).names or made_by not in ("", self.manifest.fingerprint):
            return None
        rows = table.to_pandas()
        suite = self.request.attacks.get(attack)
        cells = list(zip(rows["perturbation"], rows["budget"], strict=True))
        if suite is None:  # unperturbed: each sample in a condition of the set's own
            known = {cell.texts for cell in self.request.conditions}
            whole = list(rows["sample"]) == list(ids) and set(cells) <= known
        else:
            expected = [(str(attack), str(budget), sample) for budget in suite.budgets for sample in ids]
            whole = [(*cell, sample) for cell, sample in zip(cells, rows["sample"], strict=True)] == expected
        settings = {model: self.request.model(model).vision}
        if not whole or not (rows["model"] == model).all() or self.task.sound(rows, settings):
            return None
        self._whole.add(file)
        return rows

    def write_rows(self, model: str, attack: AttackId, first: int, rows: pd.DataFrame) -> None:
        schema = schema_of(self.task)
        table = pa.Table.from_pandas(rows, schema, preserve_index=False)
        path = self.folder.rows(model, attack, first)
        self._own.write(path, lambda file: write_table(file, table, {MARK: self.manifest.fingerprint}))
        self._whole.add(path)

    def write_examples(self, model: str, attack: AttackId, first: int, examples: dict[str, Any]) -> None:
        """Perturbed samples of a chunk to look at, see `robustkpca.runs.run.Examples`."""
        self._own.write(self.folder.examples(model, attack, first), lambda file: save_arrays(file, examples))

    # -- records

    def record(self, model: str, first: int | None) -> Record:
        """What is kept beside the rows of a chunk; an empty record where nothing is, or it is torn."""
        with contextlib.suppress(OSError, ValueError, RobustKPCAError):
            plain = read_json(self.folder.path, self.folder.record(model, first), sealed=self.manifest.sealed)
            record: Record = Record.parse(plain, "record")
            return record
        return Record(model=model, first=first)

    def remove_parts(self) -> None:
        """Remove what killed processes left half written; for a run of which everything is there."""
        for part in self.folder.path.rglob("*.part"):
            if is_part(part.name):
                with contextlib.suppress(OSError):
                    part.unlink()

    def _remove_damaged(self) -> None:
        """Remove records that are none, or not what was written: what they are of is made again where it matters."""
        for model, file in self.folder.stored_records():
            refuse_links(self.folder.path, file)
            with contextlib.suppress(OSError, ValueError):
                try:
                    plain = read_json(self.folder.path, file, sealed=self.manifest.sealed)
                    damaged = Record.parse(plain, "record").model != model
                except (RunError, SpecError):
                    damaged = True
                if damaged:
                    file.unlink()

    def write_record(self, record: Record) -> None:
        text = sealed_text(json.loads(record.model_dump_json(exclude_none=True))) + "\n"
        self._own.write(self.folder.record(record.model, record.first), lambda file: file.write(text.encode()))


def _strange(path: Path) -> set[str]:
    """What lies in a folder and is not of a run."""
    names = {file.name for file in path.iterdir()}
    return {name for name in names if name not in OURS and not name.endswith(".part")}
