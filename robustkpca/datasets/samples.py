"""Labelled images with stable ids, whatever they are stored in."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from timm.data import ImageNetInfo
from torch import Tensor

from robustkpca.config import composed
from robustkpca.datasets.pictures import Mode
from robustkpca.datasets.sample_set import SampleSet
from robustkpca.errors import DataError
from robustkpca.models.settings import ModelSettings, Preprocessing


class Samples(SampleSet):
    """Images, labels and ids. `labels[i]` counts in `classes`; `among` restricts a model's answers to these class
    names.

    `rest`: see SampleSet.
    """

    resized = True  # whether pictures are resized before the crop; released ImageNet-C is only cropped

    def __init__(
        self,
        name: str,
        ids: Sequence[str],
        labels: NDArray[np.int64],
        classes: tuple[str, ...],
        *,
        among: tuple[str, ...] = (),
        **rest: Any,
    ) -> None:
        if len(ids) == 0:
            raise DataError(f"data {name}: no images found")
        if labels.min() < 0 or labels.max() >= len(classes):
            raise DataError(
                f"data {name}: expected labels from 0 to {len(classes) - 1}, got {labels.min()} to {labels.max()}"
            )
        super().__init__(name, ids, **rest)
        self.labels, self.classes, self.among = labels, classes, among

    def id_lines(self) -> Sequence[str]:
        return [f"{i}\t{self.classes[label]}" for i, label in zip(self.ids, self.labels, strict=True)]

    @property
    def source_hash(self) -> str:
        """SHA-256 (16 hex digits) that changes when a picture does; the key of caches on this machine."""
        return self.content_hash

    @abstractmethod
    def image(self, index: int, preprocessing: Preprocessing) -> Tensor:
        """One preprocessed image, float32 (C, S, S) in [0, 1], not normalised.

        Called in several threads at once where `--workers` is above 1; it must draw nothing from global generators.
        """

    def picture(self, index: int, mode: Mode) -> Image.Image:
        """One picture as it is, 8 bits a channel, for recipes of training that crop it themselves."""
        raise DataError(f"data {self.name}: it has images as models take them only, this recipe needs whole pictures")

    def taken(self, indices: NDArray[np.int64]) -> dict[str, Any]:
        return super().taken(indices) | {"among": self.among}

    def spread(self, group: NDArray[np.int64], n: int, seed: int) -> NDArray[np.int64]:
        """n of them, spread over the classes as evenly as they allow."""
        order = group[np.random.default_rng(seed).permutation(len(group))]
        rank = np.empty(len(order), dtype=np.int64)  # how many of its class were drawn before it
        seen: dict[int, int] = {}
        for place, index in enumerate(order):
            label = int(self.labels[index])
            rank[place] = seen.get(label, 0)
            seen[label] = seen.get(label, 0) + 1
        return order[np.argsort(rank, kind="stable")][:n]

    def labels_for(self, settings: ModelSettings) -> NDArray[np.int64]:
        """Labels counted as the model counts its logits: by class name, never by the order of folders.

        Where the model has no names, folders named by numbers are those numbers. Raises DataError for anything else.
        """
        names = class_names(settings)
        if names:
            position = {composed(name): i for i, name in enumerate(names)}
            classes = [composed(name) for name in self.classes]
            if strange := [name for name in classes if name not in position]:
                raise DataError(
                    f"data {self.name}: {len(strange)} of its {len(self.classes)} classes are unknown to "
                    f"{settings.title} "
                    f"({', '.join(strange[:3])}); the model knows {', '.join(names[:3])}, ... ({len(names)})"
                )
            return np.array([position[name] for name in classes], dtype=np.int64)[self.labels]
        if all(name.isdecimal() for name in self.classes):
            numbers = np.array([int(name) for name in self.classes], dtype=np.int64)
            if len(set(numbers)) == len(numbers) and numbers.max() < settings.num_classes:
                return numbers[self.labels]
            raise DataError(
                f"data {self.name}: classes up to {numbers.max()}, {settings.title} has logits 0 to "
                f"{settings.num_classes - 1}"
            )
        raise DataError(
            f"data {self.name}: it has {len(self.classes)} classes ({', '.join(self.classes[:3])}, ...), "
            f"{settings.title} has "
            f"{settings.num_classes} without names; say --classes FILE, one name a line in the order of the logits"
        )


def class_names(settings: ModelSettings) -> tuple[str, ...]:
    """The names of a model's logits, in their order; empty when unknown."""
    if isinstance(settings.classes, str):
        return tuple(ImageNetInfo(settings.classes).label_names())
    return settings.classes
