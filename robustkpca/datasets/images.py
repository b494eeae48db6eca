"""Labelled images with stable ids, whatever they are stored in."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from timm.data.transforms import CenterCropOrPad, ResizeKeepRatio
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as TF

from robustkpca.datasets.pictures import Mode, decode, eight_bit, naming
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
        shape, dtype = tuple(pixels.shape), pixels.dtype
        if dtype != np.uint8 or shape[:1] != (len(ids),) or len(shape) != 3 + (shape[3:] == (3,)):
            n = len(ids)
            raise DataError(f"data {name}: expected pixels as uint8 ({n}, H, W) or ({n}, H, W, 3), got {dtype} {shape}")
        self.pixels = pixels

    @property
    def content_hash(self) -> str:
        digest = hashlib.sha256("\n".join(self.ids).encode("utf-8", "surrogateescape"))
        digest.update(np.ascontiguousarray(self.pixels).data)
        return digest.hexdigest()[:16]

    def image(self, index: int, preprocessing: Preprocessing) -> Tensor:
        pixels, size = self.pixels[index], preprocessing.img_size
        if pixels.shape == (size, size) and preprocessing.channels == 1 and preprocessing.crop_pct == 1.0:
            return torch.from_numpy(pixels)[None].float() / 255
        return preprocess(Image.fromarray(pixels), preprocessing)

    def picture(self, index: int, mode: Mode) -> Image.Image:
        return Image.fromarray(self.pixels[index]).convert(mode)

    def take(self, indices: NDArray[np.int64]) -> ArraySamples:
        ids = [self.ids[i] for i in indices]
        return ArraySamples(
            self.name, ids, self.labels[indices], self.classes, self.pixels[indices], **self.taken(indices)
        )


READ = 1000  # files whose content is hashed, spread over the set; to read all of a large set takes too long


@dataclass(frozen=True)
class _Content:
    """A content hash and what it was computed from: the size of every file, and the digests of those that were read."""

    hash: str
    sizes: list[int]
    digests: dict[int, bytes]


class FileSamples(Samples):
    """Picture files below a root; ids are their paths relative to it, `paths` has those whose id is not.

    They are decoded when asked for, one at a time. A file that is no longer what `content_hash` saw when it was last
    asked for is refused: results would stand under the hash of other pictures.
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
        paths: Mapping[str, Path] | None = None,
        **rest: object,
    ) -> None:
        super().__init__(name, ids, labels, classes, **rest)  # type: ignore[arg-type]
        self.roots, self.resized = dict(roots), resized  # an id begins with one of these ("" where there is one root)
        self.paths = dict(paths or {})
        self._content: _Content | None = None

    def path(self, index: int) -> Path:
        if self.ids[index] in self.paths:
            return self.paths[self.ids[index]]
        first, _, rest = self.ids[index].partition("/")
        return self.roots[first] / rest if first in self.roots else self.roots[""] / self.ids[index]

    @property
    def hash_covers(self) -> str:  # type: ignore[override]
        return (
            "ids, file sizes and content" if len(self) <= READ else f"ids, file sizes and the content of {READ} files"
        )

    @property
    def content_hash(self) -> str:
        """Taken anew each time: a picture may have been replaced since."""
        digest, sizes, digests = hashlib.sha256(), [], {}
        read = set(range(len(self)) if len(self) <= READ else np.linspace(0, len(self) - 1, READ).astype(int).tolist())
        for index, name in enumerate(self.ids):
            path = self.path(index)
            with naming(path):
                sizes.append(path.stat().st_size)
                digest.update(f"{name}\t{sizes[-1]}\n".encode("utf-8", "surrogateescape"))
                if index in read:
                    with path.open("rb") as file:
                        digests[index] = hashlib.file_digest(file, "sha256").digest()
                    digest.update(digests[index])
        self._content = _Content(digest.hexdigest()[:16], sizes, digests)
        return self._content.hash

    @property
    def source_hash(self) -> str:
        """Of what `content_hash` saw, so that cache and run never disagree; where it did not read every file, with
        what tells a replaced one (paths, times, inodes)."""
        content = self._content.hash if self._content else self.content_hash
        if len(self) <= READ:
            return content
        digest = hashlib.sha256(content.encode())
        for index in range(len(self)):
            path = self.path(index)
            with naming(path):
                stat = path.stat()
                times = f"{stat.st_mtime_ns}\t{stat.st_ctime_ns}\t{stat.st_dev}\t{stat.st_ino}"
                line = f"{path.resolve()}\t{stat.st_size}\t{times}\n"
            digest.update(line.encode("utf-8", "surrogateescape"))
        return digest.hexdigest()[:16]

    def _check_unchanged(self, index: int, file: BufferedReader) -> None:
        """Raises DataError where the content hash was asked for and saw something else in this file."""
        if self._content is None:
            return
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        same = size == self._content.sizes[index]
        if same and index in self._content.digests:
            same = hashlib.file_digest(file, "sha256").digest() == self._content.digests[index]
            file.seek(0)
        if not same:
            raise DataError(f"image {self.path(index)}: it was replaced while it was in use; start again")

    def image(self, index: int, preprocessing: Preprocessing) -> Tensor:
        picture = self.picture(index, mode_of(preprocessing))
        with naming(self.path(index)):
            return preprocess(picture, preprocessing, resized=self.resized)

    def picture(self, index: int, mode: Mode) -> Image.Image:
        """The picture as it is in its file. Raises DataError where it cannot be read or decoded, or was replaced."""
        path = self.path(index)
        with naming(path), path.open("rb") as file:
            self._check_unchanged(index, file)
            return decode(file, mode)

    def take(self, indices: NDArray[np.int64]) -> FileSamples:
        ids = [self.ids[i] for i in indices]
        rest = self.taken(indices) | {"paths": self.paths}
        return FileSamples(self.name, ids, self.labels[indices], self.classes, self.roots, resized=self.resized, **rest)


def mode_of(preprocessing: Preprocessing) -> Mode:
    return "RGB" if preprocessing.channels == 3 else "L"


def preprocess(picture: Image.Image, to: Preprocessing, *, resized: bool = True) -> Tensor:
    """A picture as float32 (C, S, S) in [0, 1], equal to timm's transform for the same settings to the bit.

    It is resized to S / crop_pct as `to.crop_mode` says, only if `resized`; then the centre S x S is cropped.
    """
    picture = eight_bit(picture).convert(mode_of(to))
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
    # In NumPy: this runs in several threads at once, each of which torch would give threads of its own.
    pixels = torch.from_numpy(np.asarray(picture).astype(np.float32) / np.float32(255))
    return pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)


def _resized(picture: Image.Image, to: Preprocessing) -> Image.Image:
    """The picture at S / crop_pct, rounded down."""
    side = math.floor(to.img_size / to.crop_pct)
    if to.crop_mode == "border":
        bordered: Image.Image = ResizeKeepRatio(side, longest=1.0, interpolation=to.interpolation)(picture)
        return bordered
    size = [side, side] if to.crop_mode == "squash" else [side]
    resized: Image.Image = TF.resize(picture, size, InterpolationMode(to.interpolation))
    return resized
