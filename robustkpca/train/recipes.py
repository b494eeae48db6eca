"""Recipes: everything that decides how a model is trained, but for the model, the data and the seed. No torch here."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from robustkpca.config import Frozen, read_toml
from robustkpca.errors import SpecError, unknown
from robustkpca.suites.budget import exact


class Recipe(Frozen):
    """AdamW, linear warm-up, then cosine, and what is done to the images. 0, "" and None switch a thing off.

    With `crop_area`, pictures are opened in every epoch and go through timm's transforms, in colour, normalised
    with ImageNet's mean and std; without, all images are held in memory, with their own mean and std.
    """

    epochs: int = Field(ge=1)
    batch_size: int = Field(ge=1)  # images a step, over all processes together
    lr: float = Field(gt=0, allow_inf_nan=False)  # the highest
    lr_batch: int | None = Field(default=None, ge=1)  # `lr` is for this batch size: lr * batch_size / lr_batch is used
    min_lr: float = Field(default=0.0, ge=0)
    warmup: float = Field(default=0.05, ge=0, le=1)  # share of all steps
    weight_decay: float = Field(default=0.05, ge=0)  # not of norms, biases, position and class embeddings
    clip_grad: float | None = Field(default=1.0, gt=0)  # norm
    label_smoothing: float = Field(default=0.1, ge=0, lt=1)
    patch_size: int = Field(ge=1)
    drop_path: float = Field(default=0.0, ge=0, lt=1)  # of the last block, growing linearly from 0 in the first
    ema: float | None = Field(
        default=None, gt=0, lt=1
    )  # decay of the moving average of the weights that is kept beside them
    amp: Literal["none", "bf16", "fp16"] = "none"  # on CUDA; the CPU computes in float32

    crop_padding: int = Field(default=0, ge=0)  # pixels; a random crop of the padded image
    flip: bool = False
    crop_area: tuple[float, float] | None = None  # share of the picture in a random resized crop
    rand_augment: str = ""  # timm's words, e.g. rand-m9-mstd0.5-inc1; with crop_area
    erasing: float = Field(default=0.0, ge=0, le=1)  # probability of random erasing
    mixup: float = Field(default=0.0, ge=0)  # alpha
    cutmix: float = Field(default=0.0, ge=0)  # alpha; with mixup, each batch has one of the two
    repeats: int = Field(
        default=1, ge=1
    )  # repeated augmentation: so many views of an image in a batch, fewer images an epoch

    adversarial: Literal["none", "pgd-at", "trades"] = "none"
    eps: str = "8/255"  # L-inf, in pixels
    attack_steps: int = Field(default=10, ge=1)  # of 2.5 eps / attack_steps
    beta: float = Field(default=6.0, ge=0)  # TRADES: weight of the divergence

    @field_validator("lr_batch", "clip_grad", "ema", "crop_area", mode="before")
    @classmethod
    def _none(cls, value: object) -> object:
        return None if value == "none" else value  # TOML has no other word for it

    @field_validator("crop_area")
    @classmethod
    def _shares(cls, area: tuple[float, float] | None) -> tuple[float, float] | None:
        if area is not None and not 0 < area[0] <= area[1] <= 1:
            raise ValueError("expected two shares, the smaller one first, above 0 and up to 1")
        return area

    @field_validator("eps")
    @classmethod
    def _budget(cls, eps: str) -> str:
        try:
            inside = 0 < exact(eps) <= 1
        except SpecError:
            inside = False
        if not inside:
            raise ValueError("expected a budget in pixels such as 8/255, above 0 and up to 1")
        return eps

    @model_validator(mode="after")
    def _together(self) -> Recipe:
        if self.rand_augment and self.crop_area is None:
            raise ValueError("rand_augment works on pictures: expected crop_area beside it, e.g. [0.08, 1]")
        if self.crop_area is not None and self.crop_padding:
            raise ValueError("expected crop_area or crop_padding, got both")
        if self.adversarial != "none" and (self.mixup or self.cutmix or self.erasing):
            raise ValueError(
                f"{self.adversarial} attacks images with one label, in [0, 1]: expected mixup, cutmix and erasing 0 "
                "(--set mixup=0)"
            )
        return self

    @property
    def peak_lr(self) -> float:
        """The highest learning rate, for this batch size."""
        return self.lr * self.batch_size / self.lr_batch if self.lr_batch else self.lr

    def but(self, **changes: Any) -> Recipe:
        """The recipe with other values. Raises SpecError for an unknown name or a value that it cannot have."""
        if strange := [name for name in changes if name not in Recipe.model_fields]:
            raise SpecError(unknown("part of a recipe", strange[0], Recipe.model_fields))
        return Recipe.parse({**self.model_dump(), **changes}, "recipe")


# Named after the data whose recipe they are unless another is asked for; `deit` is ImageNet's.
RECIPES: dict[str, Recipe] = {
    "digits": Recipe(epochs=50, batch_size=32, lr=2e-3, warmup=0.2, patch_size=2, drop_path=0.1, mixup=0.2),
    "fashion-mnist": Recipe(epochs=8, batch_size=50, lr=2e-3, patch_size=4, flip=True),
    "cifar10": Recipe(epochs=30, batch_size=64, lr=1e-3, patch_size=4, crop_padding=4, flip=True),
    "folder": Recipe(epochs=30, batch_size=64, lr=1e-3, patch_size=4, crop_padding=2, flip=True),
    # Touvron et al. 2021, arXiv 2012.12877, with the 50 epochs, of which 5 of warm-up, of arXiv 2406.13762.
    "deit": Recipe(
        epochs=50,
        batch_size=1024,
        lr=5e-4,
        lr_batch=512,
        min_lr=1e-5,
        warmup=0.1,
        clip_grad=None,
        patch_size=16,
        drop_path=0.1,
        ema=0.99996,
        amp="fp16",
        flip=True,
        crop_area=(0.08, 1.0),
        rand_augment="rand-m9-mstd0.5-inc1",
        erasing=0.25,
        mixup=0.8,
        cutmix=1.0,
        repeats=3,
    ),
}
_OF_DATA = {"cifar100": "cifar10", "imagenet": "deit"}


def recipe_for(kind: str) -> str:
    """The name of the recipe of a kind of data (see `datasets.DATASETS`) unless another is asked for."""
    name = _OF_DATA.get(kind, kind)
    return name if name in RECIPES else "folder"


def load_recipe(name: str) -> Recipe:
    """A recipe by name (see RECIPES) or from a TOML file that names its values. Raises SpecError."""
    if name in RECIPES:
        return RECIPES[name]
    if not name.endswith(".toml"):
        raise SpecError(unknown("recipe", name, [*RECIPES, "FILE.toml"]))
    return Recipe.parse(read_toml(Path(name), "recipe"), f"recipe {name}")


def parse_settings(texts: Iterable[str]) -> dict[str, Any]:
    """`key=value` texts, values as TOML writes them; what is no TOML is a word.

    `["mixup=0.8", "ema=none"]` -> {"mixup": 0.8, "ema": "none"}.
    """
    settings: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or key.strip() not in Recipe.model_fields:
            names = ", ".join(Recipe.model_fields)
            raise SpecError(f"--set: expected KEY=VALUE with one of {names}; got {text!r}")
        try:
            settings[key.strip()] = tomllib.loads(f"value = {value}")["value"]
        except (ValueError, RecursionError):
            settings[key.strip()] = value.strip()
    return settings
