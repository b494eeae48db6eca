"""How images are perturbed: attacks within a ball, and generated corruptions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from robustkpca import corruptions
from robustkpca.attacks import engine, registry
from robustkpca.corruptions.registry import METHODS
from robustkpca.errors import SpecError
from robustkpca.suites.attack import AttackSpec
from robustkpca.suites.budget import Budget
from robustkpca.suites.threat import Ball, Threat
from robustkpca.tasks.base import Perturbation
from robustkpca.tasks.batch import Batch
from robustkpca.tasks.classification.batch import ImageBatch

TOLERANCE = 1e-6  # of budgets and of the pixel range, as float32 rounding exceeds them by some 1e-8


class BallAttack(Perturbation):
    """An attack of `robustkpca.attacks` within a Ball."""

    def check(self, spec: AttackSpec, threat: Threat) -> None:
        registry.check(spec, _ball(threat))

    def passes(self, spec: AttackSpec, budget: Budget) -> float:
        return registry.passes(spec) if budget.value > 0 else 0.0

    def search(self, spec: AttackSpec) -> str:
        return registry.METHODS[spec.method].search

    def decided_by_batch(self, spec: AttackSpec) -> bool:
        return registry.METHODS[spec.method].draws == "batch"

    def targets(self, batch: Batch, threat: Threat) -> Tensor:
        """Labels to drive away from, int64 (B,)."""
        assert isinstance(batch, ImageBatch) and batch.predictions is not None
        # A clean prediction of -1 marks logits that were not finite: there the true label stands in, and the row is
        # flagged.
        predicted = torch.where(batch.predictions < 0, batch.labels, batch.predictions)
        return batch.labels if _ball(threat).labels == "true" else predicted

    def apply(self, batch: Batch, spec: AttackSpec, threat: Threat, budget: Budget, label: str) -> Tensor:
        return engine.attack(
            batch.model,
            batch.inputs,
            self.targets(batch, threat),
            spec=spec,
            threat=_ball(threat),
            draws=engine.Draws(batch.seed, label, budget.value, batch.ids),
            flags=batch.untried,
        )

    def measure(
        self, batch: Batch, inputs: Tensor, threat: Threat, budget: Budget
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        ball, eps = _ball(threat), float(budget)
        moved, flags = engine.distance(batch.model, batch.inputs, inputs, ball), {}
        if ball.norm != "none":
            # Float32 sums of many values round in proportion to the sum; NaN counts as over.
            flags["over_budget"] = ~(moved <= eps + TOLERANCE * max(1.0, eps))
        if ball.clip and eps > 0:
            box = (batch.model.normalize(inputs) if ball.space == "normalized" else inputs).flatten(1)
            flags["out_of_box"] = ~((box >= -TOLERANCE) & (box <= 1 + TOLERANCE)).all(1)
        return moved, flags


def _ball(threat: Threat) -> Ball:
    assert isinstance(threat, Ball)
    return threat


class Corruption(Perturbation):
    """A generated corruption; its budget is the severity."""

    def check(self, spec: AttackSpec, threat: Threat) -> None:
        if not callable(function := METHODS[spec.method]):
            raise SpecError(
                f"corruption {spec.method}: expected a function (images, severity, generators) -> images, "
                f"got {function!r:.80}"
            )

    def passes(self, spec: AttackSpec, budget: Budget) -> float:
        return 1.0  # making a corruption costs about a forward pass of a small model

    def apply(self, batch: Batch, spec: AttackSpec, threat: Threat, budget: Budget, label: str) -> Tensor:
        return corruptions.corrupt(batch.inputs, spec.method, int(budget.value), batch.ids, seed=batch.seed)


PERTURBATIONS: dict[str, Any] = {"ball": BallAttack(), "corruptions": Corruption()}
