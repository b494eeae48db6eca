"""The parts of AutoAttack: torchattacks' APGD, targeted APGD, FAB and Square, run on samples still unbroken.

Croce and Hein, "Reliable evaluation of adversarial robustness with an ensemble of diverse parameter-free attacks",
ICML 2020, arXiv 2003.01690. Steps and search are torchattacks'; what is ours is the loop around them: restarts and
targets go on with the samples still right, whose random numbers stay their own. The suite `autoattack` puts the parts
together with the reference's parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
import torchattacks
from torch import Tensor
from torchattacks.attack import Attack

from robustkpca.runtime.keyed_random import KeyedDraws

Single = Callable[[Tensor, Tensor], Tensor]


def _on_survivors(attack: Attack, images: Tensor, labels: Tensor, rounds: Iterable[Single]) -> Tensor:
    """Run `rounds` in turn, each on the samples still correct; a sample that no round breaks comes back as it was."""
    attacked = images.clone()
    with torch.no_grad():
        right = attack.get_logits(images).argmax(1) == labels
    for single in rounds:
        left = right.nonzero().flatten()
        if not len(left):
            break
        x, y = images[left], labels[left]
        with KeyedDraws.only(left):
            candidates = single(x, y)
        with torch.no_grad():
            broken = attack.get_logits(candidates).argmax(1) != y
        attacked[left[broken]] = candidates[broken]
        right[left[broken]] = False
    return attacked


class APGD(torchattacks.APGD):
    """APGD on the cross-entropy or the DLR loss (at least 3 classes), `n_restarts` times."""

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        rounds = [lambda x, y: self.attack_single_run(x, y)[3]] * self.n_restarts
        return _on_survivors(self, images, labels, rounds)


class APGDT(torchattacks.APGDT):
    """APGD on the targeted DLR loss (at least 4 classes), for each of the `n_classes` - 1 most likely wrong classes."""

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return _on_survivors(self, images, labels, self._rounds())

    def _rounds(self) -> Iterator[Single]:
        for target in range(2, self.n_target_classes + 2):
            self.target_class = target
            for _ in range(self.n_restarts):
                yield lambda x, y: self.attack_single_run(x, y)[3]


class FABT(torchattacks.FAB):
    """Targeted FAB for each of the `n_classes` - 1 most likely wrong classes; images further than eps do not count."""

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        self.multi_targeted = True
        return _on_survivors(self, images, labels, self._rounds())

    def _rounds(self) -> Iterator[Single]:
        for target in range(2, self.n_target_classes + 2):
            self.target_class = target
            for number in range(self.n_restarts):
                yield partial(self._within, random_start=number > 0)

    def _within(self, x: Tensor, y: Tensor, random_start: bool) -> Tensor:
        moved = self.attack_single_run_targeted(x, y, use_rand_start=random_start)
        order = {"Linf": float("inf"), "L2": 2}[self.norm]
        far = torch.linalg.vector_norm((moved - x).flatten(1), ord=order, dim=1) > self.eps
        return torch.where(far[:, None, None, None], x, moved)


class Square(torchattacks.Square):
    """Square attack (Andriushchenko et al. 2020, arXiv 1912.00049) with `n_queries` queries a restart."""

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        self.init_hyperparam(images)
        rounds = [lambda x, y: self.attack_single_run(x, y)[1]] * self.n_restarts
        return _on_survivors(self, images, labels, rounds)
