"""Decoded pictures on disk: a set is decoded once for a sweep of models and attacks."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
import zlib
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
import torchvision
from numpy.typing import NDArray
from torch import Tensor

from robustkpca.datasets.samples import Samples
from robustkpca.models.settings import Preprocessing

SUFFIX = ".pixels"


class PixelCache:
    """A folder of memory-mapped files, one for each data set and preprocessing, filled as pictures are read.

    `limit`: bytes that the folder may hold; to make room, the files go first that were not used for longest. A set
    that is larger than that, or a folder that cannot be written, is read without cache, and `on_notice` is told.
    Several processes may use one folder at once.
    """

    def __init__(self, folder: Path | str, *, limit: float, on_notice: Callable[[str], None] = warnings.warn) -> None:
        self.folder, self.limit, self.on_notice = Path(folder), limit, on_notice

    def reader(self, samples: Samples, preprocessing: Preprocessing) -> Callable[[int], Tensor]:
        """A function from the number of a sample to what `samples.image` returns, the same to the bit."""
        plain = partial(samples.image, preprocessing=preprocessing)
        side, n = preprocessing.img_size, len(samples)
        size = n * (preprocessing.channels * side * side + 8)
        path = self.folder / f"{_key(samples, preprocessing)}{SUFFIX}"
        if size > self.limit:
            self.on_notice(
                f"--cache: {samples.name} takes {size / 2**30:.1f} GiB, more than the limit of "
                f"{self.limit / 2**30:.1f}; not cached"
            )
            return plain
        try:
            self._make(path, size)
        except OSError as error:
            self.on_notice(f"--cache {self.folder}: {error.strerror or error}; going on without")
            return plain
        return _CachedImages(plain, path, (n, preprocessing.channels, side, side))

    def _make(self, path: Path, size: int) -> None:
        """Make the file with all of its space reserved: a full disk must not show when a page is written."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.stat().st_size != size:
            others = sorted(self.folder.glob(f"*{SUFFIX}"), key=lambda file: file.stat().st_mtime)
            held = sum(file.stat().st_size for file in others)
            for file in others:
                if held + size <= self.limit:
                    break
                held -= file.stat().st_size
                file.unlink(missing_ok=True)  # who has it mapped keeps it until he is done
            part = path.with_name(f"{path.name}.{os.getpid()}")
            try:
                with part.open("wb") as new:
                    if hasattr(os, "posix_fallocate"):
                        os.posix_fallocate(new.fileno(), 0, size)
                    else:  # macOS
                        for start in range(0, size, 2**24):
                            new.write(bytes(min(2**24, size - start)))
                os.replace(part, path)
            finally:
                part.unlink(missing_ok=True)
        os.utime(path)
        path.open("r+b").close()


class _CachedImages:
    """Reads through one file: N checksums, uint64, then N pictures, uint8 (C, S, S).

    A picture whose checksum is wrong is decoded again.
    """

    def __init__(self, plain: Callable[[int], Tensor], path: Path, shape: tuple[int, int, int, int]) -> None:
        self.plain, self.path, self.shape = plain, path, shape

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_maps"}  # each process maps for itself

    @cached_property
    def _maps(self) -> tuple[NDArray[np.uint64], NDArray[np.uint8]]:
        n = self.shape[0]
        return np.memmap(self.path, np.uint64, "r+", shape=(n,)), np.memmap(
            self.path, np.uint8, "r+", 8 * n, self.shape
        )

    def __call__(self, index: int) -> Tensor:
        checks, pixels = self._maps
        row = pixels[index]
        if checks[index] == _checksum(row):
            return torch.from_numpy(np.asarray(row)).float() / 255
        image = self.plain(index)
        row[...] = (image * 255).round().to(torch.uint8).numpy()
        checks[index] = _checksum(row)
        return image


def _checksum(row: NDArray[np.uint8]) -> int:
    return zlib.crc32(row.tobytes()) + 1  # 0 is what an empty file holds


def _key(samples: Samples, preprocessing: Preprocessing) -> str:
    """What decides the pixels: the pictures, how they are brought to size, and by which libraries."""
    decides = {"img_size", "crop_pct", "interpolation", "crop_mode"}
    if preprocessing.crop_mode == "border":  # filled with the mean
        decides.add("mean")
    way = preprocessing.model_dump(mode="json", include=decides)
    parts = [
        samples.source_hash,
        samples.resized,
        way,
        preprocessing.channels,
        PIL.__version__,
        torchvision.__version__,
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]
