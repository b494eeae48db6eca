import numpy as np
import pandas as pd
import pytest

from robustkpca.datasets.images import ArraySamples
from robustkpca.errors import SpecError
from robustkpca.evaluation.loop import evaluate
from robustkpca.gate.check import HOLDS, INVALID, REGRESSED, Tolerances, check
from robustkpca.runs.request import Request
from robustkpca.runs.run import Run
from robustkpca.suites.suite import load_suite
from tests.helpers.oracles import SIDE, tiny
from tests.helpers.runs import records_of, with_rows

SUITES = [load_suite("fgsm").with_eps(["1/255", "8/255"])]


@pytest.fixture(scope="module")
def samples():
    pixels = np.random.default_rng(0).integers(0, 256, (400, SIDE, SIDE), dtype=np.uint8)
    ids = [f"n{i:03d}" for i in range(400)]
    return ArraySamples("noise", ids, np.arange(400) % 10, tuple(f"c{i}" for i in range(10)), pixels)


@pytest.fixture
def baseline(samples, tmp_path):
    return evaluate([tiny()], samples, SUITES, tmp_path / "baseline")


def variant(run: Run, *, request=None, rows=None, failures=None, softmaxed=None) -> Run:
    """A copy of a run with another request, other rows, with failures of perturbations, or with outputs that are
    probabilities, as if another run had made it."""
    plain = run.request.plain
    for key, value in (request or {}).items():
        *parents, last = key.split(".")
        place = plain
        for parent in parents:
            place = place[int(parent) if parent.isdigit() else parent]
        place[last] = value
    health = {} if softmaxed is None else {"softmaxed": softmaxed}
    records = [
        record.model_copy(update={"health": {**(record.health or {}), **health}, "failures": failures or {}})
        for record in records_of(run)
    ]
    return Run.in_memory(Request.parse(plain, "request"), run.rows if rows is None else rows, records)


def with_correct(run: Run, share: float, cell=("fgsm", "1/255")) -> pd.DataFrame:
    """The rows of a run with exactly `share` of one cell right, and all right when clean."""
    rows = run.rows.copy()
    rows = outcomes(rows, rows["perturbation"] == "clean", np.ones(400, dtype=bool))
    here = (rows["perturbation"] == cell[0]) & (rows["budget"] == cell[1])
    return outcomes(rows, here, np.arange(here.sum()) < round(share * here.sum()))


def outcomes(rows: pd.DataFrame, here: pd.Series, correct: np.ndarray) -> pd.DataFrame:
    """`rows` with these outcomes at `here`, predictions and all."""
    labels = rows.loc[here, "label"]
    rows.loc[here, "correct"] = correct
    rows.loc[here, "prediction"] = np.where(correct, labels, (labels + 1) % 10)
    return rows


def test_the_same_run_holds(baseline, samples, tmp_path):
    again = evaluate([tiny()], samples, SUITES, tmp_path / "again", batch_size=64)
    verdict = check(again, baseline)
    assert (verdict.code, verdict.reasons) == (HOLDS, [])
    assert len(verdict.cells) == 3
    assert (verdict.cells["change"] == 0).all()


def test_a_real_drop_is_caught_and_named(baseline):
    before = variant(baseline, rows=with_correct(baseline, 0.60))
    after = variant(baseline, rows=with_correct(baseline, 0.55))
    verdict = check(after, before)
    assert verdict.code == REGRESSED
    assert verdict.reasons[0].startswith(f"{baseline.models[0]}, fgsm 1/255: 60.0 -> 55.0 % (-5.0 points")
    assert check(after, before, tolerance=6).code == HOLDS
    assert check(before, after).code == HOLDS


def test_a_drop_that_could_be_chance_holds(baseline):
    before = variant(baseline, rows=with_correct(baseline, 0.60))
    after = variant(baseline, rows=with_correct(baseline, 0.5925))  # 3 samples of 400
    assert check(after, before, tolerance=0).code == HOLDS


def test_a_sudden_gain_is_suspicious(baseline):
    before = variant(baseline, rows=with_correct(baseline, 0.1))
    after = variant(baseline, rows=with_correct(baseline, 0.7))
    verdict = check(after, before)
    assert verdict.code == INVALID
    assert verdict.doubts[0].startswith(
        f"suspiciously better: {baseline.models[0]}, fgsm 1/255: 10.0 -> 70.0 % (+60.0 points"
    )
    assert (verdict.text, verdict.lines[0][:20]) == ("not to be believed", "not to be believed: ")
    assert check(after, before, tolerances=Tolerances(gain=60)).code == HOLDS


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [("seed", 1, "other seed: 1 here, 0 in the baseline"), ("dtype", "bfloat16", "other precision"),
     ("data.content", "0", "other image data"), ("data.ids", "0", "other sample ids"),
     ("suites.0.threat.clip", False, "other threat model"), ("suites.0.version", 2, "other threat model")],
)  # fmt: skip
def test_unlike_requests_are_not_comparable(baseline, key, value, reason):
    kept = variant(baseline)
    other = variant(kept, request={key: value})
    verdict = check(other, kept)
    assert verdict.code == INVALID
    assert reason in verdict.reasons[0]
    assert check(kept, other).code == INVALID


def test_fewer_samples_missing_suite_and_missing_model(baseline, samples, tmp_path):
    few = evaluate([tiny()], samples.limit(5, 0), SUITES, tmp_path / "few")
    assert "other number of samples: 5 here, 400 in the baseline" in check(few, baseline).reasons
    other = evaluate([tiny()], samples, [load_suite("fgsm-paper")], tmp_path / "other")
    assert "suite fgsm was not run; run were fgsm-paper" in check(other, baseline).reasons
    two = evaluate([tiny(), tiny("vit")], samples, SUITES, tmp_path / "two")
    verdict = check(baseline, two)
    assert verdict.code == INVALID
    assert "was not run" in verdict.reasons[0]
    assert check(two, baseline).code == HOLDS


def test_one_model_each_may_have_other_names(baseline, samples, tmp_path):
    vit = evaluate([tiny("vit")], samples, SUITES, tmp_path / "vit")
    everywhere = pd.Series(True, vit.rows.index)
    same = with_rows(vit, outcomes(vit.rows.copy(), everywhere, baseline.rows["correct"].to_numpy()))
    verdict = check(same, baseline)
    assert verdict.code == HOLDS
    assert len(verdict.cells) == 3
    assert (verdict.cells["change"] == 0).all()
    assert "is compared with" in verdict.notes[0]
    better = with_rows(baseline, with_correct(baseline, 1.0))
    assert check(with_rows(vit, with_correct(vit, 0.0)), better).code == REGRESSED


def test_nothing_measured_is_never_green(baseline):
    empty = variant(baseline, rows=baseline.rows.iloc[:0])
    verdict = check(empty, baseline)
    assert verdict.code == INVALID
    assert "not run" in verdict.reasons[0]
    assert check(baseline, empty).code == INVALID
    partial = variant(baseline, rows=baseline.rows[baseline.rows["sample"] != "n007"])
    assert "incomplete 399/400" in check(partial, baseline).reasons[0]
    failed = variant(baseline, failures={"fgsm": "RuntimeError: no"})
    assert "failed: RuntimeError: no" in check(failed, baseline).reasons[0]


def test_broken_rows_are_never_green(baseline):
    rows = baseline.rows.copy()
    rows.loc[450, "flags"] = "non_finite"
    verdict = check(variant(baseline, rows=rows), baseline)
    assert (verdict.code, "not finite" in verdict.reasons[0]) == (INVALID, True)
    rows = baseline.rows.astype({"correct": object})
    rows.loc[450, "correct"] = None
    assert check(variant(baseline, rows=rows), baseline).code == INVALID
    rows = baseline.rows.copy()
    rows.loc[450, "label"] = 3 if rows.loc[450, "label"] != 3 else 4
    assert "other samples or labels" in check(variant(baseline, rows=rows), baseline).reasons[0]


@pytest.mark.parametrize(
    "options", [{"tolerance": float("nan")}, {"tolerance": -1}, {"alpha": 0}, {"alpha": float("nan")}]
)
def test_settings_that_would_disarm_the_check(baseline, options):
    with pytest.raises(SpecError, match=r"--tolerance|--alpha"):
        check(baseline, baseline, **options)


# -- how often it is wrong


def in_memory(run: Run, correct: dict[tuple[str, str], np.ndarray]) -> Run:
    """The run with other outcomes, without writing anything."""
    rows = run.rows.copy()
    for (attack, budget), values in correct.items():
        rows = outcomes(rows, (rows["perturbation"] == attack) & (rows["budget"] == budget), values)
    return with_rows(run, rows)


CELLS = [("clean", ""), ("fgsm", "1/255"), ("fgsm", "8/255")]


@pytest.fixture(scope="module")
def thousand(tmp_path_factory):
    """A run of 1,000 samples in three cells."""
    pixels = np.zeros((1000, SIDE, SIDE), dtype=np.uint8)
    ids = [f"n{i:04d}" for i in range(1000)]
    many = ArraySamples("many", ids, np.arange(1000) % 10, tuple(f"c{i}" for i in range(10)), pixels)
    return evaluate([tiny()], many, SUITES, tmp_path_factory.mktemp("thousand") / "run", batch_size=1000)


def chances(draws: np.random.Generator, mean: float) -> np.ndarray:
    """How likely each of 1,000 samples is right: most nearly always or nearly never, about 9 % of answers change from
    run to run."""
    return draws.beta(mean * 0.5, (1 - mean) * 0.5, 1000).clip(0.0, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("tolerance", [0.0, 1.0])
def test_false_alarms_are_rare(thousand, tolerance):
    """500 re-runs of one model, every outcome drawn anew: fewer than 5 % may fail."""
    draws = np.random.default_rng(0)
    alarms = 0
    for _ in range(500):
        likely = {cell: chances(draws, mean) for cell, mean in zip(CELLS, (0.87, 0.7, 0.4), strict=True)}
        before, now = ({c: draws.random(1000) < p for c, p in likely.items()} for _ in range(2))
        alarms += check(in_memory(thousand, now), in_memory(thousand, before), tolerance=tolerance).code != HOLDS
    assert alarms < 25, alarms


@pytest.mark.slow
def test_a_drop_of_five_points_is_caught(thousand):
    """A twentieth of all samples, right before, is wrong now, on top of the same noise: caught in more than 95 %."""
    draws = np.random.default_rng(1)
    caught = 0
    for _ in range(200):
        likely = {cell: chances(draws, mean) for cell, mean in zip(CELLS, (0.87, 0.7, 0.4), strict=True)}
        before, now = ({c: draws.random(1000) < p for c, p in likely.items()} for _ in range(2))
        worse = np.flatnonzero(now[CELLS[1]])
        now[CELLS[1]][draws.choice(worse, 50, replace=False)] = False
        caught += check(in_memory(thousand, now), in_memory(thousand, before)).code == REGRESSED
    assert caught > 190, caught


# -- limits of single cells


def test_a_cell_may_have_a_tolerance_of_its_own(baseline, tmp_path):
    before = variant(baseline, rows=with_correct(baseline, 0.60))
    after = variant(baseline, rows=with_correct(baseline, 0.55))
    file = tmp_path / "limits.toml"
    file.write_text(
        'tolerance = 1\n[[cell]]\nattack = "fgsm"\nbudget = "1/*"\ntolerance = 6\n'
        '[[cell]]\nmodel = "Sym*"\nbudget = "8/255"\ntolerance = 0\n'
    )
    limits = Tolerances.load(file)
    verdict = check(after, before, tolerances=limits)
    assert verdict.code == HOLDS
    assert verdict.cells["tolerance"].tolist() == [1, 6, 0]
    limits = Tolerances.parse(
        {"cell": [{"attack": "fgsm", "tolerance": 6}, {"budget": "0.00392157", "tolerance": 2}]}, "t"
    )
    assert check(after, before, tolerances=limits).code == REGRESSED  # the last that matches decides


@pytest.mark.parametrize(
    ("text", "message"),
    [("tolerance = nan", "tolerance"), ("tolerance = -1", "tolerance"), ("tolerence = 1", "tolerence"),
     ("[[cell]]\ntolerance = inf", "cell"), ("[[cell]]\natack = 'x'", "atack"), ("tolerance = true", "tolerance"),
     ("[[cell]]\nattack = 'x'", "expected tolerance or gain"), ("[cell]\ntolerance = 1", "double brackets"),
     ("tolerance = 'a lot'", "tolerance"), ("tolerance =", "not TOML")],
)  # fmt: skip
def test_limits_that_make_no_sense(tmp_path, text, message):
    (tmp_path / "t.toml").write_text(text)
    with pytest.raises(SpecError, match=message):
        Tolerances.load(tmp_path / "t.toml")


def test_a_limit_that_matches_nothing_disarms_nothing(baseline):
    limits = Tolerances.parse({"cell": [{"attack": "pgdd", "tolerance": 50}]}, "t")
    verdict = check(baseline, baseline, tolerances=limits)
    assert (verdict.code, verdict.reasons) == (
        INVALID,
        ["tolerances: no cell matches model '*', attack 'pgdd', budget '*'"],
    )


def test_a_run_with_a_finding_of_level_fail_is_not_green(baseline):
    verdict = check(variant(baseline, softmaxed=True), baseline)
    assert verdict.code == INVALID
    assert verdict.doubts[0].startswith(f"logits, {baseline.models[0]}: the outputs are probabilities")


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [("prediction", 99, "no class of the model"), ("confidence", np.nan, "1 rows without a confidence"),
     ("correct", None, "rows without a value"), ("label", 3, "not what label and prediction say")],
)  # fmt: skip
def test_rows_that_contradict_themselves_are_never_green(baseline, column, value, reason):
    rows = outcomes(baseline.rows.copy(), pd.Series(True, baseline.rows.index), np.ones(len(baseline.rows), dtype=bool))
    fine = with_rows(baseline, rows)
    assert check(fine, fine).code == HOLDS
    spoilt = rows.copy().astype({"correct": object} if column == "correct" else {})
    spoilt.loc[405, column] = value
    broken = with_rows(baseline, spoilt)
    verdict = check(broken, fine)
    assert verdict.code == INVALID
    assert any(reason in r for r in verdict.reasons), verdict.reasons
