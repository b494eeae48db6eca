"""Passes of a model over samples as they are, chunk by chunk: for analysis and for training, with what evaluation has.

Inputs are decoded ahead and cached, memory that ends halves the batch, and where results are kept in a folder, a pass
goes on where it stopped and any number of processes share it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from robustkpca.datasets.samples import Samples
from robustkpca.errors import DataError, RunError, SpecError
from robustkpca.evaluation.loop import Progress, Resources
from robustkpca.evaluation.units import Unit, Work
from robustkpca.files import Folder
from robustkpca.models.classifier import Classifier
from robustkpca.runs.folder import chunk_ranges
from robustkpca.runtime.claims import Claims
from robustkpca.runtime.memory import Portions
from robustkpca.tasks.registry import task_named

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Keep:
    """Where the results of chunks are kept. `mark` says what they are of: others in the folder do not count."""

    folder: Path
    mark: str

    def path(self, first: int) -> Path:
        return self.folder / f"{self.mark}-{first:07d}.safetensors"

    def read(self, first: int) -> Tensors | None:
        """The result of the chunk that begins at sample `first`; None where it is not there, or torn."""
        try:
            return load(self.path(first).read_bytes())
        except (OSError, SafetensorError):
            return None

    def write(self, first: int, result: Tensors) -> None:
        content = save({name: value.contiguous() for name, value in result.items()})
        self._own.write(self.path(first), lambda file: file.write(content))

    @cached_property
    def _own(self) -> Folder:
        return Folder(self.folder)


def over_chunks(
    classifier: Classifier,
    samples: Samples,
    compute: Callable[[Tensor], Tensors],
    *,
    batch_size: int,
    summarise: Callable[[Tensors], Tensors] = lambda values: values,
    keep: Keep | None = None,
    resources: Resources | None = None,
) -> list[Tensors]:
    """What `summarise` makes of each chunk of `batch_size` samples, in their order.

    compute: images (B, C, H, W) on the classifier's device -> tensors (B, ...), a row for each image; called with fewer
    images at once where memory ends. summarise: those of a whole chunk, on the CPU, to what is kept of it. Raises
    DataError for an image that cannot be read.
    """
    if batch_size < 1:
        raise SpecError(f"--batch-size: expected at least 1, got {batch_size}")
    resources = resources or Resources()
    chunks = chunk_ranges(len(samples), batch_size)
    reader = task_named(samples.task).reader(samples, classifier, resources.cache)
    portions = Portions(resources.on_notice, batch_size)
    results: dict[int, Tensors] = {}

    def done(unit: Unit) -> bool:
        first = unit.samples.start
        if first not in results and keep is not None and (stored := keep.read(first)) is not None:
            results[first] = stored
        return first in results

    def show() -> None:
        if resources.on_progress and resources.here.rank == 0:
            covered = min(len(samples), batch_size * len(results))
            resources.on_progress(Progress(classifier.title, "", covered, len(samples)))

    with ExitStack() as stack:
        claims = None if keep is None else stack.enter_context(Claims(keep.folder / "claims"))
        units = [Unit(0, chunk, "pass" if keep is None else keep.mark) for chunk in chunks]
        workers = resources.workers or 0
        for unit, inputs in Work(units, {0: reader}, done, workers, claims=claims, wait=True, meanwhile=show):
            if isinstance(inputs, DataError):
                raise inputs
            images = inputs.to(classifier.device)
            values = portions.whole(len(images), partial(_joined, compute, images))
            results[unit.samples.start] = summarise(values)
            if keep is not None:
                keep.write(unit.samples.start, results[unit.samples.start])
            show()
    missing = [chunk.start for chunk in chunks if not done(Unit(0, chunk))]
    if missing:
        raise RunError(f"samples from number {missing[0]} on have no result; the same command goes on")
    show()
    return [results[chunk.start] for chunk in chunks]


def _joined(compute: Callable[[Tensor], Tensors], images: Tensor, size: int) -> Tensors:
    """`compute` for all images, `size` at once, on the CPU."""
    parts = [compute(part) for part in images.split(size)]
    return {name: torch.cat([part[name].detach().cpu() for part in parts]) for name in parts[0]}
