"""Gaussian, shot, impulse and speckle noise (ImageNet-C, arXiv 1903.12261). None scales with the image size.

Each function takes images (b, C, H, W) float32 in [0, 1], a severity 1..5 and one generator per sample, and returns
images of that shape, not yet clipped to [0, 1]. Each channel of each pixel has its own draw.
"""

from __future__ import annotations

import torch
from torch import Tensor

from robustkpca.corruptions.fields import Generators, normal, uniform


def gaussian_noise(images: Tensor, severity: int, gens: Generators) -> Tensor:
    """x + n, n normal with standard deviation 0.08 to 0.38."""
    std = (0.08, 0.12, 0.18, 0.26, 0.38)[severity - 1]
    return images + normal(gens, images.shape[1:], images.device) * std


def shot_noise(images: Tensor, severity: int, gens: Generators) -> Tensor:
    """Poisson(c x) / c with c = 60 to 3 photons at full intensity: mean x, variance x / c."""
    photons = (60.0, 25.0, 12.0, 5.0, 3.0)[severity - 1]
    rate = (images * photons).cpu()  # the Poisson draw needs the rate, and draws are made on the CPU
    counts = torch.stack([torch.poisson(r, generator=g) for r, g in zip(rate, gens, strict=True)])
    return counts.to(images.device) / photons


def impulse_noise(images: Tensor, severity: int, gens: Generators) -> Tensor:
    """Salt and pepper: a share 0.03 to 0.27 of the values becomes 0 or 1, each as likely."""
    share = (0.03, 0.06, 0.09, 0.17, 0.27)[severity - 1]
    u = uniform(gens, images.shape[1:], images.device)
    return torch.where(u < share, (u < share / 2).to(images.dtype), images)


def speckle_noise(images: Tensor, severity: int, gens: Generators) -> Tensor:
    """x + x n, n normal with standard deviation 0.15 to 0.6."""
    std = (0.15, 0.2, 0.35, 0.45, 0.6)[severity - 1]
    return images + images * (normal(gens, images.shape[1:], images.device) * std)
