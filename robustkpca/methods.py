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
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torchattacks.attack import Attack

from robustkpca.draws import generator
from robustkpca.errors import SpecError, unknown
from robustkpca.models import Classifier
from robustkpca.own_attacks import SparseL1Descent, UniformNoise
from robustkpca.spec import AttackSpec, ThreatModel


@dataclass(frozen=True)
class Method:
    """An attack class and what has to be known to run it fairly.

    norm: the norm of its ball, `none` for an attack that bounds nothing. lengths: parameters measured in the threat model's space.
    draws: what its random numbers are keyed by. `sample`: each sample's own. `attack`: some are shared by all samples, but are the same
    whatever the batch. `batch`: they, or a stopping rule, depend on the batch, whose size then decides the result.
    passes: forward and backward passes a sample. least_classes: what its loss needs.
    """

    attack: type[Attack]
    norm: Literal["linf", "l2", "l1", "none"]
    lengths: tuple[str, ...] = ("eps", "alpha")
    draws: Literal["sample", "attack", "batch"] = "sample"
    passes: Callable[[Mapping[str, Any]], float] = lambda p: 2.0 * p.get("steps", 1)
    least_classes: int = 2

    @property
    def defaults(self) -> dict[str, Any]:
        """Every parameter of the class and its default."""
        signature = inspect.signature(self.attack.__init__).parameters
        return {name: p.default for name, p in signature.items() if name not in ("self", "model")}

    @property
    def parameters(self) -> tuple[str, ...]:
        """Parameters a suite may set; eps comes from the threat model, the seed from the run, classes from the model."""
        return tuple(name for name in self.defaults if name not in ("eps", "seed", "n_classes", "norm", "verbose"))


METHODS: dict[str, Method] = {
    "FGSM": Method(torchattacks.FGSM, "linf"),
    "PGD": Method(torchattacks.PGD, "linf"),
    "BIM": Method(torchattacks.BIM, "linf"),
    "MIFGSM": Method(torchattacks.MIFGSM, "linf"),
    "PGDL2": Method(torchattacks.PGDL2, "l2"),
    "SPSA": Method(
        torchattacks.SPSA,
        "linf",
        lengths=("eps", "delta", "lr"),
        draws="attack",
        passes=lambda p: 2.0 * p.get("nb_iter", 1) * p.get("nb_sample", 128),
    ),
    "Square": Method(
        torchattacks.Square, "linf", lengths=("eps",), draws="attack", passes=lambda p: float(p.get("n_queries", 5000))
    ),
    "CW": Method(torchattacks.CW, "none", lengths=(), draws="batch", passes=lambda p: 2.0 * p.get("steps", 50)),
    "AutoAttack": Method(
        torchattacks.AutoAttack, "linf", lengths=("eps",), draws="batch", passes=lambda _: 6000.0, least_classes=4
    ),
    "SLD": Method(SparseL1Descent, "l1"),
    "UniformNoise": Method(UniformNoise, "linf", passes=lambda _: 0.0),
}


class KeyedDraws(TorchFunctionMode):
    """Makes an attack on a batch equal the attacks on its samples, as far as the attack lets it.

    Random numbers drawn for each sample of the batch come from one generator a sample; others from `shared`, or are refused where
    it is None. The batch's cross-entropy is the sum of its samples' losses, so that the gradient of a sample does not
    depend, even in its last bit, on how many others there are.
    """

    _FILLS = (Tensor.uniform_, Tensor.normal_, Tensor.bernoulli_)
    _FACTORIES = (torch.rand, torch.randn)
    _UNKEYED = (torch.rand_like, torch.randn_like, torch.randint, torch.randperm, torch.bernoulli, Tensor.random_,
                torch.multinomial)  # fmt: skip

    def __init__(self, generators: Sequence[torch.Generator], shared: torch.Generator | None = None) -> None:
        super().__init__()
        self.generators, self.shared = generators, shared

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self._FILLS:
            return self._fill(func, args[0], args[1:], kwargs)
        if func in self._FACTORIES:
            return self._make(func, torch.Size(args[0] if len(args) == 1 and not isinstance(args[0], int) else args))
        if func in self._UNKEYED:
            raise SpecError(f"this attack draws with {func.__name__}, which cannot be keyed by sample")
        if func is F.cross_entropy and kwargs.get("reduction", "mean") == "mean":
            kwargs = {**kwargs, "reduction": "sum"}
        return func(*args, **kwargs)

    def _fill(self, func: Callable[..., Any], target: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        if target.ndim and target.shape[0] == len(self.generators) and func is not Tensor.bernoulli_:
            rows = [func(torch.empty(target.shape[1:]), *args, **kwargs, generator=g) for g in self.generators]
            return target.copy_(torch.stack(rows))
        return target.copy_(func(torch.empty(target.shape), *args, **kwargs, generator=self._shared(target.shape)))

    def _make(self, func: Callable[..., Any], shape: torch.Size) -> Tensor:
        # Images have four dimensions: fewer are numbers that the batch shares, also when the first happens to be its size.
        if len(shape) == 4 and shape[0] == len(self.generators):
            return torch.stack([func(shape[1:], generator=g) for g in self.generators])
        return func(shape, generator=self._shared(shape))

    def _shared(self, shape: torch.Size) -> torch.Generator:
        if self.shared is None:
            raise SpecError(f"this attack draws numbers of shape {tuple(shape)}, which cannot be keyed by sample")
        return self.shared


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
        with torch._C.DisableTorchFunction():
            return self.coordinates.logits(u)


def check(spec: AttackSpec, threat: ThreatModel) -> None:
    """Raise SpecError when the method, one of its parameters, or the norm does not exist or fit."""
    if spec.method not in METHODS:
        raise SpecError(f"attack {spec.name}: {unknown('method', spec.method, METHODS)}")
    method = METHODS[spec.method]
    if method.norm != threat.norm:
        raise SpecError(f"attack {spec.name}: {spec.method} has norm {method.norm}, the threat model has {threat.norm}")
    for key in spec.parameters:
        if key not in method.parameters:
            raise SpecError(f"attack {spec.name}: {unknown('parameter', key, method.parameters)}")


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
    method = METHODS[spec.method]
    if (classes := classifier.settings.num_classes) < method.least_classes:
        raise SpecError(
            f"{spec.method} needs at least {method.least_classes} classes, {classifier.title} has {classes}"
        )
    # Some attacks seed the global generator: it is put back.
    with torch.random.fork_rng(), torch.inference_mode(False), torch.enable_grad():
        coordinates = Coordinates.of(classifier, threat, eps)
        given: dict[str, Any] = {"eps": float(eps), "n_classes": min(10, classes), "seed": seed} | spec.resolve(eps)
        parameters = {name: given.get(name, default) for name, default in method.defaults.items()}
        for name in parameters.keys() & method.lengths:
            parameters[name] /= coordinates.width
        engine = method.attack(_Surface(coordinates), **parameters)
        own = [generator(seed, "attack", label, eps, i) for i in ids]
        scope = {"sample": None, "attack": ("all",), "batch": ("batch", ids[0])}[method.draws]
        shared = None if scope is None else generator(seed, "attack", label, eps, *scope)
        start = coordinates.enter(images.detach().clone())
        with KeyedDraws(own, shared):
            found = engine(start, labels.detach().clone())
        return coordinates.leave(found.detach())


def distance(classifier: Classifier, images: Tensor, attacked: Tensor, threat: ThreatModel) -> Tensor:
    """How far each image was moved, in the norm (L2 where there is none) and space of the threat model. (B, C, H, W) twice -> (B,)."""
    moved = attacked - images
    if threat.space == "normalized":
        moved = moved / classifier.std
    order = {"linf": float("inf"), "l1": 1, "l2": 2, "none": 2}[threat.norm]
    return torch.linalg.vector_norm(moved.flatten(1), ord=order, dim=1)
