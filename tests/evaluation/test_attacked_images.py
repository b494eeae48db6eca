"""Attacked images of a run made again, and written as files."""

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from robustkpca.datasets.sources import load_images
from robustkpca.errors import RunError
from robustkpca.evaluation import attacked_images
from robustkpca.evaluation.attacked_images import FLOATS, INDEX, export_images
from robustkpca.evaluation.loop import evaluate
from robustkpca.evaluation.plan import Plan
from robustkpca.models.settings import RPCSettings
from robustkpca.suites.cell import CLEAN_CELL
from robustkpca.suites.suite import Suite, load_suite
from robustkpca.tasks.base import Options
from tests.helpers.oracles import noise, tiny
from tests.helpers.runs import with_rows

OPTIONS = Options(seed=3, batch_size=20)
CASCADE = {
    "name": "two", "version": 1, "title": "Two", "cascade": True,
    "threat": {"norm": "linf", "eps": ["1/255", "4/255"], "space": "pixel", "clip": True, "labels": "true"},
    "attack": [
        {"name": "one", "method": "FGSM"},
        {"name": "more", "method": "PGD", "parameters": {"steps": 3, "alpha": "0.5 eps", "random_start": True}},
    ],
}  # fmt: skip


def models():
    return [tiny(), tiny("rpc-symvit", RPCSettings(iterations=2, lam=1.0))]


def samples():
    """30 images that the first model gets right, but for every seventh."""
    found = noise()
    images = torch.stack([found.image(i, tiny().settings.preprocessing) for i in range(len(found))])
    labels = tiny()(images).argmax(1).numpy()
    labels[::7] = (labels[::7] + 1) % 10
    found.labels = labels
    return found


def suites():
    return [
        load_suite("fgsm").with_eps(["3/510", "4/255"]),
        Suite.parse(CASCADE, "suite"),
        Suite.parse({"name": "fog", "version": 1, "title": "Fog", "corruptions": ["fog"], "severities": [2]}, "suite"),
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return evaluate(models(), samples(), suites(), tmp_path_factory.mktemp("made") / "run", options=OPTIONS)


def plan(loaded=None, data=None, options=OPTIONS):
    return Plan(loaded or models(), data or samples(), suites(), options)


@pytest.fixture(scope="module")
def written(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("images") / "out"
    return folder, export_images(run, plan(), folder, run.cells[1:], floats=True)


def test_images_get_the_answers_of_the_run(run, written):
    folder, index = written
    assert len(index) == len(models()) * len(run.cells) * run.n
    assert index["as_in_run"].all()
    for (label, attack, budget), part in index.groupby(["model", "attack", "budget"], sort=False):
        archive = np.load((folder / part["file"].iloc[0]).parents[1] / FLOATS)
        assert (archive.shape, archive.dtype) == ((30, 1, 28, 28), np.float32)
        answers = models()[run.models.index(label)](torch.from_numpy(archive)).argmax(1)
        rows = run.rows[(run.rows["model"] == label) & (run.rows["perturbation"] == attack)]
        rows = rows[rows["budget"] == budget]
        assert list(answers) == list(rows["prediction"]) == list(part["prediction"]), (attack, budget)
        clean = np.load(folder / label.replace(" (", "-").replace("/", "-").strip(")") / "clean" / FLOATS)
        moved = np.abs(archive - clean).max((1, 2, 3))
        if budget and not attack.startswith("fog"):
            assert np.allclose(moved, rows["distance"], atol=1e-7)
            assert moved.max() > 0


def test_files_are_these_images_rounded_and_their_answers_are_said(run, written):
    folder, index = written
    for file, part in index.groupby(index["file"].str.rsplit("/", n=2).str[0]):
        pixels = np.stack([np.asarray(Image.open(folder / name)) for name in part["file"]])
        assert np.array_equal(pixels, np.rint(np.load(folder / file / FLOATS)[:, 0] * 255))
        model = models()[run.models.index(part["model"].iloc[0])]
        answers = model(torch.from_numpy(pixels)[:, None].float() / 255).argmax(1)
        assert list(answers) == list(part["prediction_8bit"])
    read = pd.read_csv(folder / INDEX, keep_default_na=False)
    assert list(read["file"]) == list(index["file"])
    assert list(read["label"]) == list(index["label"])


def test_rounding_out_of_the_budget_is_flagged(written):
    _, index = written
    odd, even = (index[(index["attack"] == "fgsm") & (index["budget"] == eps)] for eps in ("3/510", "4/255"))
    assert (odd["distance_8bit"] > 1.9 / 255).equals(odd["over_budget_8bit"].astype(bool))
    assert odd["over_budget_8bit"].all()
    assert not even["over_budget_8bit"].any()
    assert not index[index["attack"].str.startswith(("clean", "fog"))]["over_budget_8bit"].any()


def test_of_a_cascade_images_stay_as_the_attack_left_them_that_broke_them(run, written):
    folder, _ = written
    home = folder / "SymViT-w16d2h2"
    rows = run.cell_rows(run.models[0], next(c for c in run.cells if c.texts == ("two/one", "4/255")))
    wrong = ~rows["correct"].to_numpy(bool)
    one, more, clean = (np.load(home / name / FLOATS) for name in ("two-one-4-255", "two-more-4-255", "clean"))
    assert wrong.any() and not wrong.all()
    assert np.array_equal(one[wrong], more[wrong])
    broken = rows["broken"].to_numpy(bool)
    assert (one[broken] != clean[broken]).any((1, 2, 3)).all()
    assert np.array_equal(one[wrong & ~broken], clean[wrong & ~broken])


def test_the_files_can_be_evaluated_as_a_data_set(run, written, tmp_path):
    folder, index = written
    for attack in ("fgsm-4-255", "two-more-4-255"):
        data = load_images(f"folder:{folder / 'SymViT-w16d2h2' / attack}")
        again = evaluate([tiny()], data, [], tmp_path / attack)
        part = index[index["file"].str.startswith(f"SymViT-w16d2h2/{attack}/")]
        right = again.cell_rows(again.models[0], CLEAN_CELL)["correct"]
        assert right.sum() == (part["prediction_8bit"] == part["label"]).sum()


def test_some_models_some_cells_and_the_first_samples(run, tmp_path):
    cells = [cell for cell in run.cells if cell.texts in (("two/more", "4/255"), ("fgsm", "4/255"))]
    some = export_images(run, plan(models()[1:]), tmp_path / "few", cells, first=23)
    assert list(some["model"].unique()) == run.models[1:]
    assert list(some.groupby(["attack", "budget"]).size()) == [23] * 3
    assert some["as_in_run"].all()
    assert len(list((tmp_path / "few").rglob("*.png"))) == 69
    assert not list((tmp_path / "few").rglob(FLOATS))


def test_no_two_models_or_classes_share_a_folder():
    for names in (["3-x", "x", "X"], ["a", "A", "2-a"], ["b"] * 4):
        made = attacked_images._distinct(names)
        assert len({name.casefold() for name in made}) == len(names)
        assert made[0] == names[0]


def moved(found):
    found.labels = (found.labels + 1) % 10
    return found


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: plan([tiny(seed=1)]), "has no weights"),
        (lambda: plan([tiny("rpc-symvit", RPCSettings(iterations=3, lam=1.0))]), "with these settings"),
        (lambda: plan(data=samples().take(np.arange(29))), "is of other data (n: 29 here, 30 there)"),
        (lambda: plan(data=moved(samples())), "is of other data (ids: "),
        (lambda: plan(options=Options(seed=4, batch_size=20)), "seed: 4 here, 3 there"),
        (lambda: plan([tiny(), tiny()]), "has no weights"),
    ],
)  # fmt: skip
def test_other_models_or_data_are_refused(run, tmp_path, other, message):
    with pytest.raises(RunError) as raised:
        export_images(run, other(), tmp_path / "never", run.cells[1:])
    assert message in str(raised.value)
    assert not (tmp_path / "never").exists()


def test_what_is_not_complete_or_not_new_is_refused(run, tmp_path):
    cell = run.cells[1]
    torn = with_rows(run, run.rows[~((run.rows["budget"] == cell.budget.text) & (run.rows["sample"] == "n05"))])
    with pytest.raises(RunError, match="incomplete 29/30"):
        export_images(torn, plan(), tmp_path / "never", [cell])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    with pytest.raises(RunError, match="new or empty"):
        export_images(run, plan(), tmp_path / "mine", [cell])
    assert [f.name for f in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_an_answer_that_is_not_the_runs_is_said(run, tmp_path):
    cell = run.cells[1]
    rows = run.rows.copy()
    place = rows.index[(rows["perturbation"] == str(cell.attack)) & (rows["budget"] == cell.budget.text)][4]
    rows.loc[place, "prediction"] = (rows.loc[place, "prediction"] + 1) % 10
    index = export_images(with_rows(run, rows), plan(), tmp_path / "out", [cell])
    assert list(index.index[~index["as_in_run"]]) == [30 + 4]
