"""What a file says of its weights, and where a model contradicts it."""

import argparse

import pytest
import torch

from robustkpca.models import checkpoints
from robustkpca.models.checkpoints import load_classifier
from robustkpca.models.origin import recipe_of
from robustkpca.models.settings import RPCSettings
from tests.helpers.oracles import tiny, tiny_settings
from tests.results.test_trainings import training


@pytest.fixture(params=["ours", "authors"])
def file(request, tmp_path):
    """Weights that say 2 iterations, lambda 4, first layer."""
    state = tiny().network.state_dict()
    if request.param == "ours":
        settings = tiny_settings("rpc-symvit", RPCSettings(iterations=2, lam=4.0))
        checkpoints.save(tmp_path / "m.safetensors", state, settings, training(7))
        return tmp_path / "m.safetensors"
    args = argparse.Namespace(robust=True, num_iter=2, lambd=4.0, layer=0)
    torch.save({"model": state, "args": args}, tmp_path / "m.pth")
    return tmp_path / "m.pth"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ()),
        ({"lam": 4.0, "iterations": 2, "layers": "first"}, ()),
        ({"lam": 1.0}, ("lambda 1 (file: 4)",)),
        ({"layers": "all", "iterations": 3}, ("iterations 3 (file: 2)", "layers all (file: first)")),
        ({"layers": (1, 2)}, ("layers all (file: first)",)),
        ({"img_size": 56}, ("image size 56 (file: 28)",)),
    ],
)
def test_settings_that_contradict_the_file(file, options, expected):
    heads = {} if file.suffix == ".safetensors" else {"heads": 2}
    model = load_classifier(checkpoint=file, **options, **heads)
    assert tuple(map(str, model.origin.overrides)) == expected
    assert model.twin().variant(dtype=torch.bfloat16).origin == model.origin
    as_sym = load_classifier("symvit", file, **heads)
    assert tuple(map(str, as_sym.origin.overrides)) == ("family symvit (file: rpc-symvit)",)


def test_trainings_of_one_recipe_differ_in_the_seed_alone(file):
    known = recipe_of(training(0))
    assert recipe_of(training(3)) == (known[0], 3)
    if file.suffix == ".safetensors":
        origin = load_classifier(checkpoint=file).origin
        assert (origin.recipe, origin.seed) == (known[0], 7)
    for other in (
        training(0, adversarial="pgd-at"),
        training(0) | {"n": 6},
        training(0) | {"holdout": 1},
        training(0) | {"start": "w" * 16},
        training(0) | {"data": {"name": "fashion-mnist", "hash": "of seed 0"}},
    ):
        assert recipe_of(other)[0] != known[0]
    folders = [training(seed) | {"data": {"name": "folder:x", "hash": f"{seed}"}} for seed in (0, 1)]
    assert recipe_of(folders[0])[0] != recipe_of(folders[1])[0]  # may be other pictures altogether
    assert recipe_of({}) == (None, None)
