"""Scaled Attention and PAP on asymmetric attention: the definitions,
and the whole way through checkpoints, attacks and analysis."""

import pytest
import torch
from torch import Tensor

from robustkpca.errors import CheckpointError, SpecError
from robustkpca.evaluation.loop import evaluate
from robustkpca.kpca import analysis
from robustkpca.models import checkpoints
from robustkpca.models.attention import (
    AlphaScaledAttention,
    AsymmetricAttention,
    RPCAttention,
    ScaledAttention,
    principal_attention,
)
from robustkpca.models.checkpoints import load_classifier
from robustkpca.models.classifier import Classifier
from robustkpca.models.networks import build_network
from robustkpca.models.settings import RPCSettings, split_name
from robustkpca.suites.suite import load_suite
from tests.helpers.oracles import tiny, tiny_settings

RPC = RPCSettings(iterations=3, lam=0.5, layers="all")
FAMILIES = {"rpc-vit": RPC, "scaled-vit": None, "scaled-vit-alpha": None}


def heads(seed=0, count=3):
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(count, 2, 3, 11, 5, generator=draws, dtype=torch.float64).unbind()


def weights(a: Tensor, b: Tensor) -> Tensor:
    return (a @ b.mT / a.shape[-1] ** 0.5).softmax(-1)


def test_scaled_attention_is_its_definition():
    q, k, v = heads()
    module = ScaledAttention(15, 3, tokens=11, dtype=torch.float64)
    assert (module.S == 0).all()
    torch.nn.init.normal_(module.S)
    expected = weights(q, k) @ (torch.eye(11, dtype=torch.float64) - module.S) @ v
    torch.testing.assert_close(module.attend(q, k, v, None, False, 0.0), expected, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="without masks"):
        module.attend(q, k, v, None, True, 0.0)


def test_alpha_scaled_attention_is_its_definition():
    q, k, v = heads()
    module = AlphaScaledAttention(15, 3, dtype=torch.float64)
    assert module.s == 0
    with torch.no_grad():
        module.s.fill_(0.7)
    expected = weights(q, k) @ (torch.eye(11, dtype=torch.float64) - 0.7 * weights(k, k)) @ v
    torch.testing.assert_close(module.attend(q, k, v, None, False, 0.0), expected, rtol=0, atol=1e-12)
    assert set(dict(module.named_parameters())) == {"s", "qkv.weight", "proj.weight", "proj.bias"}


@pytest.mark.parametrize("n", [1, 2, 5])
def test_pap_on_asymmetric_attention_keeps_the_queries(n):
    q, k, v = heads()
    k.requires_grad_()
    q.requires_grad_()
    mu = 11 * 15 / (4 * k.abs().sum((-2, -1), keepdim=True))
    low, y = torch.zeros_like(k), torch.zeros_like(k)
    for _ in range(n):
        m = k - low + y / mu
        s = m.sign() * (m.abs() - 0.5 * mu).clamp_min(0)
        low = weights(q, k - s - y / mu) @ v
        y = y + mu * (k - low - s)
    ours = principal_attention(k, v, q=q, iterations=n, lam=0.5)
    torch.testing.assert_close(ours, low, rtol=0, atol=1e-11)
    direction = heads(1, 1)[0]
    a, b = (torch.autograd.grad((out * direction).sum(), (q, k)) for out in (ours, low))
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    with torch.no_grad():
        symmetric = principal_attention(k, v, q=k, iterations=1, lam=1e9)
        torch.testing.assert_close(symmetric, principal_attention(k, v, iterations=1, lam=1e9), rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", ["scaled-vit", "scaled-vit-alpha"])
def test_fresh_scaled_models_are_vits(family):
    vit, scaled = tiny("vit"), build_network(tiny_settings(family))
    missing, unexpected = scaled.load_state_dict(vit.network.state_dict(), strict=False)
    assert unexpected == []
    assert {key.rpartition(".")[2] for key in missing} == {"S" if family == "scaled-vit" else "s"}
    images = torch.rand(4, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(Classifier(scaled, tiny_settings(family))(images), vit(images), rtol=0, atol=1e-5)


def test_rpc_vit_has_the_parameters_of_a_vit(tmp_path):
    vit = tiny("vit")
    checkpoints.save(tmp_path / "vit.safetensors", vit.network.state_dict(), vit.settings, {})
    rpc = load_classifier("rpc-vit", tmp_path / "vit.safetensors", iterations=2, lam=1.0, layers=(2,))
    kinds = [type(block.attn) for block in rpc.network.blocks]
    assert kinds == [AsymmetricAttention, RPCAttention]
    assert rpc.weights == vit.weights
    assert rpc.title == "RPC-ViT-w16d2h2 (2iter/layer2)"
    with pytest.raises(CheckpointError, match="expected rpc-symvit, got the weights of a vit"):
        load_classifier("rpc-symvit", tmp_path / "vit.safetensors", iterations=2, lam=1.0)
    with pytest.raises(CheckpointError, match=r"say --iterations"):
        load_classifier("rpc-vit", tmp_path / "vit.safetensors")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_whole_way(family, tmp_path, noise_samples):
    made = tiny(family, FAMILIES[family])  # all parameters disturbed, S and s too
    checkpoints.save(tmp_path / "w.safetensors", made.network.state_dict(), made.settings, {})
    loaded = load_classifier(family, tmp_path / "w.safetensors")
    images = torch.rand(4, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    assert torch.equal(loaded(images), made(images))
    torch.save(made.network.state_dict(), tmp_path / "plain.pth")
    wanted = {"heads": 2, "classes": made.settings.classes}
    if family != "rpc-vit":
        assert load_classifier(None, tmp_path / "plain.pth", **wanted).settings.family == family
        with pytest.raises(CheckpointError, match="expected vit, got the weights of a scaled-vit"):
            load_classifier("vit", tmp_path / "plain.pth", **wanted)
        with pytest.raises(SpecError, match="settings of rpc-symvit and rpc-vit"):
            load_classifier(family, tmp_path / "plain.pth", iterations=2, **wanted)
    some = noise_samples.limit(4, 0)
    run = evaluate([loaded], some, [load_suite("pgd").with_steps(2), load_suite("fgsm")], tmp_path / "run")
    assert {s.text for s in run.statuses} == {"complete"}
    table = analysis.analyze(loaded, some).tables["heads"]
    assert len(table) == 4
    assert table["projection_loss"].notna().all()


def test_surrogates_reach_rpc_vit():
    from robustkpca.attacks.gradient_paths import SURROGATES, surrogate

    made, vit = tiny("rpc-vit", RPC), tiny("vit")
    images = torch.rand(4, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    for through in SURROGATES:
        found = surrogate(made, through)(images)
        expected = vit(images) if through == "symvit" else made(images)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_names():
    assert split_name("scaled-vit-alpha-tiny") == ("scaled-vit-alpha", "tiny")
    assert split_name("scaled-vit-alpha") == ("scaled-vit-alpha", None)
    assert split_name("rpc-vit-base") == ("rpc-vit", "base")
