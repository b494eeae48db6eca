"""The columns of rows, and their flags: those that say a row must not be believed, and those that are counted apart."""

from __future__ import annotations

from collections.abc import Container, Mapping

import pandas as pd
import pyarrow as pa

from robustkpca.tasks.base import Task

# For every task; a task's own columns follow.
CORE: list[tuple[str, pa.DataType]] = [
    ("model", pa.string()),
    ("perturbation", pa.string()),  # "clean", or the text of an AttackId
    ("budget", pa.string()),  # the text of a Budget, "" for samples as they are
    ("sample", pa.string()),
    ("cluster", pa.string()),  # the document or graph that a sample depends on others through; null: the sample itself
    ("broken", pa.bool_()),  # by the task's criterion; null where nothing was perturbed
    ("distance", pa.float32()),  # perturbed minus clean, in the norm and space of the threat model; null without one
    ("queries", pa.int64()),  # of an attack that counts them; else null
    ("flags", pa.string()),  # "", or names of flags joined by commas
]
CORE_FLAGS = {
    "over_budget": "the attack left its budget (tolerance 1e-6)",
    "out_of_box": "the attack left the range [0, 1] (tolerance 1e-6)",
}


def schema_of(task: Task) -> pa.Schema:
    """The columns of a task's rows."""
    return pa.schema([*CORE, *task.columns])


def flags_of(task: Task) -> Mapping[str, str]:
    """The flags of rows that must not be believed, and what they mean."""
    return {**CORE_FLAGS, **task.flags}


def remarks_of(task: Task) -> Mapping[str, str]:
    """The flags of rows that are counted apart and hold all the same, and what they mean."""
    return {name: meaning for name, meaning in task.untried.items() if name not in task.flags}


def invalid_flags(rows: pd.DataFrame, task: Task) -> pd.Series:
    """The flags of each row that say it must not be believed, joined by commas."""
    remarks = remarks_of(task)
    known = {text: ",".join(n for n in text.split(",") if n not in remarks) for text in rows["flags"].unique()}
    return rows["flags"].map(known)


def raises(rows: pd.DataFrame, names: Container[str]) -> pd.Series:
    """Which rows have any of these flags, bool."""
    known = {text: any(name in names for name in text.split(",")) for text in rows["flags"].unique()}
    return rows["flags"].map(known).astype(bool)
