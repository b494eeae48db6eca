"""Attack methods: torchattacks, run in the threat model's own space, with draws keyed by sample.

torchattacks works on [0, 1] and clips there. Any other space is reached by an affine coordinate u = (x - low) / (high - low) with
[low, high] so wide that the clip never acts; eps and step sizes are divided by high - low.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torchattacks
from torchattacks.attack import Attack

from robustkpca.attacks.autoattack import APGD, APGDT, FABT, Square
from robustkpca.attacks.noise import UniformNoise
from robustkpca.attacks.pgd import LOSSES, BestPGD
from robustkpca.attacks.sparse_l1 import SparseL1Descent
from robustkpca.errors import SpecError, unknown
from robustkpca.suites.attack import AttackSpec
from robustkpca.suites.threat import Ball

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


def check(spec: AttackSpec, threat: Ball) -> None:
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
