"""The training of one model: settings, epochs, state and log. See the package for the whole."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from robustkpca._version import __version__
from robustkpca.datasets.samples import Samples, class_names
from robustkpca.errors import DataError, ProcessError, SpecError, TrainingError, brief
from robustkpca.evaluation.passes import over_chunks
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
from robustkpca.runtime.keyed_random import generator, seeded
from robustkpca.runtime.place import ALONE, Place
from robustkpca.train.data import Batches, Order, Pictures, Stored, load_pixels
from robustkpca.train.loop import Trainer
from robustkpca.train.recipes import RECIPES, Recipe, recipe_for
from robustkpca.train.state import companions, load_state, plain, save_state, tensorboard, write_log


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


def run(
    model: str,
    samples: Samples,
    out: Path,
    *,
    rpc: RPCSettings | None = None,
    recipe: Recipe | None = None,
    overrides: dict[str, Any] | None = None,
    start: Classifier | None = None,
    seed: int = 0,
    holdout: int = 0,
    projection_loss: int = 0,
    img_size: int | None = None,
    device: str = "cpu",
    workers: int = 0,
    here: Place = ALONE,
    fresh: bool = False,
    board: Path | None = None,
    on_epoch: Callable[[dict[str, Any]], None] | None = None,
    on_step: Callable[[int, int], None] | None = None,
    on_notice: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Train `model` on `samples`, write a self-contained checkpoint to `out` (safetensors), return its record.

    `recipe`, else the one of the data (`recipe_for`), changed by `overrides`. `start`: begin from these weights, of
    the same classes, and not from fresh ones; its settings are then the model's, and `model`, `rpc`, `img_size` and
    the recipe's patch size say nothing. `holdout` images, drawn with the seed, are kept out and scored after each
    epoch. `projection_loss`: that of kernel PCA on so many fixed images after each epoch (mean over images, heads and
    layers; queries and keys as they are, where the paper's figure has a ViT that standardises them). `workers`:
    processes that open pictures, where the recipe opens them (see Recipe). `here`: which of several processes this
    is; the batch is divided among them, the first one writes. `board`: folder for TensorBoard.

    The state beside `out` is gone on from unless `fresh`. Raises RunError when it is of other settings, data or seed,
    TrainingError at the first loss or gradient that is not finite; the state of the last complete epoch stays.
    """
    recipe = (recipe or RECIPES[recipe_for(samples.name.partition(":")[0])]).but(**overrides or {})
    if start:
        if start.settings.patch_size is None:
            raise SpecError(f"train: expected one of our own models to start from, got {start.title}")
        recipe = recipe.but(patch_size=start.settings.patch_size)
    state_file, log_file = companions(out)
    if not 0 <= holdout < len(samples):
        raise DataError(f"--holdout: expected 0 to {len(samples) - 1}, got {holdout}")
    settings, source = _inputs(model, samples, recipe, seed, rpc=rpc, start=start, img_size=img_size)
    labels = torch.from_numpy(samples.labels_for(settings))
    shuffled = torch.randperm(len(samples), generator=generator(seed, "holdout")).numpy()
    used = np.sort(shuffled[holdout:])
    held = samples.take(np.sort(shuffled[:holdout])) if holdout else None
    order = Order(used, recipe, seed, here)
    steps = len(order.batches(1))
    probe = samples.take(used[:: max(1, len(used) // projection_loss)][:projection_loss]) if projection_loss else None
    request = plain(
        {
            "classes": settings.classes,
            "data": samples.content_hash,
            "holdout": holdout,
            "seed": seed,
            "start": start.weights if start else None,
            "projection_loss": projection_loss,
            "recipe": recipe.model_dump(),
            "model": settings.model_dump(mode="json", by_alias=True, exclude={"classes"}),
        }
    )
    leads = here.rank == 0
    if fresh and leads:
        state_file.unlink(
            missing_ok=True
        )  # not to be gone on from if this training breaks before it has a state of its own
    earlier = None if fresh else load_state(state_file, request)
    record: dict[str, Any] = {
        "recipe": recipe.model_dump(),
        "seed": seed,
        "n": len(used),
        "holdout": holdout,
        "start": start.weights if start else None,
        "epochs": earlier["training"]["epochs"] if earlier else [],
        "data": {"name": samples.name, "hash": samples.content_hash},
        "device": device.partition(":")[0],
        "processes": here.world,
        "versions": {"robustkpca": __version__, "torch": torch.__version__},
    }
    epochs: list[dict[str, Any]] = record["epochs"]
    if epochs:
        if leads:
            write_log(log_file, epochs)  # the state may have been written without it
        if on_notice:
            what = "complete" if len(epochs) == recipe.epochs else "going on from there"
            on_notice(f"{state_file} holds {len(epochs)} of {recipe.epochs} epochs: {what}")
    show = tensorboard(board, epochs) if board and leads else None
    with seeded(seed, "init"):
        network = build_network(settings)
    if start:
        network.load_state_dict(start.network.state_dict())
    if probe is not None:
        analysis.attention_layers(Classifier(network, settings))  # raises where nothing is to be analysed
    with _together(here, device):
        trainer = Trainer(network, settings, recipe, steps=steps, seed=seed, device=device, here=here)
        if earlier:
            trainer.load(earlier)
        before, began = epochs[-1]["seconds"] if epochs else 0.0, time.monotonic()
        for epoch in range(len(epochs) + 1, recipe.epochs + 1):
            batches = Batches(source, labels, epoch, order.batches(epoch))
            feed = batches.load(workers if isinstance(source, Pictures) else 0, pinned=device.startswith("cuda"))
            step = _counted(on_step, (epoch - 1) * steps, recipe.epochs * steps)
            try:
                loss = trainer.epoch(epoch, feed, step)
            except TrainingError as error:
                good = f"the state after epoch {epoch - 1} is kept in {state_file}" if epoch > 1 else "nothing was kept"
                raise TrainingError(f"{error}; {good}") from None
            if not leads:
                continue
            figures: dict[str, Any] = {
                "epoch": epoch,
                "model": settings.title,
                "train_loss": loss,
                "lr": trainer.lr,
                "seconds": round(before + time.monotonic() - began, 1),
            }
            classifier = Classifier(network, settings).to(device)
            if held is not None:
                figures["holdout_accuracy"] = accuracy(classifier, held)
            if probe is not None:
                figures["projection_loss"] = _projection_loss(classifier, probe)
            epochs.append(figures)
            save_state(state_file, trainer.state(), request, settings, record)
            write_log(log_file, epochs)
            if show:
                show(figures)
            if on_epoch:
                on_epoch(figures)
    if leads:
        checkpoints.save(out, network.state_dict(), settings, record)
    return record


def _inputs(
    model: str,
    samples: Samples,
    recipe: Recipe,
    seed: int,
    *,
    rpc: RPCSettings | None,
    start: Classifier | None,
    img_size: int | None,
) -> tuple[ModelSettings, Stored | Pictures]:
    """Settings of the model that is trained, and what makes its batches."""
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
        return settings_for(model, samples, recipe, to, rpc), source
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
    strange, absent = sorted(set(samples.classes) - set(names)), sorted(set(names) - set(samples.classes))
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
