"""A family of models that somebody else wrote: built, saved, loaded; and what is refused."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from robustkpca.errors import CheckpointError, SpecError
from robustkpca.models import checkpoints
from robustkpca.models.checkpoints import load_classifier
from robustkpca.models.families import BUILT_IN, FAMILIES, Family, alike
from robustkpca.models.networks import build_network, symvit
from robustkpca.models.settings import ModelSettings, RPCSettings, split_name
from robustkpca.profile import untrained
from tests.helpers.oracles import tiny, tiny_settings


@pytest.fixture
def mine(monkeypatch):
    monkeypatch.setattr(FAMILIES, "_registered", dict(FAMILIES._registered))

    @FAMILIES.register("mine")
    def mean_of_patches(settings: ModelSettings) -> nn.Module:
        pixels = settings.preprocessing.channels * settings.preprocessing.img_size**2
        return nn.Sequential(nn.Flatten(), nn.Linear(pixels, settings.num_classes))

    mean_of_patches.title = "Mine"


def test_a_family_of_others_is_built_saved_and_loaded(mine, tmp_path):
    settings = tiny_settings("mine")
    assert settings.title == "Mine-w16d2h2"
    assert split_name("mine-tiny") == ("mine", "tiny")
    assert untrained("mine-tiny", img_size=32).title == "Mine-tiny"
    network = build_network(settings)
    file = tmp_path / "mine.safetensors"
    checkpoints.save(file, network.state_dict(), settings, {})
    images = torch.rand(4, 1, settings.preprocessing.img_size, settings.preprocessing.img_size)
    loaded = load_classifier(None, file)
    assert loaded.settings == settings
    assert torch.equal(loaded(images), network((images - loaded.mean) / loaded.std))
    with pytest.raises(CheckpointError, match="expected symvit, got the weights of a mine"):
        load_classifier("symvit", file)
    with pytest.raises(SpecError, match="rpc settings do not belong to mine"):
        ModelSettings.parse({**settings.model_dump(), "rpc": RPCSettings(iterations=1, lam=1.0)}, "model")


def test_a_family_with_rpc_attention_of_its_own(monkeypatch):
    monkeypatch.setattr(FAMILIES, "_registered", dict(FAMILIES._registered))
    FAMILIES.register("twin")(Family("Twin", symvit, pursues=True, parameters_of="symvit"))
    assert alike("twin", "rpc-symvit")
    assert not alike("twin", "vit")
    with pytest.raises(SpecError, match="expected rpc settings"):
        ModelSettings.parse(tiny_settings("symvit").model_dump() | {"family": "twin"}, "model")
    rpc = RPCSettings(iterations=2, lam=1.0)
    images = torch.rand(4, 1, 28, 28)
    assert torch.equal(tiny("twin", rpc)(images), tiny("rpc-symvit", rpc)(images))


def test_what_builds_no_network_is_refused(monkeypatch):
    monkeypatch.setattr(FAMILIES, "_registered", dict(FAMILIES._registered))
    FAMILIES.register("number")(3)
    FAMILIES.register("none")(lambda settings: None)
    with pytest.raises(SpecError, match="model family number: expected a Family or a function"):
        FAMILIES["number"]
    with pytest.raises(SpecError, match=r"model none: expected a torch.nn.Module, got NoneType"):
        build_network(tiny_settings("none"))


def test_names_and_titles_without_torch():
    code = "import sys; from robustkpca.models.families import FAMILIES; [str(f) for f in FAMILIES.values()]"
    assert subprocess.run([sys.executable, "-c", code + "; sys.exit('torch' in sys.modules)"]).returncode == 0
    assert {name: str(family) for name, family in BUILT_IN.items()}["rpc-symvit"] == "RPC-SymViT"
