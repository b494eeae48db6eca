"""Runs with other rows than were measured."""

from __future__ import annotations

from typing import Any

import pandas as pd

from robustkpca.runs.run import Run


class Given(Run):
    """A run whose rows are given, and nothing is read or written."""

    def __init__(self, run: Run, rows: pd.DataFrame) -> None:
        super().__init__(run.path, run.manifest)
        self._given = rows

    @property
    def rows(self) -> Any:
        return self._given


def with_rows(run: Run, rows: pd.DataFrame) -> Run:
    """The request of one run with these rows."""
    return Given(run, rows)
