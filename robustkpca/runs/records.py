"""What is kept beside rows: times, failures and health. One small file for each unit of work, so that any number of
processes can write to one run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pydantic import ConfigDict, Field

from robustkpca.config import Frozen


class Record(Frozen):
    """Of one model, and of the chunk that begins at sample `first` (None: of the model as a whole).

    times: by perturbation, wall seconds and how many samples times budgets they were for. failures: by perturbation,
    why it could not be run. health: what `Task.health` returned.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    first: int | None = None
    times: dict[str, tuple[float, int]] = Field(default_factory=dict)
    failures: dict[str, str] = Field(default_factory=dict)
    health: dict[str, Any] | None = None


@dataclass(frozen=True)
class Failure:
    """Why a perturbation has no result on a model. Rows from sample `first` on do not count."""

    reason: str
    first: int


@dataclass
class Summary:
    """All records of a run together, the same whoever wrote them and in whatever order."""

    times: dict[tuple[str, str], tuple[float, int]] = field(default_factory=dict)  # by model and perturbation
    failures: dict[tuple[str, str], Failure] = field(default_factory=dict)
    health: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, records: Iterable[Record]) -> Summary:
        summary, ordered = cls(), sorted(records, key=lambda r: (r.model, -1 if r.first is None else r.first))
        for record in ordered:
            if record.health is not None:
                summary.health[record.model] = record.health
            for attack, reason in record.failures.items():  # the first in the order of the samples stands for all
                summary.failures.setdefault((record.model, attack), Failure(reason, record.first or 0))
        for record in ordered:
            for attack, (seconds, samples) in record.times.items():
                failure = summary.failures.get((record.model, attack))
                if failure is not None and record.first is not None and record.first >= failure.first:
                    continue  # as the rows, which do not count: another process ran them before the failure was known
                had = summary.times.get((record.model, attack), (0.0, 0))
                summary.times[record.model, attack] = (round(had[0] + seconds, 4), had[1] + samples)
        return summary
