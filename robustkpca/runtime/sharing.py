"""Several processes that share one run: who they are, what each does, and how they hear of each other.

They are started by `torchrun`, or by Slurm's `srun` with MASTER_ADDR set. What is to be done is shared out once, at the start; rows go to
the folder of the run, which all processes see. A small store (torch.distributed's TCPStore) carries the shares, signs of life, and what each
process has to say at its end; no figure goes through it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch

from robustkpca.errors import ProcessError, brief

START = 300  # seconds within which all processes must have come
PATIENCE = 5  # seconds after which it is said that others are waited for
SILENCE = 60  # seconds without a sign of life after which a process counts as lost
BEAT = 1.0  # seconds between signs of life
DEFAULT_PORT = 29500


@dataclass(frozen=True)
class Place:
    """Where this process stands: its number and how many there are, in all and on this machine."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    host: str = ""
    port: int = DEFAULT_PORT
    notice: str = ""  # something about the environment that the user should know

    @property
    def alone(self) -> bool:
        return self.world == 1


ALONE = Place()


def place(environment: Mapping[str, str] = os.environ) -> Place:
    """Read from the variables that torchrun sets (RANK, WORLD_SIZE, ...), or Slurm's (SLURM_PROCID, SLURM_NTASKS) where MASTER_ADDR is set.

    Slurm's variables alone mean nothing: they stand in every shell of a job. Raises ProcessError where half of what is needed is there.
    """
    given = {name: value for name, value in environment.items() if value}
    if "RANK" in given or _number(given, "WORLD_SIZE", 1) > 1:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        default_port = None
    else:
        tasks = _number(given, "SLURM_STEP_NUM_TASKS", _number(given, "SLURM_NTASKS", 1))
        if tasks == 1 or "SLURM_PROCID" not in given:
            return ALONE
        if "MASTER_ADDR" not in given:
            return Place(
                notice=f"one process, though Slurm counts {tasks} tasks: set MASTER_ADDR to share a run among them"
            )
        on_node = given.get("SLURM_STEP_TASKS_PER_NODE", given.get("SLURM_TASKS_PER_NODE", "1")).partition("(")[0]
        given |= {"_WORLD": str(tasks), "_HERE": on_node.partition(",")[0]}
        names = ("SLURM_PROCID", "_WORLD", "SLURM_LOCALID", "_HERE")
        default_port = DEFAULT_PORT
    rank, world = (_number(given, name) for name in names[:2])
    if world == 1:
        return ALONE
    if not 0 <= rank < world:
        raise ProcessError(f"{names[0]}: expected 0 to {world - 1}, as there are {world} processes, got {rank}")
    if "MASTER_ADDR" not in given:
        raise ProcessError(f"MASTER_ADDR: expected, as there are {world} processes, but not set; torchrun sets it")
    return Place(
        rank,
        world,
        _number(given, names[2], rank),
        _number(given, names[3], world),
        given["MASTER_ADDR"],
        _number(given, "MASTER_PORT", default_port),
    )


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
    """Give each process of this machine its share of the CPUs, where OMP_NUM_THREADS does not ask for more than torchrun's 1."""
    if here.local_world > 1 and environment.get("OMP_NUM_THREADS", "1") == "1":
        mine = _number(environment, "SLURM_CPUS_PER_TASK", cpus() // here.local_world)
        torch.set_num_threads(max(1, mine))


class Peers:
    """The processes of one run, as one of them sees them; a context, which tells the others how it ended.

    With one process everything is local and there is no store.
    """

    def __init__(self, here: Place, name: str, on_notice: Callable[[str], None] = warnings.warn) -> None:
        """`name`: that of the run, the same in all processes. `on_notice` is told where others are waited for."""
        self.here = here
        self.done = 0.0  # how far this process has come, in the caller's unit
        self._store: Any = None if here.alone else _store_of_run(here, name, on_notice)
        self._stopped = threading.Event()
        self._beat: threading.Thread | None = None

    @property
    def leads(self) -> bool:
        """Whether this is the process that opens the run and closes it."""
        return self.here.rank == 0

    def __enter__(self) -> Peers:
        if self._store is not None:
            self._beat = threading.Thread(target=self._beats, daemon=True)
            self._beat.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and self._store is not None:
            why = (
                "interrupted"
                if isinstance(error, KeyboardInterrupt)
                else (str(error).splitlines() or [kind.__name__])[0]
            )
            with contextlib.suppress(ProcessError):
                self._say("plan" if self.leads else "end", {"error": why}, again=False)
        self._stopped.set()
        if self._beat is not None:
            self._beat.join(2 * BEAT)

    def share(self, plan: Callable[[], Sequence[int]]) -> list[int]:
        """This process's part of the numbers that `plan` returns; it is called by the leading process only."""
        if self._store is None:
            return list(plan())
        if self.leads:
            numbers = list(plan())
            self._say("plan", {"numbers": numbers})
        else:
            numbers = self._hear("plan", 0)["numbers"]
        return numbers[self.here.rank :: self.here.world]

    def end(self, report: Any, meanwhile: Callable[[], None]) -> list[Any]:
        """Say how it went, as JSON data; the leading process waits for what each other says, and calls `meanwhile` now and then."""
        if self._store is None:
            return []
        if not self.leads:
            self._say("end", {"report": report})
            return []
        return [self._hear("end", rank, meanwhile)["report"] for rank in range(1, self.here.world)]

    @property
    def done_by_others(self) -> float:
        """How far the others have come, as far as is known."""
        if self._store is None:
            return 0.0
        keys = [f"done/{rank}" for rank in range(self.here.world) if rank != self.here.rank]
        try:
            return sum(float(self._store.get(key)) for key in keys if self._store.check([key]))
        except RuntimeError:  # the store is gone, which `end` will say
            return 0.0

    def _beats(self) -> None:
        while not self._stopped.wait(BEAT):
            try:
                self._store.set(f"done/{self.here.rank}", repr(self.done))
                self._store.add(f"beat/{self.here.rank}", 1)
            except RuntimeError:  # the store is gone, and with it the leading process
                return

    def _say(self, what: str, said: dict[str, Any], *, again: bool = True) -> None:
        """`again`: also where something was said before."""
        key = f"{what}/{self.here.rank}"
        try:
            if again or not self._store.check([key]):
                self._store.set(key, json.dumps(said))
        except RuntimeError:
            raise self._gone() from None

    def _hear(self, what: str, rank: int, meanwhile: Callable[[], None] | None = None) -> dict[str, Any]:
        """Wait for what a process has to say, as long as it gives signs of life."""
        last, since = -1, time.monotonic()
        while True:
            try:
                if self._store.check([f"{what}/{rank}"]):
                    said: dict[str, Any] = json.loads(self._store.get(f"{what}/{rank}"))
                    break
                beats = self._store.add(f"beat/{rank}", 0)
            except RuntimeError:
                raise self._gone() from None
            if beats != last:
                last, since = beats, time.monotonic()
            elif time.monotonic() - since > SILENCE:
                raise ProcessError(
                    f"{self._of(rank)} has given no sign of life for {SILENCE} s; what is done is kept, the same command goes on"
                )
            if meanwhile:
                meanwhile()
            time.sleep(BEAT / 4)
        if "error" in said:
            raise ProcessError(f"{self._of(rank)} stopped: {said['error']}; what is done is kept")
        return said

    def _gone(self) -> ProcessError:
        gone = f"{self._of(0)}, or what started the processes, is gone"
        return ProcessError(f"{gone}; what is done is kept, the same command goes on")

    def _of(self, rank: int) -> str:
        return f"process {rank} of {self.here.world}"


_stores: dict[Place, Any] = {}  # one for all runs of this process


def _store(here: Place, on_notice: Callable[[str], None]) -> Any:
    """The store that all processes share, once they have all come."""
    if here in _stores:
        return _stores[here]
    import torch.distributed as dist

    address = f"{here.host}:{here.port}"
    url = f"tcp://{address}?rank={here.rank}&world_size={here.world}"
    failed: list[Exception] = []

    def meet() -> None:
        try:
            _stores[here] = next(dist.rendezvous(url, timeout=timedelta(seconds=START)))[0]
        except (RuntimeError, ValueError) as error:
            failed.append(error)

    # Beside the main thread, which alone hears of signals, and only between two steps of Python.
    meeting = threading.Thread(target=meet, daemon=True)
    meeting.start()
    meeting.join(PATIENCE)
    if meeting.is_alive():
        on_notice(f"process {here.rank} waits for the others of {here.world} at {address}, for at most {START} s")
    while meeting.is_alive():
        meeting.join(0.5)
    if failed:
        why = brief(failed[0])[:200]
        raise ProcessError(f"expected {here.world} processes at {address} within {START} s, not all came ({why})")
    return _stores[here]


def _store_of_run(here: Place, name: str, on_notice: Callable[[str], None]) -> Any:
    """A part of the store for the next run of these processes. Raises ProcessError when they have come for different ones."""
    import torch.distributed as dist

    store = _store(here, on_notice)
    shared: Any = dist.PrefixStore(f"robustkpca/{next(_RUNS)}", store)
    theirs = shared.compare_set("run", "", name).decode()
    if theirs != name:
        raise ProcessError(
            f"the processes were given different runs, {theirs} and {name}; start all with the same command"
        )
    return shared


_RUNS = itertools.count()
