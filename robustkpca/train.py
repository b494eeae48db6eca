"""Training with a fixed recipe, for models small enough to train on what is at hand."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from robustkpca import __version__, checkpoints
from robustkpca.datasets import Samples
from robustkpca.errors import DataError, TrainingError
from robustkpca.models import Classifier, build_network
from robustkpca.settings import SIZES, ModelSettings, Preprocessing, RPCSettings, split_name


@dataclass(frozen=True)
class Recipe:
    """AdamW, linear warm-up then cosine to zero, gradients clipped at norm 1, label smoothing, shifted crops and flips."""

    epochs: int
    batch_size: int
    lr: float
    patch_size: int
    weight_decay: float = 0.05
    warmup: float = 0.05  # share of all steps
    label_smoothing: float = 0.1
    crop_padding: int = 0  # pixels; a random crop of the padded image
    flip: bool = False


RECIPES: dict[str, Recipe] = {
    "fashion-mnist": Recipe(epochs=8, batch_size=50, lr=2e-3, patch_size=4, flip=True),
    "digits": Recipe(epochs=50, batch_size=32, lr=3e-3, patch_size=2, label_smoothing=0.0),
    "folder": Recipe(epochs=30, batch_size=64, lr=1e-3, patch_size=4, crop_padding=2, flip=True),
}


def settings_for(
    model: str, samples: Samples, images: Tensor, recipe: Recipe, rpc: RPCSettings | None, heads: int | None = None
) -> ModelSettings:
    """Settings of a new model for these training images, uint8 (N, C, S, S); mean and std are theirs."""
    family, size = split_name(model)
    if family.startswith("timm:"):
        raise DataError(f"train: expected vit, symvit or rpc-symvit, got {model}")
    if len(samples.classes) < 2:
        raise DataError(f"train: expected at least 2 classes, {samples.name} has {len(samples.classes)}")
    width, depth, known_heads = SIZES[size or "micro"]
    values = images.double() / 255
    mean, std = values.mean((0, 2, 3)), values.std((0, 2, 3))
    return ModelSettings(
        family=family,
        preprocessing=Preprocessing(
            img_size=images.shape[-1],
            mean=tuple(round(float(m), 4) for m in mean),
            std=tuple(round(float(s), 4) for s in std),
            crop_pct=1.0,
        ),
        num_classes=len(samples.classes),
        classes=samples.classes,
        patch_size=recipe.patch_size,
        width=width,
        depth=depth,
        heads=heads or known_heads,
        rpc=rpc if family == "rpc-symvit" else None,
    )


def load_pixels(samples: Samples, img_size: int | None = None, channels: int | None = None) -> Tensor:
    """All samples in memory, uint8 (N, C, S, S). Size and channels are those of the first image unless given."""
    if img_size is None or channels is None:
        pixels = getattr(samples, "pixels", None)
        if pixels is not None:
            img_size, channels = img_size or pixels.shape[1], channels or (1 if pixels.ndim == 3 else 3)
        else:
            img_size, channels = img_size or 32, channels or 3
    plain = Preprocessing(img_size=img_size, mean=(0.0,) * channels, std=(1.0,) * channels, crop_pct=1.0)
    return torch.stack([(samples.image(i, plain) * 255).round().to(torch.uint8) for i in range(len(samples))])


def augment(images: Tensor, recipe: Recipe, draws: torch.Generator) -> Tensor:
    """Random crops of the zero-padded images and horizontal flips, one draw a sample. (B, C, S, S) -> (B, C, S, S)."""
    batch, _, _, size = images.shape
    if recipe.crop_padding:
        pad = recipe.crop_padding
        padded = F.pad(images, (pad, pad, pad, pad))
        top, left = torch.randint(2 * pad + 1, (2, batch, 1), generator=draws)
        span = torch.arange(size)
        rows, columns = (top + span)[:, :, None], (left + span)[:, None, :]
        images = padded[torch.arange(batch)[:, None, None], :, rows, columns].permute(0, 3, 1, 2)
    if recipe.flip:
        flipped = torch.rand(batch, generator=draws) < 0.5
        images = torch.where(flipped[:, None, None, None], images.flip(-1), images)
    return images


@torch.no_grad()
def accuracy(classifier: Classifier, images: Tensor, labels: Tensor, batch_size: int = 500) -> float:
    """Share of right answers, in [0, 1]; images uint8 (N, C, S, S)."""
    right = 0
    for start in range(0, len(images), batch_size):
        logits = classifier((images[start : start + batch_size].float() / 255).to(classifier.device))
        right += int((logits.argmax(1).cpu() == labels[start : start + batch_size]).sum())
    return right / len(images)


def train(
    settings: ModelSettings,
    images: Tensor,
    labels: Tensor,
    recipe: Recipe,
    *,
    seed: int,
    holdout: int = 0,
    device: str = "cpu",
    on_epoch: Callable[[dict[str, Any]], None] | None = None,
    on_step: Callable[[int, int], None] | None = None,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Train from scratch; returns the state dict and the training record (recipe, seed, figures of each epoch).

    images: uint8 (N, C, S, S); labels: int64 (N,). The last `holdout` images of a seeded shuffle are kept out and scored after
    each epoch. All draws come from `seed`. Raises TrainingError at the first loss that is not finite.
    """
    if not 0 <= holdout < len(images):
        raise DataError(f"--holdout: expected 0 to {len(images) - 1}, got {holdout}")
    draws = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(images), generator=draws)
    kept, held = order[: len(images) - holdout], order[len(images) - holdout :]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = build_network(settings).to(device)
    mean = torch.tensor(settings.preprocessing.mean, device=device)[:, None, None]
    std = torch.tensor(settings.preprocessing.std, device=device)[:, None, None]
    decayed = [
        p for p in network.parameters() if p.ndim >= 2 and p is not network.pos_embed and p is not network.cls_token
    ]
    chosen = set(map(id, decayed))
    rest = [p for p in network.parameters() if id(p) not in chosen]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": rest, "weight_decay": 0.0}], lr=recipe.lr
    )
    per_epoch = math.ceil(len(kept) / recipe.batch_size)
    total = per_epoch * recipe.epochs
    warmup = max(1, round(total * recipe.warmup))

    def rate(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    epochs: list[dict[str, Any]] = []
    start = time.monotonic()
    for epoch in range(1, recipe.epochs + 1):
        network.train()
        loss_sum = torch.zeros((), dtype=torch.float64)
        for step, batch in enumerate(
            kept[torch.randperm(len(kept), generator=draws)].split(recipe.batch_size), start=1
        ):
            inputs = augment(images[batch].float() / 255, recipe, draws).to(device)
            loss = F.cross_entropy(
                network((inputs - mean) / std), labels[batch].to(device), label_smoothing=recipe.label_smoothing
            )
            if not torch.isfinite(loss):
                raise TrainingError(
                    f"training broke: loss {loss.item()} at epoch {epoch}, step {step}; try a lower --lr or fewer iterations"
                )
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            loss_sum += loss.detach().cpu().double() * len(batch)
            if on_step:
                on_step((epoch - 1) * per_epoch + step, total)
        figures: dict[str, Any] = {
            "epoch": epoch,
            "loss": round(float(loss_sum) / len(kept), 4),
            "seconds": round(time.monotonic() - start, 1),
        }
        if holdout:
            network.eval()
            frozen = [p.requires_grad for p in network.parameters()]
            figures["holdout_accuracy"] = round(accuracy(Classifier(network, settings), images[held], labels[held]), 4)
            for p, flag in zip(network.parameters(), frozen, strict=True):
                p.requires_grad_(flag)
        epochs.append(figures)
        if on_epoch:
            on_epoch(figures)
    record = {
        "recipe": asdict(recipe),
        "seed": seed,
        "n": len(kept),
        "holdout": holdout,
        "epochs": epochs,
        "versions": {"robustkpca": __version__, "torch": torch.__version__},
    }
    return {k: v.detach().cpu() for k, v in network.state_dict().items()}, record


def run(
    model: str,
    samples: Samples,
    out: Path,
    *,
    rpc: RPCSettings | None = None,
    recipe: Recipe | None = None,
    overrides: dict[str, Any] | None = None,
    seed: int = 0,
    holdout: int = 0,
    img_size: int | None = None,
    device: str = "cpu",
    on_epoch: Callable[[dict[str, Any]], None] | None = None,
    on_step: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Train `model` on `samples` and write a checkpoint that needs nothing else to `out` (safetensors)."""
    kind = samples.name.partition(":")[0]
    recipe = replace(recipe or RECIPES.get(kind, RECIPES["folder"]), **(overrides or {}))
    images = load_pixels(samples, img_size)
    settings = settings_for(model, samples, images, recipe, rpc)
    labels = torch.from_numpy(np.ascontiguousarray(samples.labels))
    state, record = train(
        settings, images, labels, recipe, seed=seed, holdout=holdout, device=device, on_epoch=on_epoch, on_step=on_step
    )
    record["data"] = {"name": samples.name, "hash": samples.content_hash}
    checkpoints.save(out, state, settings, record)
    return record
