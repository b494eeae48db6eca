"""`analyze`: what is caught in a model's layers, the means over images, the page, the figures and the command."""

import xml.dom.minidom

import numpy as np
import pandas as pd
import pytest
import torch
from timm.layers import Attention
from torch import Tensor, nn

from robustkpca.datasets.sources import load_samples
from robustkpca.errors import DataError, SpecError
from robustkpca.evaluation.loop import Resources
from robustkpca.evaluation.passes import Keep
from robustkpca.kpca import analysis, theory
from robustkpca.kpca import page as kpca_page
from robustkpca.kpca.analysis import EXTRACTORS, Mean, analyze
from robustkpca.kpca.plots import plot_gamma, plot_loss
from robustkpca.models.attention import RPCAttention, SymmetricAttention
from robustkpca.models.checkpoints import load_classifier
from robustkpca.models.settings import RPCSettings
from tests.helpers.cli import call
from tests.helpers.oracles import SIDE, classifier_of, tiny

RPC = RPCSettings(iterations=3, lam=0.5, layers=(2,))


def layers_of_each_class():
    symmetric = SymmetricAttention(24, num_heads=3, qkv_bias=True)
    return [
        Attention(24, num_heads=3, qkv_bias=True),
        Attention(24, num_heads=3, qk_norm=True, norm_layer=nn.LayerNorm),
        symmetric,
        RPCAttention.of(symmetric, iterations=4, lam=0.2),
    ]


@pytest.mark.parametrize("number", range(4))
def test_what_is_caught_gives_the_output_of_the_layer(number):
    torch.manual_seed(0)
    module = layers_of_each_class()[number].double().eval()
    for p in module.parameters():
        p.data += 0.3 * torch.randn_like(p)
    x = torch.randn(2, 7, 24, dtype=torch.float64)
    with torch.no_grad():
        heads = EXTRACTORS[type(module)](module, x)
        h = theory.log_kernel(heads.q, heads.k).softmax(-1) @ heads.v
        torch.testing.assert_close(module.proj(h.transpose(1, 2).reshape(2, 7, 24)), module(x), rtol=0, atol=1e-10)


@pytest.fixture(scope="module")
def noise():
    from robustkpca.datasets.images import ArraySamples

    pixels = np.random.default_rng(0).integers(0, 256, (30, SIDE, SIDE), dtype=np.uint8)
    ids, classes = [f"n{i}" for i in range(30)], tuple(f"c{i}" for i in range(10))
    return ArraySamples("noise", ids, np.arange(30, dtype=np.int64) % 10, classes, pixels)


@pytest.fixture(scope="module")
def found(noise):
    return analyze(tiny("rpc-symvit", RPC), noise, batch_size=30)


def test_tables_are_tidy(found):
    sizes = {"heads": 2 * 2, "gamma": 2 * 2 * 8, "spectrum": 2 * 2 * 17, "pursuit": 1 * 2 * 3}  # 2 layers, 2 heads
    assert {name: len(table) for name, table in found.tables.items()} == sizes
    assert found.layers == [("blocks.0.attn", "SymmetricAttention"), ("blocks.1.attn", "RPCAttention")]
    assert found.n == 30
    assert found.warnings == []
    keys = {"heads": [], "gamma": ["axis"], "spectrum": ["rank"], "pursuit": ["iteration"]}
    for name, more in keys.items():
        table = found.tables[name]
        assert list(table.columns[: 2 + len(more)]) == ["layer", "head", *more]
        assert not table.duplicated(["layer", "head", *more]).any()
        assert table.notna().all(axis=None)
    assert set(found.tables["pursuit"]["layer"]) == {2}
    spectrum = found.tables["spectrum"].groupby(["layer", "head"])
    assert (spectrum["share"].sum() - 1).abs().max() < 1e-9
    # The eigenvalue beside an axis is that of the same rank.
    beside = found.tables["gamma"].merge(
        found.tables["spectrum"], left_on=["layer", "head", "axis"], right_on=["layer", "head", "rank"]
    )
    pd.testing.assert_series_equal(beside["eigenvalue_x"], beside["eigenvalue_y"], check_names=False)


@pytest.mark.parametrize("batch_size", [1, 7])
def test_means_do_not_depend_on_the_batch_size(found, noise, batch_size):
    seen = []
    other = analyze(
        tiny("rpc-symvit", RPC),
        noise,
        batch_size=batch_size,
        on_progress=lambda done, total: seen.append((done, total)),
    )
    assert seen[-1] == (30, 30)
    for name, table in found.tables.items():
        # The model runs in float32, and the spread of gamma has small differences of small numbers in it.
        pd.testing.assert_frame_equal(other.tables[name], table, rtol=2e-5)


def test_means_and_errors_are_those_of_all_images_together(found, noise):
    """The first head of the first layer, caught by hand."""
    model = tiny("rpc-symvit", RPC)
    seen: list[Tensor] = []
    module = model.network.blocks[0].attn
    module.register_forward_hook(lambda m, inputs, output: seen.append(inputs[0]))
    with torch.no_grad():
        model(torch.stack([noise.image(i, model.settings.preprocessing) for i in range(30)]))
        heads = EXTRACTORS[type(module)](module, seen[0][:30])
    losses = theory.projection_loss(heads.q, heads.k, heads.v)[:, 0].numpy()
    row = found.tables["heads"].iloc[0]
    assert row["projection_loss"] == pytest.approx(losses.mean(), rel=1e-6)
    assert row["projection_loss_se"] == pytest.approx(losses.std(ddof=1) / 30**0.5, rel=1e-6)


def test_running_mean():
    values = torch.randn(23, 3, 2, dtype=torch.float64) + 1e4
    mean = Mean()
    for part in values.split([1, 9, 13]):
        mean.add(len(part), *Mean.parts(part))
    torch.testing.assert_close(mean.mean, values.mean(0))
    torch.testing.assert_close(mean.error, values.std(0) / 23**0.5, rtol=1e-9, atol=0)
    single = Mean()
    single.add(1, *Mean.parts(values[:1]))
    assert single.error.isnan().all()


def test_the_model_is_left_as_it_was(noise):
    model = tiny("rpc-symvit", RPC)
    images = torch.rand(3, 1, SIDE, SIDE)
    before = model(images)
    with torch.inference_mode():  # also inside a caller's
        analyze(model, noise.take(np.arange(3)))
    assert torch.equal(model(images), before)
    assert not any(m._forward_hooks for m in model.modules())
    assert not any(p.requires_grad for p in model.parameters())


class Exact(nn.Module):
    """Each row of an image is a token; attention in float64 whose values hold eigenvectors of one image's keys, axis d
    the (d % 6)-th."""

    def __init__(self, image: Tensor) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attn = SymmetricAttention(56, num_heads=2)
        self.double()
        tokens = self.tokens(image[None])
        with torch.no_grad():
            k = EXTRACTORS[SymmetricAttention](self.attn, tokens).k
            g = theory.log_normalizer(k, k).exp()
            gram = (theory.log_kernel(k, k).exp() / g[..., None] / g[..., None, :])[0]
            gram = gram - gram.mean(-1, keepdim=True)
            gram = gram - gram.mean(-2, keepdim=True)
            vectors = torch.linalg.eigh((gram + gram.mT) / 2).eigenvectors.flip(-1)[..., torch.arange(28) % 6]
            values = (vectors / g[0, :, :, None]).permute(1, 0, 2).reshape(28, 56)
            self.attn.qkv.weight[56:] = torch.linalg.lstsq(tokens[0], values).solution.T

    def tokens(self, x: Tensor) -> Tensor:
        rows = x.double().reshape(len(x), SIDE, SIDE)
        return torch.cat([rows, rows.square() + rows.roll(1, 1)], -1)

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(self.tokens(x)).mean(1)[:, :2]


def test_a_layer_whose_values_hold_eigenvectors_is_told_from_one_whose_values_do_not(noise):
    image = noise.image(0, tiny().settings.preprocessing)
    model = classifier_of(Exact(image), 2)
    true, others = (analyze(model, noise.take(np.array(i))).tables for i in ([0], [1, 2]))
    assert true["heads"]["gamma_relative"].max() < 1e-8
    assert true["heads"]["cosine"].min() > 1 - 1e-10
    assert true["heads"]["gamma_relative_control"].min() > 0.3
    assert (true["gamma"]["gamma_difference_mean"] < 1e-8 * true["gamma"]["eigenvalue"].max()).all()
    assert others["heads"]["gamma_relative"].min() > 0.3  # eigenvectors of another image's keys are none of these


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = SymmetricAttention(28, num_heads=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x.reshape(len(x), SIDE, SIDE), is_causal=True).mean(1)[:, :2]


class WindowAttention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)[:, :2]


def test_what_cannot_be_analysed_is_refused_by_name(noise, linear):
    with pytest.raises(
        SpecError, match=r"analyze needs one of AlphaScaledAttention, .*SymmetricAttention; attention in oracle: none"
    ):
        analyze(linear, noise)
    with pytest.raises(SpecError, match="attention in swin: WindowAttention"):
        analyze(classifier_of(nn.Sequential(WindowAttention()), 2, title="swin"), noise)
    with pytest.raises(SpecError, match=r"pursuit needs RPCAttention, .* has SymmetricAttention"):
        analyze(tiny(), noise, ["pursuit"])
    with pytest.raises(SpecError, match=r"unknown analysis 'gama'. Did you mean 'gamma'"):
        analyze(tiny(), noise, ["gama"])
    with pytest.raises(SpecError, match="at least 1, got 0"):
        analyze(tiny(), noise, batch_size=0)
    masked = classifier_of(Masked(), 2)
    with pytest.raises(SpecError, match="attn: masked attention is not analysed"):
        analyze(masked, noise)
    assert not any(m._forward_hooks for m in masked.modules())


def test_only_what_is_asked_for(noise):
    found = analyze(tiny("rpc-symvit", RPC), noise.take(np.arange(2)), ["loss"])
    assert list(found.tables) == ["heads"]
    assert not [c for c in found.tables["heads"] if "rank" in c or "gamma" in c]


def test_more_axes_than_tokens_are_warned_of_with_both_numbers(noise):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(2), SymmetricAttention(784, num_heads=2), nn.Flatten(1), nn.Linear(784, 2))
    found = analyze(classifier_of(network, 2), noise.take(np.arange(2)), ["gamma"])
    (warning,) = found.warnings
    assert warning.startswith("head width 392 is above the number of tokens 1 (layers 1)")
    assert len(found.tables["gamma"]) == 2 * 392
    assert found.tables["gamma"]["eigenvalue"].notna().sum() == 2


def test_a_class_of_attention_is_registered_in_one_line(noise, monkeypatch):
    class Special(SymmetricAttention):
        pass

    network = nn.Sequential(nn.Flatten(1, 2), Special(28, num_heads=2), nn.Flatten(1), nn.Linear(784, 2))
    with pytest.raises(SpecError, match="analyze needs"):
        analyze(classifier_of(network, 2), noise)
    monkeypatch.setitem(EXTRACTORS, Special, analysis._plain)
    assert analyze(classifier_of(network, 2), noise.take(np.arange(2))).layers == [("1", "Special")]


@pytest.mark.slow
def test_the_command_writes_tables_figures_and_a_page(tmp_path):
    log = tmp_path / "log.csv"
    log.write_text("epoch,model,projection_loss,lr\n1,SymViT,3.5,1\n2,SymViT,2.5,1\n")
    done = call(
        "analyze",
        "symvit",
        "rpc-symvit-2iter-all",
        "--limit",
        8,
        "--batch-size",
        3,
        "--log",
        log,
        "--out",
        tmp_path / "o",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("attention as kernel PCA") == 2
    assert done.stdout.count("principal attention pursuit") == 1
    assert done.stdout.count("Effective rank: exp") == 1
    page = (tmp_path / "o" / "analysis.md").read_text()
    symvit = load_classifier("symvit")
    for fact in (symvit.weights, "n = 8", "float64", "robustkpca analyze symvit rpc-symvit", "seed", torch.__version__):
        assert fact in page
    for name in ("heads", "gamma", "spectrum", "pursuit"):
        table = pd.read_parquet(tmp_path / "o" / f"{name}.parquet")
        pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "o" / f"{name}.csv"), table, check_dtype=False)
    heads = pd.read_parquet(tmp_path / "o" / "heads.parquet")
    assert list(heads["model"].unique()) == ["SymViT-micro", "RPC-SymViT-micro (2iter/all)"]
    for name in ("loss", "gamma-1", "gamma-2", "pursuit"):
        assert f"figures/{name}.png" in page
        assert (tmp_path / "o" / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        xml.dom.minidom.parse(str(tmp_path / "o" / "figures" / f"{name}.svg"))


def test_the_command_says_what_is_wrong_in_one_line(tmp_path):
    for arguments, said in (
        (("vit", "--only", "pursuit"), "pursuit needs RPCAttention, ViT-micro has Attention"),
        ((), "--model: expected at least one"),
        (("vit", "--log", tmp_path / "none.csv"), "none.csv"),
    ):
        done = call("analyze", *arguments, "--limit", 2, "--out", tmp_path / "o")
        assert done.returncode == 2
        assert said in done.stderr
        assert not (tmp_path / "o").exists()


def test_figures_are_the_same_again_and_logs_are_checked(tmp_path, found):
    own = found.tables["gamma"]
    first = plot_gamma(own[own["layer"] == 1], "t")
    assert plot_gamma(own[own["layer"] == 1], "t") == first
    log = tmp_path / "log.csv"
    for text, said in (
        ("epoch,loss\n1,2\n", "missing model, projection_loss"),
        ("epoch,model,projection_loss\n1,a,\n", "no row has"),
        ("", "log.csv"),
    ):
        log.write_text(text)
        with pytest.raises(DataError, match=said):
            plot_loss([log])


def test_a_folder_holds_one_analysis_and_nothing_else_is_touched(tmp_path):
    both = ("analyze", "symvit", "--limit", 2, "--only", "loss", "--out", tmp_path / "o")
    assert call(*both, "--only", "gamma").returncode == 0
    assert (tmp_path / "o" / "gamma.csv").exists()
    (tmp_path / "o" / "mine.csv").write_text("1")
    assert call(*both).returncode == 0
    left = {file.name for file in (tmp_path / "o").iterdir()}
    assert left == {".robustkpca", "analysis.md", "heads.csv", "heads.parquet", "mine.csv"}
    (tmp_path / "o" / ".robustkpca").unlink()
    refused = call(*both)
    assert (refused.returncode, "it holds something else" in refused.stderr) == (2, True)
    assert set(kpca_page.TABLES) == set(analysis.TABLES)


def test_weights_that_are_not_finite_are_refused_by_layer(noise):
    model = tiny()
    model.network.blocks[1].attn.qkv.weight[3, 3] = torch.nan
    with pytest.raises(DataError, match=r"SymViT-w16d2h2: weights are not finite: blocks.1.attn.qkv.weight"):
        analyze(model, noise)
    huge = tiny()
    weight = huge.network.blocks[1].attn.qkv.weight
    weight.div_(weight.abs().max()).mul_(3e38)  # finite, what comes of it is not
    with pytest.raises(DataError, match=r"blocks.1.attn \(layer 2\): its queries, keys or values are not finite"):
        analyze(huge, noise)


def test_a_cosine_is_one_whatever_the_scale():
    """Keys so long that every g but one underflows beside the largest."""
    torch.manual_seed(0)
    k, v = 60 * torch.randn(1, 1, 12, 8, dtype=torch.float64), torch.randn(1, 1, 12, 8, dtype=torch.float64)
    cosine = theory.gamma(k, v).cosine
    assert ((cosine.abs() <= 1 + 1e-12) | cosine.isnan()).all()
    assert not theory.gamma(k / 60, v).cosine.isnan().any()


def test_layers_without_pursuit_are_no_layers_that_were_not_run(noise):
    assert analyze(tiny("rpc-symvit", RPC), noise.take(np.arange(2)), ["pursuit"]).warnings == []


def test_an_interrupted_analysis_goes_on_and_halved_batches_change_nothing(tmp_path):
    """Chunks that were done are not done again, torn ones are, and the tables are the same to the bit."""
    model, samples = load_classifier("rpc-symvit"), load_samples("fashion-mnist", limit=11)
    whole = analyze(model, samples, batch_size=4)
    keep = Keep(tmp_path, "mark")

    class Stop(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done == 8:
            raise Stop

    with pytest.raises(Stop):
        analyze(model, samples, batch_size=4, keep=keep, on_progress=stop)
    kept = sorted(tmp_path.glob("*.safetensors"))
    assert len(kept) == 2
    kept[0].write_bytes(kept[0].read_bytes()[:100])
    done: list[int] = []
    resumed = analyze(model, samples, batch_size=4, keep=keep, on_progress=lambda n, total: done.append(n))
    assert done[-1] == 11
    halved = analyze(model, samples, batch_size=4, resources=Resources(on_notice=lambda text: None, workers=1))
    for name, table in whole.tables.items():
        pd.testing.assert_frame_equal(resumed.tables[name], table)
        pd.testing.assert_frame_equal(halved.tables[name], table)
