import pytest
import timm
import torch
from torch import nn

from robustkpca.errors import CheckpointError, SpecError
from robustkpca.models.attention import RPCAttention, SymmetricAttention
from robustkpca.models.checkpoints import load_classifier
from robustkpca.models.classifier import weights_hash
from robustkpca.models.networks import build_network
from robustkpca.models.settings import ModelSettings, Preprocessing, RPCSettings, parse_layers, split_name
from tests.helpers.oracles import OFFICIAL, classifier_of, tiny, tiny_settings


@pytest.mark.parametrize("configuration", OFFICIAL)
def test_official_logits(golden_attacks, official, configuration):
    classifier = official(configuration)
    logits = classifier(golden_attacks["images"])
    assert (logits - golden_attacks[f"{configuration}.logits"]).abs().max() < 1e-5
    torch.testing.assert_close(
        classifier.normalize(golden_attacks["images"]), golden_attacks["images_normalized"], rtol=0, atol=1e-5
    )


def test_vit_is_timms():
    settings = tiny_settings("vit")
    network = build_network(settings)
    reference = timm.models.VisionTransformer(
        img_size=28, patch_size=7, in_chans=1, num_classes=10, embed_dim=16, depth=2, num_heads=2
    )
    reference.load_state_dict(network.state_dict(), strict=True)
    x = torch.randn(2, 1, 28, 28)
    torch.testing.assert_close(network.eval()(x), reference.eval()(x))


@pytest.mark.parametrize(("layers", "expected"), [("first", [0]), ("all", [0, 1, 2]), ((1, 3), [0, 2])])
def test_rpc_runs_in_the_layers_asked_for(layers, expected):
    settings = tiny_settings("rpc-symvit", RPCSettings(iterations=2, lam=1.0, layers=layers))
    network = build_network(settings.model_copy(update={"depth": 3}))
    assert [i for i, b in enumerate(network.blocks) if isinstance(b.attn, RPCAttention)] == expected
    assert all(b.attn.parts == SymmetricAttention.parts for b in network.blocks)


def test_layers_beyond_the_depth_are_refused():
    with pytest.raises(SpecError, match=r"from 1 to 2, got .3."):
        build_network(tiny_settings("rpc-symvit", RPCSettings(iterations=2, lam=1.0, layers=(3,))))


def test_same_parameters_other_answers():
    plain, rpc = tiny("symvit"), tiny("rpc-symvit", RPCSettings(iterations=2, lam=1.0))
    assert plain.weights == rpc.weights
    x = torch.rand(3, 1, 28, 28)
    assert (plain(x) - rpc(x)).abs().max() > 1e-3


def test_gradients_reach_every_parameter_through_all_iterations():
    network = build_network(tiny_settings("rpc-symvit", RPCSettings(iterations=3, lam=0.5, layers="all")))
    network(torch.randn(2, 1, 28, 28)).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())


@pytest.mark.parametrize("family", ["vit", "symvit", "rpc-symvit"])
def test_a_sample_is_the_same_to_the_bit_in_any_batch(family):
    classifier = load_classifier({"rpc-symvit": "rpc-symvit-2iter-all"}.get(family, family))
    images = torch.rand(64, 1, 28, 28, generator=torch.Generator().manual_seed(0))

    def logits_and_gradient(part):
        part = part.clone().requires_grad_()
        logits = classifier(part)
        return logits, torch.autograd.grad(logits.logsumexp(1).sum(), part)[0]

    whole = logits_and_gradient(images)
    for size in (1, 3, 7, 32):
        parts = zip(*(logits_and_gradient(part) for part in images.split(size)), strict=True)
        for found, expected in zip(parts, whole, strict=True):
            assert torch.equal(torch.cat(found), expected), size


def test_two_heads_are_read_as_their_mean():
    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(784, 3), nn.Linear(784, 3)

        def forward(self, x):
            return self.a(x.flatten(1)), self.b(x.flatten(1))

    classifier = classifier_of(TwoHeads(), 3)
    x = torch.rand(4, 1, 28, 28)
    a, b = classifier.network(x)
    torch.testing.assert_close(classifier(x), (a + b) / 2)


def test_logits_of_another_shape_are_refused():
    with pytest.raises(CheckpointError, match=r"expected logits of shape \(2, 4\), got \(2, 3\)"):
        classifier_of(nn.Sequential(nn.Flatten(), nn.Linear(784, 3)), 4)(torch.rand(2, 1, 28, 28))


def test_weights_hash_sees_values_names_and_dtypes():
    state = {"a": torch.arange(3.0), "b": torch.ones(2)}
    assert weights_hash(state) == weights_hash(dict(reversed(state.items())))
    assert weights_hash(state) != weights_hash({**state, "b": torch.zeros(2)})
    assert weights_hash(state) != weights_hash({"a": state["a"], "c": state["b"]})
    assert weights_hash(state) != weights_hash({**state, "b": state["b"].double()})


def test_titles_are_the_papers():
    p = Preprocessing(img_size=224, mean=(0.5,) * 3, std=(0.5,) * 3)
    common = {"preprocessing": p, "num_classes": 1000, "patch_size": 16, "width": 192, "depth": 12, "heads": 3}
    assert ModelSettings(family="symvit", **common).title == "SymViT-tiny"
    rpc = RPCSettings(iterations=4, lam=4.0)
    assert ModelSettings(family="rpc-symvit", rpc=rpc, **common).title == "RPC-SymViT-tiny (4iter/layer1)"
    assert RPCSettings(iterations=2, lam=4.0, layers="all").label == "2iter/all"
    assert RPCSettings(iterations=2, lam=4.0, layers=(1, 3)).label == "2iter/layer1+3"


def test_the_same_layers_are_equal_settings_however_they_are_written():
    def of(layers):
        return RPCSettings.parse({"iterations": 2, "lambda": 4.0, "layers": layers}, "settings")

    assert of([1]) == of((1,)) == of([1, 1]) == of("first")
    assert of([1]).model_dump(mode="json")["layers"] == "first"
    assert of([3, 1, 3]) == of((1, 3))
    assert of([3, 1]).label == "2iter/layer1+3"
    assert len({of([1]), of("first"), of([2]), of("all")}) == 3
    for nonsense in ((), (0, 1), (-1,), (4,)):
        with pytest.raises(SpecError, match="from 1 to 3"):
            of(nonsense).indices(3)


def test_names():
    assert split_name("rpc-symvit-tiny") == ("rpc-symvit", "tiny")
    assert split_name("rpc-symvit") == ("rpc-symvit", None)
    assert split_name("timm:vit_tiny_patch16_224") == ("timm:vit_tiny_patch16_224", None)
    with pytest.raises(SpecError, match="Did you mean 'symvit-tiny'"):
        split_name("symvit-tinny")
    assert parse_layers("1") == "first"
    assert parse_layers("3,1") == (1, 3)
    with pytest.raises(SpecError, match="--layers"):
        parse_layers("last")


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"iterations": 0, "lambda": 1}, "iterations"), ({"iterations": 1, "lambda": 0}, "lambda"),
     ({"iterations": 1, "lambda": float("nan")}, "lambda"), ({"iterations": 1, "lambda": 1, "layer": 1}, "layer")],
)  # fmt: skip
def test_rpc_settings_that_make_no_sense(settings, message):
    with pytest.raises(SpecError, match=message):
        RPCSettings.parse(settings, "RPC settings")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("configuration", OFFICIAL)
def test_official_logits_on_cuda(golden_attacks, official, configuration):
    classifier = official(configuration).cuda()
    logits = classifier(golden_attacks["images"].cuda()).cpu()
    assert (logits - golden_attacks[f"{configuration}.logits"]).abs().max() < 1e-3


def test_a_variant_in_bfloat16_leaves_the_model_and_is_near_it():
    classifier = tiny("rpc-symvit", RPCSettings(iterations=2, lam=1.0))
    images = torch.rand(6, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    before = classifier(images)
    half = classifier.variant(dtype=torch.bfloat16)
    assert (half.dtype, classifier.dtype) == (torch.bfloat16, torch.float32)
    assert half.weights == classifier.weights
    logits = half(images)
    assert logits.dtype == torch.float32
    error = (logits - before).abs().max() / before.abs().max()
    assert 1e-5 < error < 0.05
    assert torch.equal(classifier(images), before)
    with pytest.raises(SpecError, match="expected float32 or bf16"):
        classifier.variant(dtype=torch.float16)


def test_checkpointed_blocks_change_no_bit():
    for made in (tiny(), tiny("vit")):
        x = torch.rand(4, 1, 28, 28, generator=torch.Generator().manual_seed(0)).requires_grad_()
        results = []
        for classifier in (made, made.variant(checkpointed=True)):
            logits = classifier(x)
            results.append((logits.detach(), torch.autograd.grad(logits[:, 0].sum(), x)[0]))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.slow
def test_a_compiled_variant_agrees_and_says_so():
    classifier = tiny("rpc-symvit", RPCSettings(iterations=2, lam=1.0))
    compiled = classifier.variant(compiled=True)
    assert compiled.attention_kernel.endswith(", compiled")
    assert not classifier.attention_kernel.endswith(", compiled")
    images = torch.rand(4, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(compiled(images), classifier(images), rtol=1e-4, atol=1e-5)


def test_the_weights_of_a_restricted_model_are_still_its_own():
    classifier = tiny()
    assert classifier.restricted([1, 3], ("c1", "c3")).weights == classifier.weights
