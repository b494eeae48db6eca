"""What a training leaves behind: a state to go on from, in the format of DeiT's checkpoints, and a CSV log."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from robustkpca import escape
from robustkpca.errors import RunError, SpecError
from robustkpca.files import write_files, write_whole
from robustkpca.models.settings import ModelSettings, RPCSettings
from robustkpca.models.weight_files import RECORD_KEY

COLUMNS = ("epoch", "model", "train_loss", "lr", "holdout_accuracy", "seconds", "projection_loss")


def companions(out: Path) -> tuple[Path, Path]:
    """The state (.pth) and the log (.csv) beside a checkpoint `out`, whose folder is made.

    Raises SpecError where `out` can be no checkpoint.
    """
    if out.is_dir():
        raise SpecError(f"--out: expected a file, {out} is a folder")
    if out.suffix != ".safetensors":
        raise SpecError(f"--out: expected a name such as {out.stem}.safetensors, got {out}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError(f"--out: cannot make {out.parent}: {error.strerror or error}") from None
    return out.with_suffix(".pth"), out.with_suffix(".csv")


def refuse_foreign(out: Path, *, fresh: bool) -> None:
    """Raises RunError where a file that a training would replace is there and is none of a training's. Without `fresh`
    the state is read, see `load_state`."""
    state, log = companions(out)
    try:
        with safe_open(out, "pt") as file:
            ours = RECORD_KEY in (file.metadata() or {})
    except FileNotFoundError:
        ours = True
    except (OSError, SafetensorError):
        ours = False
    if not ours:
        raise RunError(f"--out {out}: is there and is no checkpoint of ours; choose another --out")
    if fresh and state.exists():
        _read_state(state, mmap=True)
    head = ",".join(COLUMNS[:3]).encode()
    try:
        with log.open("rb") as lines:
            ours = lines.read(len(head)) in (head, b"")
    except FileNotFoundError:
        return
    except OSError:
        ours = False
    if not ours:
        raise RunError(f"{log}: is there and is no log of a training; move it, or choose another --out")


def save_state(
    path: Path, state: Mapping[str, Any], request: Mapping[str, Any], settings: ModelSettings, record: Mapping[str, Any]
) -> None:
    """Write {model, model_ema, optimizer, lr_scheduler, scaler, epoch, args}, plain data, and our record as JSON.

    `epoch` is the last complete one, counted from 0, and `args` has the names of the authors' options, so that their
    code goes on from it.
    """
    recipe, rpc = record["recipe"], settings.rpc
    indices = rpc.indices(settings.depth or 0) if rpc else ()
    args = {
        "model": settings.title,
        "input_size": settings.preprocessing.img_size,
        "robust": rpc is not None,
        "num_iter": rpc.iterations if rpc else None,
        "lambd": rpc.lam if rpc else None,
        "layer": indices[0] if len(indices) == 1 else -1,  # counted from 0; -1 is all
        **{name: recipe[name] for name in ("epochs", "batch_size", "lr", "weight_decay", "drop_path")},
        "seed": record["seed"],
    }
    ours = {"request": request, "settings": settings.model_dump(mode="json", by_alias=True), "training": record}
    content = {**state, "epoch": len(record["epochs"]) - 1, "args": args, RECORD_KEY: json.dumps(ours)}
    write_whole(path, lambda file: torch.save(content, file))


def load_state(path: Path, request: Mapping[str, Any]) -> dict[str, Any] | None:
    """The state at `path` and, under `training`, its record; None where there is none.

    Raises RunError where the file is broken, or another training's: the message says what differs from `request`.
    """
    if not path.exists():
        return None
    state, before, training = _read_state(path)
    if differ := _differences(before, request):
        more = f", and {len(differ) - 3} more" if len(differ) > 3 else ""
        raise RunError(
            f"{path} is the state of another training: {', '.join(differ[:3])}{more}; choose another --out, or "
            "start over with --fresh"
        )
    return {**state, "training": training}


def _read_state(path: Path, **how: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The state in a file, what it is of, and its record. Raises RunError where it is anything else."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, **how)
        ours = json.loads(state[RECORD_KEY])
        before, training = ours["request"], ours["training"]
        if rpc := before["model"]["rpc"]:  # may be from before there was one way to write the layers
            before["model"]["rpc"] = RPCSettings.parse(rpc, str(path)).model_dump(mode="json", by_alias=True)
    except Exception:  # the unpickler raises whatever a foreign file makes it raise
        raise RunError(f"{path}: not the state of a training; remove it, or choose another --out") from None
    return state, before, training


def _differences(before: Any, now: Any, name: str = "") -> list[str]:
    """What differs between two nested dicts, in words."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = dict.fromkeys([*before, *now])
        return [d for k in keys for d in _differences(before.get(k), now.get(k), f"{name}.{k}" if name else k)]
    return [] if before == now else [f"{name} was {_short(before)}, now {_short(now)}"]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def plain(request: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON gives it back, so that it can be compared with what was kept."""
    copy: dict[str, Any] = json.loads(json.dumps(request))
    return copy


def write_log(path: Path, epochs: list[dict[str, Any]]) -> None:
    """A row for each epoch, of COLUMNS; what was not asked for stays empty."""
    text = io.StringIO(newline="")
    rows = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    rows.writeheader()
    rows.writerows({name: escape.csv(value) for name, value in epoch.items()} for epoch in epochs)
    write_files({path: text.getvalue().encode()})


def tensorboard(folder: Path, epochs: list[dict[str, Any]]) -> Callable[[dict[str, Any]], None]:
    """A function that adds the row of an epoch to TensorBoard's files in `folder`; `epochs` are added at once."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise SpecError("--tensorboard: it needs the package tensorboard; pip install tensorboard") from None
    board = SummaryWriter(str(folder), purge_step=0)

    def add(row: dict[str, Any]) -> None:
        for name, value in row.items():
            if isinstance(value, int | float) and name != "epoch":
                board.add_scalar(name, value, row["epoch"])
        board.flush()

    for row in epochs:
        add(row)
    return add
