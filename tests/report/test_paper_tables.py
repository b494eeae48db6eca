import re

import numpy as np
import pandas as pd
import pytest

from robustkpca.errors import SpecError
from robustkpca.evaluation.loop import evaluate
from robustkpca.models.settings import RPCSettings
from robustkpca.report import paper_tables
from robustkpca.report.formats import render
from robustkpca.report.paper_tables import LAYOUTS, Column, Entry, Table
from robustkpca.runs.request import Request
from robustkpca.runs.run import Run
from robustkpca.suites.suite import load_suite
from robustkpca.tasks.classification.accuracy import ACCURACY
from tests.gate.test_check import variant
from tests.helpers.oracles import tiny

MODELS = ("symvit", "rpc")


@pytest.fixture
def run(noise_samples, tmp_path):
    models = [tiny(), tiny("rpc-symvit", RPCSettings(iterations=2, lam=1.0))]
    suites = [load_suite("fgsm"), load_suite("fgsm-paper")]
    return evaluate(models, noise_samples, suites, tmp_path / "run")


@pytest.fixture
def papers(run, monkeypatch) -> Run:
    """The run as if it had been made on the paper's data, all of it, with the paper's models;
    figures are what they are."""
    monkeypatch.setitem(paper_tables.PUBLISHED, "imagenet", ("imagenet-1k", run.n))
    return on_the_papers_data(run)


def on_the_papers_data(run: Run) -> Run:
    names = dict(zip(run.models, ["SymViT-tiny", "RPC-SymViT-tiny (4iter/layer1)"], strict=True))
    request = run.request.plain
    for model in request["models"]:
        model["label"] = names[model["label"]]
        model["settings"] |= {"width": 192, "depth": 12, "heads": 3}
        if model["settings"]["rpc"]:
            model["settings"]["rpc"] |= {"iterations": 4, "lambda": 4.0}
    request["data"]["name"] = "imagenet"
    rows = run.rows.assign(model=run.rows["model"].map(names))
    return Run.in_memory(Request.parse(request, "request"), rows)


def test_attacks_are_the_highest_budget_recomputed(run):
    table = paper_tables.attacks([run])
    values = table.values()
    assert list(values.columns) == [
        "fgsm 8/255 top-1 ↑", "fgsm 8/255 top-5 ↑", "fgsm-paper 6/255 top-1 ↑", "fgsm-paper 6/255 top-5 ↑",
    ]  # fmt: skip
    part = run.rows[(run.rows["perturbation"] == "fgsm") & (run.rows["budget"] == "8/255")]
    means = part.groupby("model", sort=False)[["correct", "correct_top5"]].agg(lambda s: 100 * s.astype(float).mean())
    np.testing.assert_allclose(values.iloc[:, :2].to_numpy(), means.to_numpy())


def test_budgets_have_clean_first_and_once(run):
    assert list(paper_tables.budgets([run]).values().columns)[:3] == ["clean ↑", "fgsm 2/255 ↑", "fgsm 4/255 ↑"]


def test_the_papers_figures_stand_beside_the_same_protocol_data_and_model_only(run, papers, monkeypatch):
    cells = paper_tables.attacks([papers]).texts(reference=True)
    row = cells.loc["RPC-SymViT-tiny (4iter/layer1)"]
    assert row["fgsm-paper 6/255 top-1 ↑ paper"] == "26.62"
    measured = float(row["fgsm-paper 6/255 top-1 ↑"])
    assert row["fgsm-paper 6/255 top-1 ↑ difference"] == f"{measured - 26.62:+.2f}"
    assert "fgsm 8/255 top-1 ↑ paper" not in cells  # another protocol
    cells = paper_tables.robustness([papers]).texts(reference=True)
    assert cells["imagenet top-1 ↑ paper"].tolist() == ["70.44", "70.94"]
    other = paper_tables.attacks([run]).texts(reference=True)
    assert not [c for c in other.columns if c.endswith("paper")]  # other data and models
    monkeypatch.undo()  # the whole of ImageNet's val again: the run has fewer
    assert not paper_tables.robustness([papers]).published()


@pytest.mark.parametrize(
    "change",
    [{"models.1.overrides": ["lambda 4 (file: 1)"]}, {"models.1.settings.rpc.lambda": 1.0},
     {"models.1.notes": ["trained as 4iter/layer1, lambda 1"]}],
)  # fmt: skip
def test_a_model_that_is_not_as_its_file_or_the_paper_says_has_no_published_figure(papers, change):
    other = variant(papers, request=change)
    cells = paper_tables.robustness([other]).texts(reference=True)
    assert cells["imagenet top-1 ↑ paper"].tolist() == ["70.44", ""]
    named = variant(papers, request={"models.1.given_name": "ours"})
    assert paper_tables.robustness([named]).texts(reference=True)["imagenet top-1 ↑ paper"].tolist() == [
        "70.44",
        "70.94",
    ]


def test_the_published_sets_are_whole():
    assert paper_tables.PUBLISHED["imagenet"] == ("imagenet-1k", 50_000)
    assert paper_tables.PUBLISHED["imagenet-c"][1] == 75 * 50_000


@pytest.mark.parametrize(
    "change",
    [{"suites.1.threat.eps": ["1/255", "2/255", "3/255", "4/255", "5/255"]}, {"suites.1.threat.labels": "true"},
     {"suites.1.protocol": "standard"}, {"suites.1.name": "fgsm-paper-2"}],
)  # fmt: skip
def test_other_parameters_have_no_published_figure(papers, change):
    rows = papers.rows
    if "suites.1.name" in change:
        rows = rows.assign(perturbation=rows["perturbation"].replace("fgsm-paper", "fgsm-paper-2"))
    if "suites.1.threat.eps" in change:
        rows = rows.query("budget != '6/255'")
    other = variant(papers, request=change, rows=rows)
    cells = paper_tables.attacks([other]).texts(reference=True)
    assert not [c for c in cells.columns if c.endswith("paper")]


def column(head="a", higher=True, basis="x"):
    return Column(head, higher, basis)


def right(count):
    """Rows of 100 samples, of which the first so many are right."""
    return pd.DataFrame({"correct": np.arange(100) < count}, index=[f"s{i}" for i in range(100)])


def toy():
    table = Table("A | title")
    figures = {"base": (50.0, 20.0), "better": (60.0, 10.0), "worse": (40.0, 30.0)}
    for model, (up, down) in figures.items():
        table.add(model, column("up"), Entry(up, rows=right(up), score=ACCURACY))
        table.add(model, column("down", False), Entry(down))
    table.add("vit|x", column("up"), Entry(None, "failed: no | bar"))
    return table


def test_the_best_is_bold_in_the_right_direction():
    cells = toy().texts(bold="<{}>")
    assert cells["up ↑"].tolist() == ["50.00", "<60.00>", "40.00", "failed: no | bar"]
    assert cells["down ↓"].tolist() == ["20.00", "<10.00>", "30.00", "not run"]


def test_intervals_and_significance():
    cells = toy().texts(intervals=True, significance=True)
    assert cells.loc["base", "up ↑"] == "50.00 (40.4–59.6)"
    assert cells.loc["better", "up ↑"].endswith(" *")  # 10 of 100 gained, none lost: p = 0.002
    near = Table("t")
    for model, up in (("base", 50), ("near", 53)):
        near.add(model, column(), Entry(float(up), rows=right(up), score=ACCURACY))
    assert not near.significance()


def test_columns_of_one_name_and_two_bases_are_kept_apart(run, noise_samples, tmp_path):
    other = evaluate([tiny("vit")], noise_samples, [load_suite("fgsm")], tmp_path / "other", seed=1)
    table = paper_tables.attacks([run, other])
    heads = list(table.values().columns)
    assert [h for h in heads if h.startswith("fgsm 8/255 top-1")] == [f"fgsm 8/255 top-1, seed {i} ↑" for i in (0, 1)]
    assert all(", seed " in head for head in heads)
    newer = variant(other, request={"seed": 0, "software": {"torch": "3.0"}})
    table = paper_tables.attacks([run, newer])
    assert {"fgsm 8/255 top-1 ↑ [1]", "fgsm 8/255 top-1 ↑ [2]"} <= set(table.values().columns)
    assert any("is not the column [1] of that name: software.robustkpca" in note for note in table.notes)
    same = evaluate([tiny("vit")], noise_samples, [load_suite("fgsm")], tmp_path / "same")
    assert "fgsm 8/255 top-1 ↑" in paper_tables.attacks([run, same]).values().columns
    with pytest.raises(SpecError, match="two runs hold"):
        paper_tables.attacks([run, run])


def test_every_format_keeps_the_shape():
    table = toy()
    lines = [line for line in render(table, "markdown").splitlines() if line.startswith("|")]
    assert len(lines) == 6
    assert {line.replace("\\|", "").count("|") for line in lines} == {4}
    assert "**60.00**" in lines[3]
    latex = render(table, "latex")
    assert r"\textbf{60.00}" in latex
    assert r"up $\uparrow$ & down $\downarrow$ \\" in latex
    assert latex.index(r"\toprule") < latex.index(r"\midrule") < latex.index(r"\bottomrule")
    rows = [line for line in latex.splitlines() if line.endswith(r"\\")]
    assert {len(re.findall(r"(?<!\\)&", row)) for row in rows} == {2}
    page = render(table, "html")
    assert page.count("<tr>") == 5
    assert "<b>60.00</b>" in page
    assert "failed: no | bar" in page
    frame = pd.read_csv(__import__("io").StringIO(render(table, "csv")), index_col=0)
    assert frame.shape == (4, 2)
    with pytest.raises(SpecError, match="Did you mean 'latex'"):
        render(table, "latx")


def test_latex_has_groups_a_caption_and_a_label():
    table = Table("Two attacks")
    for head, group in (("clean", ""), ("a_b 2/255", "a_b"), ("a_b 8/255", "a_b"), ("c 8/255", "c")):
        for k, model in enumerate(("one", "two")):
            table.add(model, Column(head, True, "basis", group=group), Entry(50.0 + k * (head != "clean")))
    lines = [line for line in render(table, "latex", "A & B", "tab:a-b").splitlines() if not line.startswith("%")]
    assert lines[2:9] == [
        r"\caption{A \& B}", r"\label{tab:a-b}", r"\begin{tabular}{lrrrr}", r"\toprule",
        r" &  & \multicolumn{2}{c}{a\_b} &  \\", r"\cmidrule(lr){3-4}",
        r"model & clean $\uparrow$ & 2/255 $\uparrow$ & 8/255 $\uparrow$ & c 8/255 $\uparrow$ \\",
    ]  # fmt: skip
    assert lines[10] == r"one & 50.00 & 50.00 & 50.00 & 50.00 \\"
    # 50.00 is the best of both under clean: none is bold there.
    assert lines[11] == r"two & 50.00 & \textbf{51.00} & \textbf{51.00} & \textbf{51.00} \\"
    assert "tab:robustkpca" in render(table, "latex")


def test_equal_as_printed_is_a_tie():
    table = Table("t")
    for model, value in (("one", 50.004), ("two", 50.001), ("three", 49.0)):
        table.add(model, column("x"), Entry(value))
    for form in ("markdown", "latex", "html"):
        assert not re.search(r"\*\*50|textbf|<b>", render(table, form))


def test_html_and_latex_escape():
    table = Table("<b>&_%")
    table.add("a&b_c%<i>", column("x<y"), Entry(1.0))
    assert "a&amp;b_c%&lt;i&gt;" in render(table, "html")
    assert r"a\&b\_c\%\textless{}i\textgreater{}" in render(table, "latex")


def test_a_layout_without_figures_says_so(run):
    with pytest.raises(SpecError, match="none of the runs"):
        paper_tables.corruptions([run])
    assert set(LAYOUTS) == {"robustness", "attacks", "budgets", "corruptions", "runtime"}


def test_runtime_counts_parameters_and_time(run):
    values = paper_tables.runtime([run]).values()
    assert values["parameters (million) ↓"].tolist() == [sum(p.numel() for p in tiny().network.parameters()) / 1e6] * 2
    attacks = ["fgsm ms/image, mean of 3 budgets ↓", "fgsm-paper ms/image, mean of 6 budgets ↓"]
    assert (values[["clean ms/image ↓", *attacks]] > 0).all(axis=None)
    seconds, images = run.summary.times[run.models[0], "fgsm"]
    assert images == 30 * 3
    assert values.loc[run.models[0], attacks[0]] == pytest.approx(1000 * seconds / images)


@pytest.mark.parametrize("order", [["8/255", "2/255"], ["2/255", "8/255"]])
def test_the_highest_perturbation_is_the_highest_in_any_order(noise_samples, tmp_path, order):
    """`--eps 8/255 --eps 2/255` keeps its order in rows, and 8/255 is the highest all the same."""
    run = evaluate([tiny()], noise_samples, [load_suite("fgsm").with_eps(order)], tmp_path / "run")
    assert [str(budget) for budget in run.suites[0].budgets] == order
    table = paper_tables.attacks([run])
    assert table.title == "Accuracy under attack, highest perturbation (%)"
    values = table.values()
    assert list(values.columns) == ["fgsm 8/255 top-1 ↑", "fgsm 8/255 top-5 ↑"]
    part = run.rows[run.rows["budget"] == "8/255"]
    assert values.iloc[0, 0] == pytest.approx(100 * part["correct"].astype(float).mean())


@pytest.mark.parametrize("order", [["6/255", "2/255"], ["2/255", "6/255"]])
def test_the_papers_figures_stand_beside_the_highest_perturbation_in_any_order(
    noise_samples, tmp_path, monkeypatch, order
):
    models = [tiny(), tiny("rpc-symvit", RPCSettings(iterations=2, lam=1.0))]
    run = evaluate(models, noise_samples, [load_suite("fgsm-paper").with_eps(order)], tmp_path / "run")
    monkeypatch.setitem(paper_tables.PUBLISHED, "imagenet", ("imagenet-1k", run.n))
    cells = paper_tables.attacks([on_the_papers_data(run)]).texts(reference=True)
    assert cells.loc["RPC-SymViT-tiny (4iter/layer1)", "fgsm-paper 6/255 top-1 ↑ paper"] == "26.62"
