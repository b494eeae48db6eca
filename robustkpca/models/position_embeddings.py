"""Position embeddings of a file brought to the grid of patches that a network has, by timm's own resampling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from timm.layers import resample_abs_pos_embed, resample_abs_pos_embed_nhwc
from torch import Tensor

from robustkpca.errors import CheckpointError

KEY = "pos_embed"
SIZES = ("input_size", "img_size", "image_size")  # of a training script's arguments: the side, or (..., height, width)
Grid = tuple[int, int]  # patches in height and width


def grid_of(patches: int, patch: Grid, args: Mapping[str, Any]) -> Grid | None:
    """The grid of so many patches: what a training script's arguments say where that fits, else a square; None where
    it is none."""
    for name in SIZES:
        value = args.get(name)
        sides = (value, value) if isinstance(value, int) else value
        if isinstance(sides, tuple | list) and len(sides) >= 2 and all(isinstance(side, int) for side in sides[-2:]):
            grid = sides[-2] // patch[0], sides[-1] // patch[1]
            if grid[0] * grid[1] == patches:
                return grid
    side = math.isqrt(max(patches, 0))
    return (side, side) if side and side * side == patches else None


def resample(embedding: Tensor, old: Grid, new: Grid, prefix: int) -> tuple[Tensor, str]:
    """Position embeddings (1, prefix + patches, D) of one grid for another, and a note; bicubic, antialiased (timm)."""
    resampled = resample_abs_pos_embed(embedding, new_size=[*new], old_size=[*old], num_prefix_tokens=prefix)
    return resampled, _note(old, new)


def _note(old: Grid, new: Grid) -> str:
    return f"position embeddings resampled from {old[0]}x{old[1]} to {new[0]}x{new[1]}"


def square_grid(embedding: Tensor, patch: int, args: Mapping[str, Any], about: str) -> int:
    """The side of the square grid of (1, 1 + patches, D), of our own networks: a class token and square images.

    Raises:
        CheckpointError: it is of another kind, or of a grid that is not square.
    """
    if embedding.ndim != 3 or embedding.shape[0] != 1:
        raise CheckpointError(
            f"{about}: expected position embeddings (1, 1 + patches, width), got {tuple(embedding.shape)}"
        )
    tokens = embedding.shape[1]
    grid = grid_of(tokens - 1, (patch, patch), args)
    if grid is None:
        bare = grid_of(tokens, (patch, patch), args)
        why = f"{bare[0]}x{bare[1]} patches without a class token" if bare else "which is no square grid"
        raise CheckpointError(
            f"{about}: expected position embeddings of a class token and a square grid, got {tokens} tokens, {why}; "
            "distilled DeiT, DeiT-III, models with registers and the like load as timm:NAME"
        )
    if grid[0] != grid[1]:
        raise CheckpointError(
            f"{about}: expected position embeddings of a square grid, got {grid[0]}x{grid[1]} patches of "
            f"{grid[0] * patch}x{grid[1] * patch} px; --img-size resamples them"
        )
    return grid[0]


def squared(embedding: Tensor, patch: int, args: Mapping[str, Any], img_size: int) -> tuple[Tensor, str] | None:
    """Those of a grid that is not square, as the arguments say, for square images; None where it is square already."""
    if embedding.ndim != 3:
        return None
    grid = grid_of(embedding.shape[1] - 1, (patch, patch), args)
    if grid is None or grid[0] == grid[1] or img_size % patch:
        return None
    return resample(embedding, grid, (img_size // patch, img_size // patch), prefix=1)


def fit(network: Any, state: dict[str, Tensor], args: Mapping[str, Any], about: str, *, wanted: bool) -> list[str]:
    """Bring `state` to the grid of a timm network, only if `wanted`; shapes that no grid explains are left for strict
    loading to refuse. Returns notes.

    Raises:
        CheckpointError: as many tokens in another grid, and not `wanted`; tokens that are no grid.
    """
    old, new = state.get(KEY), getattr(network, KEY, None)
    if old is None or not isinstance(new, Tensor):
        return []
    if old.ndim == new.ndim == 4 and old.shape[-1] == new.shape[-1]:  # (1, height, width, D)
        if old.shape == new.shape or not wanted:
            return []
        state[KEY] = resample_abs_pos_embed_nhwc(old, new_size=list(new.shape[1:3]))
        return [_note((old.shape[1], old.shape[2]), (new.shape[1], new.shape[2]))]
    target, patch = _grid(network), getattr(getattr(network, "patch_embed", None), "patch_size", None)
    if old.ndim != 3 or new.ndim != 3 or target is None or patch is None:
        return []
    prefix = new.shape[1] - target[0] * target[1]  # a class token and registers, where they have positions at all
    if not 0 <= prefix <= int(getattr(network, "num_prefix_tokens", 0)):
        return []
    grid = grid_of(old.shape[1] - prefix, patch, args)
    if grid == target or (old.shape[1] != new.shape[1] and not wanted):
        return []
    if grid is None:
        raise CheckpointError(
            f"{about}: expected position embeddings of {prefix} tokens and a grid of patches, got {old.shape[1]} "
            "tokens, which is no square grid"
        )
    if not wanted:
        raise CheckpointError(
            f"{about}: expected position embeddings of {target[0]}x{target[1]} patches, got {grid[0]}x{grid[1]}; "
            "--img-size resamples them"
        )
    state[KEY], note = resample(old, grid, target, prefix)
    return [note]


def _grid(network: Any) -> Grid | None:
    size = getattr(getattr(network, "patch_embed", None), "grid_size", None)
    return (int(size[0]), int(size[1])) if isinstance(size, tuple | list) and len(size) == 2 else None
