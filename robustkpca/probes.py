"""What a few passes say about whether an evaluation of a model can be believed. Numbers only; `rules` reads them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from robustkpca.models import Classifier
from robustkpca.settings import IMAGENET_MEAN, IMAGENET_STD

GRADIENTS = 64  # samples whose gradient is looked at
DOUBLES = 8  # samples whose gradient is taken in float64 too


def probe(classifier: Classifier, images: Tensor, labels: Tensor) -> dict[str, Any]:
    """Properties of a model on some clean samples, as plain numbers.

    images: float32 (B, C, H, W) in [0, 1]; labels: int64 (B,). Returns

    - `n`, `correct`: samples, and how many are right
    - `softmaxed`: whether the logits are probabilities
    - `random`: largest difference of two passes over the same images, as a share of the largest logit; `random_predictions`: answers that changed
    - `gradients`, `zero_gradients`, `broken_gradients`: samples looked at; those whose input gradient of the cross-entropy is zero, and not finite
    - `cosine_worst`, `cosine_median`: cosine between input gradients of the cross-entropy in float32 and float64; None where one is zero or not finite
    - `normalisations`: for other ways of normalising than the Classifier's, how many samples are right [with, without] it, and that only
      one of the two gets right [gained, lost]
    """
    with torch.no_grad():
        logits, again = classifier(images).float(), classifier(images).float()
        right = logits.argmax(1) == labels
        largest = logits.abs().max().clamp_min(1e-12)
        found: dict[str, Any] = {
            "n": len(images),
            "correct": int(right.sum()),
            "softmaxed": bool((logits >= 0).all() and ((logits.sum(1) - 1).abs() < 1e-3).all()),
            "random": _number((logits - again).abs().max() / largest),
            "random_predictions": int((logits.argmax(1) != again.argmax(1)).sum()),
            "normalisations": {},
        }
        for name, other in _other_normalisations(classifier, images).items():
            ours = classifier.logits_of_normalized(other).argmax(1) == labels
            found["normalisations"][name] = [int((ours & ~right).sum()), int((right & ~ours).sum())]
    few, their_labels = images[:GRADIENTS], labels[:GRADIENTS]
    gradient = _gradient(classifier, few, their_labels).flatten(1)
    finite = gradient.isfinite().all(1)
    zero = finite & (gradient == 0).all(1)
    found |= {"gradients": len(few), "zero_gradients": int(zero.sum()), "broken_gradients": int((~finite).sum())}
    # Of samples that have a gradient: where there is none, there is nothing to compare.
    usable = (finite & ~zero).nonzero().flatten()[:DOUBLES]
    cosines = torch.empty(0)
    if len(usable):
        double = copy.deepcopy(classifier).double()
        exact = _gradient(double, few[usable].double(), their_labels[usable]).flatten(1)
        # Each by its largest entry first: a nearly saturated loss has a gradient of direction, but of hardly any length.
        ours, theirs = (g / g.abs().amax(1, keepdim=True) for g in (gradient[usable].double(), exact))
        cosines = F.cosine_similarity(ours, theirs, dim=1)
        cosines = cosines[cosines.isfinite()]
    found["cosine_worst"] = _number(cosines.min()) if len(cosines) else None
    found["cosine_median"] = _number(cosines.median()) if len(cosines) else None
    return found


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


def _number(value: Tensor) -> float | None:
    """A finite number, or None: JSON has no NaN."""
    return round(float(value), 6) if value.isfinite() else None
