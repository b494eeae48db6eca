"""Sparse L1 descent."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchattacks.attack import Attack


class SparseL1Descent(Attack):
    """Sparse L1 descent (SLD; Tramer and Boneh 2019, arXiv 1904.13000, section 4.1).

    Each step moves, by `alpha` in L1 and equally, the 1 - `sparsity` share of values whose loss gradient is largest,
    then projects the perturbation onto the L1 ball of radius `eps` and clips to [0, 1]. The last iterate is returned.
    """

    def __init__(
        self, model: nn.Module, eps: float = 10.0, alpha: float = 1.0, steps: int = 20, sparsity: float = 0.99
    ) -> None:
        super().__init__("SparseL1Descent", model)
        self.eps, self.alpha, self.steps, self.sparsity = eps, alpha, steps, sparsity

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        size = images[0].numel()
        count = max(1, round((1 - self.sparsity) * size))
        moved = images.clone()
        for _ in range(self.steps):
            moved = moved.detach().requires_grad_()
            loss = F.cross_entropy(self.get_logits(moved), labels)
            (gradient,) = torch.autograd.grad(loss, moved)
            flat = gradient.flatten(1)
            places = flat.abs().topk(count, dim=1).indices
            step = torch.zeros_like(flat).scatter(1, places, flat.gather(1, places).sign() * (self.alpha / count))
            delta = project_l1((moved.detach() - images).flatten(1) + step, self.eps)
            moved = (images + delta.view_as(images)).clamp(0, 1)
        return moved.detach()


def project_l1(x: Tensor, radius: float) -> Tensor:
    """Euclidean projection of each row of (B, D) onto the L1 ball (Duchi et al. 2008)."""
    magnitude = x.abs()
    outside = magnitude.sum(1) > radius
    if not outside.any():
        return x
    ordered = magnitude.sort(1, descending=True).values
    sums = ordered.cumsum(1) - radius
    rank = torch.arange(1, x.shape[1] + 1, device=x.device)
    count = (ordered * rank > sums).sum(1, keepdim=True)
    threshold = sums.gather(1, count - 1) / count
    projected = x.sign() * (magnitude - threshold).clamp_min(0)
    return torch.where(outside[:, None], projected, x)
