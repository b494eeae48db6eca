"""What reading pictures costs an evaluation: decoded in the same process, ahead by a worker, and from the cache, over
images that lie in memory.

Usage: python benchmarks/data_path.py [--threads N] [--repeats N]. Prints a Markdown table of ratios of medians, all
ways in turn in one process.
"""

from __future__ import annotations

import shutil
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from timing import arguments, conditions, medians, table

from robustkpca import evaluate, load_samples
from robustkpca.datasets.cache import PixelCache
from robustkpca.datasets.samples import Samples
from robustkpca.profile import untrained

PICTURES, SIZE, BATCH = 96, (500, 375), 16


def write_pictures(folder: Path) -> None:
    """JPEG files of the size that ImageNet's have, smooth fields with some noise, in folders named by numbers."""
    draws = np.random.default_rng(0)
    for i in range(PICTURES):
        (folder / str(i % 4)).mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(draws.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize(
            SIZE, Image.Resampling.BICUBIC
        )
        noisy = np.asarray(coarse).astype(np.int16) + draws.integers(-12, 13, (SIZE[1], SIZE[0], 3))
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(folder / str(i % 4) / f"{i}.jpg", quality=90)


class InMemory(Samples):
    """The same images, decoded before the clock runs."""

    hash_covers = "ids"

    def __init__(self, samples: Samples, preprocessing: object) -> None:
        super().__init__(samples.name, samples.ids, samples.labels, samples.classes)
        self.images = [samples.image(i, preprocessing) for i in range(len(samples))]  # type: ignore[arg-type]

    content_hash = "in memory"

    def image(self, index: int, preprocessing: object) -> torch.Tensor:
        return self.images[index]

    def take(self, indices: object) -> Samples:
        raise NotImplementedError


def main() -> None:
    options = arguments(__doc__ or "", repeats=5).parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        write_pictures(place / "pictures")
        classifier = untrained("symvit-tiny", num_classes=10)
        files = load_samples(f"folder:{place / 'pictures'}")
        memory = InMemory(files, classifier.settings.preprocessing)
        cache = PixelCache(place / "cache", limit=2**32)

        def run(samples: Samples, workers: int, kept: PixelCache | None, fresh: bool = False) -> None:
            if fresh:
                shutil.rmtree(place / "cache", ignore_errors=True)
            out = place / f"run {type(samples).__name__}"
            evaluate([classifier], samples, [], out, batch_size=BATCH, workers=workers, cache=kept)
            shutil.rmtree(out / "rows")  # what is left holds the probes, which are made once

        tasks = {
            "memory": partial(run, memory, 0, None),
            "no worker": partial(run, files, 0, None),
            "one worker": partial(run, files, 1, None),
            "two workers": partial(run, files, 2, None),
            "cache, first time": partial(run, files, 0, cache, True),
            "cache, after": partial(run, files, 0, cache),
        }
        seconds = medians(tasks, options)
    print(
        f"Clean accuracy of {PICTURES} JPEGs of {SIZE[0]}x{SIZE[1]}, SymViT-tiny, batch {BATCH}; "
        f"{conditions(options)}\n"
    )
    rows = [(f"{name} over images in memory", seconds[name] / seconds["memory"], None) for name in list(tasks)[1:]]
    print(table(rows))


if __name__ == "__main__":
    main()
