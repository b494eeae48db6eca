"""Corruptions by name. No torch here: what makes a corruption is imported when it is asked for.

One corruption more is one function, that a suite names by its import path, `corruptions = ["mypkg.looks:vignette"]`,
or by the name that the decorator gives it in a module that is imported anyway,

    @METHODS.register("vignette")
    def vignette(images, severity, generators): ...

or by that of an entry point of a package in the group `robustkpca.corruptions`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from robustkpca.extensions import Registry, import_object, is_import_path

if TYPE_CHECKING:
    from torch import Tensor

    from robustkpca.corruptions.fields import Generators


class Corruption(Protocol):
    """A function of images float32 (b, C, H, W) in [0, 1], a severity 1 to 5 and one CPU generator a sample.

    It returns images of that shape on the same device, not yet clipped to [0, 1]. Every random number comes from a
    sample's own generator, so that the result depends on no other sample.
    """

    def __call__(self, images: Tensor, severity: int, gens: Generators, /) -> Tensor: ...


# The benchmark's 15, in its order: mCE is a mean over exactly these (arXiv 1903.12261). The others count nowhere.
CORRUPTIONS: tuple[str, ...] = (
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "defocus_blur",
    "glass_blur",
    "motion_blur",
    "zoom_blur",
    "snow",
    "frost",
    "fog",
    "brightness",
    "contrast",
    "elastic_transform",
    "pixelate",
    "jpeg_compression",
)
EXTRA_CORRUPTIONS: tuple[str, ...] = ("speckle_noise", "gaussian_blur", "spatter", "saturate")
SMALLEST = 28  # pixels; below, a blur of a few pixels at 224 is nothing

_MODULES = {
    "noise": ("gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise"),
    "blur": ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "gaussian_blur"),
    "weather": ("snow", "frost", "fog", "brightness", "spatter"),
    "digital": ("contrast", "elastic_transform", "pixelate", "jpeg_compression", "saturate"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


class _Corruptions(Registry[Corruption]):
    """Corruptions by name or import path."""

    def __getitem__(self, name: str) -> Corruption:
        if super().__contains__(name) or not is_import_path(name):
            return super().__getitem__(name)
        function: Corruption = import_object(name, what="corruption")
        return function

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and is_import_path(name))


METHODS = _Corruptions(
    "corruption",
    "robustkpca.corruptions",
    {name: f"robustkpca.corruptions.{_HOMES[name]}:{name}" for name in CORRUPTIONS + EXTRA_CORRUPTIONS},
)
