"""Attacked images of a run, made again and written as files: every draw is keyed, so that the same models on the same
data give the same images. What they are is checked: the models' answers against the run's rows, and the images once
more after they were rounded to 8 bits.

    DIR/MODEL/clean/CLASS/NUMBER.png           the image as the model takes it
    DIR/MODEL/ATTACK-BUDGET/CLASS/NUMBER.png   as it was attacked; NUMBER is the sample's place in the set
    DIR/MODEL/ATTACK-BUDGET/images.npy         on request, not rounded: float32 (n, C, H, W), pixels in [0, 1]
    DIR/index.csv                              one line for each file; written last
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from robustkpca import escape
from robustkpca.datasets.samples import class_names
from robustkpca.errors import DataError, OutputError, RunError, SpecError
from robustkpca.evaluation.loop import Progress, Resources
from robustkpca.evaluation.plan import Plan
from robustkpca.evaluation.units import Unit, Work
from robustkpca.files import Folder, refuse_used, write_whole
from robustkpca.models.classifier import Classifier
from robustkpca.models.model import Unusable
from robustkpca.runs.folder import chunk_ranges
from robustkpca.runs.request import ModelRecord, differences
from robustkpca.runs.run import Run
from robustkpca.runtime.memory import Portions
from robustkpca.suites.budget import Budget
from robustkpca.suites.cell import CLEAN, CLEAN_CELL, Cell
from robustkpca.tasks.base import Chunk
from robustkpca.tasks.batch import Batch
from robustkpca.tasks.classification.task import CLASSIFICATION
from robustkpca.tasks.jobs import Job

INDEX = "index.csv"
FLOATS = "images.npy"


def export_images(
    run: Run,
    plan: Plan,
    path: Path,
    cells: Sequence[Cell],
    *,
    first: int | None = None,
    floats: bool = False,
    resources: Resources | None = None,
) -> pd.DataFrame:
    """Make attacked images of a run again and write them into the folder `path`, which is new or empty.

    plan: the run's suites, seed and batch size with some of its models on its data. cells: attacks and budgets of the
    run. first: only so many samples, the first of the set. floats: the images before rounding, too.

    Returns the index: model, attack, budget, sample, file, label, what the model answered in the run and what it
    answers to the file, `distance` (in the units of the threat model) and `distance_8bit`, `over_budget_8bit`, and
    `as_in_run`: whether the image, before it was rounded, gets the answer that the run's rows have.

    Raises:
        RunError: models or data that are not the run's, cells that are not complete, a folder that holds something.
        SpecError: another task, or images that are neither grey nor RGB.
    """
    if plan.task.name != CLASSIFICATION.name:
        raise SpecError(f"images: expected a run of {CLASSIFICATION.name}, got one of {plan.task.name}")
    resources, labels = resources or Resources(), matched(run, plan)
    for label in labels.values():
        for cell in (CLEAN_CELL, *cells):
            if not (status := run.status(label, cell)).complete:
                raise RunError(f"run {run.name}: {label}, {cell}: {status.text}; choose other --model or --attack")
    refuse_used(path)
    files = _Files(Folder(path), run, plan, first, floats=floats)
    parts = (_of_model(run, plan, number, label, files, cells, resources) for number, label in labels.items())
    chunks = pd.concat(itertools.chain(*parts))
    cell_by_cell = [part for _, part in chunks.groupby(["model", "attack", "budget"], sort=False)]
    found = pd.concat(cell_by_cell, ignore_index=True)
    shown = found.map(escape.csv)
    write_whole(path / INDEX, lambda file: shown.to_csv(file, index=False))
    return found


def matched(run: Run, plan: Plan) -> dict[int, str]:
    """For each model of a plan, by its number, its label in the run. Raises RunError where models, data or what else
    decides a number are not the run's; device and versions may be others."""
    ours, theirs = plan.request, run.request
    for part in ("task", "task_version", "seed", "batch_size", "suites"):
        if lines := differences(ours.plain[part], theirs.plain[part], part):
            raise RunError(f"run {run.name}: {lines[0]}")
    for field in ("n", "ids", "content", "resized", "argmax"):
        mine, its = getattr(ours.data, field), getattr(theirs.data, field)
        if mine != its:
            raise RunError(f"run {run.name} is of other data ({field}: {mine} here, {its} there): {theirs.data.name}, "
                           f"n = {theirs.data.n}")  # fmt: skip
    labels: dict[int, str] = {}
    for number, record in enumerate(ours.models):
        if isinstance(plan.models[number], Unusable):
            raise RunError(f"model {record.label}: {plan.models[number].reason}")
        same = [m.label for m in theirs.models if _same(record, ours.dtype, m, theirs.dtype)]
        free = [label for label in same if label not in labels.values()]
        if not free:
            known = "; ".join(f"{m.label}: weights {m.weights}" for m in theirs.models)
            raise RunError(
                f"model {record.label}: run {run.name} has no weights {record.weights} with these settings ({known})"
            )
        labels[number] = free[0]
    return labels


def _same(ours: ModelRecord, dtype: str, theirs: ModelRecord, their_dtype: str) -> bool:
    return (
        (ours.weights, ours.settings, ours.dtype or dtype)
        == (theirs.weights, theirs.settings, theirs.dtype or their_dtype)
    ) and theirs.code in (None, ours.code)  # fmt: skip


class _Files:
    """Where images go, and how they become files."""

    def __init__(self, folder: Folder, run: Run, plan: Plan, first: int | None, *, floats: bool) -> None:
        self.folder, self.floats = folder, floats
        self.n = min(run.n, first or run.n)
        names = [escape.file_name(label)[:80] for label in run.models]
        self._models = dict(zip(run.models, _distinct(names), strict=True))
        folders = _distinct([escape.file_name(str(cell))[:120] for cell in run.cells])
        self._cells = dict(zip(run.cells, folders, strict=True))
        for model in plan.models:
            if isinstance(model, Classifier) and (channels := model.settings.preprocessing.channels) not in (1, 3):
                raise SpecError(f"model {model.title}: expected images of 1 or 3 channels, got {channels}")

    def write(
        self, label: str, cell: Cell, numbers: range, classes: Sequence[str], images: Tensor, pixels: Tensor
    ) -> list[str]:
        """Write the first of a chunk of images (B, C, H, W), with their `pixels` of 0 to 255; returns their files."""
        home = Path(self._models[label], self._cells[cell])
        names = [home / name / f"{number:06d}.png" for number, name in zip(numbers, classes, strict=True)]
        for folder in {name.parent for name in names}:
            self.folder.make(self.folder.path / folder)
        try:
            for name, image in zip(names, pixels.to(torch.uint8).cpu().numpy(), strict=False):
                shown = image.transpose(1, 2, 0) if len(image) == 3 else image[0]
                Image.fromarray(shown).save(self.folder.path / name)
            if self.floats:
                floats = images[: len(numbers)].float().cpu().numpy()
                self._archive(self.folder.path / home / FLOATS, numbers, floats)
        except OSError as error:
            raise OutputError(f"cannot write {self.folder.path / home}: {error.strerror or error}") from None
        return [name.as_posix() for name in names]

    def _archive(self, file: Path, numbers: range, images: NDArray[np.float32]) -> None:
        new = numbers.start == 0
        shape = (self.n, *images.shape[1:]) if new else None
        archive = np.lib.format.open_memmap(file, "w+" if new else "r+", np.float32 if new else None, shape)
        archive[numbers.start : numbers.stop] = images
        archive.flush()


def _of_model(
    run: Run, plan: Plan, number: int, label: str, files: _Files, cells: Sequence[Cell], resources: Resources
) -> Iterator[pd.DataFrame]:
    """The lines of the index, as the images of one model are written."""
    model, portions = plan.models[number], Portions(resources.on_notice, plan.options.batch_size)
    classes = class_names(model.settings) or tuple(map(str, range(model.settings.num_classes)))
    folders = _distinct([_class_folder(name) for name in classes])
    chunks = [c for c in chunk_ranges(len(plan.samples), plan.options.batch_size) if c.start < files.n]
    for unit, inputs in Work([Unit(number, c) for c in chunks], plan.readers(resources.cache)):
        if isinstance(inputs, DataError):
            raise inputs
        chunk = Chunk(plan.task, model, label, plan.samples, unit.samples, inputs, plan.options.seed, portions)
        yield from _Part(run, plan.task.batch(chunk), unit.samples, files, folders).made(plan.jobs, cells)
        if resources.on_progress:
            resources.on_progress(Progress(label, "", min(unit.samples.stop, files.n), files.n))


class _Part:
    """One chunk of samples on one model. `folders`: by class."""

    def __init__(self, run: Run, batch: Batch, numbers: range, files: _Files, folders: Sequence[str]) -> None:
        self.run, self.batch, self.files, self.folders = run, batch, files, folders
        self.numbers = range(numbers.start, min(numbers.stop, files.n))  # of the samples that are written
        self.left: dict[tuple[str, Budget], Tensor] = {}  # by suite, of cascades: the images so far

    def made(self, jobs: Sequence[Job], cells: Sequence[Cell]) -> Iterator[pd.DataFrame]:
        again = self.batch.clean_rows([CLEAN_CELL] * len(self.batch.ids))
        self.batch.note_clean(self.rows(CLEAN_CELL))
        yield self.written(CLEAN_CELL, again, self.batch.inputs)
        asked = {(cell.attack.suite, cell.budget) for cell in cells}  # a cascade is made from its beginning
        for job in jobs:
            for budget in job.suite.budgets:
                cell = Cell(job.id, budget)
                if cell in cells or (job.after is not None and (job.suite.name, budget) in asked):
                    again, images = self.perturbed(job, budget)
                    if cell in cells:
                        yield self.written(cell, again, images, job)

    def rows(self, cell: Cell) -> pd.DataFrame:
        """The run's rows of these samples, in their order."""
        return self.run.cell_rows(self.batch.label, cell).loc[self.batch.ids].reset_index()

    def perturbed(self, job: Job, budget: Budget) -> tuple[pd.DataFrame, Tensor]:
        """The rows of an attack, and the images; of a cascade, with those that attacks before it broke."""
        if job.after is None:
            return self.batch.perturbed(job, budget)
        before = self.rows(CLEAN_CELL if job.after == CLEAN_CELL.attack else Cell(job.after, budget))
        where = (job.suite.name, budget)
        again, self.left[where] = self.batch.perturbed(job, budget, before, self.left.get(where))
        return again, self.left[where]

    def written(self, cell: Cell, again: pd.DataFrame, images: Tensor, job: Job | None = None) -> pd.DataFrame:
        """Write images (B, C, H, W) in [0, 1]; a line of the index for each. `again`: the answers to them."""
        stored, clean = self.rows(cell), cell == CLEAN_CELL
        pixels = (images.nan_to_num(0.0).clamp(0, 1) * 255).round()
        rounded = self.batch.rows(pixels / 255, cell, job)
        index = pd.DataFrame(
            {
                "model": stored["model"],
                "attack": CLEAN if clean else str(cell.attack),
                "budget": str(cell.budget),
                "sample": stored["sample"],
                "label": stored["label"],
                "clean_prediction": stored["clean_prediction"],
                "prediction": stored["prediction"],
                "prediction_8bit": rounded["prediction"],
                "distance": stored["distance"],
                "distance_8bit": rounded["distance"],
                "over_budget_8bit": rounded["flags"].str.contains("over_budget"),
                "as_in_run": stored["prediction"] == again["prediction"],
            }
        )[: len(self.numbers)]
        classes = [self.folders[label] for label in index["label"]]
        paths = self.files.write(self.batch.label, cell, self.numbers, classes, images, pixels)
        return index.assign(file=paths)


def _class_folder(name: str) -> str:
    """The class's own name where it can name a folder, so that the files are read back with it."""
    plain = name == escape.visible(name) and not set(name) & set('/\\:*?"<>|') and not name.startswith(".")
    return name if plain and name.strip() == name and len(name.encode()) < 200 else escape.file_name(name)[:80]


def _distinct(names: Sequence[str]) -> list[str]:
    """Names in which a second of the same letters has its number before it."""
    seen: set[str] = set()
    distinct = []
    for number, name in enumerate(names, start=1):
        while name.casefold() in seen:
            name = f"{number}-{name}"
        seen.add(name.casefold())
        distinct.append(name)
    return distinct
