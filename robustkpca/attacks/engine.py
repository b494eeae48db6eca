"""Runs one attack of torchattacks in the threat model's own space, with draws keyed by sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from robustkpca.attacks.gradient_paths import surrogate
from robustkpca.attacks.gradient_watch import GradientWatch
from robustkpca.attacks.registry import METHODS, TARGETS, least_classes
from robustkpca.errors import SpecError
from robustkpca.models.classifier import Classifier
from robustkpca.runtime.keyed_random import KeyedDraws, generator, seeded
from robustkpca.suites.attack import AttackSpec
from robustkpca.suites.threat import Ball


@dataclass(frozen=True)
class Coordinates:
    """Where the attack runs: u in [0, 1], x = low + (high - low) u, x a pixel or a normalised value."""

    classifier: Classifier
    normalized: bool
    low: float
    high: float

    @classmethod
    def of(cls, classifier: Classifier, threat: Ball, eps: Fraction) -> Coordinates:
        if threat.clip:
            return cls(classifier, threat.space == "normalized", 0.0, 1.0)
        low, high = 0.0, 1.0
        if threat.space == "normalized":
            low = float(classifier.normalize(torch.zeros_like(classifier.mean)).min())
            high = float(classifier.normalize(torch.ones_like(classifier.mean)).max())
        margin = 2 * float(eps) + 1e-3  # twice eps: no rounding brings the clip into play
        return cls(classifier, threat.space == "normalized", low - margin, high + margin)

    @property
    def width(self) -> float:
        return self.high - self.low

    def enter(self, images: Tensor) -> Tensor:
        """Pixels to u. Where the threat model clips, what lies outside [0, 1] is clipped from the start."""
        x = self.classifier.normalize(images) if self.normalized else images
        return x.clamp(0, 1) if (self.low, self.high) == (0.0, 1.0) else (x - self.low) / self.width

    def leave(self, u: Tensor) -> Tensor:
        """u to pixels."""
        x = self.values(u)
        return self.classifier.denormalize(x) if self.normalized else x

    def values(self, u: Tensor) -> Tensor:
        return u if (self.low, self.high) == (0.0, 1.0) else u * self.width + self.low

    def logits(self, u: Tensor) -> Tensor:
        x = self.values(u)
        return self.classifier.logits_of_normalized(x) if self.normalized else self.classifier(x)


class _Surface(nn.Module):
    """The model torchattacks sees: u -> logits."""

    def __init__(self, coordinates: Coordinates, watch: GradientWatch | None = None) -> None:
        super().__init__()
        self.classifier = coordinates.classifier
        self.coordinates, self.watch = coordinates, watch

    def forward(self, u: Tensor) -> Tensor:
        # Not through KeyedDraws: what the model draws is the model's.
        # A copy, since Square writes into the logits it is given.
        with torch._C.DisableTorchFunction():
            return self.coordinates.logits(u if self.watch is None else self.watch.watched(u)).clone()


@dataclass(frozen=True)
class Draws:
    """What decides the random numbers of an attack on a batch: the run's seed, the attack as rows name it, the budget,
    and the ids of the B samples. Each sample's draws depend on its own id alone, where the attack lets them."""

    seed: int
    label: str
    eps: Fraction
    ids: Sequence[str]


def attack(
    classifier: Classifier,
    images: Tensor,
    labels: Tensor,
    *,
    spec: AttackSpec,
    threat: Ball,
    draws: Draws,
    flags: dict[str, str] | None = None,
) -> Tensor:
    """Attacked images, float32 (B, C, H, W) in pixels (outside [0, 1] where the threat model does not clip).

    images: float32 (B, C, H, W) in [0, 1]; labels: int64 (B,), what to drive away from; `draws`: the budget, and what
    keys every random number. A ball of radius 0 holds one image: eps 0 returns the images. `flags` takes up, for each
    sample by id, the flag of a method by gradients that had none to follow, see `GradientWatch`; else "".
    """
    eps, ids = draws.eps, draws.ids
    if eps == 0 and threat.norm != "none":
        return images.clone()
    method, classes = METHODS[spec.method], classifier.settings.num_classes
    if classes < least_classes(spec):
        raise SpecError(f"{spec.method} needs at least {least_classes(spec)} classes, {classifier.title} has {classes}")
    coordinates = Coordinates.of(surrogate(classifier, spec.through), threat, eps)
    given: dict[str, Any] = {
        "eps": float(eps),
        "n_classes": min(TARGETS + 1, classes),
        "norm": {"linf": "Linf", "l2": "L2"}.get(threat.norm),
        "seed": draws.seed,
    } | spec.resolve(eps)
    parameters = {name: given.get(name, default) for name, default in method.defaults.items()}
    for name in parameters.keys() & method.lengths:
        parameters[name] /= coordinates.width
    key = (draws.seed, "attack", draws.label, eps)
    scope = {"sample": None, "attack": ("all",), "batch": ("batch", ids[0])}[method.draws]
    keyed = KeyedDraws(
        [generator(*key, i) for i in ids],
        None if scope is None else lambda number: generator(*key, *scope, *([number] if number else [])),
    )
    # Some attacks seed the global generators, and some models draw from them.
    with seeded(*key, "model", ids[0]), torch.inference_mode(False), torch.enable_grad():
        start = coordinates.enter(images.detach().clone())
        watch = None if flags is None or method.blind else GradientWatch(start.clone(), keyed)
        engine = method.attack(_Surface(coordinates, watch), **parameters)
        with keyed:
            attacked = engine(start, labels.detach().clone())
        if not isinstance(attacked, Tensor) or attacked.shape != images.shape:
            got = f"shape {tuple(attacked.shape)}" if isinstance(attacked, Tensor) else type(attacked).__name__
            raise TypeError(f"{spec.method} returned {got}, expected a tensor of shape {tuple(images.shape)}")
        if flags is not None and watch is not None:
            flags.update(zip(ids, watch.flags, strict=True))
        return coordinates.leave(attacked.detach())


def distance(classifier: Classifier, images: Tensor, attacked: Tensor, threat: Ball) -> Tensor:
    """How far each image was moved, in the norm (L2 where there is none) and space of the threat model.

    (B, C, H, W) twice -> (B,).
    """
    moved = attacked - images
    if threat.space == "normalized":
        moved = moved / classifier.std
    order = {"linf": float("inf"), "l1": 1, "l2": 2, "none": 2}[threat.norm]
    norms: Tensor = torch.linalg.vector_norm(moved.flatten(1), ord=order, dim=1)
    return norms
