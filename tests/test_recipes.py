"""The recipes of CONTRIBUTING.md, followed to the letter in a package of somebody else."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from robustkpca.runs.run import Run
from tests.helpers.cli import call

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"<!-- recipe: (.+?) -->\n```\w+\n(.*?)```", re.DOTALL)
RECIPES = dict(BLOCK.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")))
# The command, then what other commands see.
MAIN = """
import sys
sys.argv = {words}
from robustkpca.cli.app import run
assert run() == 0
from robustkpca.datasets.registry import DATASETS
from robustkpca.models.families import FAMILIES
from mypkg.models import build
network = FAMILIES["my-linear"].network(build().settings)
print(f"my-linear of {{network[1].out_features}} logits; {{DATASETS['squares'].title}}")
"""


@pytest.fixture
def work(tmp_path):
    """A working directory with every file of the recipes."""
    for name, text in RECIPES.items():
        if "." in name:
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    (tmp_path / "mypkg" / "__init__.py").write_text("")
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "mypkg"]:
        del sys.modules[name]


def install(work):
    """The package as pip would leave it: code and metadata in a folder that is on the path."""
    site = work / "site"
    site.mkdir()
    (work / "mypkg").rename(site / "mypkg")
    info = site / "mypkg-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mypkg\nVersion: 1.0\n")
    lines = RECIPES["entry points"].replace('[project.entry-points."', "[").replace('"]', "]").replace('"', "")
    (info / "entry_points.txt").write_text(lines)
    return site


def test_the_recipes_are_there():
    assert len(RECIPES) == 8


def test_an_attack_a_corruption_a_data_set_and_a_model_by_import_path(work, monkeypatch):
    monkeypatch.chdir(work)
    done = call(
        "eval", "--model", "symvit", "--model", "mypkg.models:build", "--data", "mypkg.data:squares",
        "--attack", "darker.toml", "--attack", "stripes.toml", "--out", "run",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = Run.open(work / "run")
    assert run.n == 20
    assert run.request.searches == {"mypkg.attacks:Darker": "blind"}
    rows = run.rows[run.rows["model"] == run.models[0]].set_index("sample")
    assert set(rows["perturbation"]) == {"clean", "darker", "stripes/stripes"}
    darker = rows[rows["perturbation"] == "darker"]
    assert darker["distance"].tolist() == pytest.approx([4 / 255] * 20, abs=1e-6)  # half of the budget of 8/255
    for severity in ("1", "5"):
        striped = rows[(rows["perturbation"] == "stripes/stripes") & (rows["budget"] == severity)]
        assert len(striped) == 20
    confidence = rows[rows["perturbation"] == "stripes/stripes"].groupby("budget")["confidence"].apply(list)
    assert confidence["1"] != confidence["5"]


@pytest.mark.slow
def test_names_of_an_installed_package(work):
    site = install(work)
    suite = (work / "darker.toml").read_text().replace("mypkg.attacks:Darker", "Darker")
    (work / "darker.toml").write_text(suite)
    suite = (work / "stripes.toml").read_text().replace("mypkg.looks:stripes", "stripes")
    (work / "stripes.toml").write_text(suite)
    words = ["robustkpca", "eval", "--model", "symvit", "--data", "squares", "--limit", "8", "--attack", "darker.toml"]
    words += ["--attack", "stripes.toml", "--out", "run"]
    done = subprocess.run(
        [sys.executable, "-c", MAIN.format(words=words)],
        cwd=work, env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{site}"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "enough-samples" in done.stdout
    assert "8 samples" in done.stdout
    assert "my-linear of 10 logits; Bright squares, called bags." in done.stdout
    counts = pd.Series(Run.open(work / "run").rows["perturbation"]).value_counts()
    assert counts.to_dict() == {"stripes/stripes": 16, "clean": 8, "darker": 8}
