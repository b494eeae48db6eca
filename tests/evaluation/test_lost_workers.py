"""A process that is killed from outside is no attack's failure: the run stops, and the same command goes on."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from concurrent.futures import ProcessPoolExecutor

import pytest
from torch.utils.data import DataLoader
from torchattacks.attack import Attack

from robustkpca.errors import ProcessError
from robustkpca.evaluation.loop import evaluate
from robustkpca.suites.suite import load_suite
from tests.helpers.attacks import register, suite_of
from tests.helpers.oracles import noise, tiny

KILLED = []  # a mark for each time


class Helped(Attack):
    """An attack that goes on while a process that works for the program is killed, once."""

    def __init__(self, model, eps: float = 8 / 255) -> None:
        super().__init__("Helped", model)

    def forward(self, images, labels):
        if not KILLED:
            KILLED.append(True)
            self.lose()
        return images.clone()


class ByAPool(Helped):
    """It asks for the result of its own worker."""

    def lose(self):
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
            pool.submit(os.kill, os.getpid(), 0).result()
            (worker,) = pool._processes
            os.kill(worker, signal.SIGKILL)
            pool.submit(os.getpid).result(timeout=60)


class ByALoader(Helped):
    """Torch raises the loss of a loader's worker wherever the program is: here it only waits."""

    def __init__(self, model, eps: float = 8 / 255) -> None:
        super().__init__(model)
        self.batches = iter(DataLoader(range(100), num_workers=0 if KILLED else 1))

    def lose(self):
        next(self.batches)
        (worker,) = self.batches._workers
        os.kill(worker.pid, signal.SIGKILL)
        for _ in range(600):
            time.sleep(0.1)
        raise AssertionError("torch has not said that its worker is gone")


class AsACause(ByAPool):
    """What it raises hides the reason."""

    def lose(self):
        try:
            super().lose()
        except Exception as error:
            raise ValueError("no result") from error


@pytest.mark.parametrize("attack", [ByAPool, ByALoader, AsACause])
def test_the_run_stops_and_goes_on(tmp_path, monkeypatch, attack):
    KILLED.clear()
    register(monkeypatch, Helped=attack)
    suites = [load_suite("fgsm"), suite_of([{"name": "own", "method": "Helped"}])]
    with pytest.raises(ProcessError, match=r"^a worker process was ended from outside .*; what is done is kept"):
        evaluate([tiny()], noise(), suites, tmp_path)
    run = evaluate([tiny()], noise(), suites, tmp_path)
    assert not run.summary.failures
    assert all(status.complete for status in run.statuses)


def test_what_an_attack_does_wrong_itself_is_its_failure(tmp_path, monkeypatch):
    class Broken(Helped):
        def lose(self):
            raise RuntimeError("a worker of mine is killed by signal: not one that torch knows")

    KILLED.clear()
    register(monkeypatch, Helped=Broken)
    run = evaluate([tiny()], noise(), [suite_of([{"name": "own", "method": "Helped"}])], tmp_path)
    (failure,) = run.summary.failures.values()
    assert failure.reason.startswith("RuntimeError: a worker of mine")
