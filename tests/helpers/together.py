"""Run by tests in a process of its own: one evaluation by two processes that are forks, or the command line beside
another.

Arguments: `forks` SCENARIO FOLDER, or `command` FOLDER ARGUMENTS... . The forks write to FOLDER/two what one process
writes to FOLDER/one. Who wrote rows of an attack is noted in FOLDER/log, a line each: who, attack, first sample.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchattacks import FGSM

from robustkpca.attacks.registry import METHODS, Method
from robustkpca.evaluation.loop import evaluate
from robustkpca.models.model import Unusable
from robustkpca.runs.store import RunStore
from robustkpca.runtime.place import Place
from robustkpca.suites.suite import load_suite
from tests.helpers.attacks import suite_of
from tests.helpers.oracles import noise, tiny

Act = Callable[[Tensor], None]  # what an attack does before it attacks these images


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for another process."""
    end = time.monotonic() + 60
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"{what}: not within 60 s")
        time.sleep(0.01)


def logged(folder: Path, who: str) -> None:
    """Note who writes which rows."""
    write = RunStore.write_rows

    def noted(store: RunStore, model: str, attack: Any, first: int, rows: Any) -> None:
        write(store, model, attack, first, rows)
        with (folder / "log").open("a") as log:  # one short line at once, at the end: two processes do not mix
            log.write(f"{who} {attack} {first}\n")

    RunStore.write_rows = noted  # type: ignore[method-assign]


def meet(folder: Path, who: str) -> Callable[[], None]:
    """A function that returns when both processes have called it; it waits once."""
    met = []

    def wait() -> None:
        if not met:
            (folder / f"ready {who}").touch()
            until(lambda: len(list(folder.glob("ready *"))) >= 2, "the other process")
            met.append(True)

    return wait


def first_of(images: Tensor) -> int:
    """The number of the first of these images among the samples."""
    known = torch.from_numpy(noise().pixels).float().flatten(1)
    return int((known - 255 * images[0].detach().cpu().flatten()).abs().sum(1).argmin())


def run(folder: Path, act: Act, here: Place, models: int) -> None:
    class Own(FGSM):
        def forward(self, images: Tensor, labels: Tensor) -> Tensor:
            act(images)
            attacked: Tensor = super().forward(images, labels)
            return attacked

    METHODS._registered["Own"] = Method(Own, ("linf",), lengths=("eps",))
    every = [tiny(), Unusable("lost", "somewhere", "CheckpointError: torn"), tiny("symvit", seed=1)]
    suites = [suite_of([{"name": "a", "method": "Own"}]), load_suite("fgsm").with_eps(["1/255", "4/255"])]
    evaluate(every[:models], noise(), suites, folder, batch_size=2, here=here)


def equal(folder: Path, here: Place) -> Act:
    """The attack fails on the chunk from sample 8 on, and so late that the other process is beyond it."""
    wait = meet(folder, str(here.rank)) if not here.alone else lambda: None

    def act(images: Tensor) -> None:
        wait()
        if first_of(images) == 8:
            if not here.alone:
                until(lambda: any(int(line.split()[2]) >= 10 for line in own_rows(folder)), "a chunk beyond")
            raise RuntimeError("no kernel")

    return act


def own_rows(folder: Path) -> list[str]:
    log = folder / "log"
    return [line for line in log.read_text().splitlines() if line.split()[1] == "own"] if log.exists() else []


def other_fails(folder: Path, here: Place) -> Act:
    """The attack fails in the second process only."""
    wait, calls = meet(folder, str(here.rank)), []

    def act(images: Tensor) -> None:
        wait()
        calls.append(first_of(images))
        if here.rank == 1:
            (folder / "failed").write_text(str(min(calls)))
            raise RuntimeError("only here")

    return act


def killed(folder: Path, here: Place) -> Act:
    """The second process is killed in its first attack."""
    wait = meet(folder, str(here.rank))

    def act(images: Tensor) -> None:
        wait()
        if here.rank == 1:
            (folder / "killed").write_text(str(first_of(images)))
            os.kill(os.getpid(), signal.SIGKILL)

    return act


def slow(folder: Path, here: Place) -> Act:
    """The second process needs half a second more for each attack."""
    wait = meet(folder, str(here.rank))

    def act(images: Tensor) -> None:
        wait()
        if here.rank == 1:
            time.sleep(0.5)

    return act


def harmless(folder: Path, here: Place) -> Act:
    return lambda images: None


SCENARIOS = {"equal": equal, "other_fails": other_fails, "killed": killed, "slow": slow}


def fork(folder: Path, out: str, scenario: Callable[[Path, Place], Act], here: Place) -> int:
    if (child := os.fork()) == 0:
        try:
            torch.set_num_threads(1)  # before anything is computed: a pool of threads does not survive a fork
            if not here.alone:
                logged(folder, str(here.rank))
            run(folder / out, scenario(folder, here), here, 3 if scenario is equal else 1)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return child


def forks(name: str, folder: Path) -> None:
    scenario = SCENARIOS[name]
    alone = scenario if scenario is equal else harmless
    assert os.waitpid(fork(folder, "one", alone, Place()), 0)[1] == 0
    children = [fork(folder, "two", scenario, Place(rank, 2, rank, 2)) for rank in range(2)]
    left = dict(os.wait() for _ in children)  # at once: a killed process has ended when its parent has heard of it
    assert [left[child] for child in children] == [0, signal.SIGKILL if name == "killed" else 0]


def command(folder: Path, arguments: list[str]) -> None:
    """The command line, which meets its other half at the first rows."""
    from robustkpca.cli import main

    who = os.environ["SLURM_ARRAY_TASK_ID"]
    wait, write = meet(folder, who), RunStore.write_rows

    def met(store: RunStore, *rest: Any) -> None:
        wait()
        write(store, *rest)

    RunStore.write_rows = met  # type: ignore[method-assign]
    logged(folder, who)
    sys.argv = ["robustkpca", *arguments]
    main()


if __name__ == "__main__":
    if sys.argv[1] == "forks":
        for name in SCENARIOS:
            (Path(sys.argv[2]) / name).mkdir()
            forks(name, Path(sys.argv[2]) / name)
    else:
        command(Path(sys.argv[2]), sys.argv[3:])
