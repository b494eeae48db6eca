"""Attacks that torchattacks does not have, in its interface: u in [0, 1] and labels to attacked u."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchattacks.attack import Attack

from robustkpca.runtime.keyed_random import KeyedDraws


class BestPGD(Attack):
    """PGD from random starts (Madry et al. 2018, arXiv 1706.06083) that keeps the best iterate: of all steps of all
    restarts, the one whose margin max_j z_j - z_y over the wrong classes j is largest, so any that was misclassified.

    loss: what the gradient is taken of. `ce`; `margin`, the difference of logits above (Carlini and Wagner 2017,
    arXiv 1608.04644), which does not saturate as the cross-entropy does; `dlr`, that difference by the one between
    the first and the third logit (Croce and Hein 2020, arXiv 2003.01690, equation 6; at least 3 classes). eot:
    gradients and logits are means over this many passes, for models that draw random numbers (Athalye et al. 2018,
    arXiv 1707.07397). stop_when_wrong: leave a sample alone once an iterate is misclassified; off for a surrogate
    whose margin says nothing about the attacked model.
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
