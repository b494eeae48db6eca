"""Halved batches where memory ends."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Portions:
    """Does work on a batch in one go, or, where memory does not hold that much, in smaller portions.

    `limit` remembers how large they may be.

    `on_notice` is told when it shrinks. What each sample gets is the same in any portion.
    """

    def __init__(self, on_notice: Callable[[str], None] = warnings.warn, limit: int | None = None) -> None:
        self.limit = limit  # samples at once; None: all
        self.on_notice = on_notice

    def __call__(self, n: int, work: Callable[[slice], Tensor]) -> Tensor:
        """`work` for all of n samples, (n, ...)."""
        done: list[Tensor] = []
        start = 0
        while start < n:
            size = min(n - start, self.limit or n)
            try:
                done.append(work(slice(start, start + size)))
                start += size
                continue
            except Exception as error:
                if not self.may_shrink(error, size):
                    raise
            self.shrink(size)  # out here the frames that hold the failed attempt's tensors are gone
        return torch.cat(done) if len(done) > 1 else done[0]

    def whole(self, n: int, work: Callable[[int], T]) -> T:
        """`work` for n samples, told how many of them to take at once."""
        while True:
            size = min(n, self.limit or n)
            try:
                return work(size)
            except Exception as error:
                if not self.may_shrink(error, size):
                    raise
            self.shrink(size)

    def may_shrink(self, error: Exception, size: int) -> bool:
        """Whether an error with `size` samples at once says that memory has ended, and fewer could do."""
        ended = isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
        return ended and size > 1

    def shrink(self, size: int) -> None:
        """Go on with half of `size` samples at once."""
        gc.collect()
        torch.cuda.empty_cache()
        self.limit = size // 2
        self.on_notice(
            f"out of memory with {size} samples at once: going on with {self.limit}, which changes no result"
        )
