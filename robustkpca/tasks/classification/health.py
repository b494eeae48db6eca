"""What a few passes say about whether an evaluation of a model can be believed. Numbers only; `rules` reads them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from robustkpca.errors import brief
from robustkpca.models.classifier import Classifier
from robustkpca.models.density import density
from robustkpca.models.settings import IMAGENET_MEAN, IMAGENET_STD

SAMPLES = 100  # samples that are looked at, the first of the set
GRADIENTS = 64  # samples whose gradient is looked at
DOUBLES = 8  # samples whose gradient is taken in float64 too


def health(classifier: Classifier, images: Tensor, labels: Tensor, batch_size: int = SAMPLES) -> dict[str, Any]:
    """Properties of a model on some clean samples, as plain numbers.

    images: float32 (B, C, H, W) in [0, 1]; labels: int64 (B,); `batch_size` bounds the memory and changes nothing else.

    Returns:
        `n`, `correct`: samples, and how many are right. `finite`: whether every logit is.
        `softmaxed`: whether the logits are probabilities.
        `random`: largest difference of two passes over the same images, as a share of the largest logit;
        `random_predictions`: answers that changed. `batch`: the same difference for one image alone and in its batch.
        `gradients`, `zero_gradients`, `broken_gradients`: samples looked at; those whose input gradient of the
        cross-entropy is zero, and not finite.
        `cosine_worst`, `cosine_median`: cosine between input gradients of the cross-entropy in float32 and float64;
        None where there is none to compare, or where the model cannot be run in float64 (`cosine_error` says why).
        `normalisations`: for other ways of normalising than the Classifier's, how many samples only [that way, the
        Classifier's] gets right. `density`: see `robustkpca.models.density`.
    """

    def answers(x: Tensor, *, normalized: bool = False) -> Tensor:
        run = classifier.logits_of_normalized if normalized else classifier
        return torch.cat([run(part).float() for part in x.split(batch_size)])

    with torch.no_grad():
        logits, again = answers(images), answers(images)
        alone = classifier(images[:1]).float()
        right = logits.argmax(1) == labels
        largest = logits.abs().max().clamp_min(1e-12)
        health: dict[str, Any] = {
            "n": len(images),
            "correct": int(right.sum()),
            "finite": bool(logits.isfinite().all()),
            "softmaxed": bool((logits >= 0).all() and ((logits.sum(1) - 1).abs() < 1e-3).all()),
            "random": _number((logits - again).abs().max() / largest),
            "random_predictions": int((logits.argmax(1) != again.argmax(1)).sum()),
            "batch": _number((logits[:1] - alone).abs().max() / largest),
            "normalisations": {},
            "density": {name: _rounded(shares) for name, shares in density(classifier, images, batch_size).items()},
        }
        for name, other in _other_normalisations(classifier, images).items():
            ours = answers(other, normalized=True).argmax(1) == labels
            health["normalisations"][name] = [int((ours & ~right).sum()), int((right & ~ours).sum())]
    few, their_labels = images[:GRADIENTS], labels[:GRADIENTS]
    parts = zip(few.split(batch_size), their_labels.split(batch_size), strict=True)
    gradient = torch.cat([_gradient(classifier, x, y) for x, y in parts]).flatten(1)
    finite = gradient.isfinite().all(1)
    zero = finite & (gradient == 0).all(1)
    health |= {"gradients": len(few), "zero_gradients": int(zero.sum()), "broken_gradients": int((~finite).sum())}
    return health | _precision(classifier, few, their_labels, gradient, finite & ~zero)


def _precision(
    classifier: Classifier, images: Tensor, labels: Tensor, gradient: Tensor, usable: Tensor
) -> dict[str, Any]:
    """Cosines of float32 gradients (B, D) to float64 ones, for the first that are not zero."""
    chosen = usable.nonzero().flatten()[:DOUBLES]
    health: dict[str, Any] = {"cosine_worst": None, "cosine_median": None}
    if not len(chosen):
        return health
    try:
        double = copy.deepcopy(classifier).double()
        exact = _gradient(double, images[chosen].double(), labels[chosen]).flatten(1)
    except Exception as error:  # a model that casts its input has no float64 form; that must not cost the run
        return health | {"cosine_error": f"{type(error).__name__}: {brief(error)}"}
    # Each by its largest entry first: a nearly saturated loss has a gradient of direction, but of hardly any length.
    ours, theirs = (g / g.abs().amax(1, keepdim=True) for g in (gradient[chosen].double(), exact))
    cosines = F.cosine_similarity(ours, theirs, dim=1)
    cosines = cosines[cosines.isfinite()]
    if len(cosines):
        health |= {"cosine_worst": _number(cosines.min()), "cosine_median": _number(cosines.median())}
    return health


def _other_normalisations(classifier: Classifier, images: Tensor) -> dict[str, Tensor]:
    """Inputs that another reading of the model's preprocessing would give it."""
    ways = {"none": images}
    identity = bool((classifier.mean == 0).all() and (classifier.std == 1).all())
    if not identity:
        ways["twice"] = classifier.normalize(classifier.normalize(images))
    if images.shape[1] == 3:
        mean, std = (torch.tensor(v, device=images.device).reshape(1, 3, 1, 1) for v in (IMAGENET_MEAN, IMAGENET_STD))
        ways["ImageNet's mean and std"] = (images - mean) / std
    ways["mean 0.5, std 0.5"] = (images - 0.5) / 0.5
    ours = classifier.normalize(images)
    return {name: x for name, x in ways.items() if not torch.allclose(x, ours, atol=1e-4)}


def _gradient(classifier: Classifier, images: Tensor, labels: Tensor) -> Tensor:
    with torch.inference_mode(False), torch.enable_grad():
        x = images.detach().clone().requires_grad_()
        loss = F.cross_entropy(classifier(x), labels, reduction="sum")
        # A model that rounds may have no gradient at all: that is a gradient of zero.
        return torch.autograd.grad(loss, x)[0] if loss.requires_grad else torch.zeros_like(x)


def _rounded(shares: list[float]) -> list[float]:
    return [float(f"{share:.6g}") for share in shares]  # a small share is not zero


def _number(value: Tensor) -> float | None:
    """A finite number, or None: JSON has no NaN."""
    return round(float(value), 6) if value.isfinite() else None
