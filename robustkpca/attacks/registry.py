"""Attack methods: torchattacks, run in the threat model's own space, with draws keyed by sample.

torchattacks works on [0, 1] and clips there. Any other space is reached by an affine coordinate
u = (x - low) / (high - low) with [low, high] so wide that the clip never acts; eps and step sizes are divided by
high - low.

One attack more is a subclass of `torchattacks.attack.Attack` that suites name in one of three ways: an import path
(`method = "mypkg.attacks:Mine"`), a name given by the decorator `@METHODS.register("Mine")`, or an entry point in the
group `robustkpca.attacks`. `Method.of` says what is read from such a class.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torchattacks
from torchattacks.attack import Attack

from robustkpca.attacks.autoattack import APGD, APGDT, FABT, Square
from robustkpca.attacks.noise import UniformNoise
from robustkpca.attacks.pgd import LOSSES, BestPGD
from robustkpca.attacks.sparse_l1 import SparseL1Descent
from robustkpca.errors import SpecError, unknown
from robustkpca.extensions import Registry, import_object, is_import_path
from robustkpca.suites.attack import AttackSpec
from robustkpca.suites.threat import Ball

# eps and norm come from the threat model, the seed from the run, the number of classes from the model; FABT is FAB with
# multi_targeted.
_NOT_IN_SUITES = ("eps", "seed", "n_classes", "norm", "verbose", "multi_targeted")
Norm = Literal["linf", "l2", "l1", "none"]
Search = Literal["blind", "one-step", "iterated", "gradient"]


@dataclass(frozen=True)
class Method:
    """An attack class and what has to be known to run it fairly.

    attack: called with the model (u in [0, 1], float32 (B, C, H, W), to logits (B, K)) and `parameters`; an instance
        called with u and labels, int64 (B,), returns attacked u. It never says itself whether it succeeded.
    norms: those of the balls it knows; `none` for an attack that bounds nothing.
    lengths: parameters measured in the threat model's space.
    draws: what its random numbers depend on. `sample`: each sample has its own. `attack`: some are shared by all
        samples, but are the same whatever the batch. `batch`: they, or a stopping rule, depend on the batch, whose size
        then decides the result.
    passes: forward and backward passes a sample, at most, by the parameters that a suite sets.
    least_classes: how many classes its loss needs, by the same parameters.
    losses: values that its parameter `loss` may have; empty where it has no such parameter.
    search: what findings may expect of it. `blind`: it follows no gradient; `one-step`: one step along the gradient;
        `iterated`: many, so that more effort or a larger budget must not make it weaker; `gradient`: nothing of these.
    """

    attack: type[Attack]
    norms: tuple[Norm, ...]
    lengths: tuple[str, ...] = ("eps", "alpha")
    draws: Literal["sample", "attack", "batch"] = "sample"
    passes: Callable[[Mapping[str, Any]], float] = lambda p: 2.0 * p.get("steps", 1)
    least_classes: Callable[[Mapping[str, Any]], int] = lambda _: 2
    losses: tuple[str, ...] = ()
    search: Search = "gradient"

    @property
    def blind(self) -> bool:
        """Whether it asks for predictions only."""
        return self.search == "blind"

    @classmethod
    def of(cls, attack: object, what: str) -> Method:
        """The method of a class that somebody else wrote; a Method is returned as it is.

        Class attributes named as the fields of Method are taken from it: `norms = ("linf",)`, `draws = "attack"`.
        Without `norms` it takes every ball, and finds its norm in a parameter `norm` ("Linf", "L2" or None) if it has
        one. Every parameter of its __init__ but the model needs a default, and a ball needs one called `eps`.

        Args:
            attack: a subclass of torchattacks.attack.Attack.
            what: the word in messages, such as "method mypkg.attacks:Mine".

        Raises:
            SpecError: it is no such class, or does not fit the above.
        """
        if isinstance(attack, Method):
            return attack
        if not (isinstance(attack, type) and issubclass(attack, Attack)):
            raise SpecError(f"{what}: expected a subclass of torchattacks.attack.Attack, got {attack!r:.80}")
        names = [f.name for f in fields(cls) if f.name not in ("attack", "norms")]
        given = {name: getattr(attack, name) for name in names if hasattr(attack, name)}
        method = cls(attack, getattr(attack, "norms", ("linf", "l2", "l1")), **given)
        if not (isinstance(method.norms, tuple) and method.norms and set(method.norms) <= set(get_args(Norm))):
            raise SpecError(f"{what}: norms: expected a tuple of {', '.join(get_args(Norm))}, got {method.norms!r}")
        if method.draws not in ("sample", "attack", "batch"):
            raise SpecError(f"{what}: draws: expected sample, attack or batch, got {method.draws!r}")
        if method.search not in get_args(Search):
            raise SpecError(f"{what}: search: expected {', '.join(get_args(Search))}, got {method.search!r}")
        if bare := [name for name, default in method.defaults.items() if default is inspect.Parameter.empty]:
            raise SpecError(
                f"{what}: expected a default for every parameter but the model, got none for {', '.join(bare)}"
            )
        if method.norms != ("none",) and "eps" not in method.defaults:
            raise SpecError(
                f"{what}: expected a parameter eps, the budget; it has {', '.join(method.defaults) or 'none'}"
            )
        return method

    @property
    def defaults(self) -> dict[str, Any]:
        """Every parameter of the class and its default."""
        signature = list(inspect.signature(self.attack.__init__).parameters.values())[2:]  # self and the model
        return {p.name: p.default for p in signature if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}

    @property
    def parameters(self) -> tuple[str, ...]:
        """Parameters a suite may set."""
        return tuple(name for name in self.defaults if name not in _NOT_IN_SUITES)


LINF: tuple[Literal["linf"]] = ("linf",)
LINF_L2: tuple[Literal["linf"], Literal["l2"]] = ("linf", "l2")
TARGETS = 9  # wrong classes that targeted attacks try at most, as the reference AutoAttack does


def _by_loss(parameters: Mapping[str, Any]) -> int:
    return 3 if parameters.get("loss") == "dlr" else 2


BUILT_IN: dict[str, Method] = {
    "FGSM": Method(torchattacks.FGSM, LINF, search="one-step"),
    "PGD": Method(torchattacks.PGD, LINF, search="iterated"),
    "BestPGD": Method(
        BestPGD,
        LINF,
        passes=lambda p: 2.0 * p.get("restarts", 1) * (p.get("steps", 100) + 1) * p.get("eot", 1),
        least_classes=_by_loss,
        losses=tuple(LOSSES),
        search="iterated",
    ),
    "BIM": Method(torchattacks.BIM, LINF, search="iterated"),
    "MIFGSM": Method(torchattacks.MIFGSM, LINF, search="iterated"),
    "PGDL2": Method(torchattacks.PGDL2, ("l2",), search="iterated"),
    "APGD": Method(APGD, LINF_L2, ("eps",), least_classes=_by_loss, losses=("ce", "dlr"), search="iterated"),
    "APGDT": Method(
        APGDT,
        LINF_L2,
        ("eps",),
        passes=lambda p: 18.0 * p.get("steps", 10),
        least_classes=lambda _: 4,
        search="iterated",
    ),
    "FABT": Method(FABT, LINF_L2, ("eps",), passes=lambda p: 27.0 * p.get("steps", 10), search="iterated"),
    # In L2, torchattacks' Square draws for whoever is left of the batch: L-inf only.
    "Square": Method(
        Square,
        LINF,
        ("eps",),
        draws="attack",
        passes=lambda p: float(p.get("n_queries", 5000)),
        losses=("margin", "ce"),
        search="blind",
    ),
    "SPSA": Method(
        torchattacks.SPSA,
        LINF,
        lengths=("eps", "delta", "lr"),
        draws="attack",
        passes=lambda p: 2.0 * p.get("nb_iter", 1) * p.get("nb_sample", 128),
        search="blind",
    ),
    "CW": Method(
        torchattacks.CW,
        ("none",),
        lengths=(),
        draws="batch",
        passes=lambda p: 2.0 * p.get("steps", 50),
        search="iterated",
    ),
    "AutoAttack": Method(
        torchattacks.AutoAttack,
        LINF,
        ("eps",),
        draws="batch",
        passes=lambda _: 6000.0,
        least_classes=lambda _: 4,
        search="iterated",
    ),
    "SLD": Method(SparseL1Descent, ("l1",), search="iterated"),
    "UniformNoise": Method(UniformNoise, LINF, passes=lambda _: 0.0, search="blind"),
}


class _Methods(Registry[Method]):
    """Methods by name or import path; a class of somebody else becomes a Method."""

    def __getitem__(self, name: str) -> Method:
        if super().__contains__(name) or not is_import_path(name):
            return Method.of(super().__getitem__(name), f"method {name}")
        return Method.of(import_object(name, what="method"), f"method {name}")

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and is_import_path(name))


METHODS = _Methods("method", "robustkpca.attacks")
for _name, _method in BUILT_IN.items():
    METHODS.register(_name)(_method)


def check(spec: AttackSpec, threat: Ball) -> None:
    """Raise SpecError when the method, one of its parameters, or the norm does not exist or fit."""
    try:
        method = METHODS[spec.method]
    except SpecError as error:
        raise SpecError(f"attack {spec.name}: {error}") from error
    if threat.norm not in method.norms:
        raise SpecError(
            f"attack {spec.name}: {spec.method} has norm {' or '.join(method.norms)}, "
            f"the threat model has {threat.norm}"
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
