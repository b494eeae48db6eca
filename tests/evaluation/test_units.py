"""Inputs are decoded ahead in threads of the same process, one unit ahead, and errors come where they belong."""

import os
import threading

import pytest
import torch

from robustkpca.errors import DataError
from robustkpca.evaluation.units import Unit, Work

UNITS = [Unit(0, range(first, first + 4)) for first in range(0, 20, 4)]


class Reader:
    """Numbers as images, noting who asked; those of `broken` cannot be read."""

    def __init__(self, broken=()):
        self.broken, self.asked, self.threads, self.processes = broken, [], set(), set()

    def __call__(self, index):
        self.asked.append(index)
        self.threads.add(threading.current_thread().name)
        self.processes.add(os.getpid())
        if index in self.broken:
            raise DataError(f"image {index}")
        return torch.full((1, 2, 2), float(index))


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_units_come_in_order_and_one_is_decoded_ahead(workers):
    reader, ahead = Reader(), 4 * bool(workers)
    for number, (unit, inputs) in enumerate(Work(UNITS, {0: reader}, workers=workers)):
        assert unit == UNITS[number]
        assert inputs[:, 0, 0, 0].tolist() == list(unit.samples)
        assert max(reader.asked) < unit.samples.stop + ahead  # what is claimed ahead is kept from faster processes
    assert sorted(reader.asked) == list(range(20))
    assert reader.processes == {os.getpid()}  # nothing goes through /dev/shm, which containers keep small
    assert ("MainThread" in reader.threads) == (workers == 0)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_image_that_cannot_be_read_spoils_its_unit_alone(workers):
    outcomes = [inputs for _, inputs in Work(UNITS, {0: Reader(broken={5, 6})}, workers=workers)]
    assert [isinstance(inputs, DataError) for inputs in outcomes] == [False, True, False, False, False]
    assert str(outcomes[1]) == "image 5"  # the first, whichever thread was faster


@pytest.mark.parametrize("workers", [0, 2])
def test_who_stops_early_leaves_no_thread(workers):
    before = threading.active_count()
    for _ in (work := iter(Work(UNITS, {0: Reader()}, workers=workers))):
        work.close()
        break
    assert threading.active_count() == before


def test_another_error_is_not_swallowed():
    def fail(index):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(Work(UNITS, {0: fail}, workers=2))
