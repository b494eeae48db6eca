import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torchattacks.attack import Attack

from robustkpca import page
from robustkpca.evaluation.loop import evaluate
from robustkpca.models.origin import Origin
from robustkpca.report import run_tables
from robustkpca.results import accuracy, comparison, trainings
from robustkpca.runs.run import Run
from robustkpca.statistics.proportions import wilson
from robustkpca.suites.cell import CLEAN
from robustkpca.suites.suite import Suite, load_suite
from tests.helpers.attacks import register, suite_of
from tests.helpers.oracles import classifier_of, linear_accuracy, noise, tiny


@pytest.fixture
def run(noise_samples, tmp_path):
    suites = [load_suite("pgd").with_eps(["1/255", "8/255"]).with_steps(2), load_suite("fgsm").with_eps(["8/255"])]
    return evaluate([tiny(), tiny("vit")], noise_samples, suites, tmp_path / "run")


def stored(row):
    """Attack and budget as rows have them."""
    return row.attack, "" if row.attack == CLEAN else row.budget


def test_accuracy_is_recomputed_from_rows(run):
    long = accuracy.accuracy_table(run)
    assert len(long) == 2 * 4
    for row in long.itertuples():
        part = run.rows[(run.rows[["model", "perturbation", "budget"]] == [row.model, *stored(row)]).all(axis=1)]
        assert (row.n, row.correct) == (30, part["correct"].sum())
        assert row.accuracy == pytest.approx(part["correct"].mean())
        assert (row.low, row.high) == pytest.approx(wilson(int(row.correct), 30))


def test_success_rate_is_over_those_that_were_right(linear, linear_samples, tmp_path):
    run = evaluate([linear], linear_samples, [load_suite("fgsm").with_eps(["2/255", "4/255"])], tmp_path / "run")
    long = accuracy.accuracy_table(run).set_index(["attack", "budget"])
    assert long.loc[(CLEAN, CLEAN), "accuracy"] == 10 / 12
    assert long.loc[("fgsm", "4/255"), "accuracy"] == linear_accuracy(4) == 5 / 12
    assert long.loc[("fgsm", "4/255"), "success_rate"] == 0.5
    assert pd.isna(long.loc[(CLEAN, CLEAN), "success_rate"])


class TwoPixels(nn.Module):
    """Class 0 while both of the first two pixels are bright: each can be attacked alone."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(50.0))

    def forward(self, x):
        s = self.scale * (x[:, 0, 0, :2].amin(1) - 0.5)
        return torch.stack([s, -s], 1)


def test_the_worst_case_is_per_sample(noise_samples, tmp_path, monkeypatch):
    """Two attacks that break different halves: 50 % each, 0 % together."""

    samples = noise_samples.take(np.arange(10))
    samples.pixels = np.full_like(samples.pixels, 255)
    samples.labels, samples.classes = np.zeros(10, dtype=np.int64), ("0", "1")
    samples.pixels[::2, -1, -1] = 0  # the mark of one half

    class Half(Attack):
        def __init__(self, model, eps=8 / 255, marked=True):
            super().__init__("Half", model)
            self.marked = marked

        def forward(self, images, labels):
            hit = (images[:, :, -1:, -1:] < 0.5) == self.marked
            return torch.where(hit, 0.0, images)

    register(monkeypatch, Half=Half)
    attacks = [{"name": n, "method": "Half", "parameters": {"marked": m}} for n, m in (("one", True), ("other", False))]
    suite = suite_of(attacks, name="two", eps=["1"])
    run = evaluate([classifier_of(TwoPixels(), 2)], samples, [suite], tmp_path / "run", batch_size=4)
    found = {r.attack: r.accuracy for r in accuracy.accuracy_table(run).itertuples()}
    assert found == {CLEAN: 1.0, "two/one": 0.5, "two/other": 0.5, "two/worst case": 0.0}
    assert list(run_tables.views(run)[0].cells.index) == ["clean", "one eps 1", "other eps 1", "worst case eps 1"]


def test_what_was_not_run_is_never_zero(run):
    model = run.models[1]
    for path in (run.path / "rows" / "1" / "pgd").glob("*.parquet"):
        path.unlink()
    run = type(run).open(run.path)
    long = accuracy.accuracy_table(run)
    cell = long[(long["model"] == model) & (long["attack"] == "pgd")]
    assert list(cell["status"]) == ["not run", "not run"]
    assert cell[["n", "correct", "accuracy", "low", "high"]].isna().all(axis=None)
    assert list(run_tables.views(run)[0].cells.loc[model])[1:] == ["not run", "not run"]
    assert "not available" in run_tables.views(run)[-1].cells.loc["pgd eps 8/255"].tolist()
    assert set(comparison.compare(run)["attack"]) == {CLEAN, "fgsm"}


def test_comparison_is_paired_and_adjusted(run):
    frame = comparison.compare(run)
    a, b = run.models
    wide = run.rows.pivot_table(
        index=["perturbation", "budget", "sample"], columns="model", values="correct", aggfunc="first"
    )
    for row in frame.itertuples():
        part = wide.loc[stored(row)]
        assert row.gained == (part[b].astype(bool) & ~part[a].astype(bool)).sum()
        assert row.difference == pytest.approx(part[b].astype(float).mean() - part[a].astype(float).mean())
    assert (frame["p_holm"] >= frame["p_value"]).all()
    assert comparison.compare(run, baseline=b)["difference"].tolist() == pytest.approx((-frame["difference"]).tolist())


def test_corruption_means_need_every_severity(noise_samples, tmp_path):
    data = {"name": "some", "version": 1, "title": "t", "corruptions": ["fog", "contrast"], "severities": [1, 3, 5]}
    run = evaluate([tiny()], noise_samples, [Suite.parse(data, "suite")], tmp_path / "run")
    long = accuracy.accuracy_table(run).set_index(["attack", "budget"])["accuracy"]
    cells = run_tables.views(run)[0].cells[run.models[0]]
    mean = long["some/fog"].mean()
    assert cells["fog"] == f"{100 * mean:.1f}"
    assert cells["mean"] == f"{100 * (mean + long['some/contrast'].mean()) / 2:.1f}"
    lost = (run.rows["perturbation"] == "some/fog") & (run.rows["budget"] == "3")
    cells = run_tables.views(Run.in_memory(run.request, run.rows[~lost]))[0].cells[run.models[0]]
    assert cells["fog"] == "not run (1 of 3 severities)"
    assert cells["mean"] == "not available"


def test_markdown_keeps_its_columns():
    cells = pd.DataFrame(
        {"a|b": ["x*y_z", "1\n2"], "<c>": ["`q`", "[l](u)"]}, index=pd.Index(["vit|rpc", "n"], name="m")
    )
    lines = page.markdown(cells).split("\n")
    assert len(lines) == 4
    for line in lines:
        bare = line.replace("\\\\", "").replace("\\|", "")
        assert bare.count("|") == 4
    assert "x\\*y\\_z" in lines[2]
    assert "1 2" in lines[3]


def test_markdown_renders_to_the_same_cells():
    mistune = pytest.importorskip("markdown_it")
    cells = pd.DataFrame({"head": ["a|b*c_d<e>`f`[g](h)\\i~j~#k{l}"]}, index=pd.Index(["vit|rpc"], name="model"))
    html = mistune.MarkdownIt("gfm-like", {"linkify": False}).render(page.markdown(cells))
    import html as escaping
    import re

    found = [escaping.unescape(text) for text in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", html)]
    assert found == ["model", "head", "vit|rpc", "a|b*c_d<e>`f`[g](h)\\i~j~#k{l}"]


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """Two models of two trainings each, with attacks whose worst case counts and a mean over corruptions."""
    models = [tiny(family, seed=i) for family in ("symvit", "vit") for i in range(2)]
    for i, model in enumerate(models):
        model.source, model.origin = f"runs/NA/{i}.pth", Origin(recipe="of the test", seed=i)
    few = load_suite("corruptions").model_dump()
    few["threat"] |= {"names": ["brightness"], "severities": [1, 5]}
    attacks = [{"name": "one", "method": "FGSM"}, {"name": "other", "method": "UniformNoise"}]
    suites = [suite_of(attacks, "two"), load_suite("fgsm").with_eps(["0", "8/255"]), Suite.parse(few, "suite")]
    return evaluate(models, noise(), suites, tmp_path_factory.mktemp("several") / "run")


@pytest.mark.parametrize(
    "made",
    [accuracy.accuracy_table, accuracy.worst_case, comparison.compare, trainings.over_seeds, trainings.compare_seeds],
)
def test_tables_come_back_whole_from_csv(several, made, tmp_path):
    """With pandas' defaults, and grouped by every column of words."""
    table = made(several)
    table.to_csv(tmp_path / "table.csv", index=False)
    again = pd.read_csv(tmp_path / "table.csv")
    words = [c for c in table.columns if c not in again.select_dtypes("number").columns and again[c].dtype != bool]
    assert {"model", "suite", "budget"} <= set(words)
    assert again[words].to_numpy().tolist() == table[words].to_numpy().tolist()
    assert again.groupby(words).size().sum() == len(table)
    if "attack" in words:
        assert set(again[again["attack"] == CLEAN]["budget"]) == {CLEAN}
        assert set(again[again["attack"] == "fgsm"]["budget"]) == {"0", "8/255"}
