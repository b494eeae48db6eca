"""Training that is stopped and gone on with, and training by two processes."""

import csv
import json
import subprocess
import sys

import pytest
import torch

from robustkpca import train as training
from robustkpca.datasets.images import ArraySamples
from robustkpca.errors import RunError, SpecError
from robustkpca.models.settings import RPCSettings
from robustkpca.models.weight_files import RECORD_KEY
from tests.helpers.trained import few, go

pytestmark = pytest.mark.slow


def state(out):
    return torch.load(out.with_suffix(".pth"), weights_only=True)


def log(out):
    """The rows of the log, but for the time."""
    with out.with_suffix(".csv").open(newline="") as file:
        return [{k: v for k, v in row.items() if k != "seconds"} for row in csv.DictReader(file)]


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def check(out, whole):
    """To the bit the same as the training that was never stopped."""
    for part in ("model", "model_ema", "optimizer", "lr_scheduler", "epoch"):
        assert equal(state(out)[part], state(whole)[part]), part
    assert log(out) == log(whole)
    assert len(log(out)) == 3
    assert out.exists()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    done = subprocess.run([sys.executable, "-m", "tests.helpers.trained", folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_killed_in_the_middle_of_an_epoch_it_ends_the_same_to_the_bit(trained):
    check(trained / "cut.safetensors", trained / "whole.safetensors")


def test_stopped_by_an_exception_it_ends_the_same_to_the_bit(tmp_path):
    out, whole = tmp_path / "m.safetensors", tmp_path / "whole.safetensors"

    def stop(seen):
        raise KeyboardInterrupt

    for _ in range(2):  # after the first epoch and after the second
        with pytest.raises(KeyboardInterrupt):
            go(out, on_epoch=stop)
        assert not out.exists()
    notices = []
    torch.rand(5)
    go(out, on_notice=notices.append)
    go(whole)
    check(out, whole)
    assert "holds 2 of 3 epochs: going on from there" in notices[0]


def test_two_processes_train_to_the_loss_of_one(trained):
    one, two = log(trained / "one.safetensors"), log(trained / "two.safetensors")
    assert len(two) == 2
    for row, alone in zip(two, one, strict=True):
        assert float(row["train_loss"]) == pytest.approx(float(alone["train_loss"]), rel=1e-4)
        assert float(row["projection_loss"]) == pytest.approx(float(alone["projection_loss"]), rel=1e-2)
        assert row["lr"] == alone["lr"]
    assert state(trained / "two.safetensors")["model"].keys() == state(trained / "one.safetensors")["model"].keys()
    assert {p.name for p in trained.glob("two*")} == {"two.safetensors", "two.csv", "two.pth"}  # no parts left


def test_what_is_complete_is_not_trained_again_and_other_settings_are_refused(tmp_path):
    out = tmp_path / "m.safetensors"
    data = few()
    quick = {"epochs": 1, "batch_size": 50}
    run = {"overrides": quick, "holdout": 0}
    first = go(out, **run)
    log = out.with_suffix(".csv").read_text()
    out.unlink()
    out.with_suffix(".csv").unlink()
    seen = []
    assert go(out, on_epoch=seen.append, **run)["epochs"] == first["epochs"]
    assert not seen
    assert out.exists()
    assert out.with_suffix(".csv").read_text() == log
    for change, message in (
        (
            {"overrides": {**quick, "lr": 1e-4}},
            r"recipe.lr was .*, now 0.0001; choose another --out, or start over with --fresh",
        ),
        ({"seed": 1}, "seed was 0, now 1"),
        ({"holdout": 5}, "holdout was 0, now 5"),
    ):
        with pytest.raises(RunError, match=message):
            go(out, **{**run, **change})
    with pytest.raises(RunError, match=r"classes was .*now"):
        training.run("vit", ArraySamples("digits", data.ids, data.labels, (*"012345678", "ten"), data.pixels), out)
    go(out, fresh=True, seed=1, **run)
    out.with_suffix(".pth").write_bytes(out.with_suffix(".pth").read_bytes()[:5000])
    with pytest.raises(RunError, match="not the state of a training; remove it"):
        go(out, **run)
    with pytest.raises(SpecError, match=r"--out: expected a name such as m\.safetensors"):
        go(tmp_path / "m.pth", **run)


def test_a_state_from_before_there_was_one_way_to_write_the_layers_is_gone_on_from(tmp_path):
    out, state_file = tmp_path / "m.safetensors", tmp_path / "m.pth"
    options = {
        "rpc": RPCSettings(iterations=1, lam=1.0, layers=(1,)),
        "overrides": {"epochs": 1, "batch_size": 50},
    }
    first = training.run("rpc-symvit", few(), out, **options)
    state = torch.load(state_file, weights_only=True)
    ours = json.loads(state[RECORD_KEY])
    assert ours["request"]["model"]["rpc"]["layers"] == "first"
    ours["request"]["model"]["rpc"]["layers"] = [1]
    torch.save({**state, RECORD_KEY: json.dumps(ours)}, state_file)
    seen = []
    assert training.run("rpc-symvit", few(), out, on_epoch=seen.append, **options)["epochs"] == first["epochs"]
    assert seen == []
    with pytest.raises(RunError, match=r"model.rpc.layers was \"first\", now \[2\]"):
        training.run("rpc-symvit", few(), out, **{**options, "rpc": RPCSettings(iterations=1, lam=1.0, layers=(2,))})


def test_tensorboard_is_asked_for_in_words_where_it_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(SpecError, match="pip install tensorboard"):
        go(tmp_path / "m.safetensors", board=tmp_path / "board")
