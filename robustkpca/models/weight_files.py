"""Weight files of the wild, read without running any code in them."""

from __future__ import annotations

import argparse
import json
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from robustkpca.errors import CheckpointError, brief

_numpy: Any = np  # its core moved in version 2
_multiarray: Any = (_numpy.core if np.lib.NumpyVersion(np.__version__) < "2.0.0" else _numpy._core).multiarray
RECORD_KEY = "robustkpca"  # the metadata entry of a safetensors file that holds the model's settings
Which = Literal["raw", "ema"]
# Where training scripts keep the weights, in the order they are looked for.
PLACES: dict[Which, tuple[str, ...]] = {
    "raw": ("model", "state_dict", "model_state_dict"),
    "ema": ("model_ema", "state_dict_ema", "ema"),
}
_PREFIXES = ("module.", "_orig_mod.")
# What training scripts store beside the weights, and what is harmless to rebuild: plain data, no code.
_SAFE: list[Any] = [
    argparse.Namespace,
    _multiarray.scalar,
    _multiarray._reconstruct,
    np.ndarray,
    np.dtype,
    *{type(np.dtype(code)) for code in "?bBhHiIlLqQefd"},
]


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
    args: dict[str, Any] = field(default_factory=dict)  # a training script's Namespace
    entries: tuple[str, ...] = ()  # every entry of the file

    @property
    def notes(self) -> tuple[str, ...]:
        """What was done to the file's weights, for the receipt."""
        lines = []
        if self.place:
            lines.append(f"weights from entry {self.place!r}")
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
    if not path.is_file():
        what = "a folder" if path.is_dir() else "nothing"
        raise CheckpointError(f"checkpoint {path}: expected a file, found {what} there")
    with path.open("rb") as file:
        head = file.read(256)
    about = f"checkpoint {path} ({path.stat().st_size} bytes)"
    _refuse_what_is_no_weights(head, about)
    if head[:2] not in (b"PK", b"\x80\x02"):
        content, record = _open_safetensors(path, about)
    else:
        content, record = _open_pickle(path, about)
    args = content.get("args")
    state, place = _choose(content, which, about)
    entries = tuple(map(str, content)) if place else ()
    cleaned, prefix = _without_prefix(state)
    bare, mean_std = _without_normalizer(cleaned)
    return Weights(
        bare,
        place,
        prefix,
        mean_std,
        record.get("settings"),
        record.get("training", {}),
        vars(args) if isinstance(args, argparse.Namespace) else {},
        entries,
    )


def _refuse_what_is_no_weights(head: bytes, about: str) -> None:
    if not head:
        raise CheckpointError(f"{about}: the file is empty")
    if head.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{about}: a Git LFS pointer, not the weights; fetch them with `git lfs pull`")
    if head.lstrip()[:1] == b"<":
        raise CheckpointError(f"{about}: a web page, not weights; download the file itself")


def _open_safetensors(path: Path, about: str) -> tuple[Mapping[str, Any], dict[str, Any]]:
    try:
        with safe_open(path, "pt") as file:
            record = (file.metadata() or {}).get(RECORD_KEY)
            state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{about}: expected safetensors or a PyTorch file, cannot read it ({error}); torn or something else?"
        ) from None
    return state, json.loads(record) if record else {}


def _open_pickle(path: Path, about: str) -> tuple[Mapping[str, Any], dict[str, Any]]:
    try:
        with torch.serialization.safe_globals(_SAFE):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        name = re.search(r"(?:GLOBAL|global|class) `?([\w.]+)", str(error))
        asks = f" It asks for {name[1]}." if name else ""
        raise CheckpointError(
            f"{about}: not plain weights, and opening it could run code.{asks} Save `model.state_dict()` and use "
            "that file"
        ) from None
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        reason = brief(error).split(". ")[0]
        raise CheckpointError(f"{about}: cannot read it, torn or half downloaded? ({reason})") from None
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{about}: expected a dict of weights, got {type(content).__name__}")
    record = content.get(RECORD_KEY)  # in the states that `train` keeps
    return content, json.loads(record) if isinstance(record, str) else {}


def _choose(content: Mapping[str, Any], which: Which, about: str) -> tuple[dict[str, Tensor], str]:
    """The state dict asked for, and the entry it came from."""
    entries = {
        w: next((p for p in places if isinstance(content.get(p), Mapping)), None) for w, places in PLACES.items()
    }
    place = entries[which]
    if place is None and any(entries.values()):
        other: Which = "ema" if which == "raw" else "raw"
        raise CheckpointError(f"{about}: it holds no {which} weights, only {entries[other]!r}; say --weights {other}")
    if place is None and which == "ema":
        raise CheckpointError(
            f"{about}: it holds no ema weights ({', '.join(PLACES['ema'])}); it is one plain state dict"
        )
    inside = content[place] if place else content
    state = {str(key): value for key, value in inside.items() if isinstance(value, Tensor)}
    if not state:
        raise CheckpointError(
            f"{about}: no weights in it; it holds {', '.join(map(str, list(inside)[:8])) or 'nothing'}"
        )
    return state, place or ""


def _without_prefix(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], str]:
    """Without the prefixes of wrappers (data parallel, compile), in any nesting, where every key carries them."""
    taken = ""
    while prefix := next((p for p in _PREFIXES if all(key.startswith(p) for key in state)), None):
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
