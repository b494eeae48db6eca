"""Models whose truth is known, and what `diagnose` says of them."""

import numpy as np
import pytest
import torch
from torch import nn

from robustkpca.attacks import registry
from robustkpca.datasets.images import ArraySamples
from robustkpca.diagnosis.findings import ORDER, RULES, findings, rules_of
from robustkpca.diagnosis.rules import Rule
from robustkpca.errors import SpecError
from robustkpca.evaluation.loop import evaluate
from robustkpca.models.settings import Preprocessing
from robustkpca.runs.format1 import SEARCHES
from robustkpca.runs.run import Run
from robustkpca.suites.cell import Cell
from robustkpca.suites.suite import Suite, load_suite
from robustkpca.tasks.classification.health import health
from tests.helpers.oracles import GREY, SIDE, Linear, classifier_of, tiny
from tests.helpers.runs import records_of, with_rows

N = 60
SIGNS = torch.sign(Linear().w).detach().reshape(SIDE, SIDE).numpy()


def at_margins(margins) -> ArraySamples:
    """Grey images at these distances (in 1/255) from the linear oracle's boundary, alternating classes."""
    sides = np.where(np.arange(len(margins)) % 2, -1, 1)
    pixels = np.stack([128 + s * m * SIGNS for s, m in zip(sides, margins, strict=True)]).astype(np.uint8)
    labels = np.where(sides > 0, 0, 1).astype(np.int64)
    return ArraySamples("margins", [f"m{i:03d}" for i in range(len(labels))], labels, ("0", "1"), pixels)


def diagnosed(
    network, samples, path, preprocessing=GREY, classes=2, eps=("4/255", "8/255")
) -> tuple[Run, dict[str, str]]:
    suites = [load_suite("diagnose").with_eps(["0", *eps, "1"]), load_suite("diagnose-predicted")]
    small = []
    for suite in suites:  # fewer steps and queries, the same order of strength
        data = suite.model_dump()
        for attack in data["attack"]:
            fewer = {"steps": {50: 12}.get(attack["parameters"].get("steps"), 10), "restarts": 2, "n_queries": 150}
            attack["parameters"] |= {k: v for k, v in fewer.items() if k in attack["parameters"]}
        small.append(Suite.parse(data, "suite"))
    run = evaluate([classifier_of(network, classes, preprocessing)], samples, small, path)
    return run, {f.rule: f.level for f in findings(run)}


MIXED = [(1, 3, 6, 12, 20)[i % 5] for i in range(N)]


def test_a_the_linear_oracle_passes(tmp_path):
    run, levels = diagnosed(Linear(), at_margins(MIXED), tmp_path / "run")
    assert set(levels.values()) == {"pass"}, findings(run)
    assert set(levels) >= {"logits", "randomness", "gradients", "gradient-precision", "eps-zero", "eps-order",
                           "huge-budget", "more-effort", "one-step", "masked-gradient", "attacked-labels",
                           "rows"}  # fmt: skip


class Scaled(Linear):
    def forward(self, x):
        return 1e4 * super().forward(x)


def test_b_saturated_logits_have_no_gradient(tmp_path):
    run, levels = diagnosed(Scaled(), at_margins(MIXED), tmp_path / "run")
    assert levels["gradients"] == "fail"
    said = next(f for f in findings(run) if f.rule == "gradients")
    assert f"of {N} input gradients of the cross-entropy are zero" in said.message
    assert "margin loss" in said.advice
    # The margin loss does not saturate: PGD-10 on the cross-entropy stands still where BestPGD does not.
    assert levels["more-effort"] == "warn"


class DeadZone(Linear):
    """Class 0 unless the score passes a soft threshold: below it there is no gradient,
    and a small step would pass it."""

    def forward(self, x):
        u = (x.flatten(1) - 128 / 255) @ self.w
        passed = nn.functional.softshrink(u, lambd=float(0.02 * self.w.detach().abs().sum()))
        return torch.stack([torch.full_like(u, 1e-3), passed], 1)


def test_c_a_soft_threshold_that_masks_its_gradient(tmp_path):
    # 4/255 of the way below the threshold of 0.02 (5.1/255): within reach of eps = 8/255, without gradient.
    samples = at_margins([1] * N)
    samples.labels = np.zeros(N, dtype=np.int64)
    run, levels = diagnosed(DeadZone(), samples, tmp_path / "run")
    assert levels["gradients"] == "fail"
    assert levels["huge-budget"] == "fail"
    assert run.cell_rows("oracle", Cell.parse("diagnose/pgd", "8/255"))["correct"].all()  # the naive conclusion
    # And it is not robust: a step along w, which no gradient shows, breaks every image.
    classifier = classifier_of(DeadZone(), 2)
    images = torch.stack([samples.image(i, GREY) for i in range(N)])
    step = 8 / 255 * torch.from_numpy(SIGNS)
    assert (classifier((images + step).clamp(0, 1)).argmax(1) == 1).all()


class Noisy(Linear):
    def forward(self, x):
        s = super().forward(x)
        return s + 3 * torch.randn_like(s)


def test_d_a_randomised_model(tmp_path):
    run, levels = diagnosed(Noisy(), at_margins(MIXED), tmp_path / "run")
    assert levels["randomness"] == "fail"
    said = next(f for f in findings(run) if f.rule == "randomness")
    assert "no attack averages over them" in said.advice
    again, _ = diagnosed(Noisy(), at_margins(MIXED), tmp_path / "again")
    assert run.rows.equals(again.rows)  # random, yet repeatable
    averaged = load_suite("pgd-best").model_dump()
    averaged["attack"][0]["parameters"] |= {"steps": 2, "restarts": 1, "eot": 4}
    run = evaluate([classifier_of(Noisy(), 2)], at_margins(MIXED), [Suite.parse(averaged, "s")], tmp_path / "eot")
    assert {f.rule: f.level for f in findings(run)}["randomness"] == "warn"


class Bright(nn.Module):
    """Class 1 when the mean of the input is positive; `mean` and `std` are its own normalisation, if any."""

    def __init__(self, mean=0.0, std=1.0, scale=20.0):
        super().__init__()
        self.mean, self.std = mean, std
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, x):
        s = self.scale * ((x - self.mean) / self.std).flatten(1).mean(1)
        return torch.stack([-s, s], 1)


def bright_and_dark(dark: int, bright: int) -> ArraySamples:
    pixels = np.stack([np.full((SIDE, SIDE), bright if i % 2 else dark, dtype=np.uint8) for i in range(N)])
    return ArraySamples("brightness", [f"b{i:02d}" for i in range(N)], np.arange(N) % 2, ("0", "1"), pixels)


def test_e_normalised_twice(tmp_path):
    samples = bright_and_dark(51, 102)
    twice = Preprocessing(img_size=SIDE, mean=(0.3,), std=(0.35,), crop_pct=1.0)
    run, levels = diagnosed(Bright(0.3, 0.35), samples, tmp_path / "twice", twice)
    assert levels["normalisation"] == "fail"
    said = next(f for f in findings(run) if f.rule == "normalisation")
    assert "30 of 60 images are right, and 60 with another normalisation (none)" in said.message
    assert "once" in said.advice
    _, levels = diagnosed(Bright(), samples, tmp_path / "once", twice)
    assert levels["normalisation"] == "pass"


def test_f_robust_by_construction(tmp_path):
    run, levels = diagnosed(Bright(0.5), bright_and_dark(40, 215), tmp_path / "run")
    assert set(levels.values()) == {"pass"}, findings(run)
    assert run.cell_rows("oracle", Cell.parse("diagnose/square", "8/255"))["correct"].all()
    assert not run.cell_rows("oracle", Cell.parse("diagnose/pgd", "1"))["correct"].any()


def test_probabilities_instead_of_logits():
    classifier = classifier_of(nn.Sequential(nn.Flatten(), nn.Linear(784, 3), nn.Softmax(1)), 3)
    found = health(classifier, torch.rand(8, 1, SIDE, SIDE), torch.arange(8) % 3)
    assert found["softmaxed"]
    assert not health(tiny(), torch.rand(8, 1, SIDE, SIDE), torch.arange(8))["softmaxed"]


def test_gradient_precision_against_float64():
    found = health(tiny(), torch.rand(8, 1, SIDE, SIDE), torch.arange(8))
    assert found["cosine_worst"] > 0.999

    class Rough(nn.Module):
        """In float32 the slope is lost in rounding: a difference of large numbers."""

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(784, 3)
            self.big = nn.Parameter(torch.full((784,), 3e7))

        def forward(self, x):
            x = x.flatten(1)
            return self.linear((x * 1e-1 + self.big - self.big) ** 2)

    found = health(classifier_of(Rough(), 3), torch.rand(8, 1, SIDE, SIDE), torch.arange(8) % 3)
    assert found["zero_gradients"] > 0 or found["cosine_worst"] < 0.95


class Casts(Linear):
    def forward(self, x):
        return super().forward(x.float() * 1.0)


class OverTheBatch(Linear):
    def forward(self, x):
        return super().forward(x - x.mean(0) + 0.5)


class NotANumber(Linear):
    def forward(self, x):
        return super().forward(x) * float("nan")


@pytest.mark.parametrize(
    ("network", "levels"),
    [(Casts, {"gradient-precision": "warn", "randomness": "pass", "batch": "pass"}),
     (OverTheBatch, {"batch": "fail", "gradient-precision": None, "randomness": "pass"}),
     (Noisy, {"randomness": "fail", "gradient-precision": None, "batch": None}),
     (NotANumber, {"rows": "fail", "randomness": None, "batch": None, "gradients": "fail"})],
)  # fmt: skip
def test_models_whose_health_must_not_stop_a_run(tmp_path, network, levels):
    run = evaluate([classifier_of(network(), 2)], at_margins(MIXED), [], tmp_path / "run")
    said = {f.rule: f.level for f in findings(run)}
    assert {rule: said.get(rule) for rule in levels} == levels, findings(run)


def test_health_does_not_depend_on_the_batch_size(tmp_path):
    runs = [
        evaluate([classifier_of(Linear(), 2)], at_margins(MIXED), [], tmp_path / str(b), batch_size=b)
        for b in (1, 7, 100)
    ]
    assert runs[0].health == runs[1].health == runs[2].health
    assert runs[0].health["oracle"]["gradients"] == N


# -- rules on rows alone


def tampered(run: Run, changes: dict[tuple[str, str], list[bool]]) -> Run:
    """The run with other outcomes in some cells."""
    rows = run.rows.copy()
    for (attack, budget), correct in changes.items():
        here = (rows["perturbation"] == attack) & (rows["budget"] == budget)
        rows.loc[here, "correct"] = correct
    return with_rows(run, rows)


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    """100 samples, of which FGSM, PGD and the others break what they like."""
    samples = at_margins([MIXED[i % N] for i in range(100)])
    return diagnosed(Linear(), samples, tmp_path_factory.mktemp("honest") / "run")[0]


def right(k: int, n: int = 100) -> list[bool]:
    return [i < k for i in range(n)]


OWN = ("fgsm", "pgd", "pgd-best", "transfer-symvit")  # these go along the gradient of a model without RPC-Attention


def huge(k: int) -> dict[tuple[str, str], list[bool]]:
    """k images of 100 are right at eps 1, whatever goes along the gradient."""
    return {(f"diagnose/{a}", "1"): right(k) for a in OWN}


def square_alone(k: int) -> dict[tuple[str, str], list[bool]]:
    """45 images of 100 are right, the same for attacks along the gradient; for Square k of them are others."""
    return {("diagnose/square", "8/255"): [k <= i < 45 + k for i in range(100)],
            **{(f"diagnose/{a}", "8/255"): right(45) for a in OWN}}  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "changes", "level", "words"),
    [
        ("eps-order", {("diagnose/pgd", "4/255"): right(30), ("diagnose/pgd", "8/255"): right(60)}, "fail",
         "30.0 %, but"),
        ("eps-order", {("diagnose/fgsm", "4/255"): right(30), ("diagnose/fgsm", "8/255"): right(60)}, "warn",
         "30.0 %, but"),
        ("huge-budget", {(f"diagnose/{a}", "1"): right(40) for a in ("fgsm", "pgd", "pgd-best", "transfer-symvit")},
         "fail", "40.0 %"),
        ("huge-budget", {(f"diagnose/{a}", "1"): right(5) for a in ("fgsm", "pgd", "pgd-best", "transfer-symvit")},
         "warn", "5.0 %"),
        # Both sides of 2 and 10 %.
        ("huge-budget", huge(2), "pass", "at most 2 %"), ("huge-budget", huge(3), "warn", "3.0 %"),
        ("huge-budget", huge(10), "warn", "10.0 %"), ("huge-budget", huge(11), "fail", "11.0 %"),
        # Square breaks 3 and 4 of 100 that the model's own gradient leaves, and leaves as many others.
        ("masked-gradient", square_alone(3), "pass", "find no more"),
        ("masked-gradient", square_alone(4), "warn", "4 images"),
        ("more-effort", {("diagnose/pgd-best", "4/255"): right(90), ("diagnose/pgd", "4/255"): right(60)}, "fail",
         "with more effort"),
        ("more-effort", {("diagnose/pgd-best", "4/255"): right(40), ("diagnose/pgd", "4/255"): right(60)}, "warn",
         "not converged"),
        ("one-step", {("diagnose/fgsm", "4/255"): right(30), ("diagnose/pgd", "4/255"): right(60),
                      ("diagnose/pgd-best", "4/255"): right(60), ("diagnose/transfer-symvit", "4/255"): right(60)},
                      "fail", "but diagnose/pgd"),
        ("masked-gradient", {("diagnose/square", "8/255"): right(2), **{(f"diagnose/{a}", "8/255"): right(60)
                       for a in ("fgsm", "pgd", "pgd-best", "transfer-symvit")}}, "fail", "58 images"),
        ("masked-gradient", {("diagnose/square", "8/255"): right(60)[::-1], **{(f"diagnose/{a}", "8/255"): right(45)
                       for a in ("fgsm", "pgd", "pgd-best", "transfer-symvit")}}, "warn", "40 images"),
        ("eps-zero", {}, "pass", "clean answers"),
        ("chance", {}, "pass", "above chance"),
        ("chance", {("clean", ""): right(55)}, "warn", "cannot be told from guessing (50.0%)"),
        ("eps-order", {}, "pass", "at n = 100, where differences under 7 points do not show"),
    ],
)  # fmt: skip
def test_rules_on_rows(honest, rule, changes, level, words):
    said = [f for f in findings(tampered(honest, changes)) if f.rule == rule]
    assert [f.level for f in said] == [level]
    assert words in said[0].message + said[0].advice


def test_an_attack_that_helps(tmp_path):
    """Steps towards the label: no other budget to compare with but the clean images."""
    samples = at_margins([3] * N)
    samples.labels[: N // 2] = 1 - samples.labels[: N // 2]
    run = evaluate([classifier_of(Linear(), 2)], samples, [load_suite("fgsm").with_eps(["8/255"])], tmp_path / "run")
    said = next(f for f in findings(tampered(run, {("fgsm", "8/255"): [True] * N})) if f.rule == "eps-order")
    assert (said.level, "clean 50.0 %, but fgsm at eps 8/255 100.0 %" in said.message) == ("fail", True)
    with pytest.raises(SpecError, match="alpha: expected a length above 0"):
        Suite.parse(
            load_suite("pgd").model_dump()
            | {"attack": [{"name": "a", "method": "PGD", "parameters": {"alpha": "-0.25 eps"}}]},
            "s",
        )


def test_few_samples_pass_no_comparison(tmp_path):
    _, levels = diagnosed(Linear(), at_margins(MIXED[:10]), tmp_path / "run")
    assert not {"eps-order", "more-effort", "one-step", "masked-gradient"} & set(levels)
    assert levels["eps-zero"] == "pass"


ANY_NUMBER = {"rows", "settings", "chance", "no-gradient", "eps-zero"}  # facts of a run, and a test that counts samples


@pytest.mark.parametrize(("n", "judged"), [(4, False), (13, False), (14, True)])
def test_a_pass_needs_samples(tmp_path, n, judged):
    _, levels = diagnosed(Linear(), at_margins(MIXED[:n]), tmp_path / "run")
    assert set(levels.values()) == {"pass"}
    assert (set(levels) <= ANY_NUMBER) != judged
    assert ({"gradients", "logits", "batch", "huge-budget", "attacked-labels"} <= set(levels)) == judged


def test_what_is_wrong_is_said_of_few_samples_too(tmp_path):
    _, levels = diagnosed(Scaled(), at_margins(MIXED[:4]), tmp_path / "run")
    assert levels["gradients"] == "fail"


def test_eps_zero_that_changes_answers(honest):
    rows = honest.rows.copy()
    here = rows.index[(rows["perturbation"] == "diagnose/pgd") & (rows["budget"] == "0")]
    rows.loc[here[:3], "prediction"] = 1 - rows.loc[here[:3], "prediction"]
    copy = with_rows(honest, rows)
    said = next(f for f in findings(copy) if f.rule == "eps-zero")
    assert (said.level, "changes 3 of 100 answers" in said.message) == ("fail", True)


def test_attacked_labels(tmp_path):
    """With wrong labels, attacking the model's own answer makes wrong ones right."""
    samples = at_margins([3] * N)
    samples.labels[:20] = 1 - samples.labels[:20]
    run, levels = diagnosed(Linear(), samples, tmp_path / "run")
    assert levels["attacked-labels"] == "warn"
    said = next(f for f in findings(run) if f.rule == "attacked-labels")
    assert "33.3 points are images that were wrong when clean and are right now" in said.message
    samples.labels[2:20] = 1 - samples.labels[2:20]
    _, levels = diagnosed(Linear(), samples, tmp_path / "few")
    assert levels["attacked-labels"] == "warn"  # 2 of 60 are more than 2 %
    samples.labels[1] = 1 - samples.labels[1]
    _, levels = diagnosed(Linear(), samples, tmp_path / "one")
    assert levels["attacked-labels"] == "pass"


def test_broken_rows_and_autoattack_of_other_steps(noise_samples, tmp_path):
    run = evaluate([tiny()], noise_samples, [load_suite("fgsm").with_eps(["1/255"])], tmp_path / "run")
    rows = run.rows.assign(flags=["over_budget" if i == 40 else "" for i in range(len(run.rows))])
    copy = with_rows(run, rows)
    said = next(f for f in findings(copy) if f.rule == "rows")
    assert (said.level, "left its budget" in said.message) == ("fail", True)
    suite = load_suite("autoattack").with_steps(2).with_eps(["8/255"]).model_dump()
    suite["attack"][-1]["parameters"]["n_queries"] = 5
    run = evaluate([tiny()], noise_samples.take(np.arange(14)), [Suite.parse(suite, "s")], tmp_path / "aa")
    levels = {f.rule: f.level for f in findings(run)}
    assert levels["autoattack-standard"] == "warn"
    assert "autoattack-square" in levels


def test_square_after_gradients_is_noted(tmp_path):
    """In a cascade, what Square breaks is what gradients missed."""
    suite = load_suite("autoattack").with_eps(["8/255"]).without(["apgd-t", "fab-t"], "slow").model_dump()
    suite["attack"][0]["parameters"]["steps"] = 3
    suite["attack"][-1]["parameters"]["n_queries"] = 200
    run = evaluate([classifier_of(Scaled(), 2)], at_margins([2] * N), [Suite.parse(suite, "s")], tmp_path / "run")
    said = next(f for f in findings(run) if f.rule == "autoattack-square")
    assert said.level == "warn"
    assert "that the attacks before it left" in said.message


@pytest.mark.parametrize(
    ("threat", "attack", "level", "words"),
    [
        ({"norm": "l2", "eps": ["8/255"]}, {"method": "PGDL2", "parameters": {"steps": 2, "alpha": "0.5 eps"}}, "warn",
         "was an L-inf budget meant"),
        ({"eps": ["8/255"]}, {"method": "PGD", "parameters": {"steps": 2, "alpha": 0.1}}, "warn",
         "longer than the ball is wide"),
        ({"eps": ["8/255"]}, {"method": "PGD", "parameters": {"steps": 3, "alpha": 0.001}}, "warn", "do not reach"),
        ({"eps": ["8/255", "0"]}, {"method": "PGD", "parameters": {"steps": 4, "alpha": "0.25 eps"}}, "pass",
         "fit each other"),
    ],
)  # fmt: skip
def test_numbers_that_people_mix_up(noise_samples, tmp_path, threat, attack, level, words):
    data = load_suite("fgsm").model_dump()
    data["threat"] |= threat
    data["attack"] = [{"name": "a", **attack}]
    run = evaluate([tiny()], noise_samples.take(np.arange(4)), [Suite.parse(data, "s")], tmp_path / "run")
    said = next(f for f in findings(run) if f.rule == "settings")
    assert (said.level, words in said.message + said.advice) == (level, True), said


def test_every_method_has_a_kind():
    assert {name: method.search for name, method in registry.METHODS.items()} == SEARCHES


def test_findings_come_in_one_order_whatever_was_imported_first(honest):
    assert set(ORDER) <= set(RULES)
    assert rules_of(honest)[: len(ORDER)] == list(ORDER)
    shown = [f.rule for f in findings(honest)]
    assert shown == [name for name in ORDER if name in shown]


def test_a_run_without_health_has_no_findings_of_it(honest):
    assert "logits" in {f.rule for f in findings(honest)}
    assert "logits" not in {f.rule for f in findings(Run.in_memory(honest.request, honest.rows))}


def test_findings_are_worked_out_once(honest, monkeypatch):
    run = Run.in_memory(honest.request, honest.rows, records_of(honest))
    seen: list[str] = []

    def judge(model):
        seen.append(model.name)
        return "pass", "nothing", ""

    monkeypatch.setitem(RULES._registered, "counted", Rule("counted", judge, ()))
    first = findings(run)
    assert [f.rule for f in first if f.rule == "counted"] == ["counted"]
    assert findings(run) == first
    assert seen == run.models
