"""Several trainings of a model: who belongs together, means, comparisons, and what a report shows of them."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats as scipy_stats

from robustkpca.evaluation.loop import evaluate
from robustkpca.models import checkpoints
from robustkpca.models.checkpoints import load_classifier
from robustkpca.models.classifier import Classifier
from robustkpca.models.origin import Origin
from robustkpca.models.settings import RPCSettings
from robustkpca.report import marks, plots, report, run_tables, summary
from robustkpca.results import accuracy, trainings
from robustkpca.statistics import proportions, training_runs
from robustkpca.suites.cell import CLEAN, CLEAN_CELL
from robustkpca.suites.suite import Suite, load_suite
from tests.helpers.oracles import noise, tiny, tiny_settings
from tests.helpers.runs import with_rows


def trained(family="symvit", number=3, rpc=None):
    """Checkpoints of one model, each with the mean of its own training images."""
    found = []
    for i in range(number):
        model = tiny(family, rpc, seed=i)
        pre = model.settings.preprocessing.model_copy(update={"mean": (0.3 + 0.001 * i,)})
        model = Classifier(model.network, model.settings.model_copy(update={"preprocessing": pre}))
        model.source = f"{family}-{i}.pth"
        model.origin = Origin(recipe="made here", seed=i)
        found.append(model)
    return found


def training(seed, **recipe):
    """What `robustkpca train` records in a file."""
    data = {"name": "digits", "hash": f"of seed {seed}"}
    return {"recipe": {"epochs": 1, **recipe}, "seed": seed, "n": 5, "holdout": 0, "start": None, "data": data}


def two_attacks() -> Suite:
    data = load_suite("fgsm").with_eps(["8/255"]).model_dump() | {"name": "two"}
    data["attack"] = [{"name": "one", "method": "FGSM"}, {"name": "other", "method": "UniformNoise"}]
    return Suite.parse(data, "suite")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two models of three trainings each, under two attacks and two corruptions."""
    few = load_suite("corruptions").model_dump()
    few["threat"] |= {"names": ["brightness", "contrast"], "severities": [1, 5]}
    suites = [load_suite("fgsm").with_eps(["2/255", "8/255"]), two_attacks(), Suite.parse(few, "suite")]
    return evaluate([*trained(), *trained("vit")], noise(), suites, tmp_path_factory.mktemp("seeds") / "run")


def test_the_layers_of_trainings_may_be_written_in_two_ways(noise_samples, tmp_path):
    models = [*trained("rpc-symvit", 1, RPCSettings(iterations=1, lam=1.0, layers="first"))]
    models += trained("rpc-symvit", 2, RPCSettings(iterations=1, lam=1.0, layers=(1,)))[1:]
    run = evaluate(models, noise_samples.take(np.arange(5)), [], tmp_path / "run")
    assert trainings.groups(run) == {"RPC-SymViT-w16d2h2 (1iter/layer1)": list(run.models)}
    assert len(run.models) == 2


def test_one_training_more_does_not_turn_means_off(noise_samples, tmp_path):
    run = evaluate([*trained(), tiny("vit")], noise_samples, [load_suite("fgsm").with_eps(["2/255"])], tmp_path / "run")
    assert list(trainings.groups(run)) == ["SymViT-w16d2h2", "ViT-w16d2h2"]
    assert trainings.has_training_runs(run)
    found = trainings.over_seeds(run)
    assert found[["seeds", "attack", "status", "n"]].to_numpy().tolist() == [
        [3, CLEAN, "complete", 30], [3, "fgsm", "complete", 30],
        [1, CLEAN, "complete", 30], [1, "fgsm", "complete", 30]]  # fmt: skip
    long = accuracy.accuracy_table(run)
    own = long[(long["attack"] == "fgsm") & long["model"].str.startswith("SymViT")]["accuracy"].to_numpy(float)
    row, alone = found.iloc[1], found.iloc[3]
    assert row["accuracy"] == pytest.approx(own.mean())
    assert row["low"] < own.mean() < row["high"]
    assert (row["least"], row["most"]) == (own.min(), own.max())
    assert (alone["low"], alone["high"]) == proportions.wilson(round(30 * alone["accuracy"]), 30)
    shown = run_tables.views(run)
    assert [view.title for view in shown][1:] == ["Paired comparison", "Single checkpoints"]
    assert list(shown[0].cells.index) == ["SymViT-w16d2h2", "ViT-w16d2h2"]
    assert "SymViT-w16d2h2: 3, ViT-w16d2h2: 1" in shown[0].notes[0]


def test_other_settings_and_the_same_weights_are_no_seeds(noise_samples, tmp_path):
    models = [
        tiny(),
        tiny(),
        tiny("rpc-symvit", RPCSettings(iterations=2, lam=1.0)),
        tiny("rpc-symvit", RPCSettings(iterations=3, lam=1.0)),
    ]
    run = evaluate(models, noise_samples, [], tmp_path / "run")
    assert not trainings.has_training_runs(run)
    assert trainings.compare_seeds(run).empty
    assert {len(labels) for labels in trainings.groups(run).values()} == {1}
    assert list(run_tables.views(run)[0].cells.index) == run.models
    assert [v.title for v in run_tables.views(run)][1:] == ["Paired comparison"]


def test_lambda_tells_groups_apart(noise_samples, tmp_path):
    pursued = [m for lam in (1.0, 4.0) for m in trained("rpc-symvit", 2, RPCSettings(iterations=2, lam=lam))]
    run = evaluate(pursued, noise_samples, [], tmp_path / "run")
    names = ["RPC-SymViT-w16d2h2 (2iter/layer1, lambda 1)", "RPC-SymViT-w16d2h2 (2iter/layer1, lambda 4)"]
    assert list(trainings.groups(run)) == names
    assert list(run_tables.views(run)[0].cells.index) == names
    assert run.models == [f"{name} [rpc-symvit-{i}]" for name in names for i in range(2)]


def test_other_iterations_than_in_training_are_kept_apart(noise_samples, tmp_path):
    """Two models trained with other iterations and run with the same are not trainings of one."""
    models = []
    for seed, n in enumerate((2, 2, 3, 3)):
        path = tmp_path / f"{seed}.safetensors"
        settings = tiny_settings("rpc-symvit", RPCSettings(iterations=n, lam=1.0))
        checkpoints.save(path, tiny(seed=seed).network.state_dict(), settings, training(seed))
        models.append(load_classifier(checkpoint=path, iterations=4))
    run = evaluate(models, noise_samples, [], tmp_path / "run")
    assert set(trainings.compare_seeds(run)["model"]) == {list(trainings.groups(run))[1]}
    name = "RPC-SymViT-w16d2h2 (4iter/layer1), iterations 4"
    assert list(trainings.groups(run)) == [f"{name} (file: 2)", f"{name} (file: 3)"]


def test_the_same_trainings_run_in_two_ways_are_paired(noise_samples, tmp_path):
    """Against themselves as they were trained, wherever that stands in the run."""
    models = []
    for n in (4, 2):
        for seed in range(3):
            path = tmp_path / f"{seed}.safetensors"
            settings = tiny_settings("rpc-symvit", RPCSettings(iterations=2, lam=4.0))
            checkpoints.save(path, tiny(seed=seed).network.state_dict(), settings, training(seed))
            models.append(load_classifier(checkpoint=path, iterations=n))
    run = evaluate([*models, *trained()], noise_samples, [], tmp_path / "run")
    found = trainings.compare_seeds(run)
    four, two, plain = trainings.groups(run)
    assert found[["model", "baseline"]].to_numpy().tolist() == [[four, two], [plain, two]]
    scores = [
        np.stack([run.cell_rows(label, CLEAN_CELL)["correct"].sort_index().to_numpy(float) for label in labels])
        for labels in (trainings.groups(run)[two], trainings.groups(run)[four])
    ]
    expected = training_runs.SeedDifference.of(*scores, paired=True)
    assert found.iloc[0][["difference", "low", "high"]].tolist() == pytest.approx(
        [expected.difference, expected.low, expected.high]
    )
    difference = scores[1] - scores[0]
    parts = [difference.mean(1).var(ddof=1) / 3, difference.mean(0).var(ddof=1) / 30]
    freedom = sum(parts) ** 2 / (parts[0] ** 2 / 2 + parts[1] ** 2 / 29)
    assert expected.p_value == pytest.approx(
        2 * scipy_stats.t.sf(abs(difference.mean()) / np.sqrt(sum(parts)), freedom)
    )
    assert run_tables.views(run)[1].cells.index.name == f"minus {two}"
    assert (four, two) == (
        "RPC-SymViT-w16d2h2 (4iter/layer1), iterations 4 (file: 2)",
        "RPC-SymViT-w16d2h2 (2iter/layer1)",
    )


def test_the_comparison_rests_on_all_trainings(run):
    found = trainings.compare_seeds(run)
    assert found["attack"].tolist() == [CLEAN, "fgsm", "fgsm", "two/worst case", "corruptions/mean"]
    long = accuracy.accuracy_table(run)
    for row in found.itertuples():
        if row.attack.startswith("corruptions"):
            own = long[long["suite"] == "corruptions"]
        else:
            own = long[(long["attack"] == row.attack) & (long["budget"] == row.budget)]
        means = own.groupby(own["model"].str.startswith("ViT"))["accuracy"].mean()
        assert row.difference == pytest.approx(means[True] - means[False])
        assert row.low < row.difference < row.high
    assert found["p_holm"].to_numpy() == pytest.approx(proportions.holm(found["p_value"]))


def test_the_difference_over_seeds_by_hand():
    first, second = np.random.default_rng(0).random((2, 4, 50))
    found = training_runs.SeedDifference.of(first, second[:3])
    parts = [first.mean(1).var(ddof=1) / 4, second[:3].mean(1).var(ddof=1) / 3,
             (second[:3].mean(0) - first.mean(0)).var(ddof=1) / 50]  # fmt: skip
    freedom = sum(parts) ** 2 / (parts[0] ** 2 / 3 + parts[1] ** 2 / 2 + parts[2] ** 2 / 49)
    middle = second[:3].mean() - first.mean()
    low, high = scipy_stats.t.interval(0.95, freedom, loc=middle, scale=np.sqrt(sum(parts)))
    assert (found.difference, found.low, found.high) == pytest.approx((middle, low, high))
    assert found.p_value == pytest.approx(2 * scipy_stats.t.sf(abs(middle) / np.sqrt(sum(parts)), freedom))
    alone = training_runs.over_seeds(first)
    parts = [first.mean(1).var(ddof=1) / 4, first.mean(0).var(ddof=1) / 50]
    freedom = sum(parts) ** 2 / (parts[0] ** 2 / 3 + parts[1] ** 2 / 49)
    interval = scipy_stats.t.interval(0.95, freedom, loc=first.mean(), scale=np.sqrt(sum(parts)))
    assert alone == pytest.approx((first.mean(), *interval))
    for wrong in (np.ones((1, 5)), np.ones(5)):
        with pytest.raises(ValueError, match="at least 2"):
            training_runs.SeedDifference.of(np.ones((2, 5)), wrong)
    with pytest.raises(ValueError, match="same samples"):
        training_runs.SeedDifference.of(np.ones((2, 5)), np.ones((2, 4)))


def test_where_nothing_varies_nothing_is_known_exactly():
    """Three trainings that agree on every sample count as one, and intervals stay within what can be."""
    right, wrong = np.ones((3, 20)), np.zeros((3, 20))
    assert training_runs.over_seeds(right) == (1.0, *proportions.wilson(20, 20))
    same, worse = training_runs.SeedDifference.of(right, right), training_runs.SeedDifference.of(right, wrong)
    assert (same.difference, same.low, same.high, same.p_value) == (0.0, *proportions.Paired(20, 0, 0).interval(), 1.0)
    assert (worse.difference, worse.p_value) == (-1.0, proportions.Paired(20, 0, 20).p_value)
    one = np.array([[1.0], [0.0], [1.0]])
    assert training_runs.over_seeds(one)[1:] == (0.0, 1.0)
    assert training_runs.SeedDifference.of(one, 1 - one).p_value == 1.0
    few = np.array([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    assert training_runs.over_seeds(few)[1:] == (0.0, 1.0)


@pytest.mark.parametrize(("seed_sd", "trainings"), [(0.0, 3), (0.3, 3), (1.0, 5)])
def test_the_interval_over_seeds_covers(seed_sd, trainings):
    """With trainings and images drawn, at least 94 % of intervals hold the true difference; p < 0.05 in at most 6 %.

    93 % of the other intervals hold the true accuracy. An image is right with a chance that depends on the image, and a
    training makes all images a little harder or easier.
    """
    draws = np.random.default_rng(0)
    # The true accuracy: a normal logit of mean 1 above 0.
    true = scipy_stats.norm.cdf(1.0 / np.sqrt(1.5**2 + seed_sd**2 + 0.7**2))
    inside = mean_inside = false = 0
    for _ in range(1000):
        image = draws.normal(1.0, 1.5, 300)
        scores = []
        for _model in range(2):
            logits = image + draws.normal(0, seed_sd, (trainings, 1)) + draws.normal(0, 0.7, (trainings, 300))
            scores.append((logits > 0).astype(float))
        found = training_runs.SeedDifference.of(*scores)
        inside += found.low <= 0 <= found.high
        low, high = training_runs.over_seeds(scores[0])[1:]
        mean_inside += low <= true <= high
        false += found.p_value < 0.05
    assert inside >= 940
    assert mean_inside >= 930
    assert false <= 60


@pytest.mark.slow
def test_a_report_of_seeds_shows_models_not_checkpoints(run, tmp_path):
    assert trainings.has_training_runs(run)
    found = {view.title: view for view in run_tables.views(run)}
    assert list(found)[-2:] == ["Comparison over seeds", "Single checkpoints"]
    assert "Paired comparison" not in found
    models = ["SymViT-w16d2h2", "ViT-w16d2h2"]
    attack, worst, corruption, broke = (
        list(found.values())[:4][0],
        list(found.values())[1],
        list(found.values())[3],
        list(found.values())[2],
    )
    assert list(attack.cells.index) == models
    assert list(worst.cells.columns) == list(corruption.cells.columns) == list(broke.cells.columns) == models
    assert "mean over trainings (3), with" in attack.notes[0]
    for view in (attack, worst, corruption):
        assert "SymViT-w16d2h2 is the mean of SymViT-w16d2h2 [symvit-0], SymViT-w16d2h2 [symvit-1]," in view.notes[0]
    broken = accuracy.breakers(run)
    total = broken[(broken["attack"] == "two/one") & broken["model"].str.startswith("SymViT")]["broken"].sum()
    assert broke.cells.loc["one eps 8/255", models[0]].startswith(f"{total} (")
    single = found["Single checkpoints"].cells
    assert list(single.index) == run.models
    long = accuracy.accuracy_table(run)
    mean = long[(long["suite"] == "corruptions") & (long["model"] == run.models[0])]["accuracy"].mean()
    assert single.loc[run.models[0], "corruptions/mean"] == f"{100 * mean:.1f}"
    text = "\n".join(summary.summary(run, []))
    assert "over trainings" in text
    assert list(found["Comparison over seeds"].cells.index) == ["ViT-w16d2h2"]
    assert "symvit-0" not in text
    files = report.write([run], tmp_path / "report.md")
    assert len(files) > 3


def test_the_map_of_corruptions_is_drawn(run):
    """One for each model, with its figures; what has no result stays blank."""
    long, suite = trainings.shown_table(run), run.suites[-1]
    name, styles = "SymViT-w16d2h2", marks.styles([run])
    full = plots.corruption_map(run, long, suite, name, styles)
    blank = plots.corruption_map(run, long.assign(value=pd.NA), suite, name, styles)
    assert len(full) > 1.1 * len(blank)


def test_one_image_is_shown_for_what_it_is(tmp_path):
    single = evaluate([*trained(), *trained("vit")], noise().take(np.arange(1)), [], tmp_path / "run")
    assert run_tables.views(single)[1].cells.iloc[0, 0].endswith("(-100.0 to +100.0; p = 1.000, not distinguishable)")


def test_one_training_without_a_figure_leaves_the_mean_without_one(run):
    rows = run.rows
    lost = (rows["model"] == run.models[1]) & (rows["perturbation"] == "fgsm") & (rows["budget"] == "8/255")
    torn = with_rows(run, rows[~lost])
    found = trainings.over_seeds(torn).set_index(["model", "attack", "budget"])
    cell = found.loc[("SymViT-w16d2h2", "fgsm", "8/255")]
    assert (cell["status"], pd.isna(cell["accuracy"])) == ("not run", True)
    assert trainings.compare_seeds(torn)["attack"].tolist() == [CLEAN, "fgsm", "two/worst case", "corruptions/mean"]
