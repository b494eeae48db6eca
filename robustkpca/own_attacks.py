"""Attacks that torchattacks does not have, in its interface: u in [0, 1] and labels to attacked u."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchattacks.attack import Attack

from robustkpca.draws import KeyedDraws


class UniformNoise(Attack):
    """u + e, e uniform in [-eps, eps], clipped to [0, 1]: no attack, but the noise an attack of this size should beat."""

    def __init__(self, model: nn.Module, eps: float = 8 / 255) -> None:
        super().__init__("UniformNoise", model)
        self.eps = eps

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return (images + torch.empty_like(images).uniform_(-self.eps, self.eps)).clamp(0, 1)


class SparseL1Descent(Attack):
    """Sparse L1 descent (SLD; Tramer and Boneh 2019, arXiv 1904.13000, section 4.1).

    Each step moves, by `alpha` in L1 and equally, the 1 - `sparsity` share of values whose loss gradient is largest, then projects the
    perturbation onto the L1 ball of radius `eps` and clips to [0, 1]. The last iterate is returned.
    """

    def __init__(
        self, model: nn.Module, eps: float = 10.0, alpha: float = 1.0, steps: int = 20, sparsity: float = 0.99
    ) -> None:
        super().__init__("SparseL1Descent", model)
        self.eps, self.alpha, self.steps, self.sparsity = eps, alpha, steps, sparsity

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        size = images[0].numel()
        kept = max(1, round((1 - self.sparsity) * size))
        moved = images.clone()
        for _ in range(self.steps):
            moved = moved.detach().requires_grad_()
            loss = F.cross_entropy(self.get_logits(moved), labels)
            (gradient,) = torch.autograd.grad(loss, moved)
            flat = gradient.flatten(1)
            places = flat.abs().topk(kept, dim=1).indices
            step = torch.zeros_like(flat).scatter(1, places, flat.gather(1, places).sign() * (self.alpha / kept))
            delta = project_l1((moved.detach() - images).flatten(1) + step, self.eps)
            moved = (images + delta.view_as(images)).clamp(0, 1)
        return moved.detach()


class BestPGD(Attack):
    """PGD from random starts (Madry et al. 2018, arXiv 1706.06083) that keeps the best iterate: of all steps of all restarts, the one whose
    margin max_j z_j - z_y over the wrong classes j is largest, so any that was misclassified.

    loss: what the gradient is taken of. `ce`; `margin`, the difference of logits above (Carlini and Wagner 2017, arXiv 1608.04644), which does
    not saturate as the cross-entropy does; `dlr`, that difference by the one between the first and the third logit (Croce and Hein 2020,
    arXiv 2003.01690, equation 6; at least 3 classes). eot: gradients and logits are means over this many passes, for models that draw
    random numbers (Athalye et al. 2018, arXiv 1707.07397). stop_when_wrong: leave a sample alone once an iterate is misclassified;
    off for a surrogate whose margin says nothing about the attacked model.
    """

    def __init__(
        self,
        model: nn.Module,
        eps: float = 8 / 255,
        alpha: float = 2 / 255,
        steps: int = 100,
        restarts: int = 1,
        loss: str = "margin",
        eot: int = 1,
        stop_when_wrong: bool = True,
    ) -> None:
        super().__init__("BestPGD", model)
        self.eps, self.alpha, self.steps, self.restarts = eps, alpha, steps, restarts
        self.loss, self.eot, self.stop_when_wrong = LOSSES[loss], eot, stop_when_wrong

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        best, attacked = torch.full_like(images[:, 0, 0, 0], -torch.inf), images.clone()
        left = torch.arange(len(images), device=images.device)
        for _ in range(self.restarts):
            if not len(left):
                break
            start, active = images[left], left
            with KeyedDraws.only(left):
                x = (start + torch.empty_like(start).uniform_(-self.eps, self.eps)).clamp(0, 1)
            for step in range(self.steps + 1):
                gradient, score = self._gradient(x, labels[active])
                better = score > best[active]
                best[active[better]], attacked[active[better]] = score[better], x[better]
                if self.stop_when_wrong:
                    keep = score <= 0
                    active, x, gradient, start = active[keep], x[keep], gradient[keep], start[keep]
                if step == self.steps or not len(active):
                    break
                x = x + self.alpha * gradient.sign()
                x = torch.minimum(torch.maximum(x, start - self.eps), start + self.eps).clamp(0, 1)
            left = active
        return attacked

    def _gradient(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient of the loss, and the margin (B,), both means over `eot` passes."""
        x = x.detach().requires_grad_()
        gradient, score = torch.zeros_like(x), torch.zeros(len(x), device=x.device)
        for _ in range(self.eot):
            logits = self.get_logits(x)
            gradient += torch.autograd.grad(self.loss(logits, labels).sum(), x)[0] / self.eot
            score += margin(logits.detach(), labels) / self.eot
        return gradient, score


def margin(logits: Tensor, labels: Tensor) -> Tensor:
    """The best wrong logit minus the right one, (B, K) and (B,) -> (B,): positive when misclassified."""
    right = logits.gather(1, labels[:, None])
    return logits.scatter(1, labels[:, None], -torch.inf).amax(1) - right[:, 0]


def _dlr(logits: Tensor, labels: Tensor) -> Tensor:
    ordered = logits.sort(1, descending=True).values
    return margin(logits, labels) / (ordered[:, 0] - ordered[:, 2] + 1e-12)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ce": lambda logits, labels: F.cross_entropy(logits, labels, reduction="none"),
    "margin": margin,
    "dlr": _dlr,
}


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
