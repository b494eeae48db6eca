"""Models and data whose right answers are known exactly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from robustkpca.datasets.images import ArraySamples
from robustkpca.models.classifier import Classifier
from robustkpca.models.networks import build_network
from robustkpca.models.settings import ModelSettings, Preprocessing, RPCSettings

DATA = Path(__file__).parents[1] / "data"
SIDE = 28
GREY = Preprocessing(img_size=SIDE, mean=(0.0,), std=(1.0,), crop_pct=1.0)


class Linear(nn.Module):
    """Logits [s, -s] with s = w.x - b: the smallest L-inf change that flips a sample is |s| / sum |w|."""

    def __init__(self) -> None:
        super().__init__()
        draws = torch.Generator().manual_seed(0)
        self.w = nn.Parameter(torch.randn(SIDE * SIDE, generator=draws))

    def forward(self, x: Tensor) -> Tensor:
        s = (x.flatten(1) - 128 / 255) @ self.w
        return torch.stack([s, -s], dim=1)


def classifier_of(
    network: nn.Module, classes: int, preprocessing: Preprocessing = GREY, title: str = "oracle"
) -> Classifier:
    settings = ModelSettings(
        family="timm:oracle", preprocessing=preprocessing, num_classes=classes, classes=tuple(map(str, range(classes)))
    )
    return Classifier(network, settings, title=title, source="made in a test")


def oracle() -> Classifier:
    return classifier_of(Linear(), 2)


# Margins of the linear oracle's samples in units of 1/255, and whether the label is the model's clean answer.
MARGINS = [1, 1, 3, 3, 3, 6, 6, 12, 12, 12, 3, 12]
RIGHT = [True] * 10 + [False] * 2


def oracle_samples() -> ArraySamples:
    """12 grey images at known distances from the boundary, alternating classes; the last two are labelled wrongly."""
    sign = torch.sign(Linear().w).detach().numpy().reshape(SIDE, SIDE)
    sides = [1 if i % 2 == 0 else -1 for i in range(len(MARGINS))]
    pixels = np.stack([128 + side * m * sign for side, m in zip(sides, MARGINS, strict=True)]).astype(np.uint8)
    labels = np.array([(0 if s > 0 else 1) if r else (1 if s > 0 else 0) for s, r in zip(sides, RIGHT, strict=True)])
    return ArraySamples("linear", [f"s{i}" for i in range(len(labels))], labels.astype(np.int64), ("0", "1"), pixels)


def linear_accuracy(eps_255: float) -> float:
    """The exact accuracy of the linear oracle under any strong L-inf attack of eps_255 / 255."""
    return sum(r and m > eps_255 for m, r in zip(MARGINS, RIGHT, strict=True)) / len(MARGINS)


OFFICIAL: dict[str, RPCSettings | None] = {
    "symvit": None,
    "rpc_4iter_layer1": RPCSettings(iterations=4, lam=4.0),
    "rpc_2iter_all": RPCSettings(iterations=2, lam=4.0, layers="all"),
    "rpc_6iter_layer1_lambda0.1": RPCSettings(iterations=6, lam=0.1),
}


def tiny_settings(family: str = "symvit", rpc: RPCSettings | None = None, classes: int = 10) -> ModelSettings:
    return ModelSettings(
        family=family,
        preprocessing=Preprocessing(img_size=SIDE, mean=(0.3,), std=(0.35,), crop_pct=1.0),
        num_classes=classes,
        classes=tuple(f"c{i}" for i in range(classes)),
        patch_size=7,
        width=16,
        depth=2,
        heads=2,
        rpc=rpc,
    )


def tiny(family: str = "symvit", rpc: RPCSettings | None = None, seed: int = 0) -> Classifier:
    """A small ViT with random weights, large enough to make its answers depend on the image."""
    settings = tiny_settings(family, rpc)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = build_network(settings)
        with torch.no_grad():
            for p in network.parameters():
                p.add_(0.15 * torch.randn(p.shape))
    return Classifier(network, settings)


def noise() -> ArraySamples:
    """30 random grey images of 10 classes: batches of 7 and 64 leave partial ones."""
    draws = np.random.default_rng(0)
    pixels = draws.integers(0, 256, (30, SIDE, SIDE), dtype=np.uint8)
    labels = np.arange(30, dtype=np.int64) % 10
    return ArraySamples("noise", [f"n{i:02d}" for i in range(30)], labels, tuple(f"c{i}" for i in range(10)), pixels)
