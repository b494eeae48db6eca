"""The only loop: every model, every chunk of samples, every attack; rows are written as they come."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from robustkpca.datasets.cache import PixelCache
from robustkpca.datasets.images import ArraySamples
from robustkpca.datasets.samples import Samples
from robustkpca.errors import DataError, RobustKPCAError
from robustkpca.evaluation.plan import Plan, environment
from robustkpca.models.classifier import Classifier, Unusable
from robustkpca.runs.request import fingerprint
from robustkpca.runs.run import Run, chunk_ranges
from robustkpca.runtime.keyed_random import seeded
from robustkpca.runtime.memory import Portions
from robustkpca.runtime.sharing import ALONE, Peers, Place, cpus
from robustkpca.suites.cell import CLEAN
from robustkpca.suites.suite import Suite
from robustkpca.tasks.classification.batch import Batch
from robustkpca.tasks.classification.health import SAMPLES, probe
from robustkpca.tasks.jobs import Job, jobs_of


@dataclass(frozen=True)
class Progress:
    """What has just been done, of how much, by all processes. One unit is one forward or backward pass of one sample."""

    model: str
    attack: str
    done: float
    total: float


@dataclass(frozen=True)
class Unit:
    """What one process does in one go: everything on one chunk of samples of one model, or that model's probes."""

    model: int
    samples: range
    probes: bool = False


class _Decoded(torch.utils.data.Dataset[Tensor | DataError]):
    """The images of each unit, so that a DataLoader's workers can decode ahead. An error is handed on as it is: a worker would wrap it."""

    def __init__(self, units: Sequence[Unit], readers: Mapping[int, Callable[[int], Tensor]]) -> None:
        self.units, self.readers = units, readers

    def __getitem__(self, number: int) -> Tensor | DataError:
        unit = self.units[number]
        try:
            return torch.stack([self.readers[unit.model](i) for i in unit.samples])
        except DataError as error:
            return error


class _Work:
    """One process's part of a plan, in a run that is open for writing."""

    def __init__(
        self, plan: Plan, run: Run, peers: Peers, portions: Portions, on_progress: Callable[[Progress], None] | None
    ) -> None:
        self.plan, self.run, self.peers, self.portions, self.on_progress = plan, run, peers, portions, on_progress
        self.jobs = jobs_of(plan.suites)
        self.labels: dict[int, Tensor] = {}  # of the samples as each model counts its classes
        self.units: list[Unit] = []  # all there are, the same in every process
        n = len(plan.samples)
        for number, model in enumerate(plan.models):
            if isinstance(model, Classifier):
                self.labels[number] = torch.from_numpy(plan.samples.labels_for(model.settings))
                self.units.append(Unit(number, range(min(SAMPLES, n)), probes=True))
                self.units += [Unit(number, chunk) for chunk in chunk_ranges(n, plan.batch_size)]
        self.total = len(self.labels) * n * (1 + sum(job.passes for job in self.jobs))
        self.kept = 0.0

    def pending(self) -> list[int]:
        """Numbers of the units that are not done, or not whole."""
        numbers = []
        for number, unit in enumerate(self.units):
            label = self.plan.labels[unit.model]
            if unit.probes:
                if label not in self.run.probes:
                    numbers.append(number)
                continue
            ready = [job for job in self.jobs if self._stored(unit, job.label) is not None]
            clean = self._stored(unit, CLEAN) is not None
            self.kept += len(unit.samples) * (clean + sum(job.passes for job in ready))
            if not clean or len(ready) < len(self.jobs):
                numbers.append(number)
        if self.kept and self.on_progress:
            self.on_progress(Progress("", "kept from before", self.kept, self.total))
        return numbers

    def work(self, numbers: Sequence[int], readers: Mapping[int, Callable[[int], Tensor]], workers: int) -> None:
        """Do these units; `readers` give each model's image of a sample."""
        loader = torch.utils.data.DataLoader(
            _Decoded(self.units, readers), batch_size=None, sampler=numbers, num_workers=workers,
            pin_memory=self.plan.request["device"] == "cuda",
        )  # fmt: skip
        for number, images in zip(numbers, loader, strict=True):
            unit = self.units[number]
            if not unit.probes:
                if isinstance(images, DataError):
                    raise images
                self._chunk(unit, images)
            elif not isinstance(images, DataError):  # a picture that cannot be read stops the run at its chunk
                self._probe(unit, images)
            self.save()

    def save(self) -> None:
        """Times, failures and probes; of several processes, only the leading one writes them."""
        if self.peers.leads:
            self.run.save_manifest()

    def finish(self) -> None:
        """Bring together what each process has beside its rows."""
        mine = {key: self.run.manifest.get(key, {}) for key in ("times", "failures", "probes")}
        for theirs in self.peers.end(mine, self._show):
            for key, (seconds, images) in theirs["times"].items():
                had = self.run.manifest.setdefault("times", {}).get(key, (0.0, 0))
                self.run.manifest["times"][key] = [round(had[0] + seconds, 4), had[1] + images]
            self.run.manifest["failures"] |= theirs["failures"]
            self.run.probes.update(theirs["probes"])
        self.save()
        if self.on_progress and self.peers.leads:
            self.on_progress(Progress("", "done", self.total, self.total))

    def _stored(self, unit: Unit, attack: str) -> Any:
        """The rows of a chunk, or None where they are not there, torn, or not of these samples."""
        ids = [self.plan.samples.ids[i] for i in unit.samples]
        return self.run.read_chunk(self.plan.labels[unit.model], attack, unit.samples.start, ids)

    def _probe(self, unit: Unit, images: Tensor) -> None:
        classifier = self._classifier(unit)
        label, labels = self.plan.labels[unit.model], self.labels[unit.model][: len(images)]
        images, labels = images.to(classifier.device), labels.to(classifier.device)
        while label not in self.run.probes:
            size = min(self.plan.batch_size, len(images), self.portions.limit or len(images))
            try:
                with seeded(self.plan.seed, "probe"):
                    self.run.probes[label] = probe(classifier, images, labels, size)
                return
            except Exception as error:
                if not self.portions.may_shrink(error, size):
                    raise
            self.portions.shrink(size)

    def _chunk(self, unit: Unit, images: Tensor) -> None:
        plan, run, model, first = self.plan, self.run, self.plan.labels[unit.model], unit.samples.start
        classifier = self._classifier(unit)
        labels = self.labels[unit.model][unit.samples.start : unit.samples.stop].to(classifier.device)
        ids = [plan.samples.ids[i] for i in unit.samples]
        images = images.to(classifier.device, non_blocking=True)
        batch = Batch(classifier, model, images, labels, ids, plan.seed, self.portions)
        clean = self._stored(unit, CLEAN)
        if clean is not None:
            batch.clean = torch.tensor(clean["prediction"].to_numpy(), dtype=torch.int64, device=classifier.device)
        else:
            with run.timed(model, CLEAN, len(ids)):
                rows = batch.clean_rows([plan.samples.conditions[i] for i in unit.samples])
            run.write_chunk(model, CLEAN, first, rows)
            self._advance(model, CLEAN, len(ids))
        for job in self.jobs:
            if self._stored(unit, job.label) is not None:
                continue
            if f"{model}\t{job.label}" not in run.manifest["failures"]:
                try:
                    self._attack(unit, batch, job)
                except RobustKPCAError:
                    raise
                except Exception as error:  # an attack that breaks must not cost the others
                    reason = str(error).splitlines()[0] if str(error) else ""
                    run.fail(model, job.label, f"{type(error).__name__}: {reason}")
            self._advance(model, job.label, len(ids) * job.passes)

    def _attack(self, unit: Unit, batch: Batch, job: Job) -> None:
        before = self._stored(unit, job.after) if job.after else None
        if job.after and before is None:
            raise RuntimeError(f"{job.after}, whose survivors it attacks, has failed")
        with self.run.timed(batch.model, job.label, len(batch.ids) * len(job.suite.budgets)):
            rows = batch.rows(job, before)
        if unit.samples.start == 0 and job.label in batch.examples:
            self.run.write_examples(batch.model, job.label, batch.examples[job.label])
        self.run.write_chunk(batch.model, job.label, unit.samples.start, rows)

    def _classifier(self, unit: Unit) -> Classifier:
        model = self.plan.models[unit.model]
        assert not isinstance(model, Unusable)
        return model

    def _advance(self, model: str, attack: str, passes: float) -> None:
        self.peers.done += passes
        self._show(model, attack)

    def _show(self, model: str = "", attack: str = "waiting for the other processes") -> None:
        if self.on_progress and self.peers.leads:
            done = self.kept + self.peers.done + self.peers.done_by_others
            self.on_progress(Progress(model, attack, done, self.total))


@torch.inference_mode(False)  # inside a caller's inference_mode gradients would fail
def carry_out(
    plan: Plan,
    out: Path | str,
    *,
    workers: int | None = None,
    cache: PixelCache | None = None,
    here: Place = ALONE,
    on_progress: Callable[[Progress], None] | None = None,
    on_notice: Callable[[str], None] = warnings.warn,
) -> Run:
    """Do what is not yet done of a plan in the folder `out`; see `evaluate`. `on_notice` is told what the user should know."""
    with Peers(here, fingerprint(plan.request), on_notice) as peers, contextlib.ExitStack() as stack:
        portions = Portions(on_notice)
        if peers.leads:
            run = Run.start(Path(out), plan.request, environment() | {"ignored": plan.samples.ignored})
            stack.enter_context(run.held())
            run.manifest["failures"] = {}  # what failed before is tried again
            for label, model in zip(plan.labels, plan.models, strict=True):
                if isinstance(model, Unusable):
                    run.fail(label, CLEAN, model.reason)
            work = _Work(plan, run, peers, portions, on_progress)
            work.save()
            numbers = peers.share(work.pending)
        else:
            numbers = peers.share(list)
            run = Run.open(out)
            # Of this process alone; `finish` brings them together.
            run.manifest |= {"failures": {}, "times": {}, "probes": {}}
            work = _Work(plan, run, peers, portions, on_progress)
        work.work(numbers, plan.readers(cache), _suitable(plan, here) if workers is None else workers)
        work.finish()
    return Run.open(run.path)


def _suitable(plan: Plan, here: Place) -> int:
    """How many processes should decode ahead: what lies in memory needs none, and on the CPU more than one takes from the model."""
    if isinstance(plan.samples, ArraySamples):
        return 0
    return 1 if plan.request["device"] == "cpu" else min(8, max(1, cpus() // here.local_world))


def evaluate(
    classifiers: Sequence[Classifier],
    samples: Samples,
    suites: Sequence[Suite],
    out: Path | str,
    *,
    seed: int = 0,
    batch_size: int = 100,
    full_argmax: bool = False,
    force: bool = False,
    workers: int | None = None,
    cache: PixelCache | None = None,
    here: Place = ALONE,
    on_progress: Callable[[Progress], None] | None = None,
) -> Run:
    """Attack every sample of `samples` on every classifier with every suite, and keep the rows in the folder `out`.

    A folder that holds part of this very request is continued; one that holds another request is refused. Classifiers are on
    their device. Interrupting loses at most the chunk in hand. Returns the run, complete except for what failed. `force` allows attacks by
    gradients that are known to be wrong (`Plan`). `workers` processes decode ahead (None: as many as suit data and device), `cache` keeps what is decoded; neither changes a figure. To
    share a run among processes, call it in each with `here = processes.place()`; only the first process gets a complete run.
    """
    plan = Plan(classifiers, samples, suites, seed=seed, batch_size=batch_size, full_argmax=full_argmax, force=force)
    return carry_out(plan, out, workers=workers, cache=cache, here=here, on_progress=on_progress)
