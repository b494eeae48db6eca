"""Adversarial training: the attack against a closed form, the loss against numbers by hand, and what it buys."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from robustkpca import train as training
from robustkpca.datasets.sources import load_samples
from robustkpca.models.classifier import Classifier
from robustkpca.models.settings import ModelSettings, Preprocessing
from robustkpca.runtime.place import ALONE
from robustkpca.train import Recipe
from robustkpca.train.adversarial import ascend, divergence, pgd_examples, trades_examples, trades_loss
from robustkpca.train.data import keyed
from robustkpca.train.loop import Trainer
from tests.helpers.oracles import oracle

EPS = 16 / 255
UNIT = Preprocessing(img_size=8, mean=(0.5,), std=(0.25,), crop_pct=1.0)


@pytest.mark.parametrize("steps", [1, 4, 10])
def test_the_best_attack_on_a_linear_model_is_found(steps):
    model = oracle()
    images = torch.rand(6, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 0, 1, 0, 1])
    side = (2.0 * labels - 1)[:, None, None, None] * model.network.w.sign().reshape(1, 1, 28, 28)
    best = (images + EPS * side).clamp(0, 1)
    found = ascend(lambda x: F.cross_entropy(model(x), labels, reduction="sum"), images, images, eps=EPS, steps=steps)
    torch.testing.assert_close(found, best)


def test_a_step_is_two_and_a_half_times_eps_over_steps():
    """From one side of the ball up a slope of one: five steps of half of eps, the last cut off at the other side."""
    images, seen = torch.full((1, 1, 1, 1), 0.5), []

    def loss(moved):
        seen.append(moved.item() - 0.5)
        return moved.sum()

    found = ascend(loss, images, images - 0.1, eps=0.1, steps=5)
    assert seen == pytest.approx([-0.1, -0.05, 0.0, 0.05, 0.1], abs=1e-6)
    assert found.item() == pytest.approx(0.6, abs=1e-6)


def test_examples_stay_inside_and_touch_no_parameter():
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
    images = torch.rand(5, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 2, 0, 1])
    for find in (
        lambda: pgd_examples(network, images, labels, eps=EPS, steps=5),
        lambda: trades_examples(network, images, eps=EPS, steps=5),
    ):
        with keyed(0, "test"):
            found = find()
        with keyed(0, "test"):
            assert torch.equal(find(), found)
        assert (found - images).abs().max() <= EPS + 1e-7
        assert found.min() >= 0
        assert found.max() <= 1
        assert not found.requires_grad
        assert all(p.grad is None for p in network.parameters())
    assert F.cross_entropy(network(pgd_examples(network, images, labels, eps=EPS, steps=5)), labels) > F.cross_entropy(
        network(images), labels
    )


def test_trades_by_hand():
    """Clean answers (1/2, 1/2) and (3/4, 1/4), attacked ones (1/4, 3/4) and (1/2, 1/2); labels 0 and 1."""
    clean = torch.tensor([[0.0, 0.0], [math.log(3), 0.0]], dtype=torch.float64, requires_grad=True)
    moved = torch.tensor([[0.0, math.log(3)], [1.0, 1.0]], dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 1])
    first = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    second = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    assert divergence(clean, moved).item() == pytest.approx((first + second) / 2, rel=1e-12)
    natural = (math.log(2) + math.log(4)) / 2
    loss = trades_loss(clean, moved, labels, beta=6.0)
    assert loss.item() == pytest.approx(natural + 3 * (first + second), rel=1e-12)
    loss.backward()
    # dKL / d moved logits = (p' - p) / B
    np.testing.assert_allclose(moved.grad, 3 * np.array([[-0.25, 0.25], [-0.25, 0.25]]), rtol=1e-12)
    assert clean.grad.abs().sum() > 0


def toy(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two classes told by a faint shift of all pixels and by a bright corner.

    The shift is always right and smaller than EPS, the corner right in 85 %.
    """
    draws = np.random.default_rng(seed)
    labels = draws.integers(0, 2, n)
    side = 2 * labels - 1
    pixels = 128 + 8.0 * side[:, None, None, None] + draws.normal(0, 4, (n, 1, 8, 8))
    pixels[:, :, :4, :4] += 90 * np.where(draws.random(n) < 0.85, side, -side)[:, None, None, None]
    return torch.from_numpy(pixels.clip(0, 255).astype(np.uint8)), torch.from_numpy(labels)


def test_adversarial_training_buys_robustness():
    """A linear model, as in Tsipras et al. 2019 (arXiv 1805.12152).

    Clean training leans on the faint shift, the attack turns it around.
    """
    settings = ModelSettings(family="own:linear", preprocessing=UNIT, num_classes=2)
    images, labels = toy(400, 0)
    test_images, test_labels = toy(300, 1)
    left = {}
    for method in ("none", "pgd-at", "trades"):
        network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2))
        torch.nn.init.zeros_(network[1].weight)
        recipe = Recipe(
            epochs=20, batch_size=50, lr=1e-2, patch_size=1, adversarial=method, attack_steps=3, eps="16/255"
        )
        trainer = Trainer(network, settings, recipe, steps=8, seed=0, device="cpu", here=ALONE)
        for epoch in range(1, 21):
            trainer.epoch(epoch, zip(images.split(50), labels.split(50), strict=True))
        model = Classifier(network, settings)
        pixels = test_images.float() / 255
        with keyed(0, "test"):
            attacked = pgd_examples(model, pixels, test_labels, eps=EPS, steps=10)
        clean, robust = ((model(x).argmax(1) == test_labels).double().mean().item() for x in (pixels, attacked))
        assert clean > 0.8
        left[method] = robust
    assert left["none"] < 0.6
    assert min(left["pgd-at"], left["trades"]) > 0.75


@pytest.mark.parametrize(("method", "passes"), [("pgd-at", 2), ("trades", 3)])
def test_attacks_see_the_network_in_eval_mode_and_one_training_pass_follows(method, passes):
    settings = ModelSettings(family="own:linear", preprocessing=UNIT, num_classes=2)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2))
    modes = []
    network.register_forward_hook(lambda module, args, output: modes.append(module.training))
    recipe = Recipe(epochs=1, batch_size=6, lr=1e-2, patch_size=1, adversarial=method, attack_steps=2)
    trainer = Trainer(network, settings, recipe, steps=1, seed=0, device="cpu", here=ALONE)
    trainer.epoch(1, [toy(6, 0)])
    assert modes == [False] * passes + [True]


@pytest.mark.parametrize("method", ["pgd-at", "trades"])
def test_a_run_with_attacks_is_repeatable(tmp_path, method):
    few = load_samples("digits", split="train", limit=60)
    changes = {"epochs": 1, "batch_size": 30, "adversarial": method, "attack_steps": 2, "mixup": 0.0}
    a, b = (training.run("symvit", few, tmp_path / f"{name}.safetensors", overrides=changes) for name in "ab")
    assert a["epochs"][0]["train_loss"] == b["epochs"][0]["train_loss"]
    assert a["recipe"]["adversarial"] == method
