"""Models and data whose right answers are known exactly."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

# Before torch is imported: threads that wait must not take the processor from tests beside them, and several test
# processes must not each start as many threads as there are processors. Commands that tests start get both, too.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from safetensors.torch import load_file
from torch import Tensor

from robustkpca.datasets.images import ArraySamples
from robustkpca.models.classifier import Classifier
from robustkpca.models.networks import build_network
from robustkpca.models.settings import ModelSettings, Preprocessing
from tests.helpers.oracles import DATA, OFFICIAL, noise, oracle, oracle_samples


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slow ones first: at the end they would leave the other processes without work."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture
def linear() -> Classifier:
    return oracle()


@pytest.fixture
def linear_samples() -> ArraySamples:
    return oracle_samples()


@pytest.fixture(scope="session")
def golden_attention() -> dict[str, Tensor]:
    return load_file(DATA / "attention_golden.safetensors")


@pytest.fixture(scope="session")
def golden_attacks() -> dict[str, Tensor]:
    return load_file(DATA / "attack_golden.safetensors")


@pytest.fixture(scope="session")
def official() -> Callable[[str], Classifier]:
    """The authors' small model in one of its four configurations, loaded strictly."""

    def build(name: str) -> Classifier:
        rpc = OFFICIAL[name]
        settings = ModelSettings(
            family="rpc-symvit" if rpc else "symvit",
            preprocessing=Preprocessing(img_size=32, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
            num_classes=10,
            patch_size=8,
            width=48,
            depth=3,
            heads=3,
            rpc=rpc,
        )
        network = build_network(settings)
        network.load_state_dict(load_file(DATA / "official_mini_vit.safetensors"), strict=True)
        return Classifier(network, settings)

    return build


@pytest.fixture
def noise_samples() -> ArraySamples:
    return noise()


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data that is not part of the project; tests that need it are skipped without it."""
    place = os.environ.get("ROBUSTKPCA_SHARED")
    if not place or not Path(place).is_dir():
        pytest.skip("ROBUSTKPCA_SHARED is not set")
    return Path(place)
