"""The training of one model: settings, epochs, state and log. See the package for the whole."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from robustkpca._version import __version__
from robustkpca.config import composed
from robustkpca.datasets.samples import Samples, class_names
from robustkpca.errors import DataError, ProcessError, SpecError, TrainingError, brief
from robustkpca.evaluation.passes import over_chunks
from robustkpca.files import Folder
from robustkpca.kpca import analysis
from robustkpca.models import checkpoints
from robustkpca.models.classifier import Classifier
from robustkpca.models.networks import build_network
from robustkpca.models.settings import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    SIZES,
    ModelSettings,
    Preprocessing,
    RPCSettings,
    split_name,
)
from robustkpca.runtime.claims import alone
from robustkpca.runtime.keyed_random import generator, seeded
from robustkpca.runtime.place import ALONE, Place, stops_without_workers
from robustkpca.train.data import Batches, Order, Pictures, Stored, load_pixels
from robustkpca.train.loop import Trainer
from robustkpca.train.recipes import RECIPES, Recipe, recipe_for
from robustkpca.train.state import (
    companions,
    load_state,
    plain,
    refuse_foreign,
    save_state,
    tensorboard,
    write_log,
)


def settings_for(
    model: str, samples: Samples, recipe: Recipe, preprocessing: Preprocessing, rpc: RPCSettings | None
) -> ModelSettings:
    """Settings of a new model, by its name, for the classes of `samples`."""
    family, size = split_name(model)
    if family.startswith("timm:"):
        raise DataError(f"train: expected one of our own models, vit, symvit, rpc-symvit, ..., got {model}")
    if len(samples.classes) < 2:
        raise DataError(f"train: expected at least 2 classes, {samples.name} has {len(samples.classes)}")
    width, depth, heads = SIZES[size or "micro"]
    if preprocessing.img_size % recipe.patch_size:
        raise SpecError(
            f"patch size {recipe.patch_size}: expected one that divides the image size {preprocessing.img_size}"
        )
    values = {
        "family": family,
        "preprocessing": preprocessing,
        "num_classes": len(samples.classes),
        "classes": samples.classes,
        "patch_size": recipe.patch_size,
        "width": width,
        "depth": depth,
        "heads": heads,
        "rpc": rpc,
    }
    settings: ModelSettings = ModelSettings.parse(values, f"train {model}")
    return settings


def preprocessing_of(images: torch.Tensor) -> Preprocessing:
    """Of a model for images uint8 (N, C, S, S): their size, mean and standard deviation."""
    values = images.double() / 255
    mean, std = values.mean((0, 2, 3)), values.std((0, 2, 3))
    return Preprocessing(
        img_size=images.shape[-1],
        mean=tuple(round(float(m), 4) for m in mean),
        std=tuple(max(round(float(s), 4), 1e-4) for s in std),
        crop_pct=1.0,
    )


@torch.no_grad()
def accuracy(classifier: Classifier, samples: Samples, batch_size: int = 500) -> float:
    """Share of right predictions, in [0, 1]."""
    labels = torch.from_numpy(samples.labels_for(classifier.settings))
    chunks = over_chunks(
        classifier, samples, lambda images: {"prediction": classifier(images).argmax(1)}, batch_size=batch_size
    )
    predictions = torch.cat([chunk["prediction"] for chunk in chunks])
    return int((predictions == labels).sum()) / len(samples)


@dataclass(frozen=True)
class TrainingOptions:
    """What a training may be told beside model, data and file.

    rpc: settings of RPC-Attention, for a model that has it.
    recipe: None: the one of the data (`recipe_for`). overrides: values instead of the recipe's.
    start: start from these weights, of the same classes. Their settings are then the model's: `model`, `rpc`,
        `img_size` and the recipe's patch size do not count.
    seed: of every draw. holdout: so many images, drawn with the seed, are left out and scored after each epoch.
    projection_loss: that of kernel PCA on so many fixed images after each epoch (mean over images, heads and layers;
        queries and keys as they are, where the paper's figure has a ViT that standardises them).
    img_size: side in pixels; None: 224 where the recipe crops, else the data's.
    device, workers: where it runs, and processes that open pictures, where the recipe opens them (see Recipe).
    here: which of several processes this is; the batch is divided among them, the first one writes.
    fresh: start over, whatever state is there. board: folder for TensorBoard.
    on_epoch is told each epoch's row of the log; on_step the steps done and in all; on_notice what a user should know.
    """

    rpc: RPCSettings | None = None
    recipe: Recipe | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    start: Classifier | None = None
    seed: int = 0
    holdout: int = 0
    projection_loss: int = 0
    img_size: int | None = None
    device: str = "cpu"
    workers: int = 0
    here: Place = ALONE
    fresh: bool = False
    board: Path | None = None
    on_epoch: Callable[[dict[str, Any]], None] | None = None
    on_step: Callable[[int, int], None] | None = None
    on_notice: Callable[[str], None] | None = None


@dataclass(frozen=True)
class _Job:
    """What is settled before the first step. `held`: images to score; `probe`: images for the projection loss."""

    settings: ModelSettings
    recipe: Recipe
    source: Stored | Pictures
    labels: torch.Tensor
    order: Order
    steps: int  # of an epoch
    used: int
    held: Samples | None
    probe: Samples | None
    request: dict[str, Any]


def run(model: str, samples: Samples, out: Path, options: TrainingOptions | None = None, **rest: Any) -> dict[str, Any]:
    """Train `model` on `samples`, write a self-contained checkpoint to `out` (safetensors), return its record.

    `rest`: fields of TrainingOptions, for those who do not build one. Unless `fresh`, it goes on from the state beside
    `out`.

    Raises:
        RunError: the state is of other settings, data or seed; a file that would be replaced is not a training's;
            another process trains into `out`.
        TrainingError: the first loss or gradient that is not finite; the state of the last complete epoch stays.
    """
    options = replace(options or TrainingOptions(), **rest)
    recipe = _recipe(samples, options)
    companions(out)
    if options.here.rank > 0:
        return _run(_prepare(model, samples, recipe, options), samples, out, options)
    with alone(out.with_name(f"{out.name}.claims"), f"--out {out}"):
        refuse_foreign(out, fresh=options.fresh)
        return _run(_prepare(model, samples, recipe, options), samples, out, options)


@stops_without_workers()
def _run(job: _Job, samples: Samples, out: Path, options: TrainingOptions) -> dict[str, Any]:
    """The training itself, on files that are ours."""
    state_file, log_file = companions(out)
    folder, leads = Folder(out.parent), options.here.rank == 0
    if options.fresh and leads:
        # Not to be gone on from if this training breaks before it has a state of its own.
        state_file.unlink(missing_ok=True)
    earlier = None if options.fresh else load_state(state_file, job.request)
    record = _record(job, samples, options)
    if earlier:
        record["epochs"] = earlier["training"]["epochs"]
    epochs: list[dict[str, Any]] = record["epochs"]
    if epochs:
        if leads:
            write_log(log_file, epochs)  # the state may have been written without it
        if options.on_notice:
            what = "complete" if len(epochs) == job.recipe.epochs else "going on from there"
            options.on_notice(f"{state_file} holds {len(epochs)} of {job.recipe.epochs} epochs: {what}")
    show = tensorboard(options.board, epochs) if options.board and leads else None
    network = _network(job, options)
    with _together(options.here, options.device):
        trainer = Trainer(
            network, job.settings, job.recipe,
            steps=job.steps, seed=options.seed, device=options.device, here=options.here,
        )  # fmt: skip
        if earlier:
            trainer.load(earlier)
        before, began = epochs[-1]["seconds"] if epochs else 0.0, time.monotonic()
        for epoch in range(len(epochs) + 1, job.recipe.epochs + 1):
            loss = _train_epoch(trainer, job, epoch, options, state_file)
            if not leads:
                continue
            classifier = Classifier(network, job.settings).to(options.device)
            seconds = round(before + time.monotonic() - began, 1)
            row = {
                "epoch": epoch, "model": job.settings.title, "train_loss": loss, "lr": trainer.lr, "seconds": seconds,
                **_scores(classifier, job),
            }  # fmt: skip
            epochs.append(row)
            folder.check()
            save_state(state_file, trainer.state(), job.request, job.settings, record)
            write_log(log_file, epochs)
            for tell in (show, options.on_epoch):
                if tell:
                    tell(row)
    if leads:
        folder.check()
        checkpoints.save(out, network.state_dict(), job.settings, record)
    return record


def _recipe(samples: Samples, options: TrainingOptions) -> Recipe:
    """The recipe with all that overrides it. Raises SpecError where the model to start from is none of ours."""
    recipe = (options.recipe or RECIPES[recipe_for(samples.name.partition(":")[0])]).but(**options.overrides)
    if options.start is None:
        return recipe
    if options.start.settings.patch_size is None:
        raise SpecError(f"train: expected one of our own models to start from, got {options.start.title}")
    return recipe.but(patch_size=options.start.settings.patch_size)


def _prepare(model: str, samples: Samples, recipe: Recipe, options: TrainingOptions) -> _Job:
    """Everything else that is settled before the first step. Raises for what cannot be trained."""
    seed, holdout, start = options.seed, options.holdout, options.start
    if not 0 <= holdout < len(samples):
        raise DataError(f"--holdout: expected 0 to {len(samples) - 1}, got {holdout}")
    settings, source = _inputs(model, samples, recipe, options)
    labels = torch.from_numpy(samples.labels_for(settings))
    shuffled = torch.randperm(len(samples), generator=generator(seed, "holdout")).numpy()
    used = np.sort(shuffled[holdout:])
    held = samples.take(np.sort(shuffled[:holdout])) if holdout else None
    order = Order(used, recipe, seed, options.here)
    probes = options.projection_loss
    probe = samples.take(used[:: max(1, len(used) // probes)][:probes]) if probes else None
    request = plain(
        {
            "classes": settings.classes,
            "data": samples.content_hash,
            "holdout": holdout,
            "seed": seed,
            "start": start.weights if start else None,
            "projection_loss": probes,
            "recipe": recipe.model_dump(),
            "model": settings.model_dump(mode="json", by_alias=True, exclude={"classes"}),
        }
    )
    steps = len(order.batches(1))
    return _Job(settings, recipe, source, labels, order, steps, len(used), held, probe, request)


def _record(job: _Job, samples: Samples, options: TrainingOptions) -> dict[str, Any]:
    """What the checkpoint says of its training, before the first epoch."""
    return {
        "recipe": job.recipe.model_dump(),
        "seed": options.seed,
        "n": job.used,
        "holdout": options.holdout,
        "start": options.start.weights if options.start else None,
        "epochs": [],
        "data": {"name": samples.name, "hash": job.request["data"]},
        "device": options.device.partition(":")[0],
        "processes": options.here.world,
        "versions": {"robustkpca": __version__, "torch": torch.__version__},
    }


def _network(job: _Job, options: TrainingOptions) -> nn.Module:
    """The network before the first step: drawn with the seed, or a copy of the weights to start from."""
    with seeded(options.seed, "init"):
        network = build_network(job.settings)
    if options.start:
        network.load_state_dict(options.start.network.state_dict())
    if job.probe is not None:
        analysis.attention_layers(Classifier(network, job.settings))  # raises where nothing is to be analysed
    return network


def _train_epoch(trainer: Trainer, job: _Job, epoch: int, options: TrainingOptions, state_file: Path) -> float:
    """One epoch; its mean loss."""
    batches = Batches(job.source, job.labels, epoch, job.order.batches(epoch))
    workers = options.workers if isinstance(job.source, Pictures) else 0
    feed = batches.load(workers, pinned=options.device.startswith("cuda"))
    step = _counted(options.on_step, (epoch - 1) * job.steps, job.recipe.epochs * job.steps)
    try:
        return trainer.epoch(epoch, feed, step)
    except TrainingError as error:
        good = f"the state after epoch {epoch - 1} is kept in {state_file}" if epoch > 1 else "nothing was kept"
        raise TrainingError(f"{error}; {good}") from None


def _scores(classifier: Classifier, job: _Job) -> dict[str, float | None]:
    """What is measured after an epoch, by its column in the log."""
    scores: dict[str, float | None] = {}
    if job.held is not None:
        scores["holdout_accuracy"] = accuracy(classifier, job.held)
    if job.probe is not None:
        scores["projection_loss"] = _projection_loss(classifier, job.probe)
    return scores


def _inputs(
    model: str, samples: Samples, recipe: Recipe, options: TrainingOptions
) -> tuple[ModelSettings, Stored | Pictures]:
    """Settings of the model that is trained, and what makes its batches."""
    start, img_size, seed = options.start, options.img_size, options.seed
    given = start.settings.preprocessing if start else None
    if recipe.crop_area:
        to = given or Preprocessing(img_size=img_size or 224, mean=IMAGENET_MEAN, std=IMAGENET_STD)
        if to.channels != 3:
            raise SpecError("crop_area: such recipes train in colour, the model to start from takes grey images")
        source: Stored | Pictures = Pictures(samples, to.img_size, recipe, seed)
    else:
        size, channels = (given.img_size, given.channels) if given else (img_size, None)
        images = load_pixels(samples, size, channels)
        source, to = Stored(images, recipe, seed), given or preprocessing_of(images)
    if start is None:
        return settings_for(model, samples, recipe, to, options.rpc), source
    _same_classes(samples, start.settings)
    return start.settings, source


def _projection_loss(classifier: Classifier, probe: Samples) -> float | None:
    """Mean over images, heads and layers of kernel PCA's projection loss; None where it is not finite."""
    heads = analysis.analyze(classifier, probe, ["loss"]).tables["heads"]
    mean = float(heads["projection_loss"].mean())
    return mean if math.isfinite(mean) else None


def _same_classes(samples: Samples, settings: ModelSettings) -> None:
    """Raises DataError unless data and model have the same classes, by name."""
    names = class_names(settings)
    if not names:
        raise DataError(
            f"{settings.title} does not name its classes: they cannot be told to be those of {samples.name}"
        )
    have, known = set(map(composed, samples.classes)), set(map(composed, names))
    strange, absent = sorted(have - known), sorted(known - have)
    if strange or absent:
        words = [
            f"{len(group)} {what} ({', '.join(group[:3])}{', ...' if len(group) > 3 else ''})"
            for group, what in ((strange, "are unknown to it"), (absent, "are missing in the data"))
            if group
        ]
        raise DataError(
            f"data {samples.name}: expected the {len(names)} classes of {settings.title}; {'; '.join(words)}"
        )


def _counted(on_step: Callable[[int, int], None] | None, before: int, total: int) -> Callable[[int], None] | None:
    return None if on_step is None else lambda step: on_step(before + step, total)


@contextlib.contextmanager
def _together(here: Place, device: str) -> Iterator[None]:
    """The process group of `here`, with NCCL on CUDA and Gloo on the CPU; nothing where there is one process."""
    if here.alone:
        yield
        return
    if not here.host:
        raise ProcessError(
            f"MASTER_ADDR: expected, as {here.world} processes train one model together, but not set; torchrun sets "
            "it, under srun export the name of the first node"
        )
    try:
        dist.init_process_group(
            "nccl" if device.startswith("cuda") else "gloo",
            init_method=f"tcp://{here.host}:{here.port}",
            rank=here.rank,
            world_size=here.world,
            timeout=timedelta(hours=2),  # the others wait while the first process scores and writes
        )
    except (RuntimeError, ValueError) as error:
        raise ProcessError(f"the {here.world} processes could not meet ({brief(error)[:200]})") from None
    try:
        with warnings.catch_warnings():
            # Of patch embeddings of grey images; it says itself that it is no error.
            warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
            yield
    finally:
        dist.destroy_process_group()
