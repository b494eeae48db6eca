"""Uniform noise: no attack, but what an attack of this size should beat."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchattacks.attack import Attack


class UniformNoise(Attack):
    """u + e, e uniform in [-eps, eps], clipped to [0, 1]: the noise that an attack of this size should beat."""

    def __init__(self, model: nn.Module, eps: float = 8 / 255) -> None:
        super().__init__("UniformNoise", model)
        self.eps = eps

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return (images + torch.empty_like(images).uniform_(-self.eps, self.eps)).clamp(0, 1)
