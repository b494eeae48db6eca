"""Attacks that somebody else wrote: by decorator, import path and entry point, through the command line as well."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torchattacks.attack import Attack

from robustkpca.attacks import registry
from robustkpca.attacks.registry import METHODS, Method
from robustkpca.errors import SpecError
from robustkpca.suites.attack import AttackSpec
from robustkpca.suites.suite import load_suite

LINF, L2 = load_suite("fgsm").threat, load_suite("cw").threat
SOURCE = """
from torchattacks.attack import Attack

class Darker(Attack):
    norms = ("linf",)
    search = "blind"
    def __init__(self, model, eps=8 / 255, share=1.0):
        super().__init__("Darker", model)
        self.eps, self.share = eps, share
    def forward(self, images, labels):
        return (images - self.share * self.eps).clamp(0, 1)

class NoEps(Darker):
    def __init__(self, model, share=1.0):
        super().__init__(model)

class Bare(Darker):
    def __init__(self, model, eps, share=1.0):
        super().__init__(model)

class OddNorm(Darker):
    norms = ("l3",)

class OddDraws(Darker):
    draws = "image"

def function(model):
    return model
"""
SUITE = """
name = "mine"
version = 1
title = "every pixel darker"
[threat]
norm = "linf"
eps = ["8/255"]
space = "pixel"
clip = true
labels = "true"
[[attack]]
name = "darker"
method = "METHOD"
parameters = { share = 0.5 }
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mypkg").mkdir()
    (tmp_path / "mypkg" / "__init__.py").write_text("")
    (tmp_path / "mypkg" / "attacks.py").write_text(SOURCE)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "mypkg"]:
        del sys.modules[name]


def spec(method, **parameters):
    return AttackSpec(name="mine", method=method, parameters=parameters)


def test_an_import_path_is_a_method(here):
    registry.check(spec("mypkg.attacks:Darker", share=0.5), LINF)
    method = METHODS["mypkg.attacks:Darker"]
    assert (method.norms, method.blind, method.draws, method.parameters) == (("linf",), True, "sample", ("share",))
    with pytest.raises(SpecError, match=r"attack mine: mypkg.attacks:Darker has norm linf, the threat model has none"):
        registry.check(spec("mypkg.attacks:Darker"), L2)
    with pytest.raises(SpecError, match=r"unknown parameter 'shares'. Did you mean 'share'"):
        registry.check(spec("mypkg.attacks:Darker", shares=0.5), LINF)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mypkg.attacks:function", "expected a subclass of torchattacks.attack.Attack, got <function function"),
        ("mypkg.attacks:NoEps", "expected a parameter eps, the budget; it has share"),
        ("mypkg.attacks:Bare", "expected a default for every parameter but the model, got none for eps"),
        ("mypkg.attacks:OddNorm", r"norms: expected a tuple of linf, l2, l1, none, got \('l3',\)"),
        ("mypkg.attacks:OddDraws", "draws: expected sample, attack or batch, got 'image'"),
        ("mypkg.attacks:Darkr", "unknown name 'Darkr'. Did you mean 'Darker'"),
        ("mypkg.nothing:Darker", "there is no module mypkg.nothing"),
        ("PDG", "unknown method 'PDG'. Did you mean 'PGD'"),
    ],
)
def test_what_is_no_attack_is_one_clear_line(here, name, message):
    with pytest.raises(SpecError, match=f"^attack mine: .*{message}") as error:
        registry.check(spec(name), LINF)
    assert "\n" not in str(error.value)


def test_a_decorated_class_is_a_method(monkeypatch):
    monkeypatch.setattr(METHODS, "_registered", dict(METHODS._registered))
    before = list(METHODS)

    @METHODS.register("Same")
    class Same(Attack):
        def __init__(self, model: nn.Module, eps: float = 1.0, steps: int = 3) -> None:
            super().__init__("Same", model)

        def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return images

    assert list(METHODS) == [*before, "Same"]
    assert METHODS["Same"] == Method(Same, ("linf", "l2", "l1"))
    assert registry.passes(spec("Same", steps=5)) == 10
    with pytest.raises(SpecError, match="the name is given twice"):
        METHODS.register("PGD")(Same)


@pytest.mark.slow
def test_through_the_command_line(here):
    def run(method):
        (here / "mine.toml").write_text(SUITE.replace("METHOD", method))
        command = [
            sys.executable,
            "-m",
            "robustkpca",
            "eval",
            "--model",
            "symvit",
            "--attack",
            "mine.toml",
            "--limit",
            "8",
        ]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        return subprocess.run(command, capture_output=True, text=True, env=environment)

    done = run("mypkg.attacks:Darker")
    assert done.returncode == 0, done.stderr
    refused = run("mypkg.attacks:Darkr")
    assert refused.returncode == 2
    assert "Did you mean 'Darker'" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_the_robustbench_of_torchattacks_is_never_imported(tmp_path):
    """Its wheel installs a package of that name, old and foreign, which must not be needed or hide the real one."""
    code = """
import sys
sys.modules["robustbench"] = None  # an import of it is an error
from robustkpca import evaluate, load_suite
from tests.helpers.oracles import noise, tiny
suites = [load_suite(name).with_eps(["4/255"]) for name in ("fgsm", "torchattacks-aa")]
run = evaluate([tiny()], noise().limit(4, 0), suites, sys.argv[1])
assert all(status.complete for status in run.statuses), run.statuses
"""
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code, tmp_path / "run"], cwd=root, check=True)
