"""Models and data of one's own by import path: what works, and one line for what does not."""

import sys

import pytest

from robustkpca.errors import CheckpointError, SpecError
from robustkpca.models.loading import load_models
from robustkpca.models.options import ModelOptions, with_checkpoints
from robustkpca.runs.run import Run
from tests.helpers.cli import call

CODE = """
import numpy as np
from torch import nn
from robustkpca import Classifier, ModelSettings, Preprocessing
from robustkpca.datasets.images import ArraySamples

CLASSES = tuple(f"c{i}" for i in range(10))

def build():
    settings = ModelSettings(family="own:mine", num_classes=10, classes=CLASSES,
                             preprocessing=Preprocessing(img_size=28, mean=(0.5,), std=(0.5,), crop_pct=1.0))
    return Classifier(nn.Sequential(nn.Flatten(), nn.Linear(784, 10)), settings)

def val(split):
    pixels = np.random.default_rng(0).integers(0, 256, (20, 28, 28), dtype=np.uint8)
    return ArraySamples("mine", [f"s{i:02d}" for i in range(20)], np.arange(20) % 10, CLASSES, pixels)

made = build()
number = 3

def raises(*split):
    raise ValueError("no weights here")

def network(*split):
    return nn.Linear(2, 2)
"""


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A working directory with a module of one's own, forgotten afterwards."""
    (tmp_path / "mine.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("mine", None)


def test_a_model_and_data_of_ones_own_are_evaluated(work):
    done = call(
        "eval", "--model", "mine:build", "--data", "mine:val", "--attack", "fgsm", "--limit", "10", "--out", "run"
    )
    assert done.returncode == 0, done.stderr
    run = Run.open(work / "run")
    assert run.models == ["mine"]
    assert run.n == 10
    assert "mine:build" in (work / "run" / "run.json").read_text()


def test_an_object_is_taken_as_it_is_and_left_as_it_is(work):
    (loaded,) = load_models([ModelOptions(model="mine:made")])
    theirs = sys.modules["mine"].made
    assert loaded is not theirs
    assert (loaded.source, theirs.source) == ("mine:made", "")
    assert loaded.weights == theirs.weights


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--model", "mine:raises"), "model mine:raises: the call raised ValueError: no weights here, at mine.py:"),
        (("--model", "mine:network"), "model: expected a Model, got torch.nn.Linear from mine:network"),
        (("--model", "mine:number"),
         "model mine:number: expected a Model, or a function that returns one, got int"),
        (("--model", "mine:biuld"), "Did you mean 'build'?"),
        (("--model", "nowhere.models:build"), "there is no module nowhere"),
        (("--model", "mine:build", "--iterations", "2", "--lambda", "1"),
         "--iterations, --lambda: no settings of mine:build"),
        (("--model", "mine:build", "--checkpoint", "mine.py"), "--checkpoint: no settings of mine:build"),
        (("--model", "mine:build", "--data", "mine:network"),
         "data: expected a SampleSet, got torch.nn.Linear from mine:network"),
        (("--model", "mine:build", "--data", "mine:raises"), "data mine:raises: the call raised ValueError"),
        (("--model", "mine:build", "--data", "mine:nothing"), "data mine:nothing: unknown name 'nothing'"),
        (("--model", "mine:build", "--data", "mine:val", "--in-distribution", "imagenet:x"), "it goes with imagenet-o"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_an_import_path_is_one_line(work, options, message):
    done = call("eval", "--data", "mine:val", "--attack", "fgsm", "--out", "never", *options)
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 2
    assert len(lines) == 1
    assert message in lines[0]
    assert not (work / "never").exists()


def test_models_without_names_or_with_unequal_numbers():
    assert load_models([]) == []
    with pytest.raises(SpecError, match=r"expected one for each --model \(2\), got 1"):
        with_checkpoints([ModelOptions(model="vit"), ModelOptions(model="symvit")], ["a.pth"])
    with pytest.raises(CheckpointError, match="nothing there"):
        load_models(with_checkpoints([], ["none.pth"]))
