"""Which samples an attack had a gradient to follow for."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from robustkpca.runtime.keyed_random import KeyedDraws

# Flags of rows, see `Classification.untried`.
ZERO, NOT_FINITE = "no_gradient", "gradient_not_finite"


class GradientWatch:
    """Whether each sample of an attacked batch had a gradient that was finite and not zero everywhere.

    One such gradient is enough, at whatever step of whatever restart. Where the first of a restart is none, the attack
    stands still, and so are those after it. It looks at what the model alone passes back (not at the distance that CW
    adds to its loss), until every sample had one: as a rule once.
    """

    def __init__(self, start: Tensor, keyed: KeyedDraws) -> None:
        """start: the B samples as the attack gets them, (B, ...). keyed: its draws, which know who is in a batch."""
        self._start, self._keyed = start, keyed
        self._numbers = {id(g): number for number, g in enumerate(keyed.generators)}
        self._usable = torch.zeros(len(start), dtype=torch.bool, device=start.device)
        self._first: dict[bool, Tensor] = {zero: torch.zeros_like(self._usable) for zero in (True, False)}
        self._all = False

    def watched(self, x: Tensor) -> Tensor:
        """What the model is to be given in place of x, (b, ...): the same values."""
        if self._all or not (x.requires_grad and torch.is_grad_enabled()):
            return x
        if is_functorch_wrapped_tensor(x):  # within torch.func.grad or vmap there are no hooks that could tell
            return x
        seen = x.view_as(x)
        seen.register_hook(partial(self._look, self._samples(x)))
        return seen

    def _samples(self, x: Tensor) -> Tensor:
        """Which samples of the batch the b rows of x are of, int64 (b,)."""
        active = self._keyed.generators
        now, start = x.detach().flatten(1).float(), self._start.flatten(1).float()
        distance = torch.cdist(now, start)
        least, nearest = distance.min(1)
        if len(x) != len(active):  # an attack that leaves samples out, or has several copies of each
            return nearest
        samples = torch.tensor([self._numbers[id(g)] for g in active], device=x.device)
        # In their order, unless others are clearly nearer: an attack may have two copies of one half.
        rounding = 2e-3 * torch.linalg.vector_norm(now, dim=1)
        in_order = distance.gather(1, samples[:, None])[:, 0] <= 2 * least + rounding
        return torch.where(in_order, samples, nearest)

    def _look(self, samples: Tensor, gradient: Tensor) -> None:
        size = gradient.detach().flatten(1).abs().amax(1)  # NaN and infinity stay what they are
        finite = size.isfinite()
        new = ~(self._usable | self._first[True] | self._first[False])[samples]
        self._first[True][samples[new & finite & (size == 0)]] = True
        self._first[False][samples[new & ~finite]] = True
        self._usable[samples[finite & (size > 0)]] = True
        self._all = bool(self._usable.all())

    @property
    def flags(self) -> list[str]:
        """For each sample the flag that says what its first gradient was, "" where it had one to follow, and where none
        was asked for."""
        zero, broken = (first & ~self._usable for first in self._first.values())
        pairs = zip(zero.tolist(), broken.tolist(), strict=True)
        return [ZERO if z else NOT_FINITE if b else "" for z, b in pairs]
