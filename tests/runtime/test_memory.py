"""Memory does not grow with the size of the set."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import resource, sys
import numpy as np, torch
from torch import nn
from robustkpca.datasets.images import ArraySamples
from robustkpca.evaluation.loop import evaluate
from robustkpca.models.classifier import Classifier
from robustkpca.models.settings import ModelSettings, Preprocessing
from robustkpca.results.accuracy import accuracy_table

n, out = int(sys.argv[1]), sys.argv[2]


class Generated(ArraySamples):
    '''Pictures that are made when asked for.'''
    content_hash = "generated"

    def image(self, index, preprocessing):
        return torch.full((1, 64, 64), (index % 10) / 10)


settings = ModelSettings(
    family="timm:toy", preprocessing=Preprocessing(img_size=64, mean=(0.5,), std=(0.5,)), num_classes=10,
    classes=tuple("0123456789"),
)
network = nn.Sequential(nn.AvgPool2d(64), nn.Flatten(), nn.Linear(1, 10))
ids = [f"{i:06d}" for i in range(n)]
samples = Generated("generated", ids, np.arange(n) % 10, tuple("0123456789"), np.broadcast_to(np.uint8(0), (n, 64, 64)))
run = evaluate([Classifier(network, settings, title="toy")], samples, [], out, batch_size=250)
assert accuracy_table(run)["n"].tolist() == [n]
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


@pytest.mark.slow
def test_a_hundred_times_the_images_take_the_same_memory(tmp_path: Path):
    peaks = []
    for n in (300, 30_000):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(n), str(tmp_path / str(n))], capture_output=True, text=True, check=True
        )
        peaks.append(int(done.stdout.split()[-1]))
    assert peaks[1] - peaks[0] < 100, f"{peaks} MB"
