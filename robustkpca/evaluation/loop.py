"""The only loop: every model, every chunk of samples, every perturbation; rows are written as they come."""

from __future__ import annotations

import contextlib
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from robustkpca.datasets.cache import PixelCache
from robustkpca.datasets.sample_set import SampleSet
from robustkpca.errors import DataError, RobustKPCAError, brief
from robustkpca.evaluation.plan import Plan, environment
from robustkpca.evaluation.units import Unit, Work
from robustkpca.models.model import Unusable
from robustkpca.runs.folder import chunk_ranges
from robustkpca.runs.records import Record
from robustkpca.runs.run import Run
from robustkpca.runs.store import RunStore
from robustkpca.runtime.claims import Claims
from robustkpca.runtime.memory import Portions
from robustkpca.runtime.place import ALONE, Place, cpus, lost_worker, stops_without_workers
from robustkpca.runtime.progress import Lines
from robustkpca.suites.cell import CLEAN, CLEAN_CELL, AttackId
from robustkpca.suites.suite import Suite
from robustkpca.tasks.base import Chunk, Options
from robustkpca.tasks.batch import Batch
from robustkpca.tasks.jobs import Job


@dataclass(frozen=True)
class Progress:
    """What has just been done, of how much, by all processes.
    One unit is one forward or backward pass of one sample."""

    model: str
    attack: str
    done: float
    total: float


@dataclass(frozen=True)
class Resources:
    """What an evaluation may use; none of it changes a result.

    workers: threads that decode ahead (None: as many as suit data and device). cache: what keeps decoded pictures.
    here: which of several processes this is. on_progress is told what was done; None: the logger `robustkpca` is, in
    lines of level INFO. on_notice is told what the user should know.
    """

    workers: int | None = None
    cache: PixelCache | None = None
    here: Place = ALONE
    on_progress: Callable[[Progress], None] | None = None
    on_notice: Callable[[str], None] = warnings.warn


HEALTH = "health"


class _Evaluation:
    """One process's part of a plan, in a folder that others may write to as well."""

    def __init__(self, plan: Plan, store: RunStore, resources: Resources) -> None:
        self.plan, self.store, self.resources = plan, store, resources
        self.portions = Portions(resources.on_notice, plan.options.batch_size)
        n, health = len(plan.samples), plan.task.health_samples
        self.units: list[Unit] = []
        for number, model in enumerate(plan.models):
            if not isinstance(model, Unusable):
                self.units += [Unit(number, range(min(health, n)), HEALTH)] if health else []
                self.units += [Unit(number, chunk) for chunk in chunk_ranges(n, plan.options.batch_size)]
        usable = sum(not isinstance(m, Unusable) for m in plan.models)
        self.passes = {job.id: job.passes(plan.task) for job in plan.jobs}
        self.total = usable * n * (1 + sum(self.passes.values()))
        self.counted: set[tuple[Unit, AttackId]] = set()  # what is done, by whomever, and counts in `passes_done`
        self.passes_done = 0.0
        self.log = Lines(logging.getLogger("robustkpca").info)
        self.finished: set[Unit] = set()
        # What failed before this process began is tried again; what fails from now on has failed.
        self.old_failures = {(r.model, r.first): r.failures for r in self._records()}
        self.failed: dict[tuple[str, AttackId], int] = {}  # the first sample of the chunk in which it failed

    def run(self, claims: Claims) -> None:
        workers = self.resources.workers
        work = Work(
            self.units, self.plan.readers(self.resources.cache), self.done,
            workers=_suitable_workers(self.plan, self.resources.here) if workers is None else workers,
            pinned=self.plan.request.device == "cuda", claims=claims, wait=self.resources.here.rank == 0,
            meanwhile=lambda: self._show("", "waiting for the other processes"),
        )  # fmt: skip
        for unit, inputs in work:
            if unit.purpose == HEALTH:
                if not isinstance(inputs, DataError):  # an input that cannot be read stops the run at its chunk
                    self._health(unit, inputs)
            elif isinstance(inputs, DataError):
                raise inputs
            else:
                self._chunk(unit, inputs)
            self.finished.add(unit)
        self._show("", "done")

    # -- what is there

    def done(self, unit: Unit) -> bool:
        """Whether a unit's results are there, or have failed since this process began."""
        if unit in self.finished:
            return True
        model = self.plan.labels[unit.model]
        if unit.purpose == HEALTH:
            whole = self.store.record(model, None).health is not None
        else:
            # Not `all(...)` of a generator: each that is there counts as progress.
            whole = all([self._has(unit, CLEAN_CELL.attack), *(self._settled(unit, job.id) for job in self.plan.jobs)])
        if whole:
            self.finished.add(unit)
        return whole

    def _has(self, unit: Unit, attack: AttackId) -> bool:
        there = self.store.has_rows(self.plan.labels[unit.model], attack, unit.samples.start, self._ids(unit))
        if there:
            self._advance(unit, attack)
        return there

    def _settled(self, unit: Unit, attack: AttackId) -> bool:
        return self._has(unit, attack) or self._has_failed(unit, attack)

    def _has_failed(self, unit: Unit, attack: AttackId) -> bool:
        """Whether an attack has failed on this chunk or one before it, which settles those after it."""
        model, first = self.plan.labels[unit.model], unit.samples.start
        reason = self.store.record(model, first).failures.get(str(attack))
        if reason is not None and reason != self.old_failures.get((model, first), {}).get(str(attack)):
            self.failed[model, attack] = min(first, self.failed.get((model, attack), first))
        return self.failed.get((model, attack), first + 1) <= first

    def _records(self) -> Iterator[Record]:
        """Of every chunk, as they were when this process began."""
        for unit in self.units:
            if unit.purpose != HEALTH:
                yield self.store.record(self.plan.labels[unit.model], unit.samples.start)

    def _ids(self, unit: Unit) -> list[str]:
        return [self.plan.samples.ids[i] for i in unit.samples]

    # -- doing it

    def _made_of(self, unit: Unit, inputs: Tensor) -> Chunk:
        return Chunk(
            self.plan.task, self.plan.models[unit.model], self.plan.labels[unit.model], self.plan.samples,
            unit.samples, inputs, self.plan.options.seed, self.portions,
        )  # fmt: skip

    def _health(self, unit: Unit, inputs: Tensor) -> None:
        model = self.plan.labels[unit.model]
        health = self.plan.task.health(self._made_of(unit, inputs))
        self.store.write_record(Record(model=model, health=health))

    def _chunk(self, unit: Unit, inputs: Tensor) -> None:
        store, model, first, ids = self.store, self.plan.labels[unit.model], unit.samples.start, self._ids(unit)
        batch = self.plan.task.batch(self._made_of(unit, inputs))
        log = _Log(store.record(model, first))
        clean = store.read_rows(model, CLEAN_CELL.attack, first, ids)
        if clean is not None:
            batch.note_clean(clean)
        else:
            with log.timed(CLEAN, len(ids)):
                rows = batch.clean_rows([self.plan.samples.conditions[i] for i in unit.samples])
            store.write_rows(model, CLEAN_CELL.attack, first, rows)
        self._advance(unit, CLEAN_CELL.attack)
        for job in self.plan.jobs:
            if not self._settled(unit, job.id):
                try:
                    self._perturb(unit, batch, job, log)
                    log.failures.pop(str(job.id), None)
                except RobustKPCAError:
                    raise
                except (Exception, SystemExit) as error:  # an attack that breaks must not cost the others
                    if lost_worker(error):
                        raise
                    log.failures[str(job.id)] = f"{type(error).__name__}: {brief(error)}"
                    self.failed[model, job.id] = first
            self._advance(unit, job.id)
        store.write_record(log.record)

    def _perturb(self, unit: Unit, batch: Batch, job: Job, log: _Log) -> None:
        first, ids = unit.samples.start, batch.ids
        before = None
        if job.after is not None:
            before = self.store.read_rows(batch.label, job.after, first, ids)
            if before is None:
                raise RuntimeError(f"{job.after}, whose survivors it attacks, has failed")
        with log.timed(str(job.id), len(ids) * len(job.suite.budgets)):
            rows = batch.perturbed_rows(job, before)
        if str(job.id) in batch.examples:
            self.store.write_examples(batch.label, job.id, first, batch.examples[str(job.id)])
        self.store.write_rows(batch.label, job.id, first, rows)

    # -- progress

    def _advance(self, unit: Unit, attack: AttackId) -> None:
        if (unit, attack) not in self.counted:
            self.counted.add((unit, attack))
            self.passes_done += len(unit.samples) * self.passes.get(attack, 1.0)
            self._show(self.plan.labels[unit.model], str(attack))

    def _show(self, model: str, attack: str) -> None:
        if self.resources.here.rank > 0:
            return
        done = self.total if attack == "done" else self.passes_done
        if self.resources.on_progress:
            self.resources.on_progress(Progress(model, attack, done, self.total))
        else:
            self.log(f"{model}  {attack}", done, self.total)


class _Log:
    """Times and failures of one chunk."""

    def __init__(self, record: Record) -> None:
        self._record, self.times, self.failures = record, dict(record.times), dict(record.failures)

    @contextlib.contextmanager
    def timed(self, attack: str, samples: int) -> Iterator[None]:
        """Note the wall time of the block, and how many samples times budgets it was for."""
        start = time.perf_counter()
        yield
        self.times[attack] = (round(time.perf_counter() - start, 4), samples)

    @property
    def record(self) -> Record:
        return self._record.model_copy(update={"times": self.times, "failures": self.failures})


@torch.inference_mode(False)  # inside a caller's inference_mode gradients would fail
def carry_out(plan: Plan, out: Path | str, resources: Resources | None = None) -> Run:
    """Do what is not yet done of a plan in the folder `out`, together with whoever else works on it; see `evaluate`."""
    store = RunStore.start(Path(out), plan.request, environment() | {"ignored": plan.samples.ignored})
    for label, model in zip(plan.labels, plan.models, strict=True):
        if isinstance(model, Unusable):
            store.write_record(Record(model=label, failures={CLEAN: model.reason}))
    resources = resources or Resources()
    with Claims(store.folder.claims) as claims, stops_without_workers():
        _Evaluation(plan, store, resources).run(claims)
    if resources.here.rank == 0:  # which has waited until everything is there
        store.remove_parts()
    return Run.open(store.folder.path)


def _suitable_workers(plan: Plan, here: Place) -> int:
    """How many threads should decode ahead: what lies in memory needs none,
    and on the CPU more than one takes from the model."""
    if plan.samples.in_memory:
        return 0
    return 1 if plan.request.device == "cpu" else min(8, max(1, cpus() // here.local_world))


def evaluate(
    models: Sequence[Any],
    samples: SampleSet,
    suites: Sequence[Suite],
    out: Path | str,
    *,
    options: Options | None = None,
    resources: Resources | None = None,
    **rest: Any,
) -> Run:
    """Perturb every sample of `samples` on every model with every suite, and keep the rows in the folder `out`.

    A folder that holds part of this very request is continued; one that holds another request is refused. Models are on
    their device. Interrupting loses at most the chunk in hand. Returns the run, complete except for what failed.

    `rest`: the fields of Options (`seed`, `batch_size`, `full_argmax`, `force`) and of Resources (`workers`, `cache`,
    `here`, `on_progress`, `on_notice`), for those who do not build the two. Several processes that call it with one
    folder share the work; those whose `here.rank` is above 0 do not wait for the others and may return an incomplete
    run.
    """
    options, resources = options or Options(), resources or Resources()
    for name, value in rest.items():
        if hasattr(options, name):
            options = replace(options, **{name: value})
        elif hasattr(resources, name):
            resources = replace(resources, **{name: value})
        else:
            raise TypeError(f"evaluate() got an unexpected keyword argument {name!r}")
    return carry_out(Plan(models, samples, suites, options), out, resources)
