"""Speed of robustkpca.corruptions against the usual code, one image at a time (corruption_reference.py), on one CPU
thread: a Markdown table.

Usage: python benchmarks/corruptions.py [--severity 3] [--device cpu] [--repeats 5]
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Iterator

import corruption_reference as reference
import cv2
import numpy as np
import PIL
import scipy
import skimage
import torch
from sklearn.datasets import load_sample_images

from robustkpca.corruptions.apply import corrupt
from robustkpca.corruptions.registry import CORRUPTIONS

SIZE, BATCH = 224, 16


def crops(n: int) -> np.ndarray:
    """uint8 (n, 224, 224, 3): random crops of the two photographs that come with scikit-learn."""
    rng = np.random.default_rng(0)
    photographs = load_sample_images().images

    def crop(photograph: np.ndarray) -> np.ndarray:
        y, x = (rng.integers(0, length - SIZE) for length in photograph.shape[:2])
        return photograph[y : y + SIZE, x : x + SIZE]

    return np.stack([crop(photographs[k % 2]) for k in range(n)])


def milliseconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def measured(severity: int, device: torch.device, repeats: int) -> Iterator[tuple[str, float, float]]:
    """Name, median milliseconds per image of the usual code and of ours.

    The two take turns: the usual code on `repeats` images, ours on `repeats` batches. Both start from images in memory
    (uint8 for one, float on the device for the other), and a first call of each is not counted.
    """
    pixels = crops(BATCH)
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous().to(device).float() / 255
    ids = [f"crop/{k}" for k in range(BATCH)]
    rng = np.random.default_rng(0)

    def ours(name: str) -> None:
        corrupt(images, name, severity, ids)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for name in CORRUPTIONS:
        reference.corrupt(pixels[0], name, severity, rng)
        ours(name)
        usual, batched = [], []
        for k in range(repeats):
            image = pixels[k % BATCH]
            usual.append(milliseconds(lambda image=image, name=name: reference.corrupt(image, name, severity, rng)))
            batched.append(milliseconds(lambda name=name: ours(name)) / BATCH)
        yield name, statistics.median(usual), statistics.median(batched)


def row(name: str, usual: float, ours: float) -> str:
    return f"| {name} | {usual:.2f} | {ours:.2f} | {usual / ours:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--severity", type=int, default=3, choices=range(1, 6))
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="of ours")
    parser.add_argument("--repeats", type=int, default=5, help="images of the usual code, and batches of ours")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    print(f"Severity {arguments.severity}, {SIZE} px, median milliseconds per image of {arguments.repeats} tries:\n")
    print("| corruption | usual, one at a time | ours, batch 16 | times faster |\n| --- | ---: | ---: | ---: |")
    table = []
    for entry in measured(arguments.severity, arguments.device, arguments.repeats):
        table.append(entry)
        print(row(*entry), flush=True)
    without = [entry for entry in table if entry[0] != "glass_blur"]
    for title, entries in (("**sum**", table), ("sum without glass_blur", without)):
        print(row(title, sum(entry[1] for entry in entries), sum(entry[2] for entry in entries)))
    versions = ", ".join(f"{module.__name__} {module.__version__}" for module in (torch, np, scipy, cv2, skimage, PIL))
    print(f"\n{processor()}, 1 thread, ours on {arguments.device}; Python {platform.python_version()}, {versions}.")


def processor() -> str:
    with open("/proc/cpuinfo") as file:
        models = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return models[0] if models else platform.machine()


if __name__ == "__main__":
    main()
