"""Weight files of the wild, read without running any code in them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from robustkpca.errors import CheckpointError, brief
from robustkpca.files import no_file
from robustkpca.models.weight_formats import RECORD_KEY, open_file, too_large

__all__ = ["PLACES", "RECORD_KEY", "Weights", "Which", "read"]

Which = Literal["raw", "ema"]
# Where training scripts keep the weights, in the order they are looked for.
PLACES: dict[Which, tuple[str, ...]] = {
    "raw": ("model", "state_dict", "model_state_dict", "net", "network", "params", "module"),
    "ema": ("model_ema", "state_dict_ema", "ema", "ema_model", "params_ema", "ema_state_dict", "model_ema_state_dict"),
}
_SCALARS = (str, bytes, int, float, np.generic, PurePath, type(None))
_DEEPER = (*PLACES["raw"], "shadow")  # inside such an entry, what holds the weights
_AVERAGED = "n_averaged"  # counts the models in an average that torch.optim.swa_utils made
_PREFIXES = ("module.", "_orig_mod.")
# Attributes that hold the network in training scripts. A network may have one of its own, so in our files they stay.
_ATTRIBUTES = ("model.", "net.", "network.", "timm_model.")


@dataclass(frozen=True)
class Weights:
    """What a file holds: a clean state dict, and what the file says beside it."""

    state: dict[str, Tensor]
    place: str = ""  # the entry the weights came from, "" when the file is the state dict itself
    prefix: str = ""  # the wrappers' prefix that was taken off every key
    mean_std: tuple[tuple[float, ...], tuple[float, ...]] | None = (
        None  # of a normaliser that was saved with the network
    )
    settings: dict[str, Any] | None = None  # ours, in safetensors metadata
    training: dict[str, Any] = field(default_factory=dict)  # ours
    args: dict[str, Any] = field(default_factory=dict)  # a training script's arguments
    entries: tuple[str, ...] = ()  # every entry of the file

    @property
    def notes(self) -> tuple[str, ...]:
        """What was done to the file's weights, for the receipt."""
        lines = []
        if self.place:
            average = self.place == _AVERAGED
            lines.append("averaged weights" if average else f"weights from entry {self.place!r}")
        if self.prefix:
            lines.append(f"prefix {self.prefix!r} taken off")
        if self.mean_std:
            lines.append("mean and std from the normaliser in the file")
        return tuple(lines)


def read(path: Path, which: Which = "raw") -> Weights:
    """The weights of a file: `raw` (what was optimised, the default) or `ema` (their moving average).

    Raises CheckpointError for what is no weight file, is torn, does not hold the weights asked for, or is a pickle
    that asks for more than plain data; there is no second try with unsafe unpickling.
    """
    try:
        if (reason := no_file(path)) is not None:
            raise CheckpointError(f"checkpoint {path}: {reason}")
        about = f"checkpoint {path} ({path.stat().st_size} bytes)"
        content, record = open_file(path, about)
    except OSError as error:
        raise CheckpointError(f"checkpoint {path}: cannot be read ({error.strerror or brief(error)})") from None
    settings, training = _checked(record, about)
    args = content.get("args")
    state, place = _choose(content, which, about)
    _refuse_what_is_no_number(state, path, about)
    entries = tuple(map(_shown, content)) if place not in ("", _AVERAGED) else ()
    cleaned, prefix = _without_prefix(state, _PREFIXES if settings else (*_PREFIXES, *_ATTRIBUTES))
    bare, mean_std = _without_normalizer(cleaned)
    known = vars(args) if isinstance(args, argparse.Namespace) else args if isinstance(args, Mapping) else {}
    plain = {key: value for key, value in known.items() if isinstance(key, str) and _is_plain(value)}
    return Weights(bare, place, prefix, mean_std, settings, training, plain, entries)


def _is_plain(value: Any) -> bool:
    """A scalar or a list of some. Of deeper values a small pickle can hold one whose text fills the memory."""
    if isinstance(value, list | tuple):
        return len(value) <= 1000 and all(isinstance(item, _SCALARS) for item in value)
    return isinstance(value, _SCALARS)


def _shown(key: object) -> str:
    """A key of a file in a message: short, in one line, and not written out where it is no name."""
    return repr(str(key)[:60])[1:-1] if isinstance(key, str | int) else type(key).__name__


def _checked(record: Any, about: str) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Settings and training record of our own files; the settings' values are checked when they are used."""
    named = record if isinstance(record, dict) else {"settings": record}
    settings, training = (named.get(name) or {} for name in ("settings", "training"))
    if isinstance(settings, dict) and isinstance(training, dict):
        family = settings.get("family")
        named_well = isinstance(family, str) and len(family) <= 200 and family.isprintable()
        sound = named_well and isinstance(settings.get("rpc"), dict | None)
        if sound or not settings:
            return settings or None, training
    raise CheckpointError(f"{about}: the model's description in it makes no sense")


def _refuse_what_is_no_number(state: Mapping[str, Tensor], path: Path, about: str) -> None:
    """Tensors without values, or whose values are coded in a way that is not in the file."""
    for name, tensor in state.items():
        what = (
            "a meta tensor, without values" if tensor.is_meta
            else "quantised" if tensor.is_quantized
            else "a nested tensor" if tensor.is_nested
            else "a sparse tensor" if tensor.layout != torch.strided
            else None
        )  # fmt: skip
        if what:
            raise CheckpointError(f"{about}: {name} is {what}; save the weights as plain float tensors")
    claimed = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    held = path.stat().st_size if not path.name.endswith(".json") else claimed  # an index is small, its shards are read
    if too_large(claimed, held):
        raise CheckpointError(f"{about}: its tensors claim {claimed / 2**30:.1f} GiB; no weight file is so small")


def _choose(content: Mapping[str, Any], which: Which, about: str) -> tuple[dict[str, Tensor], str]:
    """The state dict asked for, and the entry it came from."""
    found = {kind: entry for kind, places in PLACES.items() if (entry := _entry(content, places))}
    plain = not found
    if plain:
        found["raw"] = content, ""
    if "raw" in found and _AVERAGED in found["raw"][0]:
        averaged, place = found.pop("raw")
        found.setdefault("ema", (averaged, place or _AVERAGED))
    if which not in found:
        other: Which = "ema" if which == "raw" else "raw"
        if plain and which == "ema":
            names = ", ".join(PLACES["ema"])
            text = f"{about}: it holds no ema weights ({names}); it is one plain state dict"
            raise CheckpointError(text, lacks={"weights"})
        text = f"{about}: it holds no {which} weights, only {found[other][1]!r}; say --weights {other}"
        raise CheckpointError(text, lacks={"weights"} if which == "ema" else ())
    inside, place = found[which]
    state = {
        str(key): value
        for key, value in inside.items()
        if isinstance(value, Tensor) and isinstance(key, str | int) and key != _AVERAGED
    }
    if not state:
        nested = [_shown(key) for key, value in inside.items() if _tensors(value)]
        hint = f"; if its weights are in {' or '.join(nested[:4])}, save that entry by itself" if nested else ""
        raise CheckpointError(
            f"{about}: no weights in it; it holds {', '.join(map(_shown, list(inside)[:8])) or 'nothing'}{hint}"
        )
    return state, place


def _tensors(value: Any) -> bool:
    return isinstance(value, Mapping) and any(isinstance(v, Tensor) for v in value.values())


def _entry(content: Mapping[str, Any], places: tuple[str, ...]) -> tuple[Mapping[str, Any], str] | None:
    """The first of these entries that holds others, and its name; where no tensors lie in it, what holds them there."""
    held = [place for place in places if isinstance(content.get(place), Mapping)]
    for place in held:
        inside = content[place]
        if _tensors(inside):
            return inside, place
        if deeper := next((p for p in _DEEPER if _tensors(inside.get(p))), None):
            return inside[deeper], f"{place}.{deeper}"
    return (content[held[0]], held[0]) if held else None


def _without_prefix(state: dict[str, Tensor], prefixes: tuple[str, ...] = _PREFIXES) -> tuple[dict[str, Tensor], str]:
    """Without the prefixes of wrappers (data parallel, compile), in any nesting, where every key carries them."""
    taken = ""
    while prefix := next((p for p in prefixes if all(key.startswith(p) for key in state)), None):
        state = {key[len(prefix) :]: value for key, value in state.items()}
        taken += prefix
    return state, taken


def _without_normalizer(
    state: dict[str, Tensor],
) -> tuple[dict[str, Tensor], tuple[tuple[float, ...], tuple[float, ...]] | None]:
    """Split `Sequential(Normalize, network)` into the network and its mean and std: normalised exactly once, by us."""
    modules = {key.split(".")[0] for key in state}
    for first in modules:
        names = {f"{first}.mean", f"{first}.std"}
        rest = modules - {first}
        if names == {key for key in state if key.split(".")[0] == first} and len(rest) == 1:
            mean, std = (tuple(float(v) for v in state[f"{first}.{n}"].flatten()) for n in ("mean", "std"))
            inner = f"{rest.pop()}."
            bare = {key[len(inner) :]: value for key, value in state.items() if key not in names}
            return _without_prefix(bare)[0], (mean, std)
    return state, None
