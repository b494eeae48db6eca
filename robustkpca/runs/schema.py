"""The columns of rows, and the flags that say a row must not be believed."""

from __future__ import annotations

from collections.abc import Mapping

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
    """The flags that a task's rows may have, and what they mean."""
    return {**CORE_FLAGS, **task.flags}
