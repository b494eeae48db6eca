"""Models of one architecture from the command line to tables, comparisons and the gate."""

import re
import shutil

import pandas as pd
import pytest

from robustkpca.gate.check import HOLDS, INVALID, check
from robustkpca.models import checkpoints
from robustkpca.models.settings import RPCSettings
from robustkpca.results import trainings
from robustkpca.runs.run import Run
from tests.helpers.cli import call, make_place
from tests.helpers.oracles import tiny, tiny_settings
from tests.results.test_trainings import training


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two checkpoints of one architecture, each called `best`, one trained by another recipe, and an RPC model."""
    folder = make_place(tmp_path_factory.mktemp("names"))
    for number, recipe in enumerate(({}, {}, {"adversarial": "pgd-at"})):
        (folder / f"exp{number}").mkdir()
        state = tiny(seed=number).network.state_dict()
        checkpoints.save(
            folder / f"exp{number}" / "best.safetensors", state, tiny_settings(), training(number, **recipe)
        )
    settings = tiny_settings("rpc-symvit", RPCSettings(iterations=2, lam=4.0))
    checkpoints.save(folder / "four.safetensors", tiny().network.state_dict(), settings, {})
    return folder


def run(place, out, *files, attack="fgsm", options=()):
    """A run of these checkpoints at one budget."""
    chosen = [part for file in files for part in ("--checkpoint", file)]
    where = ("--data", "folder:pictures", "--out", out)
    done = call("eval", *chosen, *where, "--attack", attack, "--eps", "1/255", *options, cwd=place)
    assert done.returncode == 0, done.stderr
    return Run.open(place / out), done.stdout


def files(*numbers):
    return [f"exp{number}/best.safetensors" for number in numbers]


def rows(place, *runs):
    """The table of budgets of these runs, read from CSV as anyone would."""
    done = call("table", *runs, "--layout", "budgets", "--format", "csv", "--out", "t.csv", cwd=place)
    assert done.returncode == 0, done.stderr
    return pd.read_csv(place / "t.csv").set_index("model")


def test_two_checkpoints_of_one_architecture_are_a_row_each(place):
    """Plain and adversarially trained files of our own, too."""
    found, shown = run(place, "two", *files(0, 2))
    title = "SymViT-w16d2h2"
    assert found.models == [f"{title} [exp0/best]", f"{title} [exp2/best]"]
    assert not trainings.has_training_runs(found)
    assert "mean over trainings" not in shown
    assert call("report", "two", "--out", "two.md", cwd=place).returncode == 0
    first = next(line for line in (place / "two.md").read_text().splitlines() if line.startswith("- Without an attack"))
    assert all(name in first.replace("\\", "") for name in found.models)


def test_trainings_that_differ_in_the_seed_alone_are_averaged_and_said(place):
    found, shown = run(place, "three", *files(0, 1, 2))
    title = "SymViT-w16d2h2"
    assert trainings.groups(found) == {
        f"{title} [exp*/best]": [f"{title} [exp0/best]", f"{title} [exp1/best]"],
        f"{title} [exp2/best]": [f"{title} [exp2/best]"],
    }
    text = re.sub(r"\s+", " ", shown)
    assert f"{title} [exp*/best] is the mean of {title} [exp0/best], {title} [exp1/best]." in text


def test_a_table_joins_no_two_models_in_a_row(place):
    run(place, "A", *files(0))
    run(place, "B", *files(2), attack="noise")
    table = rows(place, "A", "B")
    assert table.index.tolist() == ["SymViT-w16d2h2 [exp0/best]", "SymViT-w16d2h2 [exp2/best]"]
    assert table["clean ↑"].notna().all()
    run(place, "lam4", "four.safetensors")
    run(place, "lam1", "four.safetensors", attack="noise", options=("--lambda", "1"))
    title = "RPC-SymViT-w16d2h2 (2iter/layer1)"
    assert rows(place, "lam4", "lam1").index.tolist() == [title, f"{title}, lambda 1 (file: 4)"]
    shutil.copy(place / files(0)[0], place / "copy.safetensors")
    run(place, "copied", "copy.safetensors", attack="noise")
    assert rows(place, "A", "copied").index.tolist() == ["SymViT-w16d2h2"]  # the same weights elsewhere


def test_columns_over_other_samples_say_how_many(place):
    run(place, "all", *files(0))
    run(place, "few", *files(0), attack="noise", options=("--limit", "10"))
    heads = rows(place, "all", "few").columns.tolist()
    assert heads == ["clean, n = 20 ↑", "fgsm 1/255, n = 20 ↑", "clean, n = 10 ↑", "noise 1/255, n = 10 ↑"]
    assert rows(place, "all").columns.tolist() == ["n", "clean ↑", "fgsm 1/255 ↑"]
    assert rows(place, "all")["n"].tolist() == [20]


def test_the_gate_does_not_depend_on_the_order_of_files(place):
    before, _ = run(place, "before", *files(0, 1))
    after, _ = run(place, "after", *files(1, 0))
    verdict = check(after, before)
    assert (verdict.code, verdict.reasons) == (HOLDS, [])
    assert (verdict.cells["change"] == 0).all()
    (place / "moved").mkdir()
    shutil.copy(place / files(0)[0], place / "moved" / "first.safetensors")
    shutil.copy(place / files(1)[0], place / "moved" / "second.safetensors")
    moved, _ = run(place, "moved-run", "moved/second.safetensors", "moved/first.safetensors")
    verdict = check(moved, before)  # by weights
    assert verdict.code == HOLDS
    assert len([note for note in verdict.notes if "which has its weights" in note]) == 2
    for name, others, reason in (
        (
            "ambiguous",
            (files(0)[0], "sym.safetensors"),
            r"may be any of .*\[best\], .*\[sym\], which all have its weights",
        ),
        ("strangers", (files(2)[0], "plain2.safetensors"), r"was not run; run were .*\[best\], .*\[plain2\]"),
    ):
        state = tiny(seed=9).network.state_dict()
        checkpoints.save(place / "plain2.safetensors", state, tiny_settings(), {})
        other, _ = run(place, name, *others)
        verdict = check(other, before)
        assert verdict.code == INVALID
        assert re.search(reason, verdict.reasons[0]), verdict.reasons


def test_profile_and_analyze_name_models_as_eval_does(place):
    both = [part for file in files(0, 2) for part in ("--checkpoint", file)]
    models = [part for _ in range(2) for part in ("--model", "symvit")]
    done = call("profile", *models, *both, "--repeats", "1", "--batch-size", "1", "--out", "cost.csv", cwd=place)
    assert done.returncode == 0, done.stderr
    names = ["SymViT-w16d2h2 [exp0/best]", "SymViT-w16d2h2 [exp2/best]"]
    assert pd.read_csv(place / "cost.csv")["title"].tolist() == names
    done = call(
        "analyze", *both, "--data", "folder:pictures", "--limit", "4", "--only", "loss", "--out", "an", cwd=place
    )
    assert done.returncode == 0, done.stderr
    page = (place / "an" / "analysis.md").read_text().replace("\\", "")
    assert all(name in page for name in names)
