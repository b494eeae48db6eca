"""Batches of uint8 images for training; order and augmentation depend on (seed, epoch, place) alone."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from timm.data import create_transform
from timm.data.distributed_sampler import RepeatAugSampler
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from robustkpca.datasets.samples import Samples
from robustkpca.errors import DataError
from robustkpca.models.settings import Preprocessing
from robustkpca.runtime.keyed_random import generator, key_number, seeded
from robustkpca.runtime.place import Place
from robustkpca.train.recipes import Recipe

Batch = tuple[Tensor, Tensor]  # uint8 (B, C, S, S) and int64 (B,)
# A view of a sample: its place in the order of the epoch, and its index.
View = tuple[int, int]


@contextlib.contextmanager
def keyed(seed: int, *key: object) -> Iterator[None]:
    """Inside, the global generators of Python, NumPy and torch start from a key
    (timm draws from all); then as before."""
    before, before_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 (timm uses that one)
    number = key_number(seed, *key)
    random.seed(number)
    np.random.seed(number % 2**32)  # noqa: NPY002
    try:
        with seeded(seed, *key):
            yield
    finally:
        random.setstate(before)
        np.random.set_state(before_numpy)  # noqa: NPY002


def load_pixels(samples: Samples, img_size: int | None = None, channels: int | None = None) -> Tensor:
    """All samples in memory, uint8 (N, C, S, S). Size and channels are those of the first image unless given."""
    pixels = getattr(samples, "pixels", None)
    if pixels is not None:
        img_size, channels = img_size or pixels.shape[1], channels or (1 if pixels.ndim == 3 else 3)
    plain = unaugmented(img_size or 32, channels or 3)
    return torch.stack([(samples.image(i, plain) * 255).round().to(torch.uint8) for i in range(len(samples))])


def unaugmented(img_size: int, channels: int) -> Preprocessing:
    """Images of that size as they are, not normalised."""
    return Preprocessing(img_size=img_size, mean=(0.0,) * channels, std=(1.0,) * channels, crop_pct=1.0)


def augment(images: Tensor, recipe: Recipe, draws: Tensor) -> Tensor:
    """Random crops of the zero-padded images and horizontal flips.

    (B, C, S, S), and draws (B, 3) in [0, 1) -> (B, C, S, S).
    """
    size = images.shape[-1]
    if recipe.crop_padding:
        pad = recipe.crop_padding
        padded = F.pad(images, (pad, pad, pad, pad))
        top, left = (draws[:, :2] * (2 * pad + 1)).long().T[:, :, None]
        span = torch.arange(size)
        rows, columns = (top + span)[:, :, None], (left + span)[:, None, :]
        images = padded[torch.arange(len(images))[:, None, None], :, rows, columns].permute(0, 3, 1, 2)
    if recipe.flip:
        images = torch.where(draws[:, 2, None, None, None] < 0.5, images.flip(-1), images)
    return images


class Stored:
    """Images held in memory, with `augment`; called with the epoch and views, it returns uint8 (B, C, S, S)."""

    def __init__(self, images: Tensor, recipe: Recipe, seed: int) -> None:
        self.images, self.recipe, self.seed = images, recipe, seed

    def __call__(self, epoch: int, views: Sequence[View]) -> Tensor:
        images = self.images[[index for _, index in views]]
        if not (self.recipe.crop_padding or self.recipe.flip):
            return images
        draws = [torch.rand(3, generator=generator(self.seed, "augment", epoch, place)) for place, _ in views]
        return augment(images, self.recipe, torch.stack(draws))


class Pictures:
    """Pictures opened when they are asked for, through timm's transforms; called as `Stored` is. Always in colour."""

    def __init__(self, samples: Samples, img_size: int, recipe: Recipe, seed: int) -> None:
        self.samples, self.seed = samples, seed
        self.transform: Callable[[Image.Image], Tensor] = create_transform(
            img_size,
            is_training=True,
            scale=recipe.crop_area,
            hflip=0.5 if recipe.flip else 0.0,
            color_jitter=0.0,
            auto_augment=recipe.rand_augment or None,
            interpolation="bicubic",
            normalize=False,
        )

    def __call__(self, epoch: int, views: Sequence[View]) -> Tensor:
        return torch.stack([self._view(epoch, place, index) for place, index in views])

    def _view(self, epoch: int, place: int, index: int) -> Tensor:
        with keyed(self.seed, "picture", epoch, place):
            return self.transform(self.samples.picture(index, "RGB"))


class Batches(Dataset[Any]):
    """The batches of one epoch as a map-style data set, so that a DataLoader's workers can make them ahead."""

    def __init__(self, source: Stored | Pictures, labels: Tensor, epoch: int, batches: Sequence[Sequence[View]]):
        self.source, self.labels, self.epoch, self.batches = source, labels, epoch, batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> Batch | DataError:
        """An error is handed on as it is: a worker would wrap it in a traceback."""
        views = self.batches[number]
        try:
            return self.source(self.epoch, views), self.labels[[index for _, index in views]]
        except DataError as error:
            return error

    def load(self, workers: int, pinned: bool) -> Iterator[Batch]:
        """In order. Raises DataError for a picture that cannot be read.

        Workers are processes, as timm's transforms draw from global generators. What they hand over goes through a
        pipe: tensors go through /dev/shm, which containers keep small, and the loader would wait there for ever.
        """
        for batch in DataLoader(self, batch_size=None, num_workers=workers, collate_fn=_arrays if workers else None):
            if isinstance(batch, DataError):
                raise batch
            images, labels = map(torch.as_tensor, batch)
            yield (images.pin_memory(), labels.pin_memory()) if pinned else (images, labels)


def _arrays(batch: Any) -> Any:
    return batch if isinstance(batch, DataError) else tuple(tensor.numpy() for tensor in batch)


class Order:
    """Which images each process sees in which batch: of P processes, number r takes views r, r + P, ... of the order.

    So the processes' batches put together are those of one process. Repeated augmentation is timm's: with 256 images
    or more, an epoch has as many views as the largest multiple of 256 that does not exceed the number of images.
    """

    def __init__(self, used: NDArray[np.int64], recipe: Recipe, seed: int, here: Place) -> None:
        if recipe.batch_size % here.world:
            raise DataError(f"--batch-size: expected a multiple of the {here.world} processes, got {recipe.batch_size}")
        self.used, self.recipe, self.seed, self.here = used, recipe, seed, here
        self.sampler = RepeatAugSampler(
            used,
            num_replicas=here.world,
            rank=here.rank,
            num_repeats=recipe.repeats,
            selected_round=256 if recipe.repeats > 1 else 0,
        )

    def batches(self, epoch: int) -> list[list[View]]:
        """The last batch may be smaller.

        Mixing takes images in pairs: where it is on, an odd one at the end is left out.
        """
        self.sampler.set_epoch(key_number(self.seed, "order", epoch))  # nothing but the seed of its shuffle
        rank, world = self.here.rank, self.here.world
        views = [(rank + i * world, int(self.used[place])) for i, place in enumerate(self.sampler)]
        size = self.recipe.batch_size // world
        batches = [views[first : first + size] for first in range(0, len(views), size)]
        if self.recipe.mixup or self.recipe.cutmix:
            batches = [batch[: len(batch) // 2 * 2] for batch in batches]
        batches = [batch for batch in batches if batch]
        if not batches:
            raise DataError("mixup and cutmix take images in pairs: expected an even batch of at least 2 a process")
        return batches
