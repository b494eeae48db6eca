from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn

from robustkpca.attacks import engine, registry
from robustkpca.errors import SpecError
from robustkpca.runtime.keyed_random import KeyedDraws
from robustkpca.suites.attack import AttackSpec
from robustkpca.suites.suite import Suite, load_suite
from robustkpca.suites.threat import Ball
from tests.helpers.attacks import suite_of
from tests.helpers.oracles import OFFICIAL, classifier_of, linear_accuracy, tiny

PIXEL = Ball(norm="linf", eps=("8/255",), space="pixel", clip=True, labels="true")


def run(classifier, images, labels, suite: Suite, eps: str, **changes) -> Tensor:
    usual = {"ids": [f"s{i}" for i in range(len(images))], "seed": 0, "label": suite.name, "eps": Fraction(eps)}
    draws = engine.Draws(**usual | changes)
    return engine.attack(classifier, images, labels, spec=suite.attack[0], threat=suite.threat, draws=draws)


def images_of(samples, classifier):
    return torch.stack([samples.image(i, classifier.settings.preprocessing) for i in range(len(samples))])


@pytest.mark.parametrize("name", ["fgsm", "pgd"])
@pytest.mark.parametrize("k", [0, 2, 4, 8])
def test_linear_oracle_standard_protocol(linear, linear_samples, name, k):
    images, labels = images_of(linear_samples, linear), torch.from_numpy(linear_samples.labels)
    attacked = run(linear, images, labels, load_suite(name), f"{k}/255")
    accuracy = (linear(attacked).argmax(1) == labels).double().mean()
    assert accuracy == linear_accuracy(k)
    assert (attacked - images).abs().max() <= k / 255 + 1e-6
    if k:
        assert (attacked - images).abs().max() >= k / 255 - 1e-6


@pytest.mark.parametrize("configuration", OFFICIAL)
@pytest.mark.parametrize("k", [1, 6])
def test_golden_paper_protocol(golden_attacks, official, configuration, k):
    classifier = official(configuration)
    images = golden_attacks["images"]
    predicted = golden_attacks[f"{configuration}.logits"].argmax(1)

    fgsm = classifier.normalize(run(classifier, images, predicted, load_suite("fgsm-paper"), f"{k}/255"))
    name = f"{configuration}.fgsm_eps{k}_255"
    assert (fgsm - golden_attacks[name]).abs().max() < 1e-4
    assert (classifier.logits_of_normalized(fgsm) - golden_attacks[f"{name}.logits"]).abs().max() < 1e-3

    suite = load_suite("pgd-paper").model_dump()
    suite["attack"][0]["parameters"]["random_start"] = False
    pgd = classifier.normalize(run(classifier, images, predicted, Suite.parse(suite, "s"), f"{k}/255"))
    name = f"{configuration}.pgd20_eps{k}_255_no_random_start"
    assert ((pgd - golden_attacks[name]).abs() < 1e-4).double().mean() >= 0.999
    assert (classifier.logits_of_normalized(pgd) - golden_attacks[f"{name}.logits"]).abs().max() < 1e-3


def test_the_paper_protocol_leaves_the_pixel_range_and_stays_in_its_ball(official, golden_attacks):
    classifier = official("symvit")
    images = golden_attacks["images"].clone()
    images[:, :, :8] = 0.0
    images[:, :, 8:16] = 1.0
    suite = load_suite("pgd-paper")
    attacked = run(classifier, images, torch.arange(6) % 10, suite, "6/255")
    assert attacked.min() < 0
    assert attacked.max() > 1
    moved = engine.distance(classifier, images, attacked, suite.threat)
    assert (moved <= 6 / 255 + 1e-6).all()
    assert (moved >= 6 / 255 - 1e-4).all()


@pytest.mark.parametrize("eps", ["8/255", "1"])
def test_pixel_attacks_stay_in_box_and_ball_on_normalised_models(official, golden_attacks, eps):
    classifier = official("rpc_4iter_layer1")
    images = golden_attacks["images"].clone()
    images[:, :, :8] = 0.0
    images[:, :, 8:16] = 1.0
    for name in ("pgd", "fgsm"):
        attacked = run(classifier, images, torch.arange(6) % 10, load_suite(name), eps)
        assert attacked.min() >= 0
        assert attacked.max() <= 1
        assert (attacked - images).abs().max() <= float(Fraction(eps)) + 1e-6


@pytest.mark.parametrize("name", ["pgd", "fgsm", "pgd-paper", "fgsm-paper"])
def test_eps_zero_returns_the_images(linear, linear_samples, name):
    images = images_of(linear_samples, linear)
    labels = torch.from_numpy(linear_samples.labels)
    assert torch.equal(run(linear, images, labels, load_suite(name), "0"), images)


def test_l2_ball():
    suite = Suite.parse(
        {
            "name": "l2", "version": 1, "title": "t",
            "threat": {"norm": "l2", "eps": ["0.5"], "space": "pixel", "clip": True, "labels": "true"},
            "attack": [{"name": "a", "method": "PGDL2", "parameters": {"steps": 5, "alpha": "0.3 eps"}}],
        },
        "suite",
    )  # fmt: skip
    classifier = tiny()
    draws = torch.Generator().manual_seed(0)
    images = torch.rand(4, 1, 28, 28, generator=draws) * 0.5 + 0.25
    attacked = run(classifier, images, torch.arange(4), suite, "0.5")
    moved = engine.distance(classifier, images, attacked, suite.threat)
    assert (moved <= 0.5 + 1e-6).all()
    assert (moved > 0.4).all()
    alone = run(classifier, images[2:3], torch.arange(4)[2:3], suite, "0.5", ids=["s2"])
    torch.testing.assert_close(alone, attacked[2:3], rtol=0, atol=1e-6)


def test_random_start_is_keyed_by_seed_attack_budget_and_sample():
    classifier, suite = tiny(), load_suite("pgd").with_steps(1)
    images = torch.full((3, 1, 28, 28), 0.5)
    labels = torch.zeros(3, dtype=torch.int64)
    first = run(classifier, images, labels, suite, "8/255")
    torch.rand(7)  # the global generator's past must not matter
    assert torch.equal(run(classifier, images, labels, suite, "8/255"), first)
    assert not torch.equal(first[0], first[1])
    turned = run(classifier, images, labels, suite, "8/255", ids=["s2", "s1", "s0"])
    assert torch.equal(turned.flip(0), first)
    assert not torch.equal(run(classifier, images, labels, suite, "8/255", seed=1), first)
    assert not torch.equal(run(classifier, images, labels, suite, "8/255", label="other"), first)
    # Two budgets have draws of their own, not the same draws at another length. Of two that are independent and uniform
    # in [-1, 1], the mean distance is 2/3.
    unit = [(run(classifier, images, labels, load_suite("noise"), f"{k}/255") - images) * 255 / k for k in (4, 8)]
    assert (unit[0] - unit[1]).abs().mean() == pytest.approx(2 / 3, abs=0.05)


class Sum(nn.Module):
    """A score whose value and gradient are worked out for each image by itself, to the last bit."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(784, generator=torch.Generator().manual_seed(0)))

    def forward(self, x):
        s = torch.stack([(image.flatten() * self.w).sum() for image in x])
        return torch.stack([s, -s], 1)


@pytest.mark.parametrize("size", [1, 3, 6])
def test_an_attack_in_l2_is_the_same_to_the_bit_in_any_batch_size(size):
    """A mean over the batch would shrink the gradient, and round what is divided by its length in another way."""
    pgd = {"name": "a", "method": "PGDL2", "parameters": {"steps": 3, "alpha": "0.4 eps"}}
    classifier, suite = classifier_of(Sum(), 2), suite_of([pgd], norm="l2", eps=["0.5"])
    images = torch.rand(7, 1, 28, 28, generator=torch.Generator().manual_seed(1)) * 0.5 + 0.25
    labels = torch.tensor([0, 1, 0, 1, 1, 0, 1])
    whole = run(classifier, images, labels, suite, "0.5")
    for first in range(0, 7, size):
        part = slice(first, min(first + size, 7))
        ids = [f"s{i}" for i in range(part.start, part.stop)]
        assert torch.equal(run(classifier, images[part], labels[part], suite, "0.5", ids=ids), whole[part]), first


def test_the_global_generator_is_left_alone(linear, linear_samples):
    before = torch.get_rng_state()
    run(linear, images_of(linear_samples, linear), torch.from_numpy(linear_samples.labels), load_suite("pgd"), "8/255")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_callers_mode_does_not_matter(linear, linear_samples, mode):
    images, labels = images_of(linear_samples, linear), torch.from_numpy(linear_samples.labels)
    expected = run(linear, images, labels, load_suite("pgd"), "4/255")
    with mode():
        assert torch.equal(run(linear, images.clone(), labels, load_suite("pgd"), "4/255"), expected)


def test_the_model_is_as_before_after_an_attack():
    class WithDropout(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.linear = nn.Dropout(0.5), nn.Linear(784, 3)

        def forward(self, x):
            return self.linear(self.drop(x.flatten(1)))

    classifier = classifier_of(WithDropout().train(), 3)
    assert not any(m.training for m in classifier.modules())
    run(classifier, torch.rand(2, 1, 28, 28), torch.tensor([0, 1]), load_suite("pgd"), "4/255")
    assert not any(m.training for m in classifier.train().modules())
    assert all(not p.requires_grad and p.grad is None for p in classifier.parameters())


def test_what_the_model_draws_is_not_keyed():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.calls = nn.Linear(784, 3), 0

        def forward(self, x):
            self.calls += 1
            return self.linear(x.flatten(1)) + torch.rand(x.shape[0], 3)

    classifier = classifier_of(Noisy(), 3)
    run(classifier, torch.rand(2, 1, 28, 28), torch.tensor([0, 1]), load_suite("fgsm"), "4/255")
    assert classifier.network.calls == 1


def test_draws_that_cannot_be_keyed_are_refused():
    with KeyedDraws([torch.Generator()]), pytest.raises(SpecError, match="randint"):
        torch.randint(3, (1,))
    with KeyedDraws([torch.Generator()]), pytest.raises(SpecError, match="shape"):
        torch.empty(2, 3).uniform_(0, 1)


def test_draws_within_draws_give_back_those_around_them():
    first, second = (KeyedDraws([torch.Generator().manual_seed(i)]) for i in (0, 1))
    assert KeyedDraws.active is None
    with first:
        with second:
            assert KeyedDraws.active is second
            with first, pytest.raises(SpecError):
                torch.randint(3, (1,))
            assert KeyedDraws.active is second
        assert KeyedDraws.active is first
        with KeyedDraws.only(torch.tensor([0])):
            assert torch.rand(1, 1, 2, 2).shape == (1, 1, 2, 2)
    assert KeyedDraws.active is None


@pytest.mark.parametrize(
    ("spec", "message"),
    [({"method": "PDG"}, "Did you mean 'PGD'"), ({"method": "PGD", "parameters": {"step": 3}}, "Did you mean 'steps'"),
     ({"method": "PGD", "parameters": {"eps": 0.1}}, "unknown parameter"), ({"method": "PGDL2"}, "norm l2")],
)  # fmt: skip
def test_specs_that_do_not_exist(spec, message):
    with pytest.raises(SpecError, match=message):
        registry.check(AttackSpec(name="a", **spec), PIXEL)
