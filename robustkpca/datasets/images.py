"""Labelled images with stable ids, whatever they are stored in."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from timm.data.transforms import CenterCropOrPad, ResizeKeepRatio
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as TF

from robustkpca.datasets.samples import Samples
from robustkpca.errors import DataError
from robustkpca.models.settings import Preprocessing


class ArraySamples(Samples):
    """Images held in memory: uint8 (N, H, W) grey or (N, H, W, 3)."""

    in_memory = True
    hash_covers = "ids and pixels"

    def __init__(
        self,
        name: str,
        ids: Sequence[str],
        labels: NDArray[np.int64],
        classes: tuple[str, ...],
        pixels: NDArray[np.uint8],
        **rest: object,
    ) -> None:
        super().__init__(name, ids, labels, classes, **rest)  # type: ignore[arg-type]
        self.pixels = pixels

    @cached_property
    def content_hash(self) -> str:
        digest = hashlib.sha256("\n".join(self.ids).encode())
        digest.update(np.ascontiguousarray(self.pixels).data)
        return digest.hexdigest()[:16]

    def image(self, index: int, preprocessing: Preprocessing) -> Tensor:
        pixels, size = self.pixels[index], preprocessing.img_size
        if pixels.shape == (size, size) and preprocessing.channels == 1 and preprocessing.crop_pct == 1.0:
            return torch.from_numpy(pixels)[None].float() / 255
        return preprocess(Image.fromarray(pixels), preprocessing)

    def take(self, indices: NDArray[np.int64]) -> ArraySamples:
        ids = [self.ids[i] for i in indices]
        return ArraySamples(
            self.name, ids, self.labels[indices], self.classes, self.pixels[indices], **self.taken(indices)
        )


READ = 1000  # files whose content is hashed, spread over the set; to read all of a large set takes too long


class FileSamples(Samples):
    """Picture files below a root; ids are their paths relative to it.

    They are decoded when asked for, one at a time.
    """

    def __init__(
        self,
        name: str,
        ids: Sequence[str],
        labels: NDArray[np.int64],
        classes: tuple[str, ...],
        roots: Mapping[str, Path],
        *,
        resized: bool = True,
        **rest: object,
    ) -> None:
        super().__init__(name, ids, labels, classes, **rest)  # type: ignore[arg-type]
        self.roots, self.resized = dict(roots), resized  # an id begins with one of these ("" where there is one root)

    def path(self, index: int) -> Path:
        first, _, rest = self.ids[index].partition("/")
        return self.roots[first] / rest if first in self.roots else self.roots[""] / self.ids[index]

    @property
    def hash_covers(self) -> str:  # type: ignore[override]
        return (
            "ids, file sizes and content" if len(self) <= READ else f"ids, file sizes and the content of {READ} files"
        )

    @cached_property
    def content_hash(self) -> str:
        digest = hashlib.sha256()
        read = set(range(len(self)) if len(self) <= READ else np.linspace(0, len(self) - 1, READ).astype(int).tolist())
        for index, name in enumerate(self.ids):
            path = self.path(index)
            digest.update(f"{name}\t{path.stat().st_size}\n".encode("utf-8", "surrogateescape"))
            if index in read:
                digest.update(hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()[:16]

    @property
    def source_hash(self) -> str:
        digest = hashlib.sha256()
        for index in range(len(self)):
            path = self.path(index)
            stat = path.stat()
            line = f"{path.resolve()}\t{stat.st_size}\t{stat.st_mtime_ns}\n"
            digest.update(line.encode("utf-8", "surrogateescape"))
        return digest.hexdigest()[:16]

    def image(self, index: int, preprocessing: Preprocessing) -> Tensor:
        path = self.path(index)
        try:
            with Image.open(path) as picture:
                return preprocess(picture, preprocessing, resized=self.resized)
        except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
            raise DataError(f"image {path}: cannot be decoded ({error}); fix or remove it") from None

    def take(self, indices: NDArray[np.int64]) -> FileSamples:
        ids = [self.ids[i] for i in indices]
        rest = self.taken(indices)
        return FileSamples(self.name, ids, self.labels[indices], self.classes, self.roots, resized=self.resized, **rest)


def preprocess(picture: Image.Image, to: Preprocessing, *, resized: bool = True) -> Tensor:
    """A picture as float32 (C, S, S) in [0, 1], equal to timm's transform for the same settings to the bit.

    It is resized to S / crop_pct as `to.crop_mode` says, only if `resized`; then the centre S x S is cropped.
    """
    picture = picture.convert("RGB" if to.channels == 3 else "L")
    side = to.img_size
    if resized:
        picture = _resized(picture, to)
    elif min(picture.size) < side:
        raise ValueError(f"{picture.size[0]}x{picture.size[1]} pixels, smaller than the crop of {side}")
    if resized and to.crop_mode == "border":
        fill: Any = tuple(round(255 * mean) for mean in to.mean)
        picture = CenterCropOrPad(side, fill=fill if to.channels == 3 else fill[0])(picture)
    elif picture.size != (side, side):
        picture = TF.center_crop(picture, [side, side])
    pixels: Tensor = TF.pil_to_tensor(picture)
    return pixels.float() / 255


def _resized(picture: Image.Image, to: Preprocessing) -> Image.Image:
    """The picture at S / crop_pct, rounded down."""
    side = math.floor(to.img_size / to.crop_pct)
    if to.crop_mode == "border":
        bordered: Image.Image = ResizeKeepRatio(side, longest=1.0, interpolation=to.interpolation)(picture)
        return bordered
    size = [side, side] if to.crop_mode == "squash" else [side]
    resized: Image.Image = TF.resize(picture, size, InterpolationMode(to.interpolation))
    return resized
