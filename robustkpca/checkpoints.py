"""Weight files: read safely, understood, loaded strictly; written with their own settings."""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from robustkpca.errors import CheckpointError, SpecError, unknown
from robustkpca.models import Classifier, build_network
from robustkpca.settings import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    SIZES,
    ModelSettings,
    Preprocessing,
    RPCSettings,
    split_name,
)

EMBEDDED: dict[str, str] = {
    "vit": "vit.safetensors",
    "symvit": "symvit.safetensors",
    "rpc-symvit": "rpc-symvit.safetensors",
    "rpc-symvit-2iter-all": "rpc-symvit-2iter-all.safetensors",
}
_multiarray: Any = np.core.multiarray if np.lib.NumpyVersion(np.__version__) < "2.0.0" else np._core.multiarray  # type: ignore[attr-defined]
_KEY = "robustkpca"  # the metadata entry of a safetensors file that holds the model's settings
_WRAPPED = ("model", "state_dict")  # where training scripts keep the weights, in this order
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


def embedded_path(name: str) -> Path:
    """The file of an embedded model (see EMBEDDED)."""
    return Path(str(resources.files("robustkpca") / "embedded" / EMBEDDED[name]))


def save(path: Path, state: Mapping[str, Tensor], settings: ModelSettings, training: dict[str, Any]) -> None:
    """Write safetensors with the settings and the training record in its metadata, complete or not at all."""
    record = {"settings": settings.model_dump(mode="json", by_alias=True), "training": training}
    metadata = {_KEY: json.dumps(record, sort_keys=True, allow_nan=False)}
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({k: v.detach().cpu().contiguous() for k, v in state.items()}, part, metadata)
        os.replace(part, path)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from None


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state dict of a file, keys cleaned of wrapper prefixes, and what the file says beside it.

    The second value may hold `settings` (ours) or `args` (a training script's Namespace as a dict). Never runs code from the
    file: pickles are opened with weights_only, and a pickle that asks for more is refused.
    """
    if not path.is_file():
        what = "a folder" if path.is_dir() else "nothing"
        raise CheckpointError(f"checkpoint {path}: expected a file, found {what} there")
    with path.open("rb") as file:
        head = file.read(256)
    about = f"checkpoint {path} ({path.stat().st_size} bytes)"
    _refuse_what_is_no_weights(head, about)
    return _read_pickle(path, about) if head[:2] in (b"PK", b"\x80\x02") else _read_safetensors(path, about)


def _refuse_what_is_no_weights(head: bytes, about: str) -> None:
    if not head:
        raise CheckpointError(f"{about}: the file is empty")
    if head.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{about}: a Git LFS pointer, not the weights; fetch them with `git lfs pull`")
    if head.lstrip()[:1] == b"<":
        raise CheckpointError(f"{about}: a web page, not weights; download the file itself")


def _read_safetensors(path: Path, about: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        with safe_open(path, "pt") as file:
            record = (file.metadata() or {}).get(_KEY)
            state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{about}: expected safetensors or a PyTorch file, cannot read it ({error}); torn or something else?"
        ) from None
    return _clean(state), json.loads(record) if record else {}


def _read_pickle(path: Path, about: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        with torch.serialization.safe_globals(_SAFE):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        name = re.search(r"(?:GLOBAL|global|class) `?([\w.]+)", str(error))
        asks = f" It asks for {name[1]}." if name else ""
        raise CheckpointError(
            f"{about}: not plain weights, and opening it could run code.{asks} Save `model.state_dict()` and use that file"
        ) from None
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{about}: cannot read it, torn or half downloaded? ({str(error).splitlines()[0]})"
        ) from None
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{about}: expected a dict of weights, got {type(content).__name__}")
    record: dict[str, Any] = {}
    if isinstance(content.get("args"), argparse.Namespace):
        record["args"] = vars(content["args"])
    for key in _WRAPPED:
        if isinstance(content.get(key), Mapping):
            content = content[key]
            break
    state = {key: value for key, value in content.items() if isinstance(value, Tensor)}
    if not state:
        raise CheckpointError(
            f"{about}: no weights in it; it holds {', '.join(map(str, list(content)[:8])) or 'nothing'}"
        )
    return _clean(state), record


def _clean(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without the prefixes of wrappers (data parallel, compile), in any nesting, where every key carries them."""
    while True:
        prefix = next((p for p in _PREFIXES if state and all(k.startswith(p) for k in state)), None)
        if prefix is None:
            return dict(state)
        state = {key[len(prefix) :]: value for key, value in state.items()}


def infer_settings(
    state: Mapping[str, Tensor],
    args: Mapping[str, Any],
    family: str | None,
    rpc: RPCSettings | None,
    heads: int | None,
    about: str,
) -> ModelSettings:
    """Settings of a plain ViT state dict, read from its tensors and from a training script's arguments.

    SymViT and RPC-SymViT have the same parameters: when neither `family` nor `args` tells them apart, refuse.
    """
    try:
        width = state["cls_token"].shape[-1]
        _, channels, patch, _ = state["patch_embed.proj.weight"].shape
        tokens = state["pos_embed"].shape[1] - 1
        qkv = state["blocks.0.attn.qkv.weight"].shape[0]
        num_classes = state["head.weight"].shape[0]
    except KeyError as error:
        raise CheckpointError(
            f"{about}: expected a ViT with timm's parameter names, {error.args[0]} is missing; it has {', '.join(list(state)[:5])}, ..."
        ) from None
    depth = len({key.split(".")[1] for key in state if key.startswith("blocks.")})
    found = "vit" if qkv == 3 * width else "symvit"
    if family is None:
        family = found
        if found == "symvit":
            if "robust" not in args:
                raise CheckpointError(
                    f"{about}: SymViT and RPC-SymViT have the same parameters; say which with --model"
                )
            family = "rpc-symvit" if args["robust"] else "symvit"
    elif (family == "vit") != (found == "vit"):
        raise CheckpointError(
            f"{about}: expected {family}, got the weights of a {found} (qkv has {qkv} rows, width {width})"
        )
    if heads is None:
        named = re.search(r"_(tiny|small|base)_", str(args.get("model", "")))
        size = named[1] if named else next((s for s, (w, d, _) in SIZES.items() if (w, d) == (width, depth)), None)
        if size is None:
            raise CheckpointError(f"{about}: width {width} and depth {depth} are of no known size; say --heads")
        heads = SIZES[size][2]
    grey = channels == 1
    return ModelSettings(
        family=family,
        preprocessing=Preprocessing(
            img_size=math.isqrt(tokens) * patch,
            mean=(0.5,) if grey else IMAGENET_MEAN,
            std=(0.5,) if grey else IMAGENET_STD,
        ),
        num_classes=num_classes,
        patch_size=patch,
        width=width,
        depth=depth,
        heads=heads,
        rpc=rpc,
    )


def load_classifier(
    model: str | None = None,
    checkpoint: Path | str | None = None,
    *,
    iterations: int | None = None,
    lam: float | None = None,
    layers: str | tuple[int, ...] | None = None,
    heads: int | None = None,
    device: str | torch.device = "cpu",
) -> Classifier:
    """A classifier by name, by file, or both.

    `model`: an embedded model (EMBEDDED), `vit|symvit|rpc-symvit[-tiny|-small|-base]` with a `checkpoint`, or `timm:NAME`
    (pretrained weights unless `checkpoint` is given). `iterations`, `lam` and `layers` complete or override the RPC settings
    of the file. Loading is strict. Raises SpecError for unknown names, CheckpointError for files that do not fit.
    """
    if checkpoint is None and model is None:
        raise SpecError("expected a model name or a checkpoint")
    overrides = {k: v for k, v in (("iterations", iterations), ("lambda", lam), ("layers", layers)) if v is not None}
    if model is not None and model.startswith("timm:"):
        return _load_timm(model, checkpoint, overrides).to(device)
    if checkpoint is None:
        assert model is not None
        if model not in EMBEDDED:
            split_name(model)  # raises for what is no name at all
            raise SpecError(f"model {model!r} needs --checkpoint FILE; embedded are {', '.join(EMBEDDED)}")
        path, family, size = embedded_path(model), None, None
    else:
        path = Path(checkpoint)
        family, size = (None, None) if model is None else split_name(model)
    about = f"checkpoint {path}"
    state, record = read(path)
    settings = _settings(state, record, family, overrides, heads, about)
    if size is not None and settings.size != size:
        raise CheckpointError(
            f"{about}: expected size {size} {SIZES[size]} (width, depth, heads), got {settings.title}"
        )
    network = build_network(settings)
    _load_strictly(network, state, f"{about} does not fit {settings.title}")
    source = f"embedded:{path.stem}" if checkpoint is None else str(checkpoint)
    return Classifier(network, settings, source=source).to(device)


def _settings(
    state: Mapping[str, Tensor],
    record: Mapping[str, Any],
    family: str | None,
    overrides: dict[str, Any],
    heads: int | None,
    about: str,
) -> ModelSettings:
    """Settings from the file where it has them, else from its tensors; RPC settings completed by the flags."""
    args = record.get("args", {})
    own = record.get("settings")
    known: dict[str, Any] = {}
    if own:
        known = dict(own.get("rpc") or {})
        if family is not None and family != own["family"]:
            if "vit" in (family, own["family"]):
                raise CheckpointError(f"{about}: expected {family}, got the weights of a {own['family']}")
            own = {**own, "family": family}
        family = own["family"]
    elif args.get("robust"):
        known = {"iterations": args.get("num_iter"), "lambda": args.get("lambd"), "layers": None}
        layer = args.get("layer")
        if isinstance(layer, int) and layer >= 0:  # one layer, counted from 0
            known["layers"] = "first" if layer == 0 else (layer + 1,)
        family = family or "rpc-symvit"
    rpc = None
    if family == "rpc-symvit":
        merged = {"layers": "first", **known, **overrides}
        missing = [f"--{key}" for key in ("iterations", "lambda", "layers") if merged.get(key) is None]
        if missing:
            raise CheckpointError(f"{about}: the file does not say how RPC-Attention runs; say {' and '.join(missing)}")
        rpc = RPCSettings.parse(merged, "RPC settings")
    elif overrides and family is not None:
        raise SpecError(f"{', '.join(overrides)}: settings of rpc-symvit, but {about} is used as {family}")
    if own:
        return ModelSettings.parse({**own, "rpc": rpc}, about)
    return infer_settings(state, args, family, rpc, heads, about)


def _load_timm(model: str, checkpoint: Path | str | None, overrides: dict[str, Any]) -> Classifier:
    name = model.removeprefix("timm:")
    if overrides:
        raise SpecError(f"{', '.join(overrides)}: settings of rpc-symvit, but the model is {model}")
    if name not in timm.list_models() and name not in timm.list_models(pretrained=True):
        raise SpecError(
            unknown("timm model", name, timm.list_models(f"{name.split('_')[0]}*") or ["see timm.list_models()"])
        )
    try:
        network: Any = timm.create_model(name, pretrained=checkpoint is None)
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{model}: no pretrained weights could be had ({reason}); give --checkpoint FILE"
        ) from None
    if checkpoint is not None:
        state, _ = read(Path(checkpoint))
        _load_strictly(network, state, f"checkpoint {checkpoint} does not fit {model}")
    config = timm.data.resolve_model_data_config(network)
    settings = ModelSettings(
        family=model,
        preprocessing=Preprocessing(
            img_size=config["input_size"][-1],
            mean=config["mean"],
            std=config["std"],
            crop_pct=config["crop_pct"],
            interpolation=config["interpolation"],
        ),
        num_classes=int(network.num_classes),
    )
    return Classifier(network, settings, source=str(checkpoint) if checkpoint else model)


def _load_strictly(network: torch.nn.Module, state: Mapping[str, Tensor], what: str) -> None:
    """Every key on both sides, every shape; else one line with counts and examples."""
    expected = network.state_dict()
    missing = sorted(expected.keys() - state.keys())
    unexpected = sorted(state.keys() - expected.keys())
    shapes = [
        f"{key} expected {tuple(expected[key].shape)}, got {tuple(state[key].shape)}"
        for key in sorted(expected.keys() & state.keys())
        if expected[key].shape != state[key].shape
    ]
    faults = [
        f"{len(found)} {kind} ({', '.join(found[:3])}{', ...' if len(found) > 3 else ''})"
        for kind, found in (("missing", missing), ("unexpected", unexpected), ("of another shape", shapes))
        if found
    ]
    if faults:
        raise CheckpointError(f"{what}: {'; '.join(faults)}")
    network.load_state_dict(dict(state), strict=True)
