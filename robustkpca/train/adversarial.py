"""Adversarial training: images moved within an L-inf ball so that the model errs, and the losses on them.

PGD-AT: Madry et al. 2018, arXiv 1706.06083. TRADES: Zhang et al. 2019, arXiv 1901.08573. Images are in [0, 1]; a
`model` is any function of such images to logits, which normalises them itself. Gradients are taken with respect to
images only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

Model = Callable[[Tensor], Tensor]


def divergence(clean: Tensor, moved: Tensor) -> Tensor:
    """KL(p || p') of the softmax of two logits (B, K), p of the first, mean over the batch (equation 5 of TRADES)."""
    return F.kl_div(moved.log_softmax(-1), clean.log_softmax(-1), reduction="batchmean", log_target=True)


def ascend(loss: Model, images: Tensor, start: Tensor, *, eps: float, steps: int) -> Tensor:
    """`steps` sign steps of 2.5 eps / steps up a `loss` of images, inside eps around `images` and inside [0, 1].

    images, start: float (B, C, S, S). Returns images without gradient. A step is 2.5 eps / steps so that the far side
    of the ball can be reached (Madry et al., section 5).
    """
    step, moved = 2.5 * eps / steps, start.detach()
    low, high = (images - eps).clamp_min(0), (images + eps).clamp_max(1)
    for _ in range(steps):
        moved = torch.minimum(torch.maximum(moved, low), high).requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(loss(moved), moved)
        moved = moved.detach() + step * slope.sign()
    return torch.minimum(torch.maximum(moved, low), high)


def pgd_examples(model: Model, images: Tensor, labels: Tensor, *, eps: float, steps: int) -> Tensor:
    """Images that maximise the cross-entropy to `labels`, from a uniform start in the ball (global generator)."""
    start = images + torch.empty_like(images).uniform_(-eps, eps)
    return ascend(
        lambda moved: F.cross_entropy(model(moved), labels, reduction="sum"), images, start, eps=eps, steps=steps
    )


def trades_examples(model: Model, images: Tensor, *, eps: float, steps: int) -> Tensor:
    """Images that maximise the divergence from the clean predictions, from 0.001 N(0, 1) away (as the authors do)."""
    with torch.no_grad():
        clean = model(images)
    start = images + 0.001 * torch.randn_like(images)
    return ascend(lambda moved: divergence(clean, model(moved)), images, start, eps=eps, steps=steps)


def trades_loss(clean: Tensor, moved: Tensor, labels: Tensor, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Cross-entropy of the clean logits plus beta times the divergence; gradients flow through both logits, (B, K)."""
    return F.cross_entropy(clean, labels, label_smoothing=label_smoothing) + beta * divergence(clean, moved)
