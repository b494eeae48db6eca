"""Networks that return something else than a tensor of logits."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import robustkpca
from robustkpca.errors import CheckpointError
from robustkpca.models.classifier import logits_of
from tests.helpers.oracles import Linear, classifier_of, oracle, oracle_samples

Pair = namedtuple("Pair", ["logits", "aux_logits"])


class Output(OrderedDict):
    """As transformers' ModelOutput: entries that are attributes, too."""

    def __getattr__(self, name):
        return self[name] if name in self else super().__getattribute__(name)


@dataclass
class Record:
    loss: object
    logits: torch.Tensor


class Returning(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.inner, self.form = Linear(), form

    def forward(self, x):
        return self.form(self.inner(x))


# what the network returns -> what the note says
FORMS = {
    "attribute": (lambda y: Output(logits=y, hidden_states=None), "entry `logits` of the network's Output"),
    "dict": (lambda y: {"loss": None, "logits": y}, "entry `logits` of the network's dict"),
    "dataclass": (lambda y: Record(None, y), "entry `logits` of the network's Record"),
    "named pair": (lambda y: Pair(y, 2 * y), "entry `logits` of the network's Pair"),
    "features": (lambda y: (y, torch.ones(len(y), 7)), "the first of the network's 2 outputs"),
    "list": (lambda y: [y, None, None], "the first of the network's 3 outputs"),
    "one": (lambda y: (y,), "the first of the network's 1 outputs"),
    "three heads": (lambda y: (y, 0 * y, 0 * y), "the first of the network's 3 outputs"),
    "two heads": (lambda y: (y * 1.5, y * 0.5), "the mean of the network's two heads"),
}
# what has no logits -> what the error says
OTHERS = {
    "array": (lambda y: y.detach().numpy(), "got ndarray"),
    "arrays": (lambda y: {"logits": y.detach().numpy()}, "got dict of logits"),
    "other names": (lambda y: {"out": y, "aux": y}, "got dict of out, aux"),
    "loss first": (lambda y: (None, y), "got tuple of NoneType, Tensor"),
    "nothing": (lambda _: None, "got NoneType"),
    "empty": (lambda _: (), "got tuple of nothing"),
    "numbers": (lambda y: y.tolist(), "got list of list, list"),
    "whole numbers": (lambda y: y.argmax(1), "expected logits of floats, got int64"),
}


def images(n=5):
    return torch.rand(n, 1, 28, 28, generator=torch.Generator().manual_seed(0))


def with_gradient(model, x):
    x = x.clone().requires_grad_()
    logits = model(x)
    return logits.detach(), torch.autograd.grad(logits[:, 0].exp().sum(), x)[0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", ["plain", "train", "twin", "restricted"])
def test_logits_and_gradients_are_those_of_the_bare_network(form, way):
    make, note = FORMS[form]
    made, bare = classifier_of(Returning(make), 2), oracle()
    if way == "train":
        made.train()
    if way == "twin":
        made.note_logits()
        made = made.twin()
        assert len(made.notes) == 1
    if way == "restricted":
        made, bare = (model.restricted([1, 0], ("1", "0")) for model in (made, bare))
    for ours, theirs in zip(with_gradient(made, images()), with_gradient(bare, images()), strict=True):
        assert torch.equal(ours, theirs)
    if way != "restricted":
        made.note_logits()
        made.note_logits()
        assert len(made.notes) == 1
        assert note in made.notes[0]


@pytest.mark.parametrize("form", OTHERS)
def test_anything_else_is_one_line(tmp_path, form):
    make, message = OTHERS[form]
    made = classifier_of(Returning(make), 2)
    for use in (lambda: made(images()), made.note_logits):
        with pytest.raises(CheckpointError, match=message) as raised:
            use()
        assert str(raised.value).startswith("oracle: expected")
        assert "\n" not in str(raised.value)
    with pytest.raises(CheckpointError, match=message):
        robustkpca.evaluate([made], oracle_samples(), [robustkpca.load_suite("fgsm")], out=tmp_path / "never")
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize("form", ["attribute", "features"])
def test_an_evaluation_says_it_once_and_gives_the_same_rows(tmp_path, form):
    make, note = FORMS[form]
    samples, suites = oracle_samples(), [robustkpca.load_suite("fgsm")]
    plain = robustkpca.evaluate([oracle()], samples, suites, out=tmp_path / "plain")
    made = classifier_of(Returning(make), 2)
    for _ in range(2):  # the second time the same request: nothing is refused
        run = robustkpca.evaluate([made], samples, suites, out=tmp_path / "made")
    (kept,) = run.request.models[0].notes
    assert note in kept
    columns = ["perturbation", "budget", "sample", "prediction", "correct", "confidence"]
    assert run.rows[columns].equals(plain.rows[columns])


def test_random_draws_of_a_network_are_not_disturbed():
    made = classifier_of(Returning(lambda y: (y + torch.rand(1), None)), 2)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    made.note_logits()
    assert torch.equal(torch.rand(2), expected)


def test_a_network_that_fails_fails_where_it_is_used():
    def fail(_):
        raise RuntimeError("out of something")

    made = classifier_of(Returning(fail), 2)
    made.note_logits()
    with pytest.raises(RuntimeError, match="out of something"):
        made(images())


@pytest.mark.slow
def test_compiled(tmp_path):
    made = classifier_of(Returning(FORMS["attribute"][0]), 2).variant(compiled=True)
    assert len(made.notes) == 1
    for ours, theirs in zip(with_gradient(made, images()), with_gradient(oracle(), images()), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_bfloat16():
    made = classifier_of(Returning(lambda y: {"logits": y}), 2)
    half = made.variant(dtype=torch.bfloat16)
    half.note_logits()
    assert len(half.notes) == 1
    assert half(images()).dtype == torch.float32


def test_a_tensor_is_itself():
    y = torch.rand(2, 3)
    assert logits_of(y) == (y, "")
