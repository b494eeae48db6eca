"""Where this process stands among those that were started with it: by `torchrun`, by Slurm's `srun`, or by itself.

Sharing a run needs none of this (see `robustkpca.runtime.claims`). It decides which device a process takes, which one
reports, and how training processes meet.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import BrokenExecutor
from dataclasses import dataclass

import torch

from robustkpca.errors import ProcessError, brief

DEFAULT_PORT = 29500  # torch's own


@dataclass(frozen=True)
class Place:
    """The number of this process (`rank`, from 0) and how many there are (`world`), in all and on this machine (local).

    host, port: where training processes meet; host is "" where nothing names one.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    host: str = ""
    port: int = DEFAULT_PORT

    @property
    def alone(self) -> bool:
        return self.world == 1


ALONE = Place()


def place(environment: Mapping[str, str] = os.environ) -> Place:
    """Read from the variables of torchrun (RANK, WORLD_SIZE, ...), else from those of a step of Slurm's srun.

    Slurm's variables of a job, without a step of several tasks, are one process: they stand in every shell of a job and
    in every task of an array. Raises ProcessError where torchrun's variables are not whole, or are no numbers.
    """
    given = {name: value for name, value in environment.items() if value}
    if "RANK" in given or _number(given, "WORLD_SIZE", 1) > 1:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    elif "SLURM_PROCID" in given and _number(given, "SLURM_STEP_NUM_TASKS", 1) > 1:
        # A list such as 4(x2),3: the tasks of each node. The first node's are taken for those of all.
        on_node = given.get("SLURM_STEP_TASKS_PER_NODE", "1").partition(",")[0].partition("(")[0]
        given["SLURM_STEP_TASKS_PER_NODE"] = on_node
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
    else:
        return ALONE
    rank, world = (_number(given, name) for name in names[:2])
    if world == 1:
        return ALONE
    if not 0 <= rank < world:
        raise ProcessError(f"{names[0]}: expected 0 to {world - 1}, as there are {world} processes, got {rank}")
    local_rank, local_world = _number(given, names[2], rank), _number(given, names[3], world)
    port = _number(given, "MASTER_PORT", DEFAULT_PORT)
    return Place(rank, world, local_rank, local_world, given.get("MASTER_ADDR", ""), port)


def _number(given: Mapping[str, str], name: str, default: int | None = None) -> int:
    if name not in given:
        if default is not None:
            return default
        raise ProcessError(
            f"{name}: expected beside the other variables of torchrun, but not set; unset all for one process"
        )
    try:
        return int(given[name])
    except ValueError:
        raise ProcessError(f"{name}: expected a number, got {given[name]!r}") from None


def cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def divide_threads(here: Place, environment: Mapping[str, str] = os.environ) -> None:
    """Give each process of this machine its share of the CPUs,
    unless OMP_NUM_THREADS asks for more than torchrun's 1."""
    if here.local_world > 1 and environment.get("OMP_NUM_THREADS", "1") == "1":
        threads = _number(environment, "SLURM_CPUS_PER_TASK", cpus() // here.local_world)
        torch.set_num_threads(max(1, threads))


def lost_worker(error: BaseException | None) -> str | None:
    """Why a process that works for this one is gone, where that is what an error says, or one that it came from; else
    None. Torch raises it wherever the program is, in the middle of an attack as well."""
    while error is not None:
        if isinstance(error, BrokenExecutor) or (isinstance(error, RuntimeError) and "DataLoader worker" in str(error)):
            return brief(error)
        error = error.__cause__ or error.__context__
    return None


@contextlib.contextmanager
def stops_without_workers() -> Iterator[None]:
    """Inside, the loss of a worker is a ProcessError: it says nothing of what was being done."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ProcessError) or (reason := lost_worker(error)) is None:
            raise
        raise ProcessError(
            f"a worker process was ended from outside ({reason.rstrip('. ')}); what is done is kept, and the same "
            "command goes on"
        ) from None
