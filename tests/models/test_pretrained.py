"""Pretrained weights of timm's models: from the cache, or after one request that was answered."""

import json
import socket
import time

import pytest
import timm
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from robustkpca.errors import CheckpointError
from robustkpca.models.checkpoints import load_classifier

MODEL = "timm/test_vit.r160_in1k"  # where timm has the weights of test_vit
CONFIG = {
    "architecture": "test_vit",
    "num_classes": 1000,
    "pretrained_cfg": {"input_size": [3, 160, 160], "fixed_input_size": True, "num_classes": 1000},
}


@pytest.fixture
def tries(monkeypatch, tmp_path):
    """An empty cache and no network: the hosts that were looked for. Nothing waits."""
    hosts: list[str] = []

    def resolve(host, *_, **__):
        hosts.append(host)
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    def sleep(seconds):
        raise AssertionError(f"waits {seconds} s")

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(time, "sleep", sleep)
    return hosts


def cached(tmp_path, filename="model.safetensors", config=None):
    """Random weights where the hub's client would have put those it downloaded."""
    folder = tmp_path / "hub" / f"models--{MODEL.replace('/', '--')}"
    snapshot = folder / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0" * 40)
    state = timm.create_model("test_vit").state_dict()
    (save_file if filename.endswith(".safetensors") else torch.save)(state, snapshot / filename)
    if config is not None:
        (snapshot / "config.json").write_text(json.dumps(config))
    return state


def assert_has(classifier, state):
    assert classifier.settings.preprocessing.img_size == 160
    for key, value in classifier.network.state_dict().items():
        assert torch.equal(value, state[key])


@pytest.mark.parametrize("model", ["timm:test_vit", "timm:test_vit.r160_in1k", f"hf-hub:{MODEL}"])
def test_without_a_network_it_is_one_try_and_one_line(tries, model):
    with pytest.raises(CheckpointError, match=r"not in the hub's cache.*name resolution") as raised:
        load_classifier(model)
    assert str(raised.value).startswith(f"{model}: no pretrained weights")
    assert str(raised.value).endswith("give --checkpoint FILE")
    assert "\n" not in str(raised.value)
    assert len(tries) == 1


@pytest.mark.parametrize("model", ["timm:test_vit", f"hf-hub:{MODEL}"])
def test_where_the_hub_is_forbidden_nothing_is_asked(tries, monkeypatch, model):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE is set"):
        load_classifier(model)
    assert tries == []
    assert constants.HF_HUB_OFFLINE is True


@pytest.mark.parametrize("offline", [False, True])
@pytest.mark.parametrize("filename", ["model.safetensors", "pytorch_model.bin"])
def test_weights_in_the_cache_need_no_request(tries, monkeypatch, tmp_path, filename, offline):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    state = cached(tmp_path, filename)
    assert_has(load_classifier("timm:test_vit"), state)
    assert tries == []
    assert constants.HF_HUB_OFFLINE is offline


def test_a_model_of_the_hub_in_the_cache_needs_no_request(tries, tmp_path):
    state = cached(tmp_path, config=CONFIG)
    assert_has(load_classifier(f"hf-hub:{MODEL}"), state)
    assert tries == []


def test_a_configuration_without_its_weights_is_one_try(tries, tmp_path):
    cached(tmp_path, "other.bin", CONFIG)
    with pytest.raises(CheckpointError, match="not in the hub's cache"):
        load_classifier(f"hf-hub:{MODEL}")
    assert len(tries) == 1


def test_a_hub_that_answers_is_asked_for_the_weights(tries, monkeypatch):
    class Answering:
        def head(self, *_, **__):
            tries.append("head")

    created = []
    monkeypatch.setattr("huggingface_hub.utils.get_session", Answering)
    original = timm.create_model

    def create(*args, **options):
        created.append(constants.HF_HUB_OFFLINE)
        return original(*args, **{**options, "pretrained": constants.HF_HUB_OFFLINE})

    monkeypatch.setattr(timm, "create_model", create)
    load_classifier("timm:test_vit")
    assert tries == ["head"]
    assert created == [True, False]
