"""Wall time of one evaluation on the CPU by two processes with half of the threads each, over one process with all of
them.

Usage: python benchmarks/sharing.py [--repeats N]. Each is the whole command, imports and table included, in turn.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from timing import table

from robustkpca.profile import machine

EVAL = [
    "-m",
    "robustkpca",
    "eval",
    "--model",
    "symvit",
    "--model",
    "rpc-symvit",
    "--attack",
    "pgd",
    "--limit",
    "400",
    "--batch-size",
    "20",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    threads = os.cpu_count() or 1
    ways = {
        "one": ([sys.executable, *EVAL], {"OMP_NUM_THREADS": str(threads)}),
        "two": ([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *EVAL], {}),
    }
    clean = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(repeats):
            for name, (command, environment) in ways.items():
                start = time.perf_counter()
                out = Path(folder) / f"{name}{number}"
                subprocess.run([*command, "--out", str(out)], check=True, capture_output=True, env=clean | environment)
                seconds[name].append(time.perf_counter() - start)
    ratio = statistics.median(seconds["two"]) / statistics.median(seconds["one"])
    print(f"{' '.join(EVAL[2:])}; medians of {repeats} whole commands in turn; {machine(torch.device('cpu'))}\n")
    print(table([(f"two processes over one with {threads} threads", ratio, 1.1)]))
    print(
        "\nseconds: " + "; ".join(f"{name} {', '.join(f'{s:.1f}' for s in taken)}" for name, taken in seconds.items())
    )


if __name__ == "__main__":
    main()
