"""Attack methods: torchattacks, run in the threat model's own space, with draws keyed by sample.

torchattacks works on [0, 1] and clips there. Any other space is reached by an affine coordinate u = (x - low) / (high - low) with
[low, high] so wide that the clip never acts; eps and step sizes are divided by high - low.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
import torchattacks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from robustkpca.draws import generator
from robustkpca.errors import SpecError, unknown
from robustkpca.models import Classifier
from robustkpca.spec import AttackSpec, ThreatModel


@dataclass(frozen=True)
class Method:
    """A torchattacks class, the norm of its ball, and which of its parameters are lengths in the threat model's space."""

    attack: type[torchattacks.attack.Attack]
    norm: str
    lengths: tuple[str, ...] = ("eps", "alpha")

    @property
    def parameters(self) -> tuple[str, ...]:
        """Parameters a suite may set; eps comes from the threat model."""
        names = inspect.signature(self.attack.__init__).parameters
        return tuple(name for name in names if name not in ("self", "model", "eps"))


METHODS: dict[str, Method] = {
    "FGSM": Method(torchattacks.FGSM, "linf"),
    "PGD": Method(torchattacks.PGD, "linf"),
    "BIM": Method(torchattacks.BIM, "linf"),
    "MIFGSM": Method(torchattacks.MIFGSM, "linf"),
    "PGDL2": Method(torchattacks.PGDL2, "l2"),
}


class KeyedDraws(TorchFunctionMode):
    """Makes an attack on a batch equal the attacks on its samples.

    Random numbers drawn in place for the batch (`uniform_`, `normal_`) come from one generator a sample, and the batch's
    cross-entropy is the sum of its samples' losses, so that the gradient of a sample does not depend, even in its last bit, on how
    many others there are. Any other source of random numbers is refused.
    """

    _FILLS = (Tensor.uniform_, Tensor.normal_)
    _UNKEYED = (torch.rand, torch.randn, torch.rand_like, torch.randn_like, torch.randint, torch.randperm, torch.bernoulli,
                Tensor.random_, Tensor.bernoulli_, torch.multinomial)  # fmt: skip

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        super().__init__()
        self.generators = generators

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self._FILLS:
            return self._fill(func, args[0], args[1:], kwargs)
        if func in self._UNKEYED:
            raise SpecError(f"this attack draws with {func.__name__}, which cannot be keyed by sample")
        if func is F.cross_entropy and kwargs.get("reduction", "mean") == "mean":
            kwargs = {**kwargs, "reduction": "sum"}
        return func(*args, **kwargs)

    def _fill(self, func: Callable[..., Any], target: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        if target.ndim == 0 or target.shape[0] != len(self.generators):
            raise SpecError(
                f"this attack draws numbers of shape {tuple(target.shape)}, which cannot be keyed by sample"
            )
        rows = [func(torch.empty(target.shape[1:]), *args, **kwargs, generator=g) for g in self.generators]
        return target.copy_(torch.stack(rows))


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
            return cls(classifier, False, 0.0, 1.0)
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
        """Pixels to u."""
        x = self.classifier.normalize(images) if self.normalized else images
        return x if (self.low, self.high) == (0.0, 1.0) else (x - self.low) / self.width

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
        raise SpecError(
            f"attack {spec.name}: {spec.method} has an {method.norm} ball, the threat model is {threat.norm}"
        )
    for key in spec.parameters:
        if key not in method.parameters:
            raise SpecError(f"attack {spec.name}: {unknown('parameter', key, method.parameters)}")


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
    if eps == 0:
        return images.clone()
    with torch.inference_mode(False), torch.enable_grad():
        coordinates = Coordinates.of(classifier, threat, eps)
        method = METHODS[spec.method]
        parameters = {"eps": float(eps), **spec.resolve(eps)}
        for name in method.lengths:
            if name in parameters:
                parameters[name] /= coordinates.width
        engine = method.attack(_Surface(coordinates), **parameters)
        draws = KeyedDraws([generator(seed, "attack", label, eps, i) for i in ids])
        start = coordinates.enter(images.detach().clone())
        with draws:
            found = engine(start, labels.detach().clone())
        return coordinates.leave(found.detach())


def distance(classifier: Classifier, images: Tensor, attacked: Tensor, threat: ThreatModel) -> Tensor:
    """How far each image was moved, in the norm and space of the threat model. (B, C, H, W) twice -> (B,)."""
    moved = attacked - images
    if threat.space == "normalized":
        moved = moved / classifier.std
    return torch.linalg.vector_norm(moved.flatten(1), ord=float("inf") if threat.norm == "linf" else 2, dim=1)
