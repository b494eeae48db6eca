"""Attack methods: torchattacks, run in the threat model's own space, with draws keyed by sample.

torchattacks works on [0, 1] and clips there. Any other space is reached by an affine coordinate u = (x - low) / (high - low) with
[low, high] so wide that the clip never acts; eps and step sizes are divided by high - low.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import torch
import torchattacks
from torch import Tensor, nn
from torchattacks.attack import Attack

from robustkpca.autoattack import APGD, APGDT, FABT, Square
from robustkpca.draws import KeyedDraws, generator, seeded
from robustkpca.errors import SpecError, unknown
from robustkpca.models import Classifier
from robustkpca.own_attacks import LOSSES, BestPGD, SparseL1Descent, UniformNoise
from robustkpca.spec import AttackSpec, ThreatModel
from robustkpca.surrogates import surrogate

# eps and norm come from the threat model, the seed from the run, classes from the model; FABT is FAB with multi_targeted.
_NOT_IN_SUITES = ("eps", "seed", "n_classes", "norm", "verbose", "multi_targeted")


@dataclass(frozen=True)
class Method:
    """An attack class and what has to be known to run it fairly.

    norms: those of balls it knows, `none` for an attack that bounds nothing. lengths: parameters measured in the threat model's space.
    draws: what its random numbers are keyed by. `sample`: each sample's own. `attack`: some are shared by all samples, but are the same
    whatever the batch. `batch`: they, or a stopping rule, depend on the batch, whose size then decides the result.
    passes: forward and backward passes a sample, at most. least_classes: what its loss needs.
    """

    attack: type[Attack]
    norms: tuple[Literal["linf", "l2", "l1", "none"], ...]
    lengths: tuple[str, ...] = ("eps", "alpha")
    draws: Literal["sample", "attack", "batch"] = "sample"
    passes: Callable[[Mapping[str, Any]], float] = lambda p: 2.0 * p.get("steps", 1)
    least_classes: Callable[[Mapping[str, Any]], int] = lambda _: 2
    losses: tuple[str, ...] = ()  # values of its parameter `loss`
    blind: bool = False  # it asks for predictions only

    @property
    def defaults(self) -> dict[str, Any]:
        """Every parameter of the class and its default."""
        signature = inspect.signature(self.attack.__init__).parameters
        return {name: p.default for name, p in signature.items() if name not in ("self", "model")}

    @property
    def parameters(self) -> tuple[str, ...]:
        """Parameters a suite may set."""
        return tuple(name for name in self.defaults if name not in _NOT_IN_SUITES)


LINF: tuple[Literal["linf"]] = ("linf",)
LINF_L2: tuple[Literal["linf"], Literal["l2"]] = ("linf", "l2")
TARGETS = 9  # wrong classes that targeted attacks try at most, as the reference AutoAttack does


def _by_loss(parameters: Mapping[str, Any]) -> int:
    return 3 if parameters.get("loss") == "dlr" else 2


METHODS: dict[str, Method] = {
    "FGSM": Method(torchattacks.FGSM, LINF),
    "PGD": Method(torchattacks.PGD, LINF),
    "BestPGD": Method(
        BestPGD,
        LINF,
        passes=lambda p: 2.0 * p.get("restarts", 1) * (p.get("steps", 100) + 1) * p.get("eot", 1),
        least_classes=_by_loss,
        losses=tuple(LOSSES),
    ),
    "BIM": Method(torchattacks.BIM, LINF),
    "MIFGSM": Method(torchattacks.MIFGSM, LINF),
    "PGDL2": Method(torchattacks.PGDL2, ("l2",)),
    "APGD": Method(APGD, LINF_L2, ("eps",), least_classes=_by_loss, losses=("ce", "dlr")),
    "APGDT": Method(APGDT, LINF_L2, ("eps",), passes=lambda p: 18.0 * p.get("steps", 10), least_classes=lambda _: 4),
    "FABT": Method(FABT, LINF_L2, ("eps",), passes=lambda p: 27.0 * p.get("steps", 10)),
    # In L2, torchattacks' Square draws for whoever is left of the batch: L-inf only.
    "Square": Method(
        Square,
        LINF,
        ("eps",),
        draws="attack",
        passes=lambda p: float(p.get("n_queries", 5000)),
        losses=("margin", "ce"),
        blind=True,
    ),
    "SPSA": Method(
        torchattacks.SPSA,
        LINF,
        lengths=("eps", "delta", "lr"),
        draws="attack",
        passes=lambda p: 2.0 * p.get("nb_iter", 1) * p.get("nb_sample", 128),
        blind=True,
    ),
    "CW": Method(torchattacks.CW, ("none",), lengths=(), draws="batch", passes=lambda p: 2.0 * p.get("steps", 50)),
    "AutoAttack": Method(
        torchattacks.AutoAttack, LINF, ("eps",), draws="batch", passes=lambda _: 6000.0, least_classes=lambda _: 4
    ),
    "SLD": Method(SparseL1Descent, ("l1",)),
    "UniformNoise": Method(UniformNoise, LINF, passes=lambda _: 0.0, blind=True),
}


@dataclass(frozen=True)
class Coordinates:
    """Where the attack runs: u in [0, 1], x = low + (high - low) u, x a pixel or a normalised value."""

    classifier: Classifier
    normalized: bool
    low: float
    high: float

    @classmethod
    def of(cls, classifier: Classifier, threat: ThreatModel, eps: Fraction) -> Coordinates:
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

    def __init__(self, coordinates: Coordinates) -> None:
        super().__init__()
        self.classifier = coordinates.classifier
        self.coordinates = coordinates

    def forward(self, u: Tensor) -> Tensor:
        # Not through KeyedDraws: what the model draws is the model's.
        # A copy, since Square writes into the logits it is given.
        with torch._C.DisableTorchFunction():
            return self.coordinates.logits(u).clone()


def check(spec: AttackSpec, threat: ThreatModel) -> None:
    """Raise SpecError when the method, one of its parameters, or the norm does not exist or fit."""
    if spec.method not in METHODS:
        raise SpecError(f"attack {spec.name}: {unknown('method', spec.method, METHODS)}")
    method = METHODS[spec.method]
    if threat.norm not in method.norms:
        raise SpecError(
            f"attack {spec.name}: {spec.method} has norm {' or '.join(method.norms)}, the threat model has {threat.norm}"
        )
    for key in spec.parameters:
        if key not in method.parameters:
            raise SpecError(f"attack {spec.name}: {unknown('parameter', key, method.parameters)}")
        default, value = method.defaults[key], spec.parameters[key]
        if isinstance(default, bool) != isinstance(value, bool):
            raise SpecError(f"attack {spec.name}: {key}: expected a value such as {default!r}, got {value!r}")
    losses = method.losses
    if losses and (loss := spec.parameters.get("loss", method.defaults["loss"])) not in losses:
        raise SpecError(f"attack {spec.name}: {unknown('loss', str(loss), losses)}")
    if spec.through != "full" and method.blind:
        raise SpecError(
            f"attack {spec.name}: {spec.method} follows no gradient, through = {spec.through!r} changes nothing"
        )


def least_classes(spec: AttackSpec) -> int:
    """How many classes a model must have for this attack."""
    return METHODS[spec.method].least_classes(spec.parameters)


def passes(spec: AttackSpec) -> float:
    """Forward and backward passes a sample at one budget, for the progress bar."""
    return METHODS[spec.method].passes(spec.parameters)


def attack(
    classifier: Classifier,
    images: Tensor,
    labels: Tensor,
    *,
    spec: AttackSpec,
    threat: ThreatModel,
    eps: Fraction,
    label: str,
    ids: Sequence[str],
    seed: int,
) -> Tensor:
    """Attacked images, float32 (B, C, H, W) in pixels (outside [0, 1] where the threat model does not clip).

    images: float32 (B, C, H, W) in [0, 1]; labels: int64 (B,), what to drive away from; `ids`: B sample ids, which with `seed`,
    `label` (the attack column) and `eps` key every draw. A ball of radius 0 holds one image: eps 0 returns the images.
    """
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
        "seed": seed,
    } | spec.resolve(eps)
    parameters = {name: given.get(name, default) for name, default in method.defaults.items()}
    for name in parameters.keys() & method.lengths:
        parameters[name] /= coordinates.width
    key = (seed, "attack", label, eps)
    scope = {"sample": None, "attack": ("all",), "batch": ("batch", ids[0])}[method.draws]
    draws = KeyedDraws(
        [generator(*key, i) for i in ids],
        None if scope is None else lambda number: generator(*key, *scope, *([number] if number else [])),
    )
    # Some attacks seed the global generators, and some models draw from them.
    with seeded(*key, "model", ids[0]), torch.inference_mode(False), torch.enable_grad():
        engine = method.attack(_Surface(coordinates), **parameters)
        start = coordinates.enter(images.detach().clone())
        with draws:
            found = engine(start, labels.detach().clone())
        return coordinates.leave(found.detach())


def distance(classifier: Classifier, images: Tensor, attacked: Tensor, threat: ThreatModel) -> Tensor:
    """How far each image was moved, in the norm (L2 where there is none) and space of the threat model. (B, C, H, W) twice -> (B,)."""
    moved = attacked - images
    if threat.space == "normalized":
        moved = moved / classifier.std
    order = {"linf": float("inf"), "l1": 1, "l2": 2, "none": 2}[threat.norm]
    return torch.linalg.vector_norm(moved.flatten(1), ord=order, dim=1)
