"""Decoded pictures on disk: a set is decoded once for a sweep of models and attacks."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import warnings
import weakref
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
FORMAT = 2  # of the files; also raised when pictures are decoded to other levels than before


class PixelCache:
    """A folder of files, one for each data set and preprocessing, filled as pictures are read.

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
        return _CachedImages(plain, path, (preprocessing.channels, side, side))

    def _make(self, path: Path, size: int) -> None:
        """Make the file with all of its space reserved, so that a full disk shows here.

        It gets its name at once, so that nothing is left under another one when the process is killed, and several
        processes may do this together: records that are not whole are decoded again.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():  # whoever put it there chooses what would be overwritten
            path.unlink()
        if not path.exists() or path.stat().st_size != size:
            self._make_room(path, size)
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            try:
                os.ftruncate(file, size)
                if hasattr(os, "posix_fallocate"):  # not on macOS
                    os.posix_fallocate(file, 0, size)
            except OSError:
                path.unlink(missing_ok=True)
                raise
            finally:
                os.close(file)
        os.utime(path)

    def _make_room(self, path: Path, size: int) -> None:
        """Remove what was not used for longest, leftovers under other names (`X.pixels.PID`) as well."""
        others = []
        for file in self.folder.glob(f"*{SUFFIX}*"):
            with contextlib.suppress(FileNotFoundError):  # another process makes room, too
                stat = file.lstat()
                others.append((stat.st_mtime, stat.st_size, file))
        bytes_held = sum(held for _, held, file in others if file != path)
        for _, held, file in sorted(others):
            if bytes_held + size <= self.limit:
                break
            if file != path:
                bytes_held -= held
                file.unlink(missing_ok=True)  # who has it open keeps it until he is done


class _CachedImages:
    """Reads through one file of N records: a checksum, uint64, and a picture, uint8 (C, S, S).

    A picture whose record is torn or missing is decoded again. The file is read, not mapped: where it is cut short by
    others while it is in use, a map would end the process (SIGBUS).
    """

    def __init__(self, plain: Callable[[int], Tensor], path: Path, shape: tuple[int, int, int]) -> None:
        self.plain, self.path, self.shape = plain, path, shape

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_file"}  # each process opens its own

    @cached_property
    def _file(self) -> int | None:
        """The open file; None where it was removed in the meantime."""
        try:
            file = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            return None
        weakref.finalize(self, os.close, file)
        return file

    def __call__(self, index: int) -> Tensor:
        if self._file is None:
            return self.plain(index)
        length = 8 + math.prod(self.shape)
        record = os.pread(self._file, length, index * length)
        if len(record) == length and record[:8] == _checksum(record[8:]):
            return torch.from_numpy(_floats(np.frombuffer(record, np.uint8, offset=8).reshape(self.shape)))
        image = self.plain(index)
        levels = np.rint(image.numpy() * 255).astype(np.uint8)
        if np.array_equal(_floats(levels), image.numpy()):  # images of others' data sets may be finer than 8 bits
            with contextlib.suppress(OSError):  # a full disk: without
                os.pwrite(self._file, _checksum(levels.tobytes()) + levels.tobytes(), index * length)
        return image


def _floats(levels: NDArray[np.uint8]) -> NDArray[np.float32]:
    return levels.astype(np.float32) / np.float32(255)


def _checksum(levels: bytes) -> bytes:
    return (zlib.crc32(levels) + 1).to_bytes(8, "little")  # 0 is what an empty file holds


def _key(samples: Samples, preprocessing: Preprocessing) -> str:
    """What decides the pixels: the pictures, how they are brought to size, and by which libraries."""
    decides = {"img_size", "crop_pct", "interpolation", "crop_mode"}
    if preprocessing.crop_mode == "border":  # filled with the mean
        decides.add("mean")
    way = preprocessing.model_dump(mode="json", include=decides)
    parts = [
        FORMAT,
        samples.source_hash,
        samples.resized,
        way,
        preprocessing.channels,
        PIL.__version__,
        torchvision.__version__,
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]
