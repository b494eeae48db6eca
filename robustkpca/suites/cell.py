"""Cells: one column of results, an attack at one budget."""

from __future__ import annotations

from dataclasses import dataclass

CLEAN = "clean"  # the attack column of unattacked predictions


@dataclass(frozen=True)
class Cell:
    """One column of results: an attack at one budget (an eps or a severity)."""

    attack: str
    budget: str


# Cells of sets that come in conditions of their own and are evaluated without attacks.
RELEASED = "imagenet-c"  # the attack column of released corruptions is imagenet-c/NAME, their budget the severity
IN_DISTRIBUTION, OUT_OF_DISTRIBUTION = Cell("imagenet-o/in", ""), Cell("imagenet-o/out", "")
