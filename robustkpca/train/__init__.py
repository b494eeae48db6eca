"""Training: a recipe (`recipes`), batches with keyed draws (`data`), the loop (`loop`) and its state (`state`).

    record = run("symvit", load_samples("digits", split="train"), Path("symvit.safetensors"))

After each epoch the whole state goes to symvit.pth and the figures to symvit.csv. Since no draw depends on what was
drawn before, the same call goes on from there, and on one process ends with the same weights, to the bit, as if it
had never been stopped.

What is listed here is imported when it is used, so that the names of recipes need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from robustkpca.train.data import augment, load_pixels
    from robustkpca.train.recipes import RECIPES, Recipe, load_recipe, parse_settings, recipe_for
    from robustkpca.train.training import accuracy, run, settings_for

_HOMES = {
    "RECIPES": "recipes",
    "Recipe": "recipes",
    "accuracy": "training",
    "augment": "data",
    "load_pixels": "data",
    "load_recipe": "recipes",
    "parse_settings": "recipes",
    "recipe_for": "recipes",
    "run": "training",
    "settings_for": "training",
}

__all__ = [
    "RECIPES",
    "Recipe",
    "accuracy",
    "augment",
    "load_pixels",
    "load_recipe",
    "parse_settings",
    "recipe_for",
    "run",
    "settings_for",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
