"""How much of the sparse part S there is."""

import pytest
import torch

from robustkpca import load_classifier, load_samples
from robustkpca.diagnosis.findings import findings
from robustkpca.evaluation.loop import evaluate
from robustkpca.kpca.theory import pursuit_trace
from robustkpca.models.attention import RPCAttention, principal_attention
from robustkpca.models.density import density
from robustkpca.models.settings import RPCSettings
from robustkpca.report.paper_tables import budgets
from robustkpca.report.provenance import density_text, receipt, receipt_in_brief
from robustkpca.suites.suite import load_suite
from robustkpca.tasks.classification.health import _rounded
from tests.helpers.oracles import noise, tiny


def images(n=10):
    return torch.rand(n, 1, 28, 28, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("lam", "expected"), [(1e4, 0.0), (1e-9, 1.0)])
def test_a_threshold_that_none_or_all_pass(lam, expected):
    model = tiny("rpc-symvit", RPCSettings(iterations=3, lam=lam, layers="all"))
    shares = density(model, images(), 4)
    assert list(shares) == ["blocks.0.attn", "blocks.1.attn"]
    assert all(share == pytest.approx([expected] * 3, abs=1e-3) for share in shares.values())


def test_is_that_of_the_iteration_written_out():
    k, v = torch.randn(2, 2, 3, 9, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    seen = []
    principal_attention(
        k, v, iterations=4, lam=0.7, watch=lambda x, t: seen.append((x.abs() > t).double().mean((-2, -1)))
    )
    trace = pursuit_trace(k, v, iterations=4, lam=0.7, gradients=False)
    torch.testing.assert_close(torch.stack(seen, dim=-1), trace.nonzero, rtol=0, atol=1e-12)


def test_depends_on_no_batch_and_leaves_the_model_alone():
    model = tiny("rpc-symvit", RPCSettings(iterations=2, lam=0.5))
    before = model(images())
    found = density(model, images(), 10)
    assert 0 < found["blocks.0.attn"][0] < 1
    for size in (1, 3, 7):
        assert density(model, images(), size)["blocks.0.attn"] == pytest.approx(found["blocks.0.attn"], abs=1e-9)
    assert torch.equal(model(images()), before)
    assert all(m.watch is None for m in model.network.modules() if isinstance(m, RPCAttention))
    assert density(tiny(), images(), 10) == {}


def test_stands_in_the_receipt_and_zero_is_a_finding(tmp_path):
    models = [tiny(), tiny("rpc-symvit", RPCSettings(iterations=2, lam=0.5)),
              tiny("rpc-symvit", RPCSettings(iterations=2, lam=1e4, layers="all"))]  # fmt: skip
    run = evaluate(models, noise(), [load_suite("fgsm")], tmp_path / "run")
    _, some, none = run.models
    first, last = run.health[some]["density"]["blocks.0.attn"]
    assert density_text(run, some) == f"layer 1 {first:.2g} to {last:.2g} (first 30 samples)"
    assert density_text(run, none) == "layer 1 0 to 0, layer 2 0 to 0 (first 30 samples)"
    assert list(receipt(run)[0]["share of S that is not zero"]) == [
        "none",
        density_text(run, some),
        density_text(run, none),
    ]
    assert f"{some}: lambda 0.5, S not zero: {density_text(run, some)}." in receipt_in_brief(run)
    assert any(f"S not zero: {density_text(run, some)}" in line for line in budgets([run]).receipt)
    levels = {f.model: f.level for f in findings(run) if f.rule == "sparse-part"}
    assert levels == {some: "pass", none: "warn"}


def test_a_share_that_is_small_is_not_zero():
    assert _rounded([6.6e-8, 0.0, 0.123456789]) == [6.6e-8, 0.0, 0.123457]


def test_of_the_embedded_models():
    """What reports/README.md says of them."""
    samples = load_samples("fashion-mnist", limit=100)
    expected = {
        "rpc-symvit": [[0.47, 0.68, 0.78, 0.84, 0.87, 0.89]],
        "rpc-symvit-2iter-all": [[0.35, 0.42], [0.01, 0.03], [0.63, 0.79], [0.68, 0.78]],
    }
    for name, shares in expected.items():
        model = load_classifier(name)
        pixels = torch.stack([samples.image(i, model.settings.preprocessing) for i in range(100)])
        for layer, share in zip(density(model, pixels, 100).values(), shares, strict=True):
            assert layer == pytest.approx(share, abs=0.01)
