"""Samples that an attack by gradients had no gradient for: none of them may pass for robust in silence."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchattacks.attack import Attack

from robustkpca.datasets.images import ArraySamples
from robustkpca.diagnosis.findings import findings
from robustkpca.evaluation.loop import evaluate
from robustkpca.report import paper_tables, run_tables
from robustkpca.results.accuracy import accuracy_table
from robustkpca.runs.run import Run
from robustkpca.suites.cell import Cell
from robustkpca.suites.suite import Suite, load_suite
from tests.helpers.attacks import register, suite_of
from tests.helpers.oracles import SIDE, Linear, classifier_of, noise, tiny

N, HIDDEN = 200, 136


class Marked(nn.Module):
    """The linear oracle, but that its gradient is spoilt where the first pixel, which decides nothing, is white."""

    def __init__(self, spoilt: str) -> None:
        super().__init__()
        self.spoilt, self.w = spoilt, Linear().w
        with torch.no_grad():
            self.w[0] = 0

    def forward(self, x: Tensor) -> Tensor:
        marked = (x.flatten(1)[:, 0] > 0.5).float()
        s = (x.flatten(1) - 128 / 255) @ self.w
        if self.spoilt == "nan":  # the value of the root is 0, its derivative infinite
            s = s + marked * torch.sqrt(s * 0 + 1 - marked)
        if self.spoilt == "large":
            s = torch.where(marked > 0, 1e4 * s, s)
        return torch.stack([s, -s], 1)


def samples(hidden: int = HIDDEN, n: int = N) -> ArraySamples:
    """Grey images 3/255 from the boundary, alternating classes, the last `hidden` of them marked."""
    signs = torch.sign(Linear().w).detach().reshape(SIDE, SIDE).numpy()
    sides = np.where(np.arange(n) % 2, -1, 1)
    pixels = np.stack([128 + side * 3 * signs for side in sides]).astype(np.uint8)
    pixels[:, 0, 0] = np.where(np.arange(n) < n - hidden, 0, 255)
    return ArraySamples("marked", [f"m{i:03d}" for i in range(n)], np.where(sides > 0, 0, 1), ("0", "1"), pixels)


def evaluated(path, spoilt: str, *suites: Suite, hidden: int = HIDDEN) -> Run:
    return evaluate([classifier_of(Marked(spoilt), 2)], samples(hidden), suites, path)


def at_four(name: str) -> Suite:
    return load_suite(name).with_eps(["4/255"])


def flags(run: Run, attack: str, budget: str = "4/255") -> list[str]:
    return list(run.cell_rows("oracle", Cell.parse(attack, budget))["flags"])


def finding(run: Run, rule: str):
    return next(f for f in findings(run) if f.rule == rule)


ATTACKS = ("fgsm", "pgd", "apgd")


def test_images_without_a_finite_gradient_are_invalid(tmp_path):
    run = evaluated(tmp_path, "nan", *map(at_four, ATTACKS))
    for attack in ATTACKS:
        assert flags(run, attack) == [""] * (N - HIDDEN) + ["gradient_not_finite"] * HIDDEN
        status = run.status("oracle", Cell.parse(attack, "4/255"))
        assert not status.complete  # which ends eval with 1
        assert status.text.startswith("invalid: 136 of 200 rows: the attack's gradient was not finite")
    table = accuracy_table(run).set_index(["attack", "budget"])
    assert table["accuracy"].isna()["fgsm", "4/255"]
    assert finding(run, "rows").level == "fail"
    assert finding(run, "rows").message.startswith("408 rows must not be believed")


def test_images_with_a_gradient_of_zero_are_counted(tmp_path):
    run = evaluated(tmp_path, "large", *map(at_four, ATTACKS))
    for attack, view in zip(ATTACKS, run_tables.views(run), strict=True):
        assert flags(run, attack) == [""] * (N - HIDDEN) + ["no_gradient"] * HIDDEN
        assert run.status("oracle", Cell.parse(attack, "4/255")).complete
        assert f"136 of 200 rows (oracle, {attack} eps 4/255)" in view.notes[-1]
        assert view.notes[-1] in paper_tables.budgets([run]).notes
    seen = finding(run, "no-gradient")
    assert (
        seen.level == "fail" and "136 of 200 images had no gradient to follow under fgsm at eps 4/255" in seen.message
    )
    assert finding(run, "rows").level == "pass"


@pytest.mark.parametrize(("hidden", "level"), [(0, "pass"), (2, "warn"), (3, "fail")])
def test_one_point_of_accuracy_is_the_limit(tmp_path, hidden, level):
    run = evaluated(tmp_path, "large", at_four("pgd"), hidden=hidden)
    assert finding(run, "no-gradient").level == level
    assert len(run_tables.views(run)[0].notes) == 2 + (hidden > 0)


def test_blind_attacks_have_no_gradient_to_miss(tmp_path):
    small = at_four("square").model_dump()
    small["attack"][0]["parameters"]["n_queries"] = 5
    run = evaluated(tmp_path, "nan", at_four("noise"), Suite.parse(small, "suite"))
    assert (run.rows["flags"] == "").all()
    assert not [f for f in findings(run) if f.rule == "no-gradient"]


def test_the_margin_does_not_saturate_and_breaks_what_the_cross_entropy_leaves(tmp_path):
    """In a suite of several, and in a cascade, an image counts only where no attack could be tried."""
    margin, entropy = ({"name": loss, "method": "BestPGD", "parameters": {"steps": 3, "alpha": "0.5 eps", "loss": loss}}
                       for loss in ("margin", "ce"))  # fmt: skip
    blind = {"name": "noise", "method": "UniformNoise"}
    one, other = (suite_of([entropy, last], name, eps=["2/255"]) for name, last in (("one", margin), ("two", blind)))
    cascade = Suite.parse({**suite_of([entropy, margin], "three", eps=["2/255"]).model_dump(), "cascade": True}, "s")
    twice = {**entropy, "name": "again"}
    both = Suite.parse({**suite_of([entropy, twice], "four", eps=["2/255"]).model_dump(), "cascade": True}, "s")
    run = evaluated(tmp_path, "large", one, other, cascade, both)
    none, some = [""] * N, [""] * (N - HIDDEN) + ["no_gradient"] * HIDDEN
    expected = {"one/ce": some, "one/margin": none, "two/ce": some, "two/noise": none, "three/ce": some,
                "three/margin": none, "four/ce": some, "four/again": some}  # fmt: skip
    assert {name: flags(run, name, "2/255") for name in expected} == expected
    notes = {view.title: view.notes[-1] for view in run_tables.views(run, compared=False)}
    assert "136 of 200 rows (oracle, one/ce eps 2/255)." in notes["t (one)"]
    assert "four/worst case" in notes["t (four)"]
    assert "four/worst case" in finding(run, "no-gradient").message


def test_a_cascade_tries_again_what_was_tried_before(tmp_path):
    """A gradient that fails the second attack alone takes nothing from the first."""
    parts = [{"name": loss, "method": "BestPGD", "parameters": {"steps": 2, "alpha": "0.5 eps", "loss": loss}}
             for loss in ("margin", "ce")]  # fmt: skip
    suite = Suite.parse({**suite_of(parts, eps=["2/255"]).model_dump(), "cascade": True}, "s")
    run = evaluated(tmp_path, "large", suite)
    assert flags(run, "own/ce", "2/255") == [""] * N


class ByHalves(Attack):
    """An attack of a user: an active set, and two copies of each image, which the engine knows nothing of."""

    def __init__(self, model: nn.Module, eps: float = 8 / 255) -> None:
        super().__init__("ByHalves", model)
        self.eps = eps

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        moved = images.clone()
        for chosen in (torch.arange(0, len(images), 2), torch.arange(1, len(images), 2)):
            x = images[chosen].repeat(2, 1, 1, 1).requires_grad_()
            loss = nn.functional.cross_entropy(self.get_logits(x), labels[chosen].repeat(2))
            loss.backward()
            moved[chosen] = (images[chosen] + self.eps * x.grad[: len(chosen)].sign()).clamp(0, 1)
        return moved


class Functional(Attack):
    """An attack of a user that takes its gradient by torch.func."""

    def __init__(self, model: nn.Module, eps: float = 8 / 255) -> None:
        super().__init__("Functional", model)
        self.eps = eps

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        def loss(x: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.get_logits(x), labels, reduction="sum")

        gradient = torch.func.grad(loss)(images)
        return (images + self.eps * gradient.sign()).clamp(0, 1)


def test_an_attack_by_functional_transforms_works_and_is_not_looked_at(tmp_path, monkeypatch):
    register(monkeypatch, Functional=Functional)
    run = evaluated(tmp_path, "none", suite_of([{"name": "own", "method": "Functional"}], eps=["4/255"]))
    assert not run.cell_rows("oracle", Cell.parse("own", "4/255"))["correct"].any()
    assert flags(run, "own") == [""] * N


def distinct() -> ArraySamples:
    """Images that are told apart by their second rows, which decide nothing either."""
    images = samples(hidden=20, n=40)
    images.pixels[:, 1] = np.random.default_rng(0).integers(0, 256, (40, SIDE))
    return images


def test_attacks_of_users_with_batches_of_their_own(tmp_path, monkeypatch):
    register(monkeypatch, ByHalves=ByHalves)
    network = Marked("nan")
    with torch.no_grad():
        network.w.view(SIDE, SIDE)[1] = 0
    suite = suite_of([{"name": "own", "method": "ByHalves"}], eps=["4/255"])
    run = evaluate([classifier_of(network, 2)], distinct(), [suite], tmp_path)
    assert flags(run, "own") == [""] * 20 + ["gradient_not_finite"] * 20


class Luck(nn.Module):
    """No gradient where the second pixel is dark: a random start may leave that region, or not."""

    def forward(self, x: Tensor) -> Tensor:
        s = (x.flatten(1)[:, 0] - 0.5) * 20
        s = torch.where(x.flatten(1)[:, 1] > 0.5, s, s.detach())
        return torch.stack([s, -s], 1)


def test_one_restart_with_a_gradient_is_enough(tmp_path):
    pixels = np.full((40, SIDE, SIDE), 127, np.uint8)
    pixels[:, 0, 0] = 255  # far from the boundary: every image stays right
    images = ArraySamples("luck", [f"l{i}" for i in range(40)], np.zeros(40, np.int64), ("0", "1"), pixels)
    counts = []
    for restarts in (1, 8):
        parameters = {"steps": 1, "alpha": "0.1 eps", "restarts": restarts}
        suite = suite_of([{"name": "own", "method": "BestPGD", "parameters": parameters}], eps=["4/255"])
        run = evaluate([classifier_of(Luck(), 2)], images, [suite], tmp_path / str(restarts))
        assert run.cell_rows("oracle", Cell.parse("own", "4/255"))["correct"].all()
        counts.append(flags(run, "own").count("no_gradient"))
    assert counts[0] > 5 > counts[1]


@pytest.mark.parametrize("size", [7, 200])
def test_flags_do_not_depend_on_the_batch_size(tmp_path, size):
    whole, parts = (
        evaluate([classifier_of(Marked("large"), 2)], samples(), [at_four("apgd")], tmp_path / str(s), batch_size=s)
        for s in (100, size)
    )
    assert whole.rows.equals(parts.rows)


def test_looking_changes_no_bit_and_a_healthy_model_raises_no_flag(tmp_path, monkeypatch):
    suites = [at_four("pgd"), at_four("apgd"), load_suite("pgd-active").with_eps(["8/255"])]
    seen = evaluate([tiny()], noise(), suites, tmp_path / "seen")
    assert (seen.rows["flags"] == "").all()
    monkeypatch.setattr("robustkpca.attacks.gradient_watch.GradientWatch.watched", lambda self, x: x)
    assert seen.rows.equals(evaluate([tiny()], noise(), suites, tmp_path / "unseen").rows)
