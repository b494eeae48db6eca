"""Medians of interleaved timings, and the tables in which their ratios stand beside their targets."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path

import torch


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
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    for round_ in range(times * options.repeats + 1):
        for name, task in tasks.items():
            taken = _seconds(task, options)
            if round_:
                seconds[name].append(taken)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def _seconds(task: Callable[[], object], options: argparse.Namespace) -> float:
    if not options.device.startswith("cuda"):
        clock = time.process_time if options.cpu_time else time.perf_counter
        start = clock()
        task()
        return clock() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    task()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000


def conditions(options: argparse.Namespace, *packages: str) -> str:
    """One line: rounds, clock, processor or GPU, cores, threads and versions."""
    names = [line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")]
    cuda = options.device.startswith("cuda")
    where = torch.cuda.get_device_name(options.device) if cuda else names[0] if names else platform.machine()
    clock = "GPU time by events" if cuda else "CPU time" if options.cpu_time else "wall time"
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "timm", *packages))
    return (
        f"Medians of {options.repeats} rounds, {clock}; {where}, {os.cpu_count()} cores, "
        f"{torch.get_num_threads()} thread(s); {versions}."
    )


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def table(rows: Iterable[tuple[str, float, float | None]]) -> str:
    """A Markdown table of (what, ratio, the most it may be)."""
    lines = ["| what | ratio | at most | |", "| --- | ---: | ---: | --- |"]
    for what, ratio, most in rows:
        verdict = "" if most is None else "ok" if ratio <= most else "missed"
        lines.append(f"| {what} | {ratio:.2f} | {'' if most is None else f'{most:.2f}'} | {verdict} |")
    return "\n".join(lines)
