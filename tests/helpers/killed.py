"""Run by tests in a process of its own: evaluations by one or several processes, killed at random moments and begun
again.

Arguments: what to evaluate, folder, kills, number of processes. Everything is imported once; each evaluation is a fork,
so that many fit into a test. Writes to `folder`/whole without a kill, to `folder`/cut with them, and prints how many
kills hit a running evaluation.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch

from robustkpca.evaluation.loop import evaluate
from robustkpca.models.settings import RPCSettings
from robustkpca.runtime.place import Place
from robustkpca.suites.suite import Suite, load_suite
from tests.helpers.oracles import noise, oracle, oracle_samples, tiny


def kill_test(folder: Path, here: Place) -> None:
    blur = Suite.parse(
        {"name": "c", "version": 1, "title": "c", "corruptions": ["fog", "shot_noise"], "severities": [1, 5]}, "suite"
    )
    models = [tiny(), tiny("rpc-symvit", RPCSettings(iterations=2, lam=1.0, layers="all"))]
    suites = [load_suite("pgd").with_steps(5), load_suite("fgsm"), blur]
    evaluate(models, noise(), suites, folder, batch_size=2, here=here)


def padding(folder: Path, here: Place) -> None:
    some = oracle_samples().take(np.array([10, 0, 1, 2, 3, 4, 5, 6, 7, 8]))
    evaluate([oracle()], some, [load_suite("fgsm").with_eps(["0"])], folder, batch_size=3, here=here)


WORK = {"kills": kill_test, "padding": padding}


def begin(what: str, folder: Path, count: int) -> list[int]:
    """Process ids of `count` forks that share the run."""
    children = []
    for rank in range(count):
        if (child := os.fork()) == 0:
            here = Place(rank, count, rank, count)
            try:
                torch.set_num_threads(1)  # before anything is computed: a pool of threads does not survive a fork
                WORK[what](folder, here)
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
                os._exit(1)
            os._exit(0)
        children.append(child)
    return children


def wait_for_more(folder: Path, children: list[int]) -> None:
    """Until a file of the run has come, so that a kill always hits work, or until a process has ended."""
    before = len([*folder.rglob("*.parquet")])
    while len([*folder.rglob("*.parquet")]) == before:
        if any(os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) for child in children):
            return
        time.sleep(0.005)


def main(what: str, folder: Path, kills: int, count: int) -> None:
    assert [os.waitpid(child, 0)[1] for child in begin(what, folder / "whole", 1)] == [0]
    draws = random.Random(0)
    hit = 0
    while True:
        children = begin(what, folder / "cut", count)
        if hit < kills:
            wait_for_more(folder / "cut", children)
            time.sleep(draws.uniform(0, 0.1))
            running = 0
            for child in draws.sample(children, len(children)):
                done, _ = os.waitpid(child, os.WNOHANG)
                if not done:
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                    running += 1
                time.sleep(draws.uniform(0, 0.05))
            hit += bool(running)
            if running:
                continue
        elif any(os.waitpid(child, 0)[1] for child in children):
            sys.exit("the last evaluation failed")
        print(hit)
        return


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
