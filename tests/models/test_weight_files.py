"""Weight files of the wild: loaded where that is safe, else named for what they are, in one line."""

import argparse
import json
import pickle
import re
import struct
import sys
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

from robustkpca.errors import CheckpointError, RobustKPCAError
from robustkpca.models import checkpoints
from robustkpca.models.checkpoints import inspect, load_classifier
from robustkpca.models.weight_files import read
from tests.helpers.oracles import tiny, tiny_settings


@pytest.fixture(scope="module")
def made():
    return tiny("vit")


@pytest.fixture(scope="module")
def state(made):
    return dict(made.network.state_dict())


def loads(path, made, **options):
    loaded = load_classifier("vit", path, heads=2, **options)
    assert loaded.weights == made.weights
    return loaded


def refusal(path, **options):
    with pytest.raises(CheckpointError) as raised:
        load_classifier("vit", path, heads=2, **options)
    message = str(raised.value)
    assert "\n" not in message
    assert str(path.parent) in message
    return message


# -- loaded


@pytest.mark.parametrize("place", ["net", "network", "params", "module", "model", "state_dict"])
def test_entries_of_training_scripts(tmp_path, made, state, place):
    torch.save({"epoch": 3, "params_count": 7, place: state}, tmp_path / "m.pth")
    assert loads(tmp_path / "m.pth", made).notes == (f"weights from entry '{place}'",)


def test_an_entry_in_an_entry(tmp_path, made, state):
    torch.save({"model": {"state_dict": state, "step": 4}}, tmp_path / "m.pth")
    assert loads(tmp_path / "m.pth", made).notes == ("weights from entry 'model.state_dict'",)


@pytest.mark.parametrize("prefix", ["model.", "net.", "network.", "timm_model.", "model.module.", "module.net."])
def test_prefixes_of_attributes(tmp_path, made, state, prefix):
    torch.save({prefix + key: value for key, value in state.items()}, tmp_path / "m.pth")
    assert loads(tmp_path / "m.pth", made).notes == (f"prefix {prefix!r} taken off",)


def test_our_own_files_keep_the_names_of_a_networks_attributes(tmp_path, state):
    inner = {f"model.{key}": value for key, value in state.items()}
    checkpoints.save(tmp_path / "m.safetensors", inner, tiny_settings("vit"), {})
    assert set(read(tmp_path / "m.safetensors").state) == set(inner)


@pytest.fixture
def foreign(monkeypatch):
    """Makes an object of a library that is not here: a dict with attributes, as those are written."""

    def make(module, name, *items, **attributes):
        kind = type(name, (dict,), {"__module__": module})
        parts = module.split(".")
        for i in range(len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[: i + 1]), ModuleType(".".join(parts[: i + 1])))
        setattr(sys.modules[module], name, kind)
        instance = kind(*items)
        instance.__dict__.update(attributes)
        return instance

    return make


def test_lightning(tmp_path, made, state, foreign):
    hyper = foreign("pytorch_lightning.utilities.parsing", "AttributeDict", {"lr": 0.1, "betas": [0.9, 0.999]})
    content = {
        "state_dict": OrderedDict((f"model.{key}", value) for key, value in state.items()), "epoch": 3,
        "pytorch-lightning_version": "2.4.0", "hyper_parameters": hyper, "optimizer_states": [],
        "callbacks": {"ModelCheckpoint{}": {"best_model_score": torch.tensor(0.5)}},
    }  # fmt: skip
    torch.save(content, tmp_path / "last.ckpt")
    notes = loads(tmp_path / "last.ckpt", made).notes
    assert notes == ("weights from entry 'state_dict'", "prefix 'model.' taken off")


def test_a_configuration_with_attributes_of_its_own(tmp_path, made, state, foreign):
    config = foreign("yacs.config", "CfgNode", {"MODEL": {"TYPE": "vit"}}, __immutable__=True)
    torch.save({"model": state, "config": config}, tmp_path / "m.pth")
    loads(tmp_path / "m.pth", made)
    other = foreign("mine.config", "Config", {"a": 1})
    torch.save({"model": state, "config": other}, tmp_path / "m.pth")
    assert "It asks for mine.config.Config." in refusal(tmp_path / "m.pth")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pickle_protocols(tmp_path, made, state, protocol):
    args = argparse.Namespace(
        model="model", names=["model", "args", b"\xff"], big=2**70, where=Path("/data"), pair=(1, None)
    )
    content = {"model": state, "args": args, "best": np.float64(81.2), "dtype": torch.float16}
    torch.save(content, tmp_path / "m.pth", pickle_protocol=protocol)
    loads(tmp_path / "m.pth", made)
    found = read(tmp_path / "m.pth").args
    assert {**found, "where": str(found["where"])} == {**vars(args), "where": "/data"}


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("trap", [nn.Linear(2, 2), {"model": {}, "trap": Path.touch}, {"f": print}, {"m": eval}])
def test_no_protocol_runs_code(tmp_path, trap, protocol):
    torch.save(trap, tmp_path / "m.pth", pickle_protocol=protocol)
    assert "could run code" in refusal(tmp_path / "m.pth")


class Touch:
    def __reduce__(self):
        return (Path.touch, (Path("marker"),))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_trap_beside_good_weights_does_not_close(tmp_path, monkeypatch, state, protocol):
    monkeypatch.chdir(tmp_path)
    torch.save({"model": state, "trap": Touch()}, tmp_path / "m.pth", pickle_protocol=protocol)
    assert "could run code" in refusal(tmp_path / "m.pth")
    assert not Path("marker").exists()


@pytest.mark.parametrize("name", ["pathlib\nWindowsPath", "pathlib._local\nPosixPath", "pathlib\nPurePosixPath"])
def test_paths_of_other_systems_and_versions(tmp_path, made, state, name):
    torch.save({"model": state, "args": argparse.Namespace(output=Path("a"))}, tmp_path / "plain.pth")
    with zipfile.ZipFile(tmp_path / "plain.pth") as old, zipfile.ZipFile(tmp_path / "m.pth", "w") as new:
        for entry in old.namelist():
            new.writestr(entry, re.sub(rb"cpathlib(\._local)?\nPosixPath\n", f"c{name}\n".encode(), old.read(entry)))
    loads(tmp_path / "m.pth", made)
    assert str(read(tmp_path / "m.pth").args["output"]) == "a"


@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_shards(tmp_path, made, state, form):
    names = [f"model-0000{i}-of-00002.{form}" for i in (1, 2)]
    keys = sorted(state)
    places = {key: names[i % 2] for i, key in enumerate(keys)}
    for name in names:
        part = {key: state[key].clone() for key in keys if places[key] == name}
        save_file(part, tmp_path / name) if form == "safetensors" else torch.save(part, tmp_path / name)
    index = tmp_path / f"model.{form}.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    loads(index, made)
    assert dict(inspect(index))["tensors"].startswith(f"{len(keys)}, ")
    assert f"one of 2 shards; give {index}" in refusal(tmp_path / names[0])
    index.write_text(json.dumps({"weight_map": {**places, "extra": names[0]}}))
    assert "the index says it holds extra" in refusal(index)
    (tmp_path / names[1]).unlink()
    assert f"its shard '{names[1]}' is not beside it" in refusal(index)


@pytest.mark.parametrize(
    "index",
    ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../m.pth"}}',
     '{"weight_map": {"a": "/etc/passwd"}}', '{"weight_map": {"a": "m.safetensors.index.json"}}', "[" * 100_000],
)  # fmt: skip
def test_an_index_that_makes_no_sense(tmp_path, index):
    (tmp_path / "m.safetensors.index.json").write_text(index)
    refusal(tmp_path / "m.safetensors.index.json")


def test_arrays_of_numpy(tmp_path, made, state):
    np.savez_compressed(tmp_path / "m.npz", **{key: value.numpy() for key, value in state.items()})
    loads(tmp_path / "m.npz", made)
    np.savez(tmp_path / "traps.npz", a=np.array([Touch()], dtype=object))
    assert "not plain arrays" in refusal(tmp_path / "traps.npz")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("form", ["pth", "safetensors"])
def test_halves_and_doubles_are_the_numbers_they_are(tmp_path, state, dtype, form):
    stored = {key: value.to(dtype) for key, value in state.items()}
    save_file(stored, tmp_path / f"m.{form}") if form == "safetensors" else torch.save(stored, tmp_path / f"m.{form}")
    loaded = load_classifier("vit", tmp_path / f"m.{form}", heads=2).network.state_dict()
    assert all(torch.equal(loaded[key], stored[key].float()) for key in stored)


@pytest.mark.parametrize("length", [0x3C20, 0x4B50, 0x0248, 0x7B20, 0x0480])  # as bytes: " <", "PK", "H", " {", ...
def test_a_safetensors_file_is_one_whatever_its_length_looks_like(tmp_path, made, state, length):
    save_file(state, tmp_path / "plain.safetensors")
    content = (tmp_path / "plain.safetensors").read_bytes()
    (n,) = struct.unpack("<Q", content[:8])
    header = content[8 : 8 + n].rstrip()
    while length < len(header):
        length += 0x10000
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", length) + header.ljust(length) + content[8 + n :])
    loads(tmp_path / "m.safetensors", made)


# -- averages


@pytest.mark.parametrize("place", ["ema_model", "params_ema", "state_dict_ema", "ema_state_dict"])
def test_files_with_averaged_weights_only(tmp_path, made, state, place):
    torch.save({place: state, "epoch": 3, "args": argparse.Namespace(lr=1)}, tmp_path / "m.pth")
    assert f"it holds no raw weights, only '{place}'; say --weights ema" in refusal(tmp_path / "m.pth")
    assert loads(tmp_path / "m.pth", made, weights="ema").notes == (f"weights from entry '{place}'",)
    assert (("weights", f"weights from entry '{place}'")) in inspect(tmp_path / "m.pth")


def test_both_kinds_side_by_side(tmp_path, made, state):
    zeros = {key: torch.zeros_like(value) for key, value in state.items()}
    torch.save({"params": zeros, "params_ema": state}, tmp_path / "m.pth")
    loads(tmp_path / "m.pth", made, weights="ema")
    assert not load_classifier("vit", tmp_path / "m.pth", heads=2).network.state_dict()["pos_embed"].any()


@pytest.mark.parametrize("wrap", [lambda s: s, lambda s: {"model": s, "epoch": 1}, lambda s: {"ema_model": s}])
def test_averages_of_torch(tmp_path, made, wrap):
    average = torch.optim.swa_utils.AveragedModel(made.network)
    average.update_parameters(made.network)
    torch.save(wrap(average.state_dict()), tmp_path / "m.pth")
    assert "it holds no raw weights" in refusal(tmp_path / "m.pth")
    loads(tmp_path / "m.pth", made, weights="ema")


def test_an_average_beside_its_decay(tmp_path, made, state):
    torch.save({"model": state, "ema": {"decay": 0.99, "shadow": state}}, tmp_path / "m.pth")
    assert loads(tmp_path / "m.pth", made, weights="ema").notes == ("weights from entry 'ema.shadow'",)


# -- named for what they are


def torchscript(path, _):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(nn.Linear(2, 2)), path)


def archive(path, _):
    with zipfile.ZipFile(path, "w") as new:
        new.writestr("weights/m.pth", b"abc")


def written(content):
    return lambda path, _: path.write_bytes(content)


def saved(change):
    return lambda path, state: torch.save({k: change(k, v) for k, v in state.items()}, path)


OTHERS = {
    "int8": (saved(lambda _, v: (v * 20).to(torch.int8)), "coded otherwise.*expected float32, got int8"),
    "one in int8": (saved(lambda k, v: v.to(torch.int8) if k == "head.weight" else v), "1 coded otherwise.*got int8"),
    "float8": (saved(lambda _, v: v.to(torch.float8_e4m3fn)), "coded otherwise.*got float8_e4m3fn"),
    "int32": (saved(lambda _, v: v.to(torch.int32)), "coded otherwise.*got int32"),
    "complex": (saved(lambda _, v: v.to(torch.complex64)), "coded otherwise.*got complex64"),
    "meta": (saved(lambda _, v: v.to("meta")), "meta tensor, without values"),
    "sparse": (saved(lambda k, v: v.to_sparse() if k == "head.weight" else v), "head.weight is a sparse tensor"),
    "csr": (saved(lambda k, v: v.to_sparse_csr() if k == "head.weight" else v), "head.weight is a sparse tensor"),
    "quantised": (saved(lambda _, v: torch.quantize_per_tensor(v, 0.1, 0, torch.qint8)), "is quantised"),
    "2-D patches": (saved(lambda k, v: v.flatten(1) if k == "patch_embed.proj.weight" else v), "whose order of pixels"),
    "3-D patches": (saved(lambda k, v: v[:, :, None] if k == "patch_embed.proj.weight" else v), "with 4 dimensions"),
    "oblong": (saved(lambda k, v: v[..., :3] if k == "patch_embed.proj.weight" else v), "square patches, got 7x3"),
    "TorchScript": (torchscript, "a TorchScript program"),
    "zip": (archive, r"a zip archive \(weights/m.pth\); unpack it"),
    "pickle": (lambda path, s: path.write_bytes(pickle.dumps(s, protocol=4)), "a plain pickle"),
    "old": (lambda path, s: torch.save(s, path, pickle, 4, _use_new_zipfile_serialization=False), "a plain pickle"),
    "ONNX": (written(b"\x08\x08\x12\x07pytorch\x1a\x052.4.0" + bytes(50)), "an ONNX graph"),
    "HDF5": (written(b"\x89HDF\r\n\x1a\n" + bytes(50)), "HDF5, as Keras"),
    "GGUF": (written(b"GGUF\x03" + bytes(50)), "GGUF"),
    "gzip": (written(b"\x1f\x8b\x08" + bytes(50)), "gzip archive; unpack"),
    "tar": (written(b"m.pth".ljust(257, b"\0") + b"ustar\0" + bytes(300)), "tar archive; unpack"),
    "JSON": (written(b'{"architecture": "vit"}'), "JSON text"),
    "array": (written(b"\x93NUMPY\x01\x00"), "one array without a name"),
    "picture": (written(b"\x89PNG\r\n"), "a picture"),
    "other": (lambda path, s: torch.save({"student": s, "teacher": s}, path), "in student or teacher, save"),
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
def test_what_cannot_be_loaded_is_named(tmp_path, state, kind):
    make, message = OTHERS[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make(tmp_path / "m.pth", state)
    with pytest.raises(CheckpointError, match=message) as raised:
        load_classifier("vit", tmp_path / "m.pth", heads=2)
    assert "torn" not in str(raised.value)
    assert "\n" not in str(raised.value)


def test_whole_numbers_stay_where_the_network_has_them(tmp_path):
    network = timm.create_model("resnet10t", num_classes=3)
    assert network.state_dict()["bn1.num_batches_tracked"].dtype == torch.int64
    torch.save(network.state_dict(), tmp_path / "m.pth")
    load_classifier("timm:resnet10t", tmp_path / "m.pth")
    torch.save({k: v.to(torch.int8) for k, v in network.state_dict().items()}, tmp_path / "m.pth")
    with pytest.raises(CheckpointError, match="coded otherwise"):
        load_classifier("timm:resnet10t", tmp_path / "m.pth")


# -- bounded


def test_a_zip_bomb(tmp_path):
    with zipfile.ZipFile(tmp_path / "m.pth", "w", zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr("archive/data.pkl", b"\x80\x02")
        with bomb.open("archive/data/0", "w", force_zip64=True) as entry:
            for _ in range(20):
                entry.write(bytes(2**24))
    assert (tmp_path / "m.pth").stat().st_size < 2**20
    assert "it would unpack to 0.3 GiB" in refusal(tmp_path / "m.pth")


def test_tensors_that_claim_more_than_the_file_holds(tmp_path, state):
    torch.save({**state, "pos_embed": torch.zeros(1).expand(1, 10**6, 10**5)}, tmp_path / "m.pth")
    assert "its tensors claim 372.5 GiB" in refusal(tmp_path / "m.pth")


@pytest.mark.parametrize(
    "record",
    ["{", "[]", "7", "[" * 100_000, '{"settings": 3}', '{"settings": {}, "training": []}', '{"settings": {"rpc": 1}}',
     '{"settings": {"family": 4}}', '{"settings": {"family": "vit"}}', '{"settings": {"family": "vit", "rpc": [1]}}'],
)  # fmt: skip
def test_a_description_that_makes_no_sense(tmp_path, state, record):
    save_file(state, tmp_path / "m.safetensors", {"robustkpca": record})
    torch.save({"model": state, "robustkpca": record}, tmp_path / "m.pth")
    for name in ("m.safetensors", "m.pth"):
        with pytest.raises(RobustKPCAError) as raised:
            load_classifier(checkpoint=tmp_path / name)
        assert "\n" not in str(raised.value)
        assert len(str(raised.value)) < 500


def doubled(times):
    """A small pickle whose text would have 2 ** times parts."""
    value = ("a", "a")
    for _ in range(times):
        value = (value, value)
    return value


def test_values_whose_text_has_no_end(tmp_path, state):
    torch.save({doubled(14): 1, "b": 2}, tmp_path / "key.pth")
    assert "it holds tuple, b" in refusal(tmp_path / "key.pth")
    torch.save({"model": {doubled(14): torch.zeros(1)}}, tmp_path / "inner.pth")
    assert "it holds tuple" in refusal(tmp_path / "inner.pth")
    args = argparse.Namespace(layer=doubled(60), num_iter=3, epochs=[1, 2])
    torch.save({"model": state, "args": args, doubled(14): 1}, tmp_path / "args.pth")
    assert read(tmp_path / "args.pth").args == {"num_iter": 3, "epochs": [1, 2]}
    facts = dict(checkpoints.inspect(tmp_path / "args.pth"))
    assert facts["entries"] == "model, args, tuple"
    assert facts["arguments"] == "num_iter=3, epochs=[1, 2]"


@pytest.mark.parametrize("family", ["vit\nx", "vit" * 10**5, "\x1b[31mvit"])
def test_names_of_models_are_one_short_line(tmp_path, state, family):
    record = json.dumps({"settings": {"family": family, "rpc": None}})
    save_file(state, tmp_path / "m.safetensors", {"robustkpca": record})
    assert "the model's description in it makes no sense" in refusal(tmp_path / "m.safetensors")


@pytest.mark.parametrize("change", [{"depth": 10**9}, {"width": 10**9}, {"num_classes": 10**9, "classes": ()}])
def test_settings_of_a_boundless_model(tmp_path, state, change):
    settings = tiny_settings("vit").model_copy(update=change)
    checkpoints.save(tmp_path / "m.safetensors", state, settings, {})
    with pytest.raises(CheckpointError, match="its settings are of a model of"):
        load_classifier(checkpoint=tmp_path / "m.safetensors")


def test_any_byte_may_be_wrong(tmp_path, state):
    """Files of all forms with bytes changed or cut off: loaded or refused in one line, never anything else."""
    draws = np.random.default_rng(0)
    small = {key: value for key, value in state.items() if value.numel() < 200}
    torch.save({"model": small, "args": argparse.Namespace(lr=1.0)}, tmp_path / "2.pth")
    torch.save({"model": small, "args": argparse.Namespace(lr=1.0)}, tmp_path / "4.pth", pickle_protocol=4)
    torch.save(small, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    save_file(small, tmp_path / "m.safetensors", {"robustkpca": json.dumps({"settings": None})})
    np.savez(tmp_path / "m.npz", **{key: value.numpy() for key, value in small.items()})
    for path in sorted(tmp_path.iterdir()):
        whole = path.read_bytes()
        for i in range(60):
            content = bytearray(whole[: draws.integers(1, len(whole))] if i % 4 == 0 else whole)
            for place in draws.integers(0, min(len(content), 3000), 3):
                content[place] = draws.integers(256)
            (tmp_path / "broken").write_bytes(content)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    read(tmp_path / "broken")
                except CheckpointError as error:
                    assert "\n" not in str(error)
