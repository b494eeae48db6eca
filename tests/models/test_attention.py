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


def drawn(*shape, seed=0):
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(2, *shape, generator=draws, dtype=torch.float64).unbind(0)


LAMBDAS = [4.0, 1.0, 0.1]


@pytest.mark.parametrize("lam", LAMBDAS)
@pytest.mark.parametrize("n", range(1, 7))
def test_causal_rows_know_nothing_of_what_comes_after_them(n, lam):
    k, v = drawn(2, 8, 32, 16)
    later = torch.where(torch.arange(32) >= 20, 5.0, 1.0)[:, None]
    for keywords in ({"is_causal": True}, {"attn_mask": torch.ones(32, 32, dtype=torch.bool).tril()}):
        before = principal_attention(k, v, iterations=n, lam=lam, **keywords)
        after = principal_attention(k * later, v * later, iterations=n, lam=lam, **keywords)
        assert torch.equal(before[:, :, :20], after[:, :, :20])
        assert not torch.equal(before[:, :, 20:], after[:, :, 20:])


@pytest.mark.parametrize("lam", LAMBDAS)
@pytest.mark.parametrize("n", range(1, 7))
@pytest.mark.parametrize("gradient", ["full", "constant-sparse", "straight-through"])
def test_causal_rows_have_no_gradient_to_what_comes_after_them(n, lam, gradient):
    k, v = (x.requires_grad_() for x in drawn(1, 2, 6, 4))
    out = principal_attention(k, v, iterations=n, lam=lam, is_causal=True, gradient=gradient)
    for i in range(6):
        by_k, by_v = torch.autograd.grad(out[:, :, i].square().sum(), (k, v), retain_graph=True, allow_unused=True)
        assert by_k is None or (by_k[:, :, i + 1 :] == 0).all()  # straight through, a first iteration has no gradient
        assert (by_v[:, :, i + 1 :] == 0).all()
        assert (by_v[:, :, : i + 1] != 0).any()


@pytest.mark.parametrize("lam", LAMBDAS)
@pytest.mark.parametrize("n", [1, 2, 6])
def test_the_gradient_of_a_mu_for_each_row_is_the_true_one(n, lam):
    k, v = (x.requires_grad_() for x in drawn(1, 2, 5, 3))
    mask = torch.rand(5, 5, generator=torch.Generator().manual_seed(1)) > 0.4
    mask |= torch.eye(5, dtype=torch.bool)
    for keywords in ({"is_causal": True}, {"attn_mask": mask}):
        run = lambda k, v, kw=keywords: principal_attention(k, v, iterations=n, lam=lam, **kw)  # noqa: E731
        assert torch.autograd.gradcheck(run, (k, v))


@pytest.mark.parametrize("lam", LAMBDAS)
@pytest.mark.parametrize("n", [1, 2, 4, 6])
def test_the_last_causal_row_is_that_without_a_mask(n, lam):
    k, v = drawn(2, 3, 9, 4)
    mu = penalty(k, is_causal=True)
    torch.testing.assert_close(mu[:, :, -1:], penalty(k), rtol=1e-12, atol=0)
    for i in range(9):
        torch.testing.assert_close(mu[:, :, i : i + 1], penalty(k[:, :, : i + 1]), rtol=1e-12, atol=0)
    if n == 1:  # later the keys of other rows are those that these rows were left with
        causal = principal_attention(k, v, iterations=n, lam=lam, is_causal=True, scope="all")
        plain = principal_attention(k, v, iterations=n, lam=lam)
        torch.testing.assert_close(causal[:, :, -1], plain[:, :, -1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("lam", LAMBDAS)
@pytest.mark.parametrize("n", [1, 2, 6])
def test_a_padded_batch_is_each_sample_alone(n, lam):
    k, v = drawn(3, 2, 9, 4)
    lengths = [9, 5, 1]
    valid = torch.arange(9) < torch.tensor(lengths)[:, None]
    for mask in masks_of(valid[:, None, None, :]):
        out = principal_attention(k, v, iterations=n, lam=lam, attn_mask=mask)
        for i, length in enumerate(lengths):
            alone = principal_attention(k[i : i + 1, :, :length], v[i : i + 1, :, :length], iterations=n, lam=lam)
            torch.testing.assert_close(out[i : i + 1, :, :length], alone, rtol=0, atol=1e-10)


def masks_of(seen):
    """The same mask as bool, with -inf, and with numbers that hide in float64, float32 and half precision."""
    return [seen, *(torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, low)
                    for low in (-torch.inf, -1e30, torch.finfo(torch.float32).min, -1e4))]  # fmt: skip


@pytest.mark.parametrize("lam", LAMBDAS)
@pytest.mark.parametrize("n", [1, 2, 6])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_causal_is_its_explicit_mask(n, lam, asymmetric):
    k, v = drawn(2, 2, 6, 4)
    q = drawn(2, 2, 6, 4, seed=1)[0] if asymmetric else None
    causal = principal_attention(k, v, q=q, iterations=n, lam=lam, is_causal=True)
    for mask in masks_of(torch.ones(6, 6, dtype=torch.bool).tril()):
        masked = principal_attention(k, v, q=q, iterations=n, lam=lam, attn_mask=mask)
        torch.testing.assert_close(causal, masked, rtol=0, atol=1e-12)
    assert (causal - principal_attention(k, v, q=q, iterations=n, lam=lam)).abs().max() > 1e-3


@pytest.mark.parametrize("lam", LAMBDAS)
@pytest.mark.parametrize("n", [1, 3])
def test_rows_that_see_nothing_are_zero(n, lam):
    k, v = (x.requires_grad_() for x in drawn(2, 2, 6, 4))
    seen = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    seen[0, :, 2] = False  # a row that sees nothing and is seen
    seen[1] = False  # a sample that is all padding
    for mask in masks_of(seen):
        out = principal_attention(k, v, iterations=n, lam=lam, attn_mask=mask)
        assert (out[0, :, 2] == 0).all()
        assert (out[1] == 0).all()
        assert out.isfinite().all()
        assert all(given.isfinite().all() for given in torch.autograd.grad(out.square().sum(), (k, v)))


def test_the_scope_of_mu_is_a_choice():
    k = drawn(2, 2, 6, 4)[0]
    seen = torch.ones(6, 6, dtype=torch.bool).tril()
    assert penalty(k, attn_mask=seen, scope="all").shape == (2, 2, 1, 1)
    torch.testing.assert_close(penalty(k, is_causal=True, scope="all"), penalty(k), rtol=0, atol=0)
    for scope in ("causal", "visible"):
        torch.testing.assert_close(penalty(k, is_causal=True, scope=scope), penalty(k, attn_mask=seen))
    later = torch.where(torch.arange(6) >= 4, 5.0, 1.0)[:, None]
    layer = RPCAttention.of(SymmetricAttention(8, num_heads=2, dtype=torch.float64), iterations=4, lam=1.0)
    x = drawn(2, 6, 8)[0]
    kept = [(layer(x, is_causal=True)[:, :4] - layer(x * later, is_causal=True)[:, :4]).abs().max()]
    layer.scope = "all"
    kept.append((layer(x, is_causal=True)[:, :4] - layer(x * later, is_causal=True)[:, :4]).abs().max())
    assert kept[0] == 0
    assert kept[1] > 1e-6


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
