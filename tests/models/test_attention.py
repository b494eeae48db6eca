import pytest
import torch
from torch import Tensor, nn

from benchmarks.plain import plain_pap
from robustkpca.models.attention import (
    RPCAttention,
    SymmetricAttention,
    penalty,
    principal_attention,
    symmetric_attention,
)

SETTINGS = [(n, lam) for n in (1, 2, 4, 6) for lam in (4.0, 1.0, 0.1, 0.01)]


def golden_module(golden: dict[str, Tensor], rpc: tuple[int, float] | None) -> SymmetricAttention:
    attention = SymmetricAttention(48, num_heads=3, qkv_bias=True, dtype=torch.float64)
    weights = {key.removeprefix("weights."): value for key, value in golden.items() if key.startswith("weights.")}
    attention.load_state_dict(weights, strict=True)
    return RPCAttention.of(attention, iterations=rpc[0], lam=rpc[1]) if rpc else attention


@pytest.mark.parametrize("rpc", [None, *SETTINGS])
def test_golden_outputs_and_gradients(golden_attention, rpc):
    name = f"rpc.n{rpc[0]}.lambda{rpc[1]}" if rpc else "symmetric"
    x = golden_attention["x"].clone().requires_grad_()
    out = golden_module(golden_attention, rpc)(x)
    (gradient,) = torch.autograd.grad(out, x, golden_attention["grad_output"])
    assert (out - golden_attention[f"{name}.output"]).abs().max() < 1e-11
    assert (gradient - golden_attention[f"{name}.grad_input"]).abs().max() < 1e-8


@pytest.mark.parametrize(("heads", "tokens", "dim"), [(1, 1, 5), (2, 7, 3), (5, 50, 32), (3, 197, 8)])
@pytest.mark.parametrize(("n", "lam"), [(1, 4.0), (3, 0.3)])
def test_equals_the_definition_for_any_shape(heads, tokens, dim, n, lam):
    draws = torch.Generator().manual_seed(1)
    k, v = torch.randn(2, 2, heads, tokens, dim, generator=draws, dtype=torch.float64)
    k.requires_grad_()
    ours, plain = principal_attention(k, v, iterations=n, lam=lam), plain_pap(k, v, n, lam)
    torch.testing.assert_close(ours, plain, rtol=0, atol=1e-11)
    weight = torch.randn(ours.shape, generator=draws, dtype=torch.float64)
    (a,), (b,) = (torch.autograd.grad((out * weight).sum(), k) for out in (ours, plain))
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_penalty_is_one_number_an_image_and_head():
    k = torch.ones(2, 3, 5, 4)
    k[1, 2] *= 2
    expected = torch.full((2, 3, 1, 1), 5 * 12 / (4 * 20.0))
    expected[1, 2] /= 2
    torch.testing.assert_close(penalty(k), expected)


def test_zero_keys_give_finite_output_and_gradient():
    k = torch.zeros(1, 2, 5, 4, requires_grad=True)
    v = torch.randn(1, 2, 5, 4)
    out = principal_attention(k, v, iterations=3, lam=4.0)
    (gradient,) = torch.autograd.grad(out.sum(), k)
    assert out.isfinite().all()
    assert gradient.isfinite().all()


def test_bfloat16_stays_close():
    draws = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 2, 2, 17, 16, generator=draws)
    exact = principal_attention(k, v, iterations=2, lam=4.0)
    rough = principal_attention(k.bfloat16(), v.bfloat16(), iterations=2, lam=4.0)
    assert rough.dtype == torch.bfloat16
    assert (rough.float() - exact).abs().max() < 0.1


def test_masks_hide_tokens_in_every_iteration():
    draws = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 1, 2, 6, 4, generator=draws, dtype=torch.float64)
    causal = principal_attention(k, v, iterations=2, lam=1.0, is_causal=True)
    masked = principal_attention(k, v, iterations=2, lam=1.0, attn_mask=torch.ones(6, 6, dtype=torch.bool).tril())
    torch.testing.assert_close(causal, masked)
    assert (causal - principal_attention(k, v, iterations=2, lam=1.0)).abs().max() > 1e-3


def test_dropout_acts_in_the_last_iteration_only(monkeypatch):
    from robustkpca.models import attention

    seen = []

    def spy(k, v, **options):
        seen.append(options["dropout"])
        return symmetric_attention(k, v, **options)

    monkeypatch.setattr(attention, "symmetric_attention", spy)
    layer = RPCAttention.of(SymmetricAttention(8, num_heads=2, attn_drop=0.5), iterations=3, lam=4.0)
    x = torch.randn(1, 5, 8)
    layer.train()(x)
    assert seen == [0.0, 0.0, 0.5]
    seen.clear()
    layer.eval()(x)
    assert seen == [0.0, 0.0, 0.0]


def test_rpc_shares_the_parameters_of_its_layer():
    plain = SymmetricAttention(8, num_heads=2)
    rpc = RPCAttention.of(plain, iterations=2, lam=1.0)
    assert {n: p.data_ptr() for n, p in rpc.named_parameters()} == {
        n: p.data_ptr() for n, p in plain.named_parameters()
    }


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="iterations >= 1, got 0"):
        principal_attention(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2), iterations=0, lam=1.0)
    with pytest.raises(ValueError, match="divisible"):
        SymmetricAttention(10, num_heads=3)
    with pytest.raises(ValueError, match="qk_norm"):
        SymmetricAttention(8, num_heads=2, qk_norm=True, norm_layer=nn.LayerNorm)
