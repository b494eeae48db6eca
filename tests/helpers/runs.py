"""Runs with other rows than were measured."""

from __future__ import annotations

import pandas as pd

from robustkpca.runs.records import Record
from robustkpca.runs.run import Run


def records_of(run: Run) -> list[Record]:
    """What was kept beside the rows of a run, one record a model."""
    records = []
    for label in run.models:
        times = {attack: time for (model, attack), time in run.summary.times.items() if model == label}
        failures = {attack: f.reason for (model, attack), f in run.summary.failures.items() if model == label}
        records.append(Record(model=label, times=times, failures=failures, health=run.health.get(label)))
    return records


def with_rows(run: Run, rows: pd.DataFrame) -> Run:
    """The request and the records of one run with these rows."""
    return Run.in_memory(run.request, rows, records_of(run))
