"""From a name and a file to a classifier: settings completed, weights loaded strictly; and our own files written."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, TypedDict, Unpack

import timm
import torch
from safetensors.torch import save as serialize
from torch import Tensor

from robustkpca.config import composed
from robustkpca.errors import CheckpointError, SpecError, brief, unknown
from robustkpca.files import write_whole
from robustkpca.models.classifier import Classifier
from robustkpca.models.families import BUILT_IN, FAMILIES, alike
from robustkpca.models.networks import build_network, pursue_in
from robustkpca.models.origin import Origin, overrides_of, recipe_of
from robustkpca.models.position_embeddings import KEY, fit, resample, square_grid, squared
from robustkpca.models.position_embeddings import SIZES as SIDES
from robustkpca.models.settings import (
    CLASS_LISTS,
    EMBEDDED,
    IMAGENET_MEAN,
    IMAGENET_STD,
    PURSUING,
    RPC_TIMM,
    SIZES,
    TIMM,
    TRAINED_AS,
    ModelSettings,
    RPCSettings,
    split_name,
)
from robustkpca.models.weight_files import RECORD_KEY, Weights, Which, read
from robustkpca.models.weight_formats import too_large


def embedded_path(name: str) -> Path:
    """The file of an embedded model (see EMBEDDED)."""
    return Path(str(resources.files("robustkpca") / "embedded" / EMBEDDED[name]))


def save(path: Path, state: Mapping[str, Tensor], settings: ModelSettings, training: dict[str, Any]) -> None:
    """Write safetensors with the settings and the training record in its metadata, complete or not at all."""
    record = {"settings": settings.model_dump(mode="json", by_alias=True), "training": training}
    metadata = {RECORD_KEY: json.dumps(record, sort_keys=True, allow_nan=False)}
    content = serialize({k: v.detach().cpu().contiguous() for k, v in state.items()}, metadata)
    write_whole(path, lambda file: file.write(content))


class LoadSettings(TypedDict, total=False):
    """How weights are loaded; None and an empty tuple: as the file says.

    weights: raw or EMA weights of a file that has both (default: raw). iterations, lam, layers: complete or override
    the file's settings of RPC-Attention. heads: of weights whose size is none of the known ones. img_size: side in
    pixels; other than the file's resamples the position embeddings. classes: names of the logits where the file has
    none.
    """

    weights: Which
    iterations: int | None
    lam: float | None
    layers: str | tuple[int, ...] | None
    heads: int | None
    img_size: int | None
    classes: tuple[str, ...]


def load_classifier(
    model: str | None = None,
    checkpoint: Path | str | None = None,
    *,
    device: str | torch.device = "cpu",
    **options: Unpack[LoadSettings],
) -> Classifier:
    """A classifier by name, by file, or both.

    `model`: an embedded model (EMBEDDED), a family of FAMILIES with or without a size (`rpc-symvit-tiny`) and a
    `checkpoint`, or what timm resolves, `timm:NAME` or `hf-hub:ID` (pretrained weights unless `checkpoint` is given),
    and with `rpc-` before it RPC-Attention put into its attention.
    `options`: see LoadSettings. Loading is strict. What was done to a file's weights is in the classifier's `notes`.

    Raises:
        SpecError: an unknown name, or settings that the model does not have.
        CheckpointError: a file that does not fit.
    """
    if unexpected := options.keys() - LoadSettings.__annotations__.keys():
        raise TypeError(f"load_classifier() got an unexpected keyword argument {min(unexpected)!r}")
    if checkpoint is not None:
        checkpoint = os.path.expanduser(checkpoint)
    weights, classes = options.get("weights", "raw"), options.get("classes", ())
    heads, img_size = options.get("heads"), options.get("img_size")
    if checkpoint is None and model is None:
        raise SpecError("expected a model name or a checkpoint")
    rpc = {"iterations": options.get("iterations"), "lambda": options.get("lam"), "layers": options.get("layers")}
    overrides = {name: value for name, value in rpc.items() if value is not None}
    if model is not None and (name := model.removeprefix(RPC_TIMM)).startswith(TIMM):
        put_in = _rpc_of(model, overrides) if name != model else None
        _refuse_settings(model, checkpoint, {} if put_in else overrides, weights, heads)
        return _load_timm(name, checkpoint, weights, img_size, classes, put_in).to(device)
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
    file, reshaped = _squared(read(path, weights), img_size)
    settings = complete_settings(file, family, overrides, heads, classes, about)
    if size is not None and settings.size != size:
        raise CheckpointError(
            f"{about}: expected size {size} {SIZES[size]} (width, depth, heads), got {settings.title}"
        )
    state, notes = dict(file.state), [*file.notes, *_layer_note(file, settings), *reshaped]
    recorded = _recorded_family(file, settings.family)
    if recorded != settings.family:
        notes.append(f"the file says {recorded}, used as {settings.family}")
    if settings.rpc and (trained := (file.settings or {}).get("rpc")):
        trained = RPCSettings.parse(trained, about)
        if trained != settings.rpc:
            notes.append(f"{TRAINED_AS}{trained.label}, lambda {trained.lam:g}")
    side = "not square" if reshaped else settings.preprocessing.img_size
    if img_size is not None and img_size != settings.preprocessing.img_size:
        settings, resampled = _at_size(settings, state, img_size, about)
        notes += resampled
    _refuse_boundless(settings, state, about)
    network = build_network(settings)
    _load_strictly(network, state, f"{about} does not fit {settings.title}")
    source = f"embedded:{path.stem}" if checkpoint is None else str(checkpoint)
    classifier = Classifier(network, settings, source=source, notes=tuple(notes)).to(device)
    contradicting = overrides_of(settings, recorded, _recorded_rpc(file), side)
    classifier.origin = Origin(weights, contradicting, *recipe_of(file.training))
    return classifier


def _rpc_of(model: str, settings: Mapping[str, Any]) -> RPCSettings:
    """Settings of RPC-Attention that is put into another model, which says none itself."""
    if missing := [flag for flag in ("iterations", "lambda") if flag not in settings]:
        raise SpecError(f"model {model}: expected --iterations and --lambda, got no {' and no '.join(missing)}")
    return RPCSettings.parse({"layers": "first"} | dict(settings), f"model {model}")


def _refuse_settings(
    model: str, checkpoint: Path | str | None, rpc: Mapping[str, Any], weights: Which, heads: int | None
) -> None:
    """Raise SpecError for settings that no model of timm has."""
    if rpc:
        text = f"{', '.join(rpc)}: settings of {' and '.join(PURSUING)}, but the model is {model}"
        raise SpecError(text, lacks=_options_of(rpc))
    if heads is not None:
        raise SpecError(f"--heads: {model} has the heads that timm gives it", lacks={"heads"})
    if weights != "raw" and checkpoint is None:
        raise SpecError(f"--weights {weights}: timm's pretrained weights are of one kind", lacks={"weights"})


def _options_of(rpc: Mapping[str, Any]) -> set[str]:
    """Settings of RPC-Attention by their names in LoadSettings."""
    return {"lam" if name == "lambda" else name for name in rpc}


def _recorded_family(file: Weights, family: str) -> str:
    """The family that a file of ours, or the arguments of the authors' training script, say; where they do not,
    `family`."""
    if file.settings:
        return str(file.settings["family"])
    if file.args.get("robust"):
        return "rpc-symvit"
    pursues = family in FAMILIES and FAMILIES[family].pursues
    return FAMILIES[family].parameters_of or family if pursues and "robust" in file.args else family


def _recorded_rpc(file: Weights) -> dict[str, Any]:
    """The RPC settings that a file of ours, or the arguments of the authors' training script, say; None for what they
    leave open."""
    if file.settings:
        return dict(file.settings.get("rpc") or {})
    if not file.args.get("robust"):
        return {}
    known = {"iterations": file.args.get("num_iter"), "lambda": file.args.get("lambd"), "layers": None}
    layer = file.args.get("layer")
    if isinstance(layer, int):  # one layer, counted from 0; below 0 all of them
        known["layers"] = "all" if layer < 0 else "first" if layer == 0 else (layer + 1,)
    return known


def _layer_note(file: Weights, settings: ModelSettings) -> list[str]:
    """A note where the authors' training script said by a negative number that all layers run RPC-Attention."""
    layer = file.args.get("layer")
    negative = settings.rpc and not file.settings and isinstance(layer, int) and layer < 0
    return [f"the file's layer = {layer} means all layers"] if negative else []


def _squared(file: Weights, img_size: int | None) -> tuple[Weights, list[str]]:
    """The file with position embeddings for square images of `img_size`, where its arguments say that they are not."""
    embedding, projection = file.state.get(KEY), file.state.get("patch_embed.proj.weight")
    if img_size is None or file.settings or embedding is None or projection is None or projection.ndim != 4:
        return file, []
    made = squared(embedding, projection.shape[-1], file.args, img_size)
    if made is None:
        return file, []
    args = {name: value for name, value in file.args.items() if name not in SIDES}
    return dataclasses.replace(file, state={**file.state, KEY: made[0]}, args=args), [made[1]]


def _at_size(
    settings: ModelSettings, state: dict[str, Tensor], img_size: int, about: str
) -> tuple[ModelSettings, list[str]]:
    """Settings for images of another size, and a note of what was done to the position embeddings in `state`."""
    patch, preprocessing = settings.patch_size, settings.preprocessing
    assert patch is not None
    if img_size % patch:
        raise SpecError(f"--img-size: expected a multiple of the patch size {patch}, got {img_size}")
    notes = []
    if KEY in state:
        old, new = square_grid(state[KEY], patch, {}, about), img_size // patch
        state[KEY], note = resample(state[KEY], (old, old), (new, new), prefix=1)
        notes.append(note)
    sized = preprocessing.model_copy(update={"img_size": img_size})
    return settings.model_copy(update={"preprocessing": sized}), notes


def _refuse_boundless(settings: ModelSettings, state: Mapping[str, Tensor], about: str) -> None:
    """Raise CheckpointError for settings of a model far larger than the weights, which would take all memory."""
    width, depth, patch = settings.width or 0, settings.depth or 0, settings.patch_size or 1
    tokens = (settings.preprocessing.img_size // patch) ** 2
    needed = 12 * depth * max(width, 1) ** 2 + width * (tokens + settings.num_classes + 3 * patch**2)
    if too_large(needed, sum(tensor.numel() for tensor in state.values())):
        raise CheckpointError(f"{about}: its settings are of a model of {needed:.1e} parameters; its weights are not")


def complete_settings(
    file: Weights,
    family: str | None,
    overrides: Mapping[str, Any],
    heads: int | None,
    classes: tuple[str, ...],
    about: str,
) -> ModelSettings:
    """Settings from the file where it has them, else from its tensors; RPC settings completed by the flags."""
    recorded, known = file.settings, _recorded_rpc(file)
    if recorded:
        if family is not None and family != recorded["family"]:
            if not alike(family, recorded["family"]):
                raise CheckpointError(f"{about}: expected {family}, got the weights of a {recorded['family']}")
            recorded = {**recorded, "family": family}
        family = recorded["family"]
    elif file.args.get("robust"):
        family = family or "rpc-symvit"
    rpc = None
    if family is not None and family in FAMILIES and FAMILIES[family].pursues:
        merged = {"layers": "first", **known, **overrides}
        missing = [f"--{key}" for key in ("iterations", "lambda", "layers") if merged.get(key) is None]
        if missing:
            raise CheckpointError(f"{about}: the file does not say how RPC-Attention runs; say {' and '.join(missing)}")
        rpc = RPCSettings.parse(merged, "RPC settings")
    if recorded:
        if heads is not None and heads != recorded.get("heads"):
            raise SpecError(f"--heads: {about} says itself that it has {recorded.get('heads')}", lacks={"heads"})
        names = _agreed(recorded, classes, about)
        settings = ModelSettings.parse({**recorded, "rpc": rpc, "classes": names}, about)
    else:
        settings = _infer_settings(file, family, rpc, heads, classes, about)
    if overrides and settings.rpc is None:
        text = f"{', '.join(overrides)}: settings of {' and '.join(PURSUING)}, but {about} is used as {settings.family}"
        raise SpecError(text, lacks=_options_of(overrides))
    return settings


def _agreed(recorded: Mapping[str, Any], given: tuple[str, ...], about: str) -> Any:
    """Names of the logits: those of the file, else the given ones. Raises CheckpointError where they contradict."""
    names: Any = recorded.get("classes") or ()
    if not (names and given):
        return names or given
    listed = timm.data.ImageNetInfo(names).label_names() if names in CLASS_LISTS.values() else names
    pairs = itertools.zip_longest(map(composed, listed), map(composed, given))
    for number, (in_file, in_list) in enumerate(pairs):
        if in_file != in_list:
            raise CheckpointError(
                f"{about}: it names its classes itself, and --classes contradicts it at logit {number}: "
                f"{in_file!r} in the file, {in_list!r} in the list; leave --classes out"
            )
    return names


def _infer_settings(
    file: Weights,
    family: str | None,
    rpc: RPCSettings | None,
    heads: int | None,
    classes: tuple[str, ...],
    about: str,
) -> ModelSettings:
    """Settings of a plain ViT state dict, read from its tensors and from a training script's arguments.

    SymViT and RPC-SymViT have the same parameters: when neither `family` nor the arguments tell them apart, refuse.
    """
    state, args = file.state, file.args
    width, channels, patch = _shape(state, about)
    side = square_grid(state[KEY], patch, args, about) * patch
    qkv, num_classes = state["blocks.0.attn.qkv.weight"].shape[0], state["head.weight"].shape[0]
    depth = len({key.split(".")[1] for key in state if key.startswith("blocks.")})
    marked = (name for name, f in BUILT_IN.items() if f.mark and f"blocks.0.{f.mark}" in state)
    inferred = next(marked, "vit" if qkv == 3 * width else "symvit")
    if family is None:
        family = inferred
        if inferred == "symvit":
            if "robust" not in args:
                raise CheckpointError(
                    f"{about}: SymViT and RPC-SymViT have the same parameters; say which with --model"
                )
            family = "rpc-symvit" if args["robust"] else "symvit"
    elif family in BUILT_IN and not alike(family, inferred):  # of others, strict loading has the last word
        raise CheckpointError(
            f"{about}: expected {family}, got the weights of a {inferred} (qkv has {qkv} rows, width {width})"
        )
    if heads is None:
        named = re.search(r"_(tiny|small|base)_", str(args.get("model", "")))
        size = named[1] if named else next((s for s, (w, d, _) in SIZES.items() if (w, d) == (width, depth)), None)
        if size is None:
            raise CheckpointError(f"{about}: width {width} and depth {depth} are of no known size; say --heads")
        heads = SIZES[size][2]
    grey = channels == 1
    mean, std = file.mean_std or (((0.5,), (0.5,)) if grey else (IMAGENET_MEAN, IMAGENET_STD))
    return ModelSettings.parse(
        {
            "family": family,
            "preprocessing": {"img_size": side, "mean": mean, "std": std},
            "num_classes": num_classes,
            "classes": classes or CLASS_LISTS.get(num_classes, ()),
            "patch_size": patch,
            "width": width,
            "depth": depth,
            "heads": heads,
            "rpc": rpc,
        },
        about,
    )


def _shape(state: Mapping[str, Tensor], about: str) -> tuple[int, int, int]:
    """Width, input channels and patch size of a ViT's state dict by timm's names.

    Raises:
        CheckpointError: a name is missing, or a tensor has another number of dimensions.
    """
    projection = "patch_embed.proj.weight"
    dimensions = {"cls_token": 3, projection: 4, KEY: 3, "blocks.0.attn.qkv.weight": 2, "head.weight": 2}
    for name, n in dimensions.items():
        if name not in state:
            raise CheckpointError(
                f"{about}: expected a ViT with timm's parameter names, {name} is missing; "
                f"it has {', '.join(list(state)[:5])}, ..."
            )
        if state[name].ndim != n:
            shape = tuple(state[name].shape)
            linear = ": patches as rows, whose order of pixels is not in the file" if name == projection else ""
            raise CheckpointError(f"{about}: expected {name} with {n} dimensions, got {shape}{linear}")
    _, channels, height, width = state[projection].shape
    if height != width or not height:
        raise CheckpointError(f"{about}: expected square patches, got {height}x{width}")
    return state["cls_token"].shape[-1], channels, height


def _load_timm(
    model: str,
    checkpoint: Path | str | None,
    which: Which,
    img_size: int | None,
    classes: tuple[str, ...],
    rpc: RPCSettings | None = None,
) -> Classifier:
    name = model.removeprefix("timm:")
    known = name.startswith("hf-hub:") or name in timm.list_models() or name in timm.list_models(pretrained=True)
    if not known:
        close = timm.list_models(f"{name.split('_')[0]}*") or ["what timm.list_models() lists"]
        raise SpecError(unknown("timm model", name, close))
    notes: list[str] = []
    mean_std = None
    if checkpoint is None:
        try:
            network = _pretrained(name, img_size)
        except Exception as error:  # timm and the hub raise what they like when weights cannot be had
            raise CheckpointError(
                f"{model}: no pretrained weights could be had ({brief(error)}); give --checkpoint FILE"
            ) from None
    else:
        file = read(Path(checkpoint), which)
        state, mean_std = dict(file.state), file.mean_std
        notes += file.notes
        network = _create_timm(name, img_size, **_head(name, state))
        notes += fit(network, state, file.args, f"checkpoint {checkpoint}", wanted=img_size is not None)
        _load_strictly(network, state, f"checkpoint {checkpoint} does not fit {model}")
    config = timm.data.resolve_model_data_config(network)
    mean, std = mean_std or (config["mean"], config["std"])
    height, width = config["input_size"][-2:]
    if height != width and img_size is None:
        raise SpecError(f"{model}: expected a square input, timm's is {height}x{width}; say --img-size")
    settings = ModelSettings.parse(
        {
            "family": model,
            "preprocessing": {
                "img_size": img_size or height,
                "mean": mean,
                "std": std,
                "crop_pct": config["crop_pct"],
                "interpolation": config["interpolation"],
                "crop_mode": config["crop_mode"],
            },
            "num_classes": int(network.num_classes),
            "classes": classes or CLASS_LISTS.get(network.num_classes, ()),
            "rpc": rpc,
        },
        model,
    )
    if rpc:
        notes.append(pursue_in(network, settings))
    classifier = Classifier(network, settings, source=str(checkpoint) if checkpoint else model, notes=tuple(notes))
    classifier.origin = Origin(which)
    return classifier


def _pretrained(name: str, img_size: int | None) -> Any:
    """timm's network with its weights: those in the hub's cache, else downloaded, if the hub answers one request.

    The hub's own client would ask for each file of weights again and again before it gives up.
    """
    from huggingface_hub import constants, errors, utils

    client: Any = utils  # which does not declare all that it exports
    # Before version 1 the client's sessions stay as they were opened.
    anew = getattr(client, "reset_sessions", None) or client.close_session
    forbidden = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    anew()
    try:
        return _create_timm(name, img_size, pretrained=True)
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        pass
    finally:
        constants.HF_HUB_OFFLINE = forbidden
        anew()
    if forbidden:
        raise CheckpointError("they are not in the hub's cache, and HF_HUB_OFFLINE is set")
    try:
        client.get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as error:  # of whichever library the hub's client uses
        silent = f"{constants.ENDPOINT} does not answer: {brief(error)}"
        raise CheckpointError(f"they are not in the hub's cache, and {silent}") from None
    return _create_timm(name, img_size, pretrained=True)


def _create_timm(name: str, img_size: int | None, **options: Any) -> Any:
    if img_size is not None:
        try:
            return timm.create_model(name, img_size=img_size, **options)
        except TypeError:
            pass  # a network without a fixed size takes any
    return timm.create_model(name, **options)


def _head(name: str, state: Mapping[str, Tensor]) -> dict[str, Any]:
    """The number of classes of a file, read from its last layer; nothing where timm does not say which that is."""
    config = timm.get_pretrained_cfg(name)
    layer = config.classifier if config else None
    layer = layer[0] if isinstance(layer, tuple | list) else layer
    weight = state.get(f"{layer}.weight")
    return {} if weight is None else {"num_classes": weight.shape[0]}


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
    coded = [
        f"{key} expected {str(expected[key].dtype)[6:]}, got {str(state[key].dtype)[6:]}"
        for key in sorted(expected.keys() & state.keys())
        if expected[key].is_floating_point() and not _is_plain_float(state[key])
    ]
    faults = [
        f"{len(keys)} {kind} ({', '.join(keys[:3])}{', ...' if len(keys) > 3 else ''})"
        for kind, keys in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("of another shape", shapes),
            ("coded otherwise, without what gives their values", coded),
        )
        if keys
    ]
    if faults:
        raise CheckpointError(f"{what}: {'; '.join(faults)}")
    network.load_state_dict(dict(state), strict=True)


def _is_plain_float(tensor: Tensor) -> bool:
    """float64, float32, float16 or bfloat16; numbers of one byte mean nothing without their scales."""
    return tensor.is_floating_point() and tensor.element_size() > 1


def inspect(path: Path) -> list[tuple[str, str]]:
    """What a weight file is, as (fact, value) lines, without building a model.

    Raises CheckpointError as `read` does.
    """
    try:
        file = read(path, "raw")
    except CheckpointError as error:
        if "say --weights ema" not in str(error):
            raise
        file = read(path, "ema")
    count = sum(t.numel() for t in file.state.values())
    facts = [("file", f"{path} ({path.stat().st_size:,} bytes)"), ("tensors", f"{len(file.state)}, {count:,} numbers")]
    if file.entries:
        facts.append(("entries", ", ".join(file.entries)))
    facts += [("weights", note) for note in file.notes]
    if file.training:
        facts.append(
            ("training", json.dumps({k: v for k, v in file.training.items() if k != "epochs"}, sort_keys=True))
        )
    if file.args:
        named = ("model", "robust", "num_iter", "lambd", "layer", "input_size", "epochs")
        facts.append(
            ("arguments", ", ".join(f"{k}={file.args[k]}" for k in named if k in file.args) or "none of the model's")
        )
    try:
        settings = complete_settings(file, None, {}, None, (), "the file")
    except CheckpointError as error:
        return [*facts, ("model", str(error))]
    p = settings.preprocessing
    facts.append(("model", settings.title))
    facts.append(
        ("input", f"{p.channels}x{p.img_size}x{p.img_size}, patch {settings.patch_size}, mean {p.mean}, std {p.std}")
    )
    facts.append(
        ("classes", f"{settings.num_classes}" + (f", {settings.classes_text}" if settings.classes else ", not named"))
    )
    if settings.rpc:
        facts.append(
            ("rpc", f"iterations {settings.rpc.iterations}, lambda {settings.rpc.lam:g}, layers {settings.rpc.layers}")
        )
    facts += [("rpc", note) for note in _layer_note(file, settings)]
    try:
        _load_strictly(build_network(settings), file.state, "no")
        facts.append(("fits", "yes, every parameter"))
    except CheckpointError as error:
        facts.append(("fits", str(error)))
    return facts
