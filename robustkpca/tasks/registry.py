"""Tasks by name: built-in ones, those of other packages (entry points), or an import path."""

from __future__ import annotations

from robustkpca.errors import SpecError
from robustkpca.extensions import Registry, import_object, is_import_path
from robustkpca.tasks.base import Task

TASKS: Registry[Task] = Registry(
    "task",
    "robustkpca.tasks",
    lazy={"classification": "robustkpca.tasks.classification.task:CLASSIFICATION"},
)


def task_named(name: str) -> Task:
    """The task that samples and stored runs name. Raises SpecError for a name that does not exist."""
    task = import_object(name, what="task") if is_import_path(name) else TASKS[name]
    if not isinstance(task, Task):
        raise SpecError(f"task {name}: expected a Task, got {type(task).__name__}")
    return task
