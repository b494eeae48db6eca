"""The options of the comparisons, their interleaved medians, and the tables in which ratios stand beside their
targets.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata

import torch

from robustkpca import profile


def arguments(description: str, repeats: int) -> argparse.ArgumentParser:
    """The options that all comparisons have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--repeats", type=int, default=repeats, help="rounds, after one to warm up (default %(default)s)"
    )
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="CPU seconds of the process: for one thread on a machine that others use",
    )
    return parser


def medians(tasks: Mapping[str, Callable[[], object]], options: argparse.Namespace, times: int = 1) -> dict[str, float]:
    """Seconds of each task: all in turn in every round, so that what slows the machine for a while slows them alike.

    `times`: so many times the rounds asked for, where tasks are short.
    """
    clock = time.process_time if options.cpu_time else time.perf_counter
    return profile.medians(tasks, times * options.repeats, torch.device(options.device), clock)


def conditions(options: argparse.Namespace, *packages: str) -> str:
    """One line: rounds, clock, processor or GPU, cores, threads and versions."""
    clock = (
        "GPU time by events" if options.device.startswith("cuda") else "CPU time" if options.cpu_time else "wall time"
    )
    more = "".join(f", {name} {metadata.version(name)}" for name in packages)
    return f"Medians of {options.repeats} rounds, {clock}; {profile.machine(torch.device(options.device))}{more}."


def table(rows: Iterable[tuple[str, float, float | None]]) -> str:
    """A Markdown table of (what, ratio, the most it may be)."""
    lines = ["| what | ratio | at most | |", "| --- | ---: | ---: | --- |"]
    for what, ratio, most in rows:
        verdict = "" if most is None else "ok" if ratio <= most else "missed"
        lines.append(f"| {what} | {ratio:.2f} | {'' if most is None else f'{most:.2f}'} | {verdict} |")
    return "\n".join(lines)
