"""Training: a recipe (`recipes`), batches with keyed draws (`data`), the loop (`loop`) and its state (`state`).

    record = run("symvit", load_samples("digits", split="train"), Path("symvit.safetensors"))

After each epoch the whole state goes to symvit.pth and the figures to symvit.csv. Since no draw depends on what was
drawn before, the same call goes on from there, and on one process ends with the same weights, to the bit, as if it
had never been stopped.
"""

from robustkpca.train.data import augment, load_pixels
from robustkpca.train.recipes import RECIPES, Recipe, load_recipe, parse_settings, recipe_for
from robustkpca.train.training import accuracy, run, settings_for

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
