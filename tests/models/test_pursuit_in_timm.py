"""RPC-Attention put into networks of timm."""

import copy

import pytest
import timm
import torch

from robustkpca.attacks.gradient_paths import SURROGATES, surrogate
from robustkpca.errors import SpecError
from robustkpca.models.attention import Pursuit
from robustkpca.models.checkpoints import load_classifier
from robustkpca.models.classifier import Classifier
from robustkpca.models.density import density
from robustkpca.models.loading import load_models
from robustkpca.models.networks import build_network
from robustkpca.models.options import ModelOptions
from robustkpca.models.pursuit_in_timm import attention_of, put_into
from robustkpca.models.settings import ModelSettings, Preprocessing, RPCSettings

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 3, "num_classes": 4}
IMAGES = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def vit(**changes):
    torch.manual_seed(0)
    return timm.models.vision_transformer.VisionTransformer(**TINY, **changes).eval()


@pytest.mark.parametrize("layers", ["first", "all", (1, 3)])
@pytest.mark.parametrize(("n", "lam"), [(1, 4.0), (3, 0.3)])
def test_is_our_own_attention_over_the_same_weights(layers, n, lam):
    rpc = RPCSettings(iterations=n, lam=lam, layers=layers)
    plain, network = vit(), vit()
    note = put_into(network, rpc, IMAGES, "vit")
    settings = ModelSettings(
        family="rpc-vit", num_classes=4, patch_size=8, width=24, depth=3, heads=3, rpc=rpc,
        preprocessing=Preprocessing(img_size=32, mean=(0.0,) * 3, std=(1.0,) * 3),
    )  # fmt: skip
    ours = build_network(settings).eval()
    ours.load_state_dict(plain.state_dict())
    assert network.state_dict().keys() == plain.state_dict().keys()
    x = IMAGES.clone().requires_grad_()
    (a,), (b,) = (torch.autograd.grad(m(x).square().sum(), x) for m in (network, ours))
    torch.testing.assert_close(network(IMAGES), ours(IMAGES), rtol=0, atol=1e-6)
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert (network(IMAGES) - plain(IMAGES)).abs().max() > 1e-6 or n == 1
    count = {"first": 1, "all": 3}.get(layers, 2)
    assert note.startswith(f"RPC-Attention put into {count} of 3 attention layers (blocks.0.attn")


@pytest.mark.parametrize(
    ("name", "size", "layers", "of"),
    [
        ("vit_tiny_patch16_224", 32, 12, 12),
        ("deit_tiny_distilled_patch16_224", 32, 12, 12),
        ("vit_little_patch16_reg4_gap_256", 32, 14, 14),
        ("beit_base_patch16_224", 32, 12, 12),
        ("deit3_small_patch16_224", 32, 12, 12),
        ("eva02_tiny_patch14_224", 28, 12, 12),
        ("vit_base_patch16_siglip_224", 32, 12, 13),
        ("mobilevit_xxs", 64, 9, 9),
    ],
)
def test_architectures_of_timm(name, size, layers, of):
    network = timm.create_model(name, **({} if "mobile" in name else {"img_size": size})).eval()
    images = torch.rand(2, 3, size, size)
    before = network(images)
    note = put_into(network, RPCSettings(iterations=2, lam=0.5, layers="all"), images, name)
    assert note.startswith(f"RPC-Attention put into {layers} of {of} attention layers")
    assert sum(isinstance(m, Pursuit) for m in network.modules()) == layers
    assert network(images).isfinite().all()
    assert (network(images) - before).abs().max() > 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cait_xxs24_224", r"blocks_token_only.0.attn .its 1 queries are not of its \d+ keys' tokens"),
        ("swin_tiny_patch4_window7_224", "WindowAttention"),
        ("xcit_nano_12_p8_224", "its 1 queries are not of"),
        ("levit_128s", "Attention, AttentionDownsample"),
        ("convnext_atto", "it has none"),
    ],
)
def test_what_pap_cannot_be_put_into_is_named(name, message):
    network = timm.create_model(name).eval()
    with pytest.raises(SpecError, match=message):
        put_into(network, RPCSettings(iterations=2, lam=1.0, layers="all"), torch.rand(1, 3, 224, 224), name)


def test_layers_that_are_asked_for_must_do():
    network = timm.create_model("pvt_v2_b0").eval()
    images = torch.rand(1, 3, 224, 224)
    assert [reason == "" for reason in attention_of(network, images).values()] == [False] * 6 + [True] * 2
    with pytest.raises(SpecError, match=r"stages.0.blocks.0.attn .its 3136 queries are not of its 49 keys' tokens."):
        put_into(network, RPCSettings(iterations=2, lam=1.0, layers="first"), images, "pvt")
    with pytest.raises(SpecError, match=r"expected numbers from 1 to 8, got \[9\]"):
        put_into(network, RPCSettings(iterations=2, lam=1.0, layers=(9,)), images, "pvt")
    assert "into 2 of 8" in put_into(network, RPCSettings(iterations=2, lam=1.0, layers=(7, 8)), images, "pvt")


@pytest.fixture
def file(tmp_path):
    torch.manual_seed(0)
    network = timm.create_model("vit_tiny_patch16_224", num_classes=4)
    torch.save(network.state_dict(), tmp_path / "vit.pth")
    return tmp_path / "vit.pth"


def test_by_name_with_settings(file):
    loaded = load_classifier("rpc-timm:vit_tiny_patch16_224", file, iterations=2, lam=0.5, layers=(1, 12), img_size=32)
    plain = load_classifier("timm:vit_tiny_patch16_224", file, img_size=32)
    assert loaded.title == "RPC vit_tiny_patch16_224 (2iter/layer1+12)"
    assert loaded.weights == plain.weights
    assert loaded.pursues and not plain.pursues
    assert any(note.startswith("RPC-Attention put into 2 of 12 attention layers") for note in loaded.notes)
    images = torch.rand(4, 3, 32, 32)
    assert list(density(loaded, images, 2)) == ["blocks.0.attn", "blocks.11.attn"]
    for through in SURROGATES:  # attacks that know RPC-Attention reach it
        other = surrogate(loaded, through)
        same = torch.allclose(other(images), loaded(images), atol=1e-6)
        assert same == (through != "symvit"), through
    torch.testing.assert_close(surrogate(loaded, "symvit")(images), plain(images), rtol=0, atol=1e-6)
    assert torch.equal(copy.deepcopy(loaded)(images), loaded(images))


def test_settings_are_needed_and_go_to_no_other_model(file):
    with pytest.raises(SpecError, match="expected --iterations and --lambda, got no iterations and no lambda"):
        load_classifier("rpc-timm:vit_tiny_patch16_224", file)
    said: list[str] = []
    options = [ModelOptions.of_text(f"{name}:vit_tiny_patch16_224,checkpoint={file}") for name in ("timm", "rpc-timm")]
    shared = ModelOptions.of_flags({"iterations": "2", "lambda": "0.5", "img_size": 32})
    plain, pursuing = load_models(options, shared, "cpu", on_notice=said.append)
    assert isinstance(plain, Classifier) and not plain.pursues
    assert isinstance(pursuing, Classifier) and pursuing.pursues
    assert any("not for" in line for line in said)
