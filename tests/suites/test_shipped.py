"""Every suite that comes with the package, on models whose truth is known."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from robustkpca.attacks import engine, registry
from robustkpca.attacks.sparse_l1 import SparseL1Descent, project_l1
from robustkpca.datasets.images import ArraySamples
from robustkpca.datasets.sources import load_samples
from robustkpca.errors import SpecError
from robustkpca.evaluation.loop import evaluate
from robustkpca.models.checkpoints import load_classifier
from robustkpca.suites.budget import eps_budget, parse_eps
from robustkpca.suites.cell import Cell
from robustkpca.suites.suite import Suite, load_suite, suite_names
from tests.attacks.test_engine import images_of, run
from tests.helpers.oracles import classifier_of, linear_accuracy, tiny

ATTACKS = [name for name in suite_names() if load_suite(name).attack]
FAST = {"nb_iter": 2, "nb_sample": 8, "n_queries": 40, "steps": 4, "restarts": 2}


def quick(name, eps=None):
    """A suite with few steps and one budget."""
    suite = load_suite(name).model_dump()
    for attack in suite["attack"]:
        attack["parameters"] = {k: FAST.get(k, v) for k, v in attack["parameters"].items()}
    suite["threat"]["eps"] = [eps or suite["threat"]["eps"][0]]
    return type(load_suite(name)).parse(suite, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_every_suite_runs_and_stays_in_its_threat_model(noise_samples, tmp_path, name):
    samples = noise_samples.take(np.arange(6))
    run_ = evaluate([tiny()], samples, [quick(name)], tmp_path / "run", batch_size=4)
    assert {s.text for s in run_.statuses} == {"complete"}
    assert (run_.rows["flags"] == "").all()


@pytest.mark.parametrize(
    "name", [n for n in ATTACKS if load_suite(n).threat.norm == "linf" and load_suite(n).threat.clip]
)
def test_images_with_0_and_1_stay_in_box_and_ball_whatever_the_budget(official, tmp_path, name):
    """eps 0 gives the clean answers, eps 8/255 and 1 no more than they say, on a model with mean and std."""
    pixels = np.random.default_rng(0).choice(np.array([0, 255, 128], dtype=np.uint8), (6, 32, 32, 3))
    classifier = official("rpc_4iter_layer1")
    names = tuple(map(str, range(10)))
    classifier.settings = classifier.settings.model_copy(update={"classes": names})
    samples = ArraySamples("box", list("abcdef"), np.arange(6), names, pixels)
    suite = quick(name).with_eps(["0", "8/255", "1"])
    run_ = evaluate([classifier], samples, [suite], tmp_path / "run")
    assert (run_.rows["flags"] == "").all()
    clean = run_.cell_rows(run_.models[0], Cell.parse("clean", ""))["prediction"]
    for label in suite.attacks:
        none = run_.cell_rows(run_.models[0], Cell(label, eps_budget("0")))
        assert none["prediction"].equals(clean)
        assert (none["distance"] == 0).all()


@pytest.mark.parametrize(
    "name", [n for n in ATTACKS if registry.METHODS[load_suite(n).attack[0].method].draws != "batch"]
)
def test_rows_do_not_depend_on_the_batch_size(noise_samples, tmp_path, name):
    samples = noise_samples.take(np.arange(8))
    frames = [evaluate([tiny()], samples, [quick(name)], tmp_path / str(b), batch_size=b).rows for b in (1, 3, 8)]
    for frame in frames[1:]:
        assert frame["prediction"].equals(frames[0]["prediction"])
        np.testing.assert_allclose(frame["distance"], frames[0]["distance"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["square", "torchattacks-aa", "cw", "spsa"])
def test_the_global_generator_is_left_alone(name):
    before = torch.get_rng_state()
    run(
        tiny(),
        torch.rand(2, 1, 28, 28, generator=torch.Generator().manual_seed(1)),
        torch.tensor([0, 1]),
        quick(name),
        "8/255",
    )
    assert torch.equal(torch.get_rng_state(), before)


def test_noise_is_uniform_and_flips_nobody_far_from_the_boundary(linear, linear_samples):
    images, labels = images_of(linear_samples, linear), torch.from_numpy(linear_samples.labels)
    suite = load_suite("noise")
    noisy = run(linear, images, labels, suite, "8/255")
    moved = ((noisy - images) * 255).flatten()
    assert moved.abs().max() <= 8 + 1e-4
    assert moved.std() == pytest.approx(16 / 12**0.5, rel=0.02)
    assert (linear(noisy).argmax(1) == labels).double().mean() == linear_accuracy(0)


@pytest.mark.slow
def test_an_active_set_breaks_whatever_the_last_iterate_breaks():
    classifier, samples = load_classifier("rpc-symvit"), load_samples("fashion-mnist", limit=40)
    images, labels = images_of(samples, classifier), torch.from_numpy(samples.labels_for(classifier.settings))
    active = load_suite("pgd-active")
    parameters = {"steps": 20, "alpha": "0.15 eps", "random_start": True}
    last = Suite.parse(
        active.model_dump() | {"attack": [{"name": "last", "method": "PGD", "parameters": parameters}]}, "last"
    )
    for eps in active.budgets:
        any_, end = (
            classifier(run(classifier, images, labels, suite, str(eps), label="same starts")).argmax(1) == labels
            for suite in (active, last)
        )
        assert not (any_ & ~end).any(), eps
    assert 0 < any_.sum() < len(any_)


def test_cw_finds_the_boundary_of_the_linear_oracle(linear, linear_samples):
    """The least L2 change is |s| / ||w||: CW must flip everybody, not much further away than that."""
    images, labels = images_of(linear_samples, linear)[:10], torch.from_numpy(linear_samples.labels)[:10]
    suite = load_suite("cw").with_steps(400)
    attacked = run(linear, images, labels, suite, "0")
    assert (linear(attacked).argmax(1) != labels).all()
    logits, w = linear(images), linear.network.w
    least = logits[:, 0].abs() / w.norm()
    moved = engine.distance(linear, images, attacked, suite.threat)
    assert (moved >= least - 1e-4).all()
    assert (moved <= 1.6 * least + 0.05).all()


@pytest.mark.slow
def test_square_and_spsa_break_what_is_near_the_boundary(linear, linear_samples):
    images, labels = images_of(linear_samples, linear), torch.from_numpy(linear_samples.labels)
    for name in ("square", "spsa"):
        attacked = run(linear, images, labels, load_suite(name), "8/255")
        right = (linear(attacked).argmax(1) == labels).double().mean()
        assert linear_accuracy(8) <= right < linear_accuracy(0), name


def test_l1_projection_against_its_definition():
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(5, 40, generator=draws, dtype=torch.float64)
    x[0] *= 0.01
    found = project_l1(x, 3.0)
    assert torch.equal(found[0], x[0])
    torch.testing.assert_close(found[1:].abs().sum(1), torch.full((4,), 3.0, dtype=torch.float64))
    for row, best in zip(x, found, strict=True):  # no other point of the ball is nearer
        for _ in range(200):
            other = torch.randn(40, generator=draws, dtype=torch.float64)
            other *= 3.0 * torch.rand((), generator=draws) / other.abs().sum()
            assert (row - best).norm() <= (row - other).norm() + 1e-12


def test_sld_moves_few_values_and_the_largest_gradients_first(linear, linear_samples):
    images, labels = images_of(linear_samples, linear)[:10], torch.from_numpy(linear_samples.labels)[:10]
    surface = engine._Surface(engine.Coordinates.of(linear, load_suite("sld").threat, Fraction(1)))
    one = SparseL1Descent(surface, eps=10.0, alpha=1.0, steps=1, sparsity=0.99)(images, labels)
    moved = (one - images).flatten(1)
    assert ((moved != 0).sum(1) == 8).all()  # 1 % of 784
    best = linear.network.w.abs().topk(8).indices
    assert all(set(row.nonzero().flatten().tolist()) == set(best.tolist()) for row in moved)
    torch.testing.assert_close(moved.abs().sum(1), torch.ones(10), rtol=0, atol=1e-4)
    attacked = run(linear, images, labels, load_suite("sld"), "10")
    assert (linear(attacked).argmax(1) != labels).double().mean() > 0.4


def test_the_papers_cw_clips_normalised_values(official, golden_attacks):
    classifier = official("symvit")
    suite = load_suite("cw-paper")
    attacked = classifier.normalize(run(classifier, golden_attacks["images"], torch.arange(6), suite, "6/255"))
    assert attacked.min() >= -1e-5
    assert attacked.max() <= 1 + 1e-5
    assert classifier.normalize(golden_attacks["images"]).min() < -0.5
    assert "clipped to [0, 1] in normalised units" in suite.describe()


def test_autoattack_needs_four_classes(linear, linear_samples):
    images, labels = images_of(linear_samples, linear), torch.from_numpy(linear_samples.labels)
    with pytest.raises(SpecError, match="AutoAttack needs at least 4 classes, oracle has 2"):
        run(linear, images, labels, load_suite("torchattacks-aa"), "8/255")
    three = classifier_of(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 3)), 3)
    with pytest.raises(SpecError, match="has 3"):
        run(three, images, labels, load_suite("torchattacks-aa"), "8/255")


def test_lengths_are_scaled_to_the_papers_space(official):
    """In normalised space a step of 0.01 stays 0.01 in normalised units, whatever coordinate the attack runs in."""
    suite = load_suite("spsa-paper")
    coordinates = engine.Coordinates.of(official("symvit"), suite.threat, parse_eps("6/255"))
    assert coordinates.width > 4
    classifier = official("symvit")
    images = torch.full((1, 3, 32, 32), 0.5)
    one = quick("spsa-paper").model_dump()
    one["attack"][0]["parameters"] |= {"nb_iter": 1, "lr": 0.01}
    attacked = run(classifier, images, torch.tensor([0]), type(suite).parse(one, "s"), "6/255")
    moved = (classifier.normalize(attacked) - classifier.normalize(images)).abs()
    assert moved.max() == pytest.approx(0.01, rel=1e-2)  # Adam's first step is its learning rate
