"""Vision transformers by their settings, with fresh weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from robustkpca.errors import SpecError, unknown
from robustkpca.models.attention import (
    AlphaScaledAttention,
    AsymmetricAttention,
    RPCAttention,
    ScaledAttention,
    SymmetricAttention,
)
from robustkpca.models.families import FAMILIES
from robustkpca.models.pursuit_in_timm import put_into
from robustkpca.models.settings import ModelSettings


def build_network(settings: ModelSettings) -> nn.Module:
    """The bare network of `settings` with fresh weights: normalised images (B, C, H, W) -> logits (B, classes).

    Raises:
        SpecError: timm has no model of that name, or the family's builder returns no network.
    """
    if settings.family.startswith("timm:"):
        name = settings.family.removeprefix("timm:")
        if name not in timm.list_models():
            raise SpecError(
                unknown("timm model", name, timm.list_models(name.split("_")[0] + "*") or ["see timm.list_models()"])
            )
        network = timm.create_model(name, num_classes=settings.num_classes)
        if settings.rpc:
            pursue_in(network, settings)
        return network
    network = FAMILIES[settings.family].network(settings)
    if not isinstance(network, nn.Module):
        raise SpecError(f"model {settings.family}: expected a torch.nn.Module, got {type(network).__name__}")
    return network


def pursue_in(network: nn.Module, settings: ModelSettings) -> str:
    """Put the RPC-Attention of `settings` into a network of timm's; see `put_into`."""
    assert settings.rpc is not None
    p = settings.preprocessing
    device = next((x.device for x in network.parameters()), torch.device("cpu"))
    images = torch.zeros(2, p.channels, p.img_size, p.img_size, device=device)
    return put_into(network.eval(), settings.rpc, images, settings.title)


def vit(settings: ModelSettings) -> nn.Module:
    """timm's attention, softmax(Q K^T / sqrt(D)) V."""
    return _transformer(settings, timm.layers.Attention)


def symvit(settings: ModelSettings) -> nn.Module:
    """Keys as queries; the layers that `settings.rpc` names run PAP."""
    return _transformer(settings, SymmetricAttention)


def asymmetric_vit(settings: ModelSettings) -> nn.Module:
    """Queries of their own; the layers that `settings.rpc` names run PAP."""
    return _transformer(settings, AsymmetricAttention)


def scaled_vit(settings: ModelSettings) -> nn.Module:
    """Scaled Attention S in every layer."""
    network = _transformer(settings, AsymmetricAttention)
    for block in _blocks(network):
        block.attn = ScaledAttention.of(block.attn, tokens=network.patch_embed.num_patches + 1)
    return network


def scaled_vit_alpha(settings: ModelSettings) -> nn.Module:
    """Scaled Attention alpha x Asym in every layer."""
    network = _transformer(settings, AsymmetricAttention)
    for block in _blocks(network):
        block.attn = AlphaScaledAttention.of(block.attn)
    return network


def _blocks(network: VisionTransformer) -> list[Any]:
    return list(network.blocks)


def _transformer(settings: ModelSettings, attention: type[nn.Module]) -> VisionTransformer:
    """timm's vision transformer with one class of attention, PAP in the layers that the RPC settings name."""
    assert settings.patch_size and settings.width and settings.depth and settings.heads  # ModelSettings sees to it
    network = VisionTransformer(
        img_size=settings.preprocessing.img_size,
        patch_size=settings.patch_size,
        in_chans=settings.preprocessing.channels,
        num_classes=settings.num_classes,
        embed_dim=settings.width,
        depth=settings.depth,
        num_heads=settings.heads,
        qkv_bias=True,
        norm_layer=partial(nn.LayerNorm, eps=1e-6),
        attn_layer=attention,
    )
    blocks = _blocks(network)
    for i in settings.rpc.indices(len(blocks)) if settings.rpc else ():
        assert settings.rpc
        blocks[i].attn = RPCAttention.of(blocks[i].attn, iterations=settings.rpc.iterations, lam=settings.rpc.lam)
    return network
