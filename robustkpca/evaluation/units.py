"""Units of work: which samples of which model, shared among processes by claims, their inputs decoded ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from robustkpca.errors import DataError
from robustkpca.runtime.claims import Claims

Reader = Callable[[int], Tensor]  # from the number of a sample to its input


@dataclass(frozen=True)
class Unit:
    """What one process does in one go. `purpose` tells apart what is done with the same samples."""

    model: int
    samples: range
    purpose: str = "rows"

    @property
    def key(self) -> str:
        return f"{self.model} {self.purpose} {self.samples.start}"


@dataclass(frozen=True)
class Work:
    """Units with what makes their inputs.

    `done` says whether a unit's result is there; with `claims` it is asked again and again, and must look at the disk.
    `workers` threads decode ahead, so readers must bear that. `meanwhile` is called now and then while others are
    waited for.
    """

    units: Sequence[Unit]
    readers: Mapping[int, Reader]
    done: Callable[[Unit], bool] = lambda unit: False
    workers: int = 0
    pinned: bool = False
    claims: Claims | None = None
    wait: bool = False  # for units that other processes hold, and take over those of processes that were lost
    meanwhile: Callable[[], None] | None = None

    def __iter__(self) -> Iterator[tuple[Unit, Tensor | DataError]]:
        """Each unit that is to be done here, with its inputs, (B, ...), on the CPU."""
        yield from self._pass(self.workers, wait=False)
        if self.claims is not None and self.wait:  # without decoding ahead: who waits must hold nothing
            yield from self._pass(0, wait=True)

    def _pass(self, workers: int, *, wait: bool) -> Iterator[tuple[Unit, Tensor | DataError]]:
        # One unit ahead: what is decoded ahead is claimed, and kept from faster processes. In threads, as Pillow and
        # the file system leave Python's lock: worker processes would hand images over in /dev/shm, which containers
        # keep small, and wait there for ever.
        pool = ThreadPoolExecutor(workers, "decode") if workers else None
        begun: deque[tuple[Unit, Iterator[Tensor]]] = deque()
        try:
            for number in self._claimed(wait):
                unit = self.units[number]
                begun.append((unit, (pool.map if pool else map)(self.readers[unit.model], unit.samples)))
                if len(begun) > (pool is not None):
                    yield from self._finished(*begun.popleft())
            while begun:
                yield from self._finished(*begun.popleft())
        finally:
            if pool:
                pool.shutdown(cancel_futures=True)

    def _finished(self, unit: Unit, images: Iterator[Tensor]) -> Iterator[tuple[Unit, Tensor | DataError]]:
        """One unit, released once it was used."""
        try:
            inputs: Tensor | DataError = torch.stack(list(images))
        except DataError as error:
            inputs = error
        if self.pinned and isinstance(inputs, Tensor):
            inputs = inputs.pin_memory()
        yield unit, inputs
        if self.claims is not None:
            self.claims.release(unit.key)

    def _claimed(self, wait: bool) -> Iterator[int]:
        if self.claims is None:
            yield from (number for number, unit in enumerate(self.units) if not self.done(unit))
            return
        by_key = {unit.key: number for number, unit in enumerate(self.units)}
        keys = self.claims.units(
            list(by_key),
            lambda key: self.done(self.units[by_key[key]]),
            keep=True,
            wait=wait,
            meanwhile=self.meanwhile,
        )
        yield from (by_key[key] for key in keys)
