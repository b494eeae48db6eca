"""Models with options of their own: the commands of the README, the compact form, a models file, options for all."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from robustkpca.datasets.registry import DATASETS
from robustkpca.errors import SpecError
from robustkpca.models import checkpoints
from robustkpca.models.loading import load_models
from robustkpca.models.networks import build_network
from robustkpca.models.options import ModelOptions, read_models_file
from robustkpca.models.settings import SIZES, ModelSettings, Preprocessing, RPCSettings
from robustkpca.runs.run import Run
from tests.helpers.cli import call, make_place
from tests.helpers.oracles import tiny, tiny_settings

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
SECTION = README.partition("## Your own checkpoints and data")[2].partition("\n## ")[0]
COMMANDS = re.findall(r"^robustkpca (eval .+?)(?:\s+#.*)?$", SECTION.replace("\\\n", " "), re.MULTILINE)
PLAIN = "checkpoint=plain.pth,heads=2,classes=classes.txt"  # of a file that says nothing of itself


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A plain file that says nothing of itself, and two files of our own that say how RPC-Attention runs."""
    folder = make_place(tmp_path_factory.mktemp("models"))
    for name, rpc in (
        ("layer1", RPCSettings(iterations=4, lam=4.0)),
        ("all", RPCSettings(iterations=2, lam=1.0, layers="all")),
    ):
        checkpoints.save(
            folder / f"{name}.safetensors", tiny().network.state_dict(), tiny_settings("rpc-symvit", rpc), {}
        )
    torch.save(tiny().network.state_dict(), folder / "plain.pth")
    (folder / "classes.txt").write_text("".join(f"c{i}\n" for i in range(10)))
    return folder


def evaluate(place, out, *options):
    done = call(
        "eval", *options, "--data", "folder:pictures", "--attack", "fgsm", "--eps", "1/255", "--out", out, cwd=place
    )
    assert done.returncode == 0, done.stderr
    return Run.open(place / out), done.stderr


def load(place, monkeypatch, models, **shared):
    """The models of these texts with settings for all, and what is said of those."""
    monkeypatch.chdir(place)
    said = []
    asked = [ModelOptions.of_text(text) for text in models]
    return load_models(asked, ModelOptions.of_flags(shared), on_notice=said.append), said


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory):
    """Two pictures as ImageNet has them, and the files that the README names, of the smallest size."""
    folder = tmp_path_factory.mktemp("imagenet")
    draws = np.random.default_rng(0)
    for wnid in ("n01440764", "n01443537"):
        (folder / "val" / wnid).mkdir(parents=True)
        Image.fromarray(draws.integers(0, 256, (230, 230, 3), np.uint8)).save(folder / "val" / wnid / "a.JPEG")
    width, depth, heads = SIZES["tiny"]
    settings = ModelSettings(
        family="symvit", preprocessing=Preprocessing(img_size=224, mean=(0.5,) * 3, std=(0.5,) * 3), num_classes=1000,
        patch_size=16, width=width, depth=depth, heads=heads,
    )  # fmt: skip
    torch.manual_seed(0)
    state = build_network(settings).state_dict()
    torch.save(state, folder / "symvit.pth")
    torch.save({"model": state, "model_ema": state}, folder / "rpc.pth")
    torch.save(timm.create_model("vit_tiny_patch16_224").state_dict(), folder / "vit.pth")
    block = re.search(r"```toml\n(\[\[model\]\]\nmodel = .+?)```", README, re.DOTALL)
    (folder / "models.toml").write_text(block[1])
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(COMMANDS)))
def test_the_commands_of_the_readme_run_as_printed(imagenet, number):
    """But for the place of the data, the device, and how much is done."""
    words = shlex.split(COMMANDS[number].replace("/data/imagenet/val", "val").replace("--device cuda", "--device cpu"))
    words = [word.replace("5000", "2") for word in words]
    words += ["--eps", "1/255", "--steps", "1", "--out", str(number)]
    done = call(*words, cwd=imagenet)
    assert done.returncode == 0, done.stderr
    run = Run.open(imagenet / str(number))
    expected = {
        0: ["SymViT-tiny", "RPC-SymViT-tiny (4iter/layer1)"],
        1: ["baseline", "ours"],
        2: [f"RPC-SymViT-tiny ({n}iter/layer1, lambda {lam})" for lam in (1, 4) for n in (1, 2, 4)],
        3: ["baseline", "RPC-SymViT-tiny (4iter/layer1)"],
        4: ["vit_tiny_patch16_224", "RPC vit_tiny_patch16_224 (4iter/layer1)"],
    }
    assert len(COMMANDS) == len(expected)
    assert [re.sub(r"\), lambda (\d)", r", lambda \1)", m) for m in run.models] == expected[number]
    assert set(DATASETS) >= {"imagenet"}


def test_each_model_has_its_own_options(place):
    run, said = evaluate(
        place, "own", "--model", f"symvit,{PLAIN},name=base",
        "--model", f"rpc-symvit,{PLAIN},iterations=4,lambda=4,layers=1+2,name=ours",
        "--model", "checkpoint=all.safetensors,name=theirs",
    )  # fmt: skip
    assert run.models == ["base", "ours", "theirs"]
    base, ours, theirs = (run.request.model(label).vision.rpc for label in run.models)
    assert (base, ours) == (None, RPCSettings(iterations=4, lam=4.0, layers=(1, 2)))
    assert theirs == RPCSettings(iterations=2, lam=1.0, layers="all")
    assert "--heads" not in said


def test_an_option_for_all_goes_to_the_models_that_have_it(place, monkeypatch):
    loaded, said = load(place, monkeypatch, ["symvit", "rpc-symvit"], iterations="2")
    assert [m.settings.rpc and m.settings.rpc.iterations for m in loaded] == [None, 2]
    assert said == ["--iterations 2: changes rpc-symvit, which says 6; not for symvit"]
    # One that a model sets itself stays.
    loaded, said = load(place, monkeypatch, ["rpc-symvit,iterations=3", "rpc-symvit-2iter-all"], iterations="4")
    assert [m.settings.rpc.iterations for m in loaded] == [3, 4]
    assert said == ["--iterations 4: changes rpc-symvit-2iter-all, which says 2; rpc-symvit keeps its own"]
    with pytest.raises(SpecError, match=r"^--iterations 2: no model has it; iterations: settings of rpc-symvit"):
        load(place, monkeypatch, ["symvit", "vit"], iterations="2")


def test_an_option_that_contradicts_a_file_is_said_and_named(place):
    files = ("--checkpoint", "layer1.safetensors", "--checkpoint", "all.safetensors")
    run, said = evaluate(place, "layers", *files, "--layers", "all")
    line = "--layers all: changes layer1.safetensors, which says first; for all.safetensors"
    assert line in said.splitlines()
    assert any("layers all (file: first)" in label for label in run.models)
    assert sum("file:" in label for label in run.models) == 1


def test_sweeps_are_every_combination(place, monkeypatch):
    loaded, _ = load(place, monkeypatch, ["rpc-symvit"], iterations="1,2", **{"lambda": "0.1,4"})
    rpc = [m.settings.rpc for m in loaded]
    assert [(r.iterations, r.lam) for r in rpc] == [(1, 0.1), (2, 0.1), (1, 4.0), (2, 4.0)]
    loaded, _ = load(place, monkeypatch, ["rpc-symvit,iterations=1+2+4"])
    assert [m.settings.rpc.iterations for m in loaded] == [1, 2, 4]
    loaded, _ = load(place, monkeypatch, ["rpc-symvit"], layers=["first", "1,3", "all"])
    assert [m.settings.rpc.layers for m in loaded] == ["first", (1, 3), "all"]


def test_a_models_file_says_the_same(place, monkeypatch):
    monkeypatch.chdir(place)
    Path("models.toml").write_text(
        '[[model]]\nname = "symvit"\n\n'  # a model's name alone is the model, as in files made before
        '[[model]]\nmodel = "rpc-symvit"\ncheckpoint = "plain.pth"\nheads = 2\niterations = [1, 2]\nlambda = 0.5\n'
        'layers = [1, 2]\nname = "mine"\ngroup = "seeds"\n'
    )
    first, second = read_models_file(Path("models.toml"))
    assert (first.model, first.name) == ("symvit", None)
    text = "rpc-symvit,checkpoint=plain.pth,heads=2,iterations=1+2,lambda=0.5,layers=1+2,name=mine,group=seeds"
    assert second == ModelOptions.of_text(text)
    for command in ("eval", "diagnose", "profile", "analyze"):
        done = call(command, "--models", "none.toml")
        assert done.returncode == 2
        assert "none.toml" in done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rpc-symvit,iteration=4", "unknown key 'iteration'. Did you mean 'iterations'?"),
        ("rpc-symvit,iterations=four", "iterations: expected a whole number, or several such as 1,2,4"),
        ("rpc-symvit,lambda=-1", "lambda"),
        ("rpc-symvit,lambda=4,lambda=1", "lambda is given twice"),
        ("rpc-symvit,checkpoint=a,b.pth", "expected key=value after each comma, got 'b.pth'"),
        ("rpc-symvit,weights=best", "weights"),
        ("rpc-symwit,iterations=4", "rpc-symwit"),
        ("iterations=4", "expected a model or a checkpoint"),
        ("rpc-symvit,name=", "expected key=value after each comma, got 'name='"),
    ],
)
def test_what_makes_no_sense_is_one_line(text, message):
    done = call("eval", "--model", text, "--attack", "fgsm")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert message in done.stderr
