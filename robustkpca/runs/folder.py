"""Where everything lies in the folder of a run.

    run.json                              what was asked for, and where it was begun
    rows/MODEL/PERTURBATION/FIRST.parquet the rows of the chunk that begins at sample number FIRST
    records/MODEL/FIRST.json              times and failures of that chunk; records/MODEL/model.json: of the model as a
    whole examples/MODEL/PERTURBATION.npz       a few samples to look at
    claims/                               who is working on what, see `robustkpca.runtime.claims`

MODEL is the model's number in the request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from robustkpca.runs.request import Request
from robustkpca.suites.cell import CLEAN_CELL, AttackId

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

    def examples(self, model: str, attack: AttackId) -> Path:
        return self.path / "examples" / self._number(model) / f"{_name(attack)}.npz"

    def record(self, model: str, first: int | None) -> Path:
        name = "model" if first is None else f"{first:07d}"
        return self.path / "records" / self._number(model) / f"{name}.json"

    def all_records(self) -> list[Path]:
        return sorted((self.path / "records").glob("*/*.json"))

    def all_rows(self) -> Iterator[tuple[str, AttackId, int, Path]]:
        """(model, attack, first sample, file) of all chunks that were asked for, there or not; nothing else counts."""
        for model in self.request.labels:
            for attack in (CLEAN_CELL.attack, *self.request.attacks):
                for chunk in chunk_ranges(self.request.data.n, self.request.batch_size):
                    yield model, attack, chunk.start, self.rows(model, attack, chunk.start)

    def _number(self, model: str) -> str:
        return str(self.request.labels.index(model))


def _name(attack: AttackId) -> str:
    return str(attack).replace("/", "+")


def chunk_ranges(n: int, size: int) -> Sequence[range]:
    """Consecutive sample numbers in chunks of `size`; the last may be smaller."""
    return [range(first, min(first + size, n)) for first in range(0, n, size)]
