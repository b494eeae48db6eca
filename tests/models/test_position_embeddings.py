"""Position embeddings of any grid: resampled as timm does, or refused in one line."""

import argparse

import pytest
import timm
import torch
from timm.layers import resample_abs_pos_embed, resample_abs_pos_embed_nhwc

from robustkpca.errors import CheckpointError
from robustkpca.models import checkpoints
from robustkpca.models.checkpoints import inspect, load_classifier
from robustkpca.models.position_embeddings import grid_of
from tests.helpers.oracles import tiny, tiny_settings

PATCH, WIDTH = 7, 16


@pytest.fixture(scope="module")
def state():
    return dict(tiny("vit").network.state_dict())


def with_tokens(state, *shape):
    return {**state, "pos_embed": torch.randn(1, *shape, WIDTH, generator=torch.Generator().manual_seed(0))}


def test_grids():
    patch = (16, 16)
    assert grid_of(196, patch, {}) == (14, 14)
    assert grid_of(15, patch, {}) is None
    assert grid_of(0, patch, {}) is None
    assert grid_of(16, (8, 8), {"input_size": (16, 64)}) == (2, 8)
    assert grid_of(16, (8, 8), {"img_size": [3, 64, 16]}) == (8, 2)
    assert grid_of(16, (8, 4), {"input_size": 32}) is not None
    assert grid_of(32, (8, 4), {"input_size": 32}) == (4, 8)
    assert grid_of(16, (8, 8), {"input_size": 224}) == (4, 4)  # fine-tuned at another size than the arguments say
    assert grid_of(16, (8, 8), {"input_size": ("a", "b")}) == (4, 4)


@pytest.mark.parametrize("img_size", [None, 28, 42])
@pytest.mark.parametrize(
    ("shape", "message"),
    [((16,), "got 16 tokens, 4x4 patches without a class token.*timm:NAME"), ((1,), "got 1 tokens"),
     ((15,), "got 15 tokens, which is no square"), ((18,), "got 18 tokens, which is no square"),
     ((4, 4), r"\(1, 1 \+ patches, width\)|3 dimensions")],
)  # fmt: skip
@pytest.mark.parametrize("recorded", [False, True])
def test_other_tokens_are_refused_in_one_line(tmp_path, state, shape, message, img_size, recorded):
    if recorded:
        checkpoints.save(tmp_path / "m.safetensors", with_tokens(state, *shape), tiny_settings("vit"), {})
        path, message = tmp_path / "m.safetensors", message if img_size == 42 else "pos_embed expected"
    else:
        path = tmp_path / "m.pth"
        torch.save(with_tokens(state, *shape), path)
    with pytest.raises(CheckpointError, match=message) as raised:
        load_classifier("vit", path, heads=None if recorded else 2, img_size=img_size)
    assert "\n" not in str(raised.value)


def test_a_grid_that_is_not_square_is_resampled_on_request_and_never_reshaped(tmp_path, state):
    """2 x 8 patches are as many as 4 x 4."""
    oblong = with_tokens(state, 17)
    torch.save({"model": oblong, "args": argparse.Namespace(input_size=(14, 56))}, tmp_path / "m.pth")
    with pytest.raises(CheckpointError, match=r"got 2x8 patches of 14x56 px; --img-size resamples them"):
        load_classifier("vit", tmp_path / "m.pth", heads=2)
    assert "2x8 patches" in dict(inspect(tmp_path / "m.pth"))["model"]
    for side in (28, 42):
        loaded = load_classifier("vit", tmp_path / "m.pth", heads=2, img_size=side)
        new = side // PATCH
        true = resample_abs_pos_embed(oblong["pos_embed"], [new, new], [2, 8], num_prefix_tokens=1)
        assert torch.equal(loaded.network.pos_embed, true)
        assert loaded.settings.preprocessing.img_size == side
        assert f"position embeddings resampled from 2x8 to {new}x{new}" in loaded.notes
    same = {"model": state, "args": {"input_size": [28, 28]}}
    torch.save(same, tmp_path / "square.pth")
    assert torch.equal(load_classifier("vit", tmp_path / "square.pth", heads=2).network.pos_embed, state["pos_embed"])


def timm_file(path, name, embedding=None, **content):
    network = timm.create_model(name, num_classes=5)
    state = network.state_dict()
    if embedding is not None:
        state["pos_embed"] = embedding
    torch.save({"model": state, **content}, path)
    return network


@pytest.mark.parametrize(
    ("name", "prefix"),
    [("deit3_small_patch16_224", 0), ("vit_medium_patch16_reg4_gap_256", 0), ("vit_tiny_patch16_224", 1),
     ("deit_tiny_distilled_patch16_224", 2), ("vit_small_patch14_reg4_dinov2", 0)],
)  # fmt: skip
def test_class_tokens_and_registers_as_timm_keeps_them(tmp_path, name, prefix):
    network = timm_file(tmp_path / "m.pth", name)
    old, side = network.patch_embed.grid_size[0], network.patch_embed.patch_size[0] * 6
    loaded = load_classifier(f"timm:{name}", tmp_path / "m.pth", img_size=side)
    true = resample_abs_pos_embed(network.pos_embed, [6, 6], [old, old], num_prefix_tokens=prefix)
    assert torch.equal(loaded.network.pos_embed, true)
    assert loaded.notes == ("weights from entry 'model'", f"position embeddings resampled from {old}x{old} to 6x6")


def test_a_timm_file_of_another_grid(tmp_path):
    name = "timm:test_vit"
    network = timm.create_model("test_vit", num_classes=5)
    tokens, width = network.pos_embed.shape[1:]
    assert network.patch_embed.grid_size == (10, 10)
    embedding = torch.randn(1, tokens, width)
    patch = network.patch_embed.patch_size[0]
    args = argparse.Namespace(input_size=(3, 5 * patch, 20 * patch))
    timm_file(tmp_path / "m.pth", "test_vit", embedding, args=args)
    with pytest.raises(CheckpointError, match="expected position embeddings of 10x10 patches, got 5x20"):
        load_classifier(name, tmp_path / "m.pth")
    loaded = load_classifier(name, tmp_path / "m.pth", img_size=10 * patch)
    assert torch.equal(loaded.network.pos_embed, resample_abs_pos_embed(embedding, [10, 10], [5, 20], 1))
    timm_file(tmp_path / "m.pth", "test_vit", torch.randn(1, tokens + 3, width))
    with pytest.raises(CheckpointError, match="got 104 tokens, which is no square grid"):
        load_classifier(name, tmp_path / "m.pth", img_size=10 * patch)
    with pytest.raises(CheckpointError, match=r"does not fit timm:test_vit: 1 of another shape \(pos_embed"):
        load_classifier(name, tmp_path / "m.pth")
    timm_file(tmp_path / "m.pth", "test_vit", torch.randn(1, 10, 10, width))
    with pytest.raises(CheckpointError, match=r"1 of another shape \(pos_embed"):
        load_classifier(name, tmp_path / "m.pth", img_size=10 * patch)


def test_embeddings_with_height_and_width(tmp_path):
    network = timm.create_model("test_vit", num_classes=5)
    for shape in ((1, 6, 9, 8), (1, 12, 12, 8)):
        network.pos_embed = torch.nn.Parameter(torch.randn(1, 12, 12, 8))
        state = {"pos_embed": torch.randn(shape)}
        before = state["pos_embed"]
        notes = checkpoints.fit(network, state, {}, "m.pth", wanted=True)
        assert torch.equal(state["pos_embed"], resample_abs_pos_embed_nhwc(before, [12, 12]))
        assert notes == ([] if shape[1] == 12 else ["position embeddings resampled from 6x9 to 12x12"])
