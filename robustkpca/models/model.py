"""What is known of a model of any task, and of one that could not be loaded. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Model(Protocol):
    """What evaluation knows of a model; everything else is between it and its task. A `Classifier` is one."""

    title: str
    source: str  # where it came from
    notes: tuple[str, ...]  # what was done to it

    @property
    def weights(self) -> str:
        """A hash of what decides its outputs, as it is now."""
        ...

    @property
    def device(self) -> Any: ...

    @property
    def dtype(self) -> Any: ...


@dataclass(frozen=True)
class Unusable:
    """A model whose weights could not be loaded, kept so that it is shown as failed beside the others."""

    title: str
    source: str
    reason: str
    given_name: str | None = None
    group: str | None = None
