import argparse
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from robustkpca.errors import CheckpointError, OutputError, SpecError
from robustkpca.models import checkpoints
from robustkpca.models.checkpoints import load_classifier
from robustkpca.models.networks import build_network
from robustkpca.models.settings import EMBEDDED, RPCSettings
from robustkpca.models.weight_files import read
from tests.helpers.oracles import DATA, tiny, tiny_settings

RPC = RPCSettings(iterations=3, lam=0.5, layers=(2,))


@pytest.fixture
def state():
    return tiny("symvit").network.state_dict()


def logits(classifier):
    return classifier(torch.rand(2, 1, 28, 28, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("family", ["vit", "symvit", "rpc-symvit"])
def test_our_file_needs_nothing_else(tmp_path, family):
    made = tiny(family, RPC if family == "rpc-symvit" else None)
    checkpoints.save(tmp_path / "m.safetensors", made.network.state_dict(), made.settings, {"seed": 0})
    loaded = load_classifier(checkpoint=tmp_path / "m.safetensors")
    assert loaded.settings == made.settings
    assert loaded.weights == made.weights
    assert torch.equal(logits(loaded), logits(made))
    assert list(tmp_path.iterdir()) == [tmp_path / "m.safetensors"]


def test_flags_override_the_files_rpc_settings(tmp_path):
    made = tiny("rpc-symvit", RPC)
    checkpoints.save(tmp_path / "m.safetensors", made.network.state_dict(), made.settings, {})
    other = load_classifier(checkpoint=tmp_path / "m.safetensors", iterations=1, layers="all")
    assert other.settings.rpc == RPCSettings(iterations=1, lam=0.5, layers="all")
    with pytest.raises(SpecError, match="from 1 to 2"):
        load_classifier(checkpoint=tmp_path / "m.safetensors", layers=(3,))


def test_one_layer_has_no_note_however_it_is_written(tmp_path):
    """A file from before there was one way to write the layers is read as well, and is no other training."""
    first = tiny("rpc-symvit", RPCSettings(iterations=3, lam=0.5, layers="first"))
    checkpoints.save(tmp_path / "m.safetensors", first.network.state_dict(), first.settings, {})
    old = first.settings.model_copy(update={"rpc": first.settings.rpc.model_copy(update={"layers": (1,)})})
    checkpoints.save(tmp_path / "old.safetensors", first.network.state_dict(), old, {})
    assert read(tmp_path / "old.safetensors").settings["rpc"]["layers"] == [1]
    for name in ("m", "old"):
        for layers in (None, "first", (1,), [1]):
            loaded = load_classifier(checkpoint=tmp_path / f"{name}.safetensors", layers=layers)
            assert loaded.settings == first.settings
            assert loaded.notes == ()
    other = load_classifier(checkpoint=tmp_path / "old.safetensors", layers=(2,))
    assert other.notes == ("trained as 3iter/layer1, lambda 0.5",)


def test_symvit_weights_as_rpc_and_back(tmp_path, state):
    checkpoints.save(tmp_path / "m.safetensors", state, tiny_settings("symvit"), {})
    rpc = load_classifier("rpc-symvit", tmp_path / "m.safetensors", iterations=2, lam=1.0)
    assert rpc.settings.rpc.label == "2iter/layer1"
    with pytest.raises(CheckpointError, match="say --iterations and --lambda"):
        load_classifier("rpc-symvit", tmp_path / "m.safetensors")
    with pytest.raises(SpecError, match="settings of rpc-symvit"):
        load_classifier("symvit", tmp_path / "m.safetensors", iterations=2)


def test_symvit_and_rpc_cannot_be_told_apart_by_weights(tmp_path, state):
    torch.save(state, tmp_path / "plain.pth")
    with pytest.raises(CheckpointError, match="say which with --model"):
        load_classifier(checkpoint=tmp_path / "plain.pth", heads=2)


def test_training_arguments_and_numpy_scalars_do_not_matter(tmp_path, state):
    torch.save(state, tmp_path / "plain.pth")
    extra = {"model": state, "args": argparse.Namespace(lr=1.0), "max_accuracy": np.float64(81.2), "epoch": 299}
    torch.save({**extra, "best": np.float32(3), "count": np.int64(7)}, tmp_path / "full.pth")
    plain = load_classifier("symvit", tmp_path / "plain.pth", heads=2)
    full = load_classifier("symvit", tmp_path / "full.pth", heads=2)
    assert torch.equal(logits(plain), logits(full))
    assert plain.weights == full.weights == tiny("symvit").weights


def test_rpc_settings_come_from_training_arguments(tmp_path, state):
    args = argparse.Namespace(robust=True, num_iter=4, lambd=4.0, layer=0)
    torch.save({"model": state, "args": args}, tmp_path / "m.pth")
    assert load_classifier(checkpoint=tmp_path / "m.pth", heads=2).settings.rpc == RPCSettings(iterations=4, lam=4.0)
    args.layer = -1
    torch.save({"model": state, "args": args}, tmp_path / "m.pth")
    everywhere = load_classifier(checkpoint=tmp_path / "m.pth", heads=2)
    assert everywhere.settings.rpc.label == "4iter/all"
    assert "the file's layer = -1 means all layers" in everywhere.notes
    del args.layer
    torch.save({"model": state, "args": args}, tmp_path / "m.pth")
    with pytest.raises(CheckpointError, match="say --layers"):
        load_classifier(checkpoint=tmp_path / "m.pth", heads=2)


@pytest.mark.parametrize(
    "prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "module.module."]
)
def test_wrapper_prefixes(tmp_path, state, prefix):
    torch.save({f"{prefix}{k}": v for k, v in state.items()}, tmp_path / "m.pth")
    assert load_classifier("symvit", tmp_path / "m.pth", heads=2).weights == tiny("symvit").weights


class Trap:
    def __reduce__(self):
        return (Path.touch, (Path("marker"),))


@pytest.mark.parametrize("content", [nn.Linear(2, 2), {"model": {}, "trap": Trap()}, Trap()])
def test_pickles_that_would_run_code_are_refused(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    torch.save(content, tmp_path / "m.pth")
    with pytest.raises(CheckpointError, match="could run code"):
        read(tmp_path / "m.pth")
    assert not Path("marker").exists()


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("part", [0.6, 0.05])
def test_torn_files(tmp_path, state, suffix, part):
    path = tmp_path / f"m{suffix}"
    if suffix == ".pth":
        torch.save(state, path)
    else:
        save_file(state, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * part)])
    with pytest.raises(CheckpointError, match=r"m\.\w+ \(\d+ bytes\).*torn"):
        read(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "empty"), (b"<!DOCTYPE html><html>", "web page"), (b"\n <html>", "web page"),
     (b"version https://git-lfs.github.com/spec/v1\noid sha256:1", "Git LFS"), (b"hello, I am text", "cannot read"),
     (b"\x80\x04\x95hello", "plain pickle"), (b"\x80\x02hello", "torn|run code"), (b"PK\x03\x04hello", "torn")],
)  # fmt: skip
def test_files_that_are_no_weights(tmp_path, content, message):
    (tmp_path / "m.pth").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path / "m.pth")


def test_nothing_and_a_folder(tmp_path):
    with pytest.raises(CheckpointError, match="nothing there"):
        read(tmp_path / "none.pth")
    with pytest.raises(CheckpointError, match="a folder there"):
        read(tmp_path)


@pytest.mark.parametrize("content", [[1, 2], {"epoch": 3}, {"model": {"a": 1}}])
def test_files_without_weights(tmp_path, content):
    torch.save(content, tmp_path / "m.pth")
    with pytest.raises(CheckpointError, match=r"expected a dict of weights|no weights in it"):
        read(tmp_path / "m.pth")


def test_loading_is_strict_and_counts(tmp_path, state):
    checkpoints.save(tmp_path / "a.safetensors", {f"encoder.{k}": v for k, v in state.items()}, tiny_settings(), {})
    with pytest.raises(CheckpointError, match=rf"{len(state)} missing \(.*\); {len(state)} unexpected \(encoder\."):
        load_classifier(checkpoint=tmp_path / "a.safetensors")
    short = {k: v for k, v in state.items() if not k.startswith("blocks.1.")}
    checkpoints.save(tmp_path / "b.safetensors", short, tiny_settings(), {})
    with pytest.raises(CheckpointError, match=r"12 missing \(blocks\.1\."):
        load_classifier(checkpoint=tmp_path / "b.safetensors")
    wide = {**state, "head.weight": torch.zeros(9, 16)}
    checkpoints.save(tmp_path / "c.safetensors", wide, tiny_settings(), {})
    with pytest.raises(CheckpointError, match=r"head.weight expected \(10, 16\), got \(9, 16\)"):
        load_classifier(checkpoint=tmp_path / "c.safetensors")


def test_weights_of_rpc_attention_used_without_it_are_noted(tmp_path, state):
    settings = tiny_settings("rpc-symvit", RPCSettings(iterations=2, lam=1.0))
    checkpoints.save(tmp_path / "rpc.safetensors", state, settings, {})
    assert load_classifier("symvit", tmp_path / "rpc.safetensors").notes == (
        "the file says rpc-symvit, used as symvit",
    )
    assert load_classifier("rpc-symvit", tmp_path / "rpc.safetensors").notes == ()
    more = load_classifier("rpc-symvit", tmp_path / "rpc.safetensors", iterations=4)
    assert more.notes == ("trained as 2iter/layer1, lambda 1",)


def test_weights_of_another_family_or_size(tmp_path, state):
    torch.save(state, tmp_path / "sym.pth")
    with pytest.raises(CheckpointError, match="expected vit, got the weights of a symvit"):
        load_classifier("vit", tmp_path / "sym.pth", heads=2)
    torch.save(tiny("vit").network.state_dict(), tmp_path / "vit.pth")
    with pytest.raises(CheckpointError, match="expected symvit, got the weights of a vit"):
        load_classifier("symvit", tmp_path / "vit.pth", heads=2)
    with pytest.raises(CheckpointError, match="say --heads"):
        load_classifier("symvit", tmp_path / "sym.pth")
    with pytest.raises(CheckpointError, match="expected size tiny"):
        load_classifier("symvit-tiny", tmp_path / "sym.pth", heads=2)
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "linear.pth")
    with pytest.raises(CheckpointError, match="timm's parameter names"):
        load_classifier("vit", tmp_path / "linear.pth")


def test_official_mini_model_with_its_settings_from_the_tensors(golden_attacks):
    path = DATA / "official_mini_vit.safetensors"
    classifier = load_classifier("rpc-symvit", path, iterations=4, lam=4.0, heads=3)
    assert (classifier.settings.preprocessing.img_size, classifier.settings.patch_size) == (32, 8)
    difference = classifier(golden_attacks["images"]) - golden_attacks["rpc_4iter_layer1.logits"]
    assert difference.abs().max() < 1e-5


def test_names_without_weights():
    with pytest.raises(SpecError, match="needs --checkpoint"):
        load_classifier("symvit-tiny")
    with pytest.raises(SpecError, match="unknown model 'symvti'"):
        load_classifier("symvti")
    with pytest.raises(SpecError, match="unknown timm model"):
        load_classifier("timm:vit_tinny_patch16_224")
    with pytest.raises(SpecError, match="model name or a checkpoint"):
        load_classifier()


def test_a_timm_model_from_a_file(tmp_path):
    import timm

    network = timm.create_model("test_vit", num_classes=1000)
    torch.save(network.state_dict(), tmp_path / "m.pth")
    classifier = load_classifier("timm:test_vit", tmp_path / "m.pth")
    assert classifier.settings.title == "test_vit"
    assert classifier.settings.preprocessing.img_size == network.pretrained_cfg["input_size"][-1]
    with pytest.raises(CheckpointError, match="does not fit timm:test_vit2"):
        load_classifier("timm:test_vit2", tmp_path / "m.pth")


def test_no_permission(tmp_path, state):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write"):
        checkpoints.save(tmp_path / "file" / "m.safetensors", state, tiny_settings(), {})


def test_embedded_models_carry_settings_and_training_record():
    for name in EMBEDDED:
        path = checkpoints.embedded_path(name)
        assert path.stat().st_size < 2_000_000
        file = read(path)
        build_network(load_classifier(name).settings).load_state_dict(file.state, strict=True)
        assert json.dumps(file.training["recipe"])


@pytest.mark.parametrize("name", ["m.safetensors", "m.pth"])
@pytest.mark.parametrize("refusing", ["open", "stat"])  # the file itself; a folder above it
def test_a_file_that_may_not_be_read_is_one_line(tmp_path, monkeypatch, name, refusing):
    path, real = tmp_path / name, getattr(Path, refusing)
    if name == "m.pth":
        torch.save(tiny().network.state_dict(), path)
    else:
        checkpoints.save(path, tiny().network.state_dict(), tiny_settings(), {})

    def refuse(self, *args, **kwargs):
        if self == path:
            raise PermissionError(13, "Permission denied", str(self))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, refusing, refuse)
    for use in (lambda: load_classifier("symvit", path, heads=2), lambda: checkpoints.inspect(path)):
        with pytest.raises(CheckpointError, match=rf"checkpoint {path}: cannot be read \(Permission denied\)"):
            use()
