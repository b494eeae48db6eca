"""Rows are of the network as it is when it is evaluated, never of what it was."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest
import torch
from torch import nn

from robustkpca.errors import RunError
from robustkpca.evaluation.loop import evaluate
from robustkpca.evaluation.plan import Plan
from robustkpca.models.classifier import weights_hash
from robustkpca.models.code import code_hash
from robustkpca.suites.suite import load_suite
from tests.helpers.oracles import Linear, classifier_of, noise, oracle_samples, tiny


class Own(nn.Module):
    """With a parameter, a buffer, and one buffer that files do not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Linear()
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("shift", torch.zeros(1), persistent=False)

    def forward(self, x):
        return self.scale * self.inner(x) + self.shift * torch.tensor([1.0, 0.0])


def a_weight(network):
    with torch.no_grad():
        network.inner.w.neg_()


def past_autograd(network):  # no version counter sees it
    network.inner.w.data.numpy()[:] *= -1


def a_buffer(network):
    network.scale.fill_(-1)


def a_buffer_of_no_file(network):
    network.shift.fill_(1e6)


CHANGES = [a_weight, past_autograd, a_buffer, a_buffer_of_no_file]


@pytest.mark.parametrize("change", CHANGES)
def test_a_network_changed_in_place_is_another_request(tmp_path, change):
    network = Own()
    classifier, suites = classifier_of(network, 2), [load_suite("fgsm")]
    before = evaluate([classifier], oracle_samples(), suites, tmp_path / "a")
    change(network)
    with pytest.raises(RunError, match=r"holds another request \(models\[0\]\.weights"):
        evaluate([classifier], oracle_samples(), suites, tmp_path / "a")
    after = evaluate([classifier], oracle_samples(), suites, tmp_path / "b")
    fresh = evaluate([classifier_of(network, 2)], oracle_samples(), suites, tmp_path / "c")
    assert after.request.models[0].weights == fresh.request.models[0].weights != before.request.models[0].weights
    assert after.rows["prediction"].tolist() != before.rows["prediction"].tolist()


def test_a_change_before_the_first_evaluation_leaves_the_hash_of_the_file(tmp_path):
    classifier = tiny()
    known = classifier.weights
    assert known == weights_hash(classifier.network.state_dict())
    loaded = type(classifier)(classifier.network, classifier.settings, weights="0123456789abcdef")
    assert loaded.weights == loaded.twin().weights == "0123456789abcdef"
    assert loaded.variant(dtype=torch.bfloat16).weights == "0123456789abcdef"
    assert loaded.restricted([0, 1], ("a", "b")).weights == "0123456789abcdef"
    with torch.no_grad():
        next(loaded.network.parameters()).add_(1)
    changed = loaded.weights
    assert changed == weights_hash(loaded.network.state_dict()) != known
    assert loaded.twin().weights == loaded.restricted([0, 1], ("a", "b")).weights == changed


def of_its_class(classifier, monkeypatch):
    monkeypatch.setattr(Own, "forward", turned)


def of_one_module(classifier, monkeypatch):
    classifier.network.forward = types.MethodType(turned, classifier.network)


def of_a_library(classifier, monkeypatch):
    monkeypatch.setattr(nn.Module, "__call__", negative)


def by_a_decorator(classifier, monkeypatch):
    monkeypatch.setattr(Own, "forward", torch.no_grad()(turned))


def turned(self, x):
    return -self.inner(x)


def negative(self, *inputs):
    return -self._call_impl(*inputs)


@pytest.mark.parametrize("replace", [of_its_class, of_one_module, of_a_library, by_a_decorator])
def test_a_network_whose_code_was_replaced_is_another_request(tmp_path, monkeypatch, replace):
    classifier = classifier_of(Own(), 2)
    evaluate([classifier], oracle_samples(), [], tmp_path)
    replace(classifier, monkeypatch)
    with pytest.raises(RunError, match=r"holds another request \(models\[0\]\.code"):
        evaluate([classifier], oracle_samples(), [], tmp_path)


def test_a_decorator_does_not_hide_what_it_wraps(monkeypatch):
    hashes = set()
    for function in (turned, negative):
        monkeypatch.setattr(Own, "forward", torch.no_grad()(function))
        hashes.add(code_hash(Own()))
    assert len(hashes) == 2


def test_the_code_of_libraries_stands_in_no_request():
    record = Plan([tiny()], noise(), []).request.models[0]
    assert record.code is None
    assert "code" not in record.model_dump()


CODE = "from tests.evaluation.test_stale import *; print(code_hash(Own()))"


def test_code_has_one_hash_in_every_process():
    seen = {
        subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True).stdout.strip()
        for _ in range(2)
    }
    assert len(seen) == 1 and "None" not in seen
