"""Where everything lies in the folder of a run.

    run.json                              what was asked for, and where it was begun
    rows/MODEL/PERTURBATION/FIRST.parquet the rows of the chunk that begins at sample number FIRST
    records/MODEL/FIRST.json              times and failures of that chunk; records/MODEL/model.json: of the model
    examples/MODEL/PERTURBATION/FIRST.npz perturbed samples of that chunk to look at
    claims/                               who is working on what, see `robustkpca.runtime.claims`

MODEL is the model's number in the request. Rows, records and run.json have checksums of what they say. No link in the
folder is followed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from robustkpca.runs.request import Request
from robustkpca.suites.cell import CLEAN_CELL, AttackId

MARK = b"robustkpca.run"  # the fingerprint of the request, in the metadata of each chunk of rows
OURS = {"run.json", "rows", "records", "examples", "claims", ".lock"}  # .lock: of format 1


@dataclass(frozen=True)
class RunFolder:
    """Paths in the folder of a run."""

    path: Path
    request: Request

    @property
    def manifest(self) -> Path:
        return self.path / "run.json"

    @property
    def claims(self) -> Path:
        return self.path / "claims"

    def rows(self, model: str, attack: AttackId, first: int) -> Path:
        return self.path / "rows" / self._number(model) / _name(attack) / f"{first:07d}.parquet"

    def examples(self, model: str, attack: AttackId, first: int) -> Path:
        return self.path / "examples" / self._number(model) / _name(attack) / f"{first:07d}.npz"

    def record(self, model: str, first: int | None) -> Path:
        name = "model" if first is None else f"{first:07d}"
        return self.path / "records" / self._number(model) / f"{name}.json"

    @property
    def chunks(self) -> int:
        """How many chunks of rows were asked for."""
        each = -(-self.request.data.n // self.request.batch_size)
        return len(self.request.labels) * (1 + len(self.request.attacks)) * each

    def stored_records(self) -> Iterator[tuple[str, Path]]:
        """(model, file) of the records that are there and are of a model that was asked for."""
        for model in self.request.labels:
            for file in sorted(self.record(model, None).parent.glob("*.json")):
                yield model, file

    def stored_rows(self) -> Iterator[tuple[str, AttackId, int, Path]]:
        """(model, attack, first sample, file) of all chunks that are there and were asked for; nothing else counts."""
        for model in self.request.labels:
            for attack in (CLEAN_CELL.attack, *self.request.attacks):
                for file in sorted(self.rows(model, attack, 0).parent.glob("*.parquet")):
                    first = int(file.stem) if re.fullmatch(r"[0-9]{7,18}", file.stem) else -1
                    if first in range(0, self.request.data.n, self.request.batch_size):
                        yield model, attack, first, self.rows(model, attack, first)

    def most_rows(self, attack: AttackId) -> int:
        """How many rows a chunk may hold."""
        suite = self.request.attacks.get(attack)
        return self.request.batch_size * (len(suite.budgets) if suite else 1)

    def _number(self, model: str) -> str:
        return str(self.request.labels.index(model))


def _name(attack: AttackId) -> str:
    return str(attack).replace("/", "+")


def chunk_ranges(n: int, size: int) -> Sequence[range]:
    """Consecutive sample numbers in chunks of `size`; the last may be smaller."""
    return [range(first, min(first + size, n)) for first in range(0, n, size)]
