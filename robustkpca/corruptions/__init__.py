"""The 15 corruptions of ImageNet-C and its 4 extra ones, generated (Hendrycks & Dietterich 2019, arXiv 1903.12261).

`apply.corrupt(images, name, severity, ids)` works in batches on the device of the images. Parameters are the
published ones for 224 pixels. Lengths in pixels (radii, sigmas, displacements, trails) are multiplied by min(H, W) /
224 and may be fractional; amplitudes, probabilities and ratios (noise, contrast, zoom, pixelate, JPEG quality) are
not. The grain of snow, frost and spatter is kept from falling below the pixel, so those are coarser on small images
than a shrunk 224 image would show.

Every random draw is keyed by (seed, name, severity, sample id) and made on the CPU, so the result for a sample depends
neither on the batch it comes in nor on draws made before: bit for bit on the CPU. On another device arithmetic may
round otherwise, which can move a value by one step of 1/255.

These are not the released ImageNet-C files: frost is procedural, the images are not stored as JPEG, and some sequential
steps are done in parallel (each function says where it departs). State "generated" beside a score.
"""

from robustkpca.corruptions.apply import corrupt
from robustkpca.corruptions.registry import CORRUPTIONS, EXTRA_CORRUPTIONS, SMALLEST

__all__ = ["CORRUPTIONS", "EXTRA_CORRUPTIONS", "SMALLEST", "corrupt"]
