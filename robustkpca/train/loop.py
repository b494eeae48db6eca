"""The training loop: a network, its optimizer and what goes with them, one epoch at a time."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from timm.data import Mixup
from timm.data.random_erasing import RandomErasing
from timm.layers import DropPath
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from robustkpca.errors import TrainingError
from robustkpca.models.settings import ModelSettings
from robustkpca.runtime.sharing import Place
from robustkpca.suites.budget import parse_eps
from robustkpca.train import adversarial
from robustkpca.train.data import Batch, keyed
from robustkpca.train.guard import broken_backward, broken_forward, finite
from robustkpca.train.recipes import Recipe

_AMP = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Trainer:
    """Everything that changes while a network is trained.

    Random draws of a step are keyed by (seed, epoch, step, process).
    """

    def __init__(
        self,
        network: nn.Module,
        settings: ModelSettings,
        recipe: Recipe,
        *,
        steps: int,
        seed: int,
        device: str,
        here: Place,
    ) -> None:
        """`steps`: of an epoch. The network is trained in place, on `device`."""
        self.network, self.recipe, self.steps, self.seed, self.device, self.here = (
            network.to(device), recipe, steps, seed, device, here,
        )  # fmt: skip
        if recipe.drop_path:
            _set_drop_path(network, recipe.drop_path)
        self.optimizer = create_optimizer_v2(network, opt="adamw", lr=recipe.peak_lr, weight_decay=recipe.weight_decay)
        total = steps * recipe.epochs
        warmup = min(max(1, round(total * recipe.warmup)), total - 1)
        self.schedule = CosineLRScheduler(
            self.optimizer,
            t_initial=total - warmup + 1,
            lr_min=recipe.min_lr,
            warmup_t=warmup,
            warmup_prefix=True,
            t_in_epochs=False,
        )
        cuda = torch.device(device).type == "cuda"
        self.amp = _AMP.get(recipe.amp) if cuda else None
        self.scaler = torch.amp.GradScaler(torch.device(device).type, enabled=self.amp is torch.float16)
        self.ema = ModelEmaV3(network, decay=recipe.ema) if recipe.ema else None
        mixing = {"mixup_alpha": recipe.mixup, "cutmix_alpha": recipe.cutmix, "label_smoothing": recipe.label_smoothing}
        mixes = recipe.mixup or recipe.cutmix
        self.mixup = Mixup(**mixing, num_classes=settings.num_classes) if mixes else None
        self.eraser = RandomErasing(recipe.erasing, mode="pixel", device=device) if recipe.erasing else None
        shape = (1, -1, 1, 1)
        self.mean = torch.tensor(settings.preprocessing.mean, device=device).reshape(shape)
        self.std = torch.tensor(settings.preprocessing.std, device=device).reshape(shape)
        # The processes' gradients are averaged by a wrapper around the same parameters.
        self.wrapped: nn.Module = network
        if not here.alone:
            self.wrapped = DistributedDataParallel(network, device_ids=[torch.device(device)] if cuda else None)

    def epoch(self, number: int, batches: Iterable[Batch], on_step: Callable[[int], None] | None = None) -> float:
        """Train for epoch `number`, from 1; `on_step` gets the number of each step. Returns the mean loss of an image.

        Raises TrainingError at the first loss or gradient that is not finite; weights are then those before that step.
        """
        self.wrapped.train()
        done = torch.zeros(2, dtype=torch.float64)  # sum of losses, images
        for step, (images, labels) in enumerate(batches, start=1):
            self.schedule.step_update((number - 1) * self.steps + step)
            images = images.to(self.device, non_blocking=True).float() / 255
            loss = self._step(images, labels.to(self.device, non_blocking=True), number, step)
            done += torch.tensor([loss * len(labels), len(labels)], dtype=torch.float64)
            if on_step:
                on_step(step)
        if not all(finite(p) for p in self.network.parameters()):
            raise TrainingError(f"training broke: weights are not finite after epoch {number}; {_ADVICE}")
        if not self.here.alone:
            done = done.to(self.device)
            dist.all_reduce(done)
        total, images_seen = map(float, done.tolist())
        return total / images_seen

    def _step(self, images: Tensor, labels: Tensor, epoch: int, step: int) -> float:
        loss_of = self._adversarial if self.recipe.adversarial != "none" else self._plain
        key = ("step", epoch, step, self.here.rank)
        with keyed(self.seed, *key):
            forward = loss_of(images, labels)
            with self._autocast():
                loss = forward()
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.get_total_norm([p.grad for p in self.network.parameters() if p.grad is not None])
        value = loss.item()
        about = f"training broke at epoch {epoch}, step {step}: the loss is {value:.4g}"
        if not math.isfinite(value):
            with keyed(self.seed, *key):  # the same draws once more
                forward = loss_of(images, labels)
                with self._autocast():
                    where = broken_forward(self.network, forward)
            raise TrainingError(f"{about}, {where}; {_ADVICE}")
        # In float16 the scaler leaves such a step out and lowers its scale.
        if not self.scaler.is_enabled() and not finite(norm):
            raise TrainingError(f"{about}, {broken_backward(self.network)}; {_ADVICE}")
        if self.recipe.clip_grad:
            nn.utils.clip_grads_with_norm_(self.network.parameters(), self.recipe.clip_grad, norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.ema:
            self.ema.update(self.network)
        return value

    def _plain(self, images: Tensor, labels: Tensor) -> Callable[[], Tensor]:
        """A function that gives the loss of images (B, C, S, S) in [0, 1]; erasing and mixing are drawn now."""
        inputs = (images - self.mean) / self.std
        if self.eraser:
            inputs = self.eraser(inputs)
        if self.mixup:
            mixed, targets = self.mixup(inputs, labels)
            return lambda: SoftTargetCrossEntropy()(self.wrapped(mixed), targets)
        return lambda: F.cross_entropy(self.wrapped(inputs), labels, label_smoothing=self.recipe.label_smoothing)

    def _adversarial(self, images: Tensor, labels: Tensor) -> Callable[[], Tensor]:
        """As `_plain`; the images are attacked now, by the network in eval mode."""
        recipe = self.recipe
        eps, steps = float(parse_eps(recipe.eps)), recipe.attack_steps
        self.network.eval()
        with self._autocast():
            if recipe.adversarial == "trades":
                moved = adversarial.trades_examples(self._answers, images, eps=eps, steps=steps)
            else:
                moved = adversarial.pgd_examples(self._answers, images, labels, eps=eps, steps=steps)
        self.wrapped.train()
        moved = (moved - self.mean) / self.std
        if recipe.adversarial == "pgd-at":
            return lambda: F.cross_entropy(self.wrapped(moved), labels, label_smoothing=recipe.label_smoothing)
        both = torch.cat(
            [(images - self.mean) / self.std, moved]
        )  # one pass, which is what a distributed wrapper expects

        def loss() -> Tensor:
            clean, attacked = self.wrapped(both).chunk(2)
            return adversarial.trades_loss(
                clean, attacked, labels, beta=recipe.beta, label_smoothing=recipe.label_smoothing
            )

        return loss

    def _answers(self, images: Tensor) -> Tensor:
        logits: Tensor = self.network((images - self.mean) / self.std)
        return logits

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast("cuda", dtype=self.amp) if self.amp else contextlib.nullcontext()

    @property
    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def state(self) -> dict[str, Any]:
        """What a later process needs to go on, under the names of DeiT's checkpoints."""
        parts = {
            "model": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "lr_scheduler": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
        }
        return parts | ({"model_ema": self.ema.module.state_dict()} if self.ema else {})

    def load(self, state: dict[str, Any]) -> None:
        self.network.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["lr_scheduler"])
        if self.scaler.is_enabled() and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        if self.ema:
            self.ema.module.load_state_dict(state["model_ema"])


_ADVICE = "try a lower lr, more warm-up, or fewer iterations"


def _set_drop_path(network: nn.Module, rate: float) -> None:
    """Stochastic depth in each block of one of timm's vision transformers: 0 in the first, `rate` in the last."""
    blocks: Any = network.blocks
    for number, block in enumerate(blocks):
        share = rate * number / max(1, len(blocks) - 1)
        block.drop_path1, block.drop_path2 = DropPath(share), DropPath(share)
