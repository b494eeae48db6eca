"""What a weight file says of its weights beside their values, and where a model contradicts it. No torch here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from robustkpca.models.settings import ModelSettings

# Data that are the same under one name everywhere: trainings on draws of them differ in the seed alone.
_ONE_DATA_SET = ("digits", "fashion-mnist", "cifar10", "cifar100", "imagenet")


class Override(NamedTuple):
    """A setting, by its name in `ModelOptions` (or `family`), that contradicts the file."""

    setting: str
    value: Any
    in_file: Any

    def __str__(self) -> str:
        """As labels say it, e.g. `lambda 1 (file: 4)`."""
        word = {"lam": "lambda", "img_size": "image size"}.get(self.setting, self.setting)
        return f"{word} {_text(self.value)} (file: {self.file_text})"

    @property
    def file_text(self) -> str:
        """What the file says."""
        return _text(self.in_file)


@dataclass(frozen=True)
class Origin:
    """Where weights come from.

    weight_choice: which weights of a file that may hold two, "raw" (what was optimised) or "ema".
    overrides: each setting that contradicts the file.
    recipe: hash of how they were trained but for the seed; None where the file does not say. seed: of that training.
    """

    weight_choice: str = "raw"
    overrides: tuple[Override, ...] = ()
    recipe: str | None = None
    seed: int | None = None


def overrides_of(
    settings: ModelSettings, family: str, rpc: Mapping[str, Any], img_size: int | str
) -> tuple[Override, ...]:
    """How settings contradict a file that says this family, these RPC settings (as the file has them; None or missing:
    not said) and this side in pixels."""
    said = [Override("family", settings.family, family)]
    if ours := settings.rpc:
        said += [
            Override("iterations", ours.iterations, rpc.get("iterations")),
            Override("lam", ours.lam, rpc.get("lambda")),
            Override("layers", _layers(ours.layers, settings.depth), _layers(rpc.get("layers"), settings.depth)),
        ]
    said.append(Override("img_size", settings.preprocessing.img_size, img_size))
    return tuple(it for it in said if it.in_file is not None and it.value != it.in_file)


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _layers(layers: Any, depth: int | None) -> str | None:
    """Layers in one way of many: `first`, `all` or `1+3`; None where nothing is said."""
    if layers is None or isinstance(layers, str):
        return layers
    numbers = tuple(sorted(set(layers)))
    if depth is not None and numbers == tuple(range(1, depth + 1)):
        return "all"
    return "first" if numbers == (1,) else "+".join(map(str, numbers))


def recipe_of(training: Mapping[str, Any]) -> tuple[str | None, int | None]:
    """(hash, seed) of the training that a file of `robustkpca train` records; (None, None) where it says too little.

    The hash is over all that decides a training but the seed: the recipe (with adversarial training), the number of
    images, the held-out ones, the weights it started from and the data. Which of a public set's images were drawn
    depends on the seed and does not count; of other data their content does. The model's settings are not in it.
    """
    data = training.get("data")
    if not {"recipe", "seed", "n"} <= training.keys() or not isinstance(data, Mapping):
        return None, None
    facts = {name: training.get(name) for name in ("recipe", "n", "holdout", "start")}
    facts["data"] = data.get("name") if data.get("name") in _ONE_DATA_SET else [data.get("name"), data.get("hash")]
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16], int(training["seed"])
