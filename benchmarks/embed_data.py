"""Make robustkpca/embedded/fashion-mnist-1000.npz: 100 test images a class, drawn with seed 0.

Usage: python benchmarks/embed_data.py FASHION_MNIST_DIR
"""

import sys
from pathlib import Path

import numpy as np

from robustkpca.datasets.images import ArraySamples
from robustkpca.datasets.sources import load_samples

target = Path(__file__).parents[1] / "robustkpca" / "embedded" / "fashion-mnist-1000.npz"
samples = load_samples(f"fashion-mnist:{sys.argv[1]}", split="test", limit=1000, seed=0)
assert isinstance(samples, ArraySamples)
assert (np.bincount(samples.labels) == 100).all()
indices = np.array([int(i.removeprefix("test/")) for i in samples.ids], dtype=np.uint16)
target.parent.mkdir(exist_ok=True)
np.savez_compressed(target, images=samples.pixels, labels=samples.labels.astype(np.uint8), indices=indices)
print(f"{target}: {target.stat().st_size} bytes, {len(samples)} images, content {samples.content_hash}")
