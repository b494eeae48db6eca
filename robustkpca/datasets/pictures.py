"""One picture file as 8 bits a channel, or one line that names the file and says why not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
from PIL import Image, UnidentifiedImageError

from robustkpca.errors import DataError, brief

# What Pillow may take a content for, whatever the name of the file. It knows formats that start other programs (EPS).
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
BITS_PER_SAMPLE, PHOTOMETRIC = 258, 262  # tags of TIFF 6.0

Mode = Literal["RGB", "L"]


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Whatever goes wrong inside with the picture at `path` is a DataError that names it."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # on a broken file decoders raise anything: struct.error, IndexError, MemoryError, ...
        if isinstance(error, OSError) and error.errno is not None:
            raise DataError(f"image {path}: cannot be read ({error.strerror})") from None
        raise DataError(f"image {path}: cannot be decoded ({brief(error)}); fix or remove it") from None


def decode(file: BinaryIO, mode: Mode) -> Image.Image:
    """The picture that a file holds (its first frame), 8 bits a channel.

    Raises:
        ValueError: its content is none of FORMATS, or its levels have no agreed range (see `eight_bit`).
        Exception: whatever Pillow raises for broken or huge pictures.
    """
    try:
        picture = Image.open(file, formats=FORMATS)
    except UnidentifiedImageError:
        raise ValueError(f"its content is none of {', '.join(FORMATS)}") from None
    with picture:
        return eight_bit(picture).convert(mode)


def eight_bit(picture: Image.Image) -> Image.Image:
    """The same picture with levels from 0 to 255; Pillow's own conversion would clip 16 bits to white.

    Of 16 bits the higher 8 are taken, as Pillow does itself for pictures in colour.

    Raises:
        ValueError: levels of 12 or 32 bits or floating point, whose white the file does not say.
    """
    tags = getattr(picture, "tag_v2", {})
    sixteen = picture.mode.startswith("I;16") and tags.get(BITS_PER_SAMPLE, (16,)) == (16,)
    # Pillow gives greys of up to 16 bits in a PGM, and older versions those in a PNG, as 32 bits with 65535 for white.
    if picture.mode == "I" and picture.format in ("PNG", "PPM"):
        sixteen = True
    if sixteen and tags.get(PHOTOMETRIC, 1) == 1:
        return Image.fromarray((np.asarray(picture).astype(np.int64) >> 8).astype(np.uint8))
    if picture.mode.startswith(("I", "F")):
        raise ValueError(f"levels of mode {picture.mode} have no agreed white; save it with 8 bits a channel")
    return picture
