"""What a model is, without its weights: everything that is needed to build it, in plain data. No torch here."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from robustkpca.config import Frozen
from robustkpca.errors import SpecError, unknown
from robustkpca.models.families import BUILT_IN, FAMILIES

# (width, depth, heads). tiny, small and base are those of DeiT with patch 16 at 224 px; micro is the embedded models'.
SIZES: dict[str, tuple[int, int, int]] = {
    "micro": (64, 4, 2),
    "tiny": (192, 12, 3),
    "small": (384, 12, 6),
    "base": (768, 12, 12),
}
PURSUING = tuple(name for name, family in BUILT_IN.items() if family.pursues)  # ours with RPC-Attention
ALL_CLASSES = "among all classes of the model"  # which answers count where the data do not restrict them
TRAINED_AS = "trained as "  # begins the note of a model that runs with other RPC settings than it was trained with
_ELSEWHERE = ("timm:", "hf-hub:", "own:")  # families whose shape is not in the settings
# Class lists that timm ships, by the number of logits that means them. Names are WordNet ids.
CLASS_LISTS: dict[int, str] = {
    1000: "imagenet-1k",
    11821: "imagenet-12k",
    21841: "imagenet-22k",
    21843: "imagenet-21k-goog",
}
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

__all__ = [
    "ALL_CLASSES",
    "CLASS_LISTS",
    "EMBEDDED",
    "FAMILIES",
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "PURSUING",
    "RPC_TIMM",
    "SIZES",
    "TIMM",
    "TRAINED_AS",
    "Layers",
    "ModelSettings",
    "Preprocessing",
    "RPCSettings",
    "layers_of",
    "parse_layers",
    "split_name",
]


# The models that come with the package, and their files.
EMBEDDED: dict[str, str] = {
    "vit": "vit.safetensors",
    "symvit": "symvit.safetensors",
    "rpc-symvit": "rpc-symvit.safetensors",
    "rpc-symvit-2iter-all": "rpc-symvit-2iter-all.safetensors",
}
TIMM = ("timm:", "hf-hub:")  # model names that timm resolves
RPC_TIMM = "rpc-"  # before such a name: with RPC-Attention put in

Layers = Literal["first", "all"] | tuple[int, ...]  # which layers run RPC-Attention; numbers count from 1


class RPCSettings(Frozen):
    """RPC-Attention: n iterations, lambda, and the layers that run it ("first", "all", or a list counted from 1)."""

    iterations: int = Field(ge=1)
    lam: float = Field(gt=0, allow_inf_nan=False, alias="lambda")
    layers: Layers = "first"

    @field_validator("layers")
    @classmethod
    def _in_one_way(cls, layers: Layers) -> Layers:
        """Numbers sorted and each once, `first` for the first layer alone: the same layers are equal settings."""
        if isinstance(layers, str):
            return layers
        numbers = tuple(sorted(set(layers)))
        return "first" if numbers == (1,) else numbers

    def indices(self, depth: int) -> tuple[int, ...]:
        """The layers counted from 0, for a model of `depth` blocks."""
        if self.layers == "all":
            return tuple(range(depth))
        numbers = (1,) if self.layers == "first" else self.layers
        if not numbers or min(numbers) < 1 or max(numbers) > depth:
            raise SpecError(f"RPC layers: expected numbers from 1 to {depth}, got {list(numbers)}")
        return tuple(n - 1 for n in numbers)

    @property
    def layers_text(self) -> str:
        """`layer1`, `layer1+3` or `all`."""
        if self.layers == "all":
            return "all"
        return "layer1" if self.layers == "first" else "layer" + "+".join(map(str, self.layers))

    @property
    def label(self) -> str:
        """The paper's way of naming a variant, e.g. 6iter/layer1 or 2iter/all."""
        return f"{self.iterations}iter/{self.layers_text}"


def layers_of(text: str) -> Layers:
    """`first`, `all`, or numbers counted from 1 such as `1,3` or `1+3`. Raises ValueError for anything else."""
    if text == "first":
        return "first"
    if text == "all":
        return "all"
    try:
        numbers = tuple(sorted({int(part) for part in text.replace("+", ",").split(",")}))
    except ValueError:
        raise ValueError("expected first, all or numbers such as 1,3 (counted from 1)") from None
    return "first" if numbers == (1,) else numbers


def parse_layers(text: str) -> Layers:
    """The value of --layers, see `layers_of`. Raises SpecError."""
    try:
        return layers_of(text)
    except ValueError as error:
        raise SpecError(f"--layers: {error}, got {text!r}") from None


class Preprocessing(Frozen):
    """How a picture becomes the model's input: brought to `img_size / crop_pct`, centre crop, then mean and std.

    `crop_mode` is timm's. center: the short side gets that length. squash: both sides do, whatever the picture's
    proportions. border: the long side does, and the rest is filled with the mean. `mean` and `std` are per channel, of
    images in [0, 1]; the model has `len(mean)` input channels.
    """

    img_size: int = Field(ge=1)
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_pct: float = Field(default=0.875, gt=0, le=2)  # above 1 the crop is larger than the picture: black edges
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos", "box", "hamming"] = "bicubic"
    crop_mode: Literal["center", "squash", "border"] = "center"

    @field_validator("std")
    @classmethod
    def _positive(cls, std: tuple[float, ...]) -> tuple[float, ...]:
        if not all(math.isfinite(s) and s > 0 for s in std):
            raise ValueError("expected positive standard deviations")
        return std

    @model_validator(mode="after")
    def _channels(self) -> Preprocessing:
        if len(self.mean) != len(self.std) or len(self.mean) not in (1, 3):
            raise ValueError(f"expected 1 or 3 channels of mean and std, got {len(self.mean)} and {len(self.std)}")
        return self

    @model_serializer(mode="wrap")
    def _without_the_usual(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without the crop mode where it is `center`: fingerprints stay what they were before there were others."""
        fields: dict[str, Any] = dump(self)
        if fields.get("crop_mode") == "center":
            del fields["crop_mode"]
        return fields

    @property
    def channels(self) -> int:
        return len(self.mean)

    @property
    def crop_text(self) -> str:
        """The crop in a few words, such as `crop 0.875` or `squash, crop 1`."""
        return ("" if self.crop_mode == "center" else f"{self.crop_mode}, ") + f"crop {self.crop_pct:g}"


class ModelSettings(Frozen):
    """Everything that builds a model.

    `family` is one of FAMILIES, `timm:NAME` (sizes are then timm's), or `own:NAME` for a network that the caller built.
    """

    family: str
    preprocessing: Preprocessing
    num_classes: int = Field(ge=2)
    classes: tuple[str, ...] | str = ()  # names in the order of the logits, or one of CLASS_LISTS; empty when unknown
    patch_size: int | None = None
    width: int | None = None
    depth: int | None = None
    heads: int | None = None
    rpc: RPCSettings | None = None

    @model_validator(mode="after")
    def _whole(self) -> ModelSettings:
        if isinstance(self.classes, str):
            if CLASS_LISTS.get(self.num_classes) != self.classes:
                raise ValueError(f"no class list {self.classes!r} with {self.num_classes} names")
        elif self.classes and len(self.classes) != self.num_classes:
            raise ValueError(f"expected {self.num_classes} class names, got {len(self.classes)}")
        elif twice := {name for name in self.classes if self.classes.count(name) > 1}:
            raise ValueError(f"class names must differ, given more than once: {', '.join(sorted(twice)[:3])}")
        if self.family.startswith(_ELSEWHERE):
            return self
        if self.family not in FAMILIES:
            raise ValueError(unknown("model", self.family, FAMILIES))
        if None in (self.patch_size, self.width, self.depth, self.heads):
            raise ValueError("expected patch_size, width, depth and heads")
        if self.width and self.heads and self.width % self.heads:
            raise ValueError(f"expected heads that divide the width {self.width}, got {self.heads}")
        if FAMILIES[self.family].pursues and self.rpc is None:
            raise ValueError("expected rpc settings: iterations, lambda and layers")
        if not FAMILIES[self.family].pursues and self.rpc is not None:
            raise ValueError(f"rpc settings do not belong to {self.family}")
        return self

    @property
    def classes_text(self) -> str:
        """The class list in a few words."""
        if isinstance(self.classes, str):
            return self.classes
        return ", ".join(self.classes[:3]) + (", ..." if len(self.classes) > 3 else "")

    @property
    def size(self) -> str | None:
        """tiny, small, base, micro, or None for another size."""
        shape = (self.width, self.depth, self.heads)
        return next((name for name, known in SIZES.items() if known == shape), None)

    @property
    def title(self) -> str:
        """The name as the paper's tables write it, e.g. `RPC-SymViT-tiny (4iter/layer1)`."""
        if self.family.startswith(_ELSEWHERE):
            name = self.family.removeprefix("timm:").removeprefix("own:")
            return f"RPC {name} ({self.rpc.label})" if self.rpc else name
        size = self.size or f"w{self.width}d{self.depth}h{self.heads}"
        return f"{FAMILIES[self.family]}-{size}" + (f" ({self.rpc.label})" if self.rpc else "")

    @property
    def long_title(self) -> str:
        """The title with all that decides RPC-Attention, e.g. `RPC-SymViT-tiny (4iter/layer1, lambda 4)`."""
        rpc = self.rpc
        return self.title if rpc is None else self.title.replace(rpc.label, f"{rpc.label}, lambda {rpc.lam:g}")


def split_name(name: str) -> tuple[str, str | None]:
    """`rpc-symvit-tiny` -> (`rpc-symvit`, `tiny`); `symvit` -> (`symvit`, None); `timm:X`, `rpc-timm:X` stay whole."""
    if name.removeprefix(RPC_TIMM).startswith("timm:") or name in FAMILIES:
        return name, None
    family, _, size = name.rpartition("-")
    if family in FAMILIES and size in SIZES:
        return family, size
    raise SpecError(unknown("model", name, [*FAMILIES, *(f"{f}-{s}" for f in FAMILIES for s in SIZES), "timm:NAME"]))
