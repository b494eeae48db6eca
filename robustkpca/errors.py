"""One drawn tree of exceptions. The command line prints the message as one line and exits with `exit_code`."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

FAILED = 3  # exit code where a command could not do its work, which says nothing of what the user gave or asked


class RobustKPCAError(Exception):
    """Base class: something the user gave cannot be used. The message says expected, got, and what exists.

    lacks: settings that a model does not have, by their names in `ModelOptions`, where that is what is wrong.
    """

    exit_code = 2

    def __init__(self, *args: object, lacks: Collection[str] = ()) -> None:
        super().__init__(*args)
        self.lacks = frozenset(lacks)


class SpecError(RobustKPCAError):
    """A name, budget, suite or option that does not make sense."""


class CheckpointError(RobustKPCAError):
    """A weight file that is missing, torn, unsafe, or does not fit the model."""


class DataError(RobustKPCAError):
    """A data set that is missing, empty, or does not fit the model."""


class RunError(RobustKPCAError):
    """A run folder that cannot be read, written or continued."""


class OutputError(RunError):
    """An output that cannot be written: a full disk, a closed pipe, a folder without permission."""

    exit_code = FAILED


class ProcessError(RobustKPCAError):
    """Processes that should share a run and cannot, or one of which was lost."""


class TrainingError(RobustKPCAError):
    """Training that cannot go on."""

    exit_code = 1


def brief(error: BaseException) -> str:
    """The first line of an error's message; its type where it has none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """Message for a name that does not exist: the closest one, then all of them."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"unknown {kind} {name!r}.{hint} Available: {', '.join(known)}"
