"""What people read of a run: receipts, comparisons, seeds, who broke what."""

import numpy as np

from robustkpca.evaluation.loop import evaluate
from robustkpca.models.settings import Preprocessing
from robustkpca.report import provenance, run_tables
from robustkpca.report.summary import summary
from robustkpca.results import accuracy, comparison
from robustkpca.runs.request import ModelRecord
from robustkpca.suites.cell import CLEAN
from robustkpca.suites.suite import Suite, load_suite
from tests.helpers.oracles import SIDE, classifier_of, linear_accuracy, tiny


def test_the_comparison_says_how_sure_it_is(noise_samples, tmp_path):
    run = evaluate([tiny(), tiny("vit")], noise_samples, [load_suite("fgsm").with_eps(["2/255"])], tmp_path / "run")
    cell = run_tables.views(run)[-1].cells.iloc[0, 0]
    row = comparison.compare(run).iloc[0]
    assert f"{100 * row['low']:+.1f} to {100 * row['high']:+.1f}" in cell
    assert row["low"] <= row["difference"] <= row["high"]
    assert ("not distinguishable" in cell) == (row["p_holm"] >= 0.05)


def test_the_receipt_has_budgets_in_both_units(noise_samples, tmp_path):
    run = evaluate(
        [tiny()], noise_samples, [load_suite("fgsm"), load_suite("fgsm-paper").with_eps(["6/255"])], tmp_path / "run"
    )
    text = " ".join(provenance.receipt_lines(run))
    assert f"eps 8/255 (0.0314) in pixels is {8 / 255 / 0.35:.4f} normalised" in text
    assert f"eps 6/255 (0.0235) normalised is {6 / 255 * 0.35:.4f} in pixels" in text
    for fact in (run.models[0], run.request.models[0].weights, "seed 0", "float32", "cpu",
                 "attention fused, gradients by hand", run.request.data.ids, run.request.data.content,
                 "torchattacks 3.5.1", "it decides no figure"):  # fmt: skip
        assert fact in text, fact
    three = Preprocessing(img_size=SIDE, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    settings = run.request.models[0].vision.model_copy(update={"preprocessing": three})
    colour = ModelRecord(label="m", source="", weights="w", settings=settings)
    assert "is 0.1370 to 0.1401 normalised" in provenance.budgets_in_both_units(run, colour)
    cw = evaluate([tiny()], noise_samples.take(np.arange(4)), [load_suite("cw").with_steps(1)], tmp_path / "cw")
    assert "it decides the figures of CW" in " ".join(provenance.receipt_lines(cw))
    assert list(run_tables.views(cw)[0].cells.columns) == ["clean", "confidence 0"]
    assert any("Under cw at confidence 0" in line for line in summary(cw, []))


def two_attacks(eps=("2/255", "4/255")) -> Suite:
    data = load_suite("fgsm").model_dump() | {"name": "two"}
    data["attack"] = [{"name": "one", "method": "FGSM"}, {"name": "other", "method": "UniformNoise"}]
    data["threat"]["eps"] = list(eps)
    return Suite.parse(data, "suite")


def test_several_attacks_stand_in_rows_with_their_worst_case(linear, linear_samples, tmp_path):
    run = evaluate([linear], linear_samples, [two_attacks()], tmp_path / "run")
    cells = run_tables.views(run)[0].cells
    assert list(cells.index) == ["clean", "one eps 2/255", "other eps 2/255", "worst case eps 2/255",
                                 "one eps 4/255", "other eps 4/255", "worst case eps 4/255"]  # fmt: skip
    assert cells.loc["worst case eps 4/255", "oracle"] == cells.loc["one eps 4/255", "oracle"]
    assert cells.loc["one eps 4/255", "oracle"].startswith(f"{100 * linear_accuracy(4):.1f} ")
    broke = run_tables.views(run)[1].cells
    assert broke.loc["one eps 4/255", "oracle"] == "5 (5 by it alone)"
    assert broke.loc["other eps 4/255", "oracle"] == "0 (0 by it alone)"


def test_what_broke_each_sample(linear, linear_samples, tmp_path):
    run = evaluate([linear], linear_samples, [two_attacks(["4/255"])], tmp_path / "run")
    found = accuracy.worst_case(run).set_index("sample")["broken_by"]
    assert found.to_dict() == {
        **{f"s{i}": "two/one" for i in range(5)},
        **{f"s{i}": "nothing" for i in range(5, 10)},
        "s10": CLEAN,
        "s11": CLEAN,
    }


def test_success_rate_and_robust_accuracy_have_their_own_denominators(tmp_path, linear, linear_samples):
    """10 images, 8 right when clean, 2 still right after the attack: 20 % robust, 75 % success."""
    chosen = linear_samples.take(np.array([0, 1, 2, 3, 4, 5, 7, 8, 10, 11]))
    run = evaluate([linear], chosen, [load_suite("fgsm").with_eps(["7/255"])], tmp_path / "run")
    row = accuracy.accuracy_table(run).iloc[1]
    assert (row["accuracy"], row["success_rate"]) == (0.2, 0.75)
    assert accuracy.accuracy_table(run).iloc[0]["accuracy"] == 0.8


def test_identity_normalisation_needs_no_second_unit(linear, linear_samples, tmp_path):
    run = evaluate([classifier_of(linear.network, 2)], linear_samples, [load_suite("fgsm")], tmp_path / "run")
    assert "eps 8/255 (0.0314) in pixels is 0.0314 normalised" in " ".join(provenance.receipt_lines(run))
