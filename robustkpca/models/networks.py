"""Vision transformers by their settings, with fresh weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import timm
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
from robustkpca.models.settings import ModelSettings

# What the layers of each family compute, before those of SCALED are scaled and those that the RPC settings name run
# PAP.
ATTENTION: dict[str, Any] = {
    "vit": timm.layers.Attention,
    "symvit": SymmetricAttention,
    "rpc-symvit": SymmetricAttention,
    "rpc-vit": AsymmetricAttention,
    "scaled-vit": AsymmetricAttention,
    "scaled-vit-alpha": AsymmetricAttention,
}
SCALED: dict[str, Any] = {
    "scaled-vit": lambda attention, tokens: ScaledAttention.of(attention, tokens=tokens),
    "scaled-vit-alpha": lambda attention, tokens: AlphaScaledAttention.of(attention),
}


def build_network(settings: ModelSettings) -> nn.Module:
    """The bare network of `settings` with fresh weights: normalised images (B, C, H, W) -> logits (B, classes)."""
    if settings.family.startswith("timm:"):
        name = settings.family.removeprefix("timm:")
        if name not in timm.list_models():
            raise SpecError(
                unknown("timm model", name, timm.list_models(name.split("_")[0] + "*") or ["see timm.list_models()"])
            )
        return timm.create_model(name, num_classes=settings.num_classes)
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
        attn_layer=ATTENTION[settings.family],
    )
    blocks: list[Any] = list(network.blocks)
    if settings.family in SCALED:
        for block in blocks:
            block.attn = SCALED[settings.family](block.attn, network.patch_embed.num_patches + 1)
    if settings.rpc:
        for i in settings.rpc.indices(len(blocks)):
            block = blocks[i]
            block.attn = RPCAttention.of(block.attn, iterations=settings.rpc.iterations, lam=settings.rpc.lam)
    return network
