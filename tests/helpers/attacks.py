"""Attacks of our own for tests, added to the methods as a user would add one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor, nn
from torchattacks.attack import Attack

from robustkpca.attacks.registry import METHODS, Method
from robustkpca.suites.suite import Suite


class Shift(Attack):
    """Adds `by` to every value, whatever the budget says, and clips nothing."""

    def __init__(self, model: nn.Module, eps: float = 8 / 255, by: float = 0.0) -> None:
        super().__init__("Shift", model)
        self.eps, self.by = eps, by

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return images + self.by


def register(patch: pytest.MonkeyPatch, **attacks: type[Attack]) -> None:
    """Make attack classes methods under these names, until the test ends; known names are replaced."""
    for name, attack in attacks.items():
        patch.setitem(METHODS._registered, name, Method(attack, ("linf", "l2", "l1"), lengths=("eps", "by")))


def suite_of(attacks: Sequence[dict[str, Any]], name: str = "own", **threat: Any) -> Suite:
    """A suite of these attack tables. The threat model is L-inf in clipped pixels on true labels, but for `threat`."""
    usual = {"norm": "linf", "eps": ["8/255"], "space": "pixel", "clip": True, "labels": "true"}
    return Suite.parse(
        {"name": name, "version": 1, "title": "t", "threat": usual | threat, "attack": list(attacks)}, "suite"
    )
