"""Run by a test in a process of its own: trainings killed in the middle, gone on with, and shared by two processes.

Argument: a folder, which gets `whole` (never stopped), `cut` (killed and gone on with), `one` and `two` (by so many
processes). Each training is a fork.
"""

import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from robustkpca import train as training
from robustkpca.datasets.sources import load_samples
from robustkpca.models.settings import RPCSettings
from robustkpca.runtime.place import Place

# Everything that draws or keeps a state.
ALL = {
    "epochs": 3,
    "batch_size": 32,
    "crop_padding": 1,
    "flip": True,
    "mixup": 0.8,
    "cutmix": 1.0,
    "erasing": 0.25,
    "drop_path": 0.2,
    "ema": 0.9,
    "repeats": 2,
}
SHARED = {"epochs": 2, "batch_size": 20, "crop_padding": 1, "drop_path": 0.0, "mixup": 0.0}


def few() -> Any:
    return load_samples("digits", split="train", limit=100)


def go(out: Path, **rest: Any) -> dict[str, Any]:
    rpc = RPCSettings(iterations=2, lam=1.0, layers="all")
    return training.run("rpc-symvit", few(), out, rpc=rpc, **{"overrides": ALL, "holdout": 20, **rest})


def forked(work: Callable[[], object]) -> int:
    if (child := os.fork()) == 0:
        try:
            torch.set_num_threads(1)  # before anything is computed: a pool of threads does not survive a fork
            work()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return child


def ended(*children: int) -> list[int]:
    return [os.waitpid(child, 0)[1] for child in children]


def die(step: int, total: int) -> None:
    if step == total // 3 + 2:  # in the second epoch
        os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path) -> None:
    assert ended(forked(lambda: go(folder / "whole.safetensors"))) == [0]
    assert ended(forked(lambda: go(folder / "cut.safetensors", on_step=die))) == [signal.SIGKILL]
    assert torch.load(folder / "cut.pth", weights_only=True)["epoch"] == 0
    assert ended(forked(lambda: go(folder / "cut.safetensors"))) == [0]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"overrides": SHARED, "projection_loss": 4}
    places = [Place(rank, 2, rank, 2, "127.0.0.1", port) for rank in range(2)]
    pair = [forked(lambda here=here: go(folder / "two.safetensors", here=here, **shared)) for here in places]
    assert ended(*pair, forked(lambda: go(folder / "one.safetensors", **shared))) == [0, 0, 0]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
