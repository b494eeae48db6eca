"""Units of work: which samples of which model, shared among processes by claims, their inputs decoded ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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


class _Decoded(torch.utils.data.Dataset[Tensor | DataError]):
    """The inputs of each unit, so that a DataLoader's workers can decode ahead. An error is handed on as it is: a
    worker would wrap it."""

    def __init__(self, units: Sequence[Unit], readers: Mapping[int, Reader]) -> None:
        self.units, self.readers = units, readers

    def __getitem__(self, number: int) -> Tensor | DataError:
        unit = self.units[number]
        try:
            return torch.stack([self.readers[unit.model](i) for i in unit.samples])
        except DataError as error:
            return error


@dataclass(frozen=True)
class Work:
    """Units with what makes their inputs.

    `done` says whether a unit's result is there; with `claims` it is asked again and again, and must look at the disk.
    `workers` processes decode ahead. `meanwhile` is called now and then while others are waited for.
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
        taken: list[int] = []

        def numbers() -> Iterator[int]:
            for number in self._claimed(wait):
                taken.append(number)
                yield number

        dataset = _Decoded(self.units, self.readers)
        loader = torch.utils.data.DataLoader(
            dataset, batch_size=None, sampler=_Sampler(numbers), num_workers=workers, pin_memory=self.pinned,
            prefetch_factor=1 if workers else None,  # what is decoded ahead is claimed, and kept from faster processes
        )  # fmt: skip
        for position, inputs in enumerate(loader):
            unit = self.units[taken[position]]
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


class _Sampler(torch.utils.data.Sampler[int]):
    """Numbers as they are claimed."""

    def __init__(self, numbers: Callable[[], Iterator[int]]) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[int]:
        return self.numbers()
