"""The command that trains."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from robustkpca.cli.options import (
    Adversarial,
    Amp,
    Device,
    Limit,
    Seed,
    complete_data,
    complete_families,
    complete_layers,
    complete_recipes,
)
from robustkpca.cli.show import say, wrote
from robustkpca.cli.start import asked_data, interruptible, pick_device, progress_bar
from robustkpca.errors import SpecError

if TYPE_CHECKING:
    from robustkpca.models.classifier import Classifier
    from robustkpca.models.settings import RPCSettings


def train(
    model: Annotated[
        str,
        typer.Option(
            help="A family (see `models`): vit, symvit, rpc-symvit, ..., with -micro (default), -tiny, -small or "
            "-base.",
            autocompletion=complete_families,
        ),
    ],
    data: Annotated[
        str,
        typer.Option(
            help="digits, NAME:DIR of fashion-mnist, cifar10, imagenet, folder, ..., or package.module:object of your "
            "own.",
            autocompletion=complete_data,
        ),
    ],
    out_file: Annotated[
        Path,
        typer.Option(
            "--out",
            help="Checkpoint to write (.safetensors). Beside it: .pth, the state after each epoch, with the keys of "
            "DeiT's checkpoints, from which the same command goes on; .csv, the log.",
        ),
    ],
    start: Annotated[
        Path | None, typer.Option(help="Start from the weights of this checkpoint, which must have the data's classes.")
    ] = None,
    iterations: Annotated[int | None, typer.Option(help="RPC-Attention: iterations n of PAP.")] = None,
    lam: Annotated[float | None, typer.Option("--lambda", help="RPC-Attention: weight of the sparse part.")] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            help="RPC-Attention: first, all, or numbers counted from 1, e.g. 1,3.", autocompletion=complete_layers
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="digits, fashion-mnist, cifar10, folder, deit, or a .toml file. Default: the data's.",
            autocompletion=complete_recipes,
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="KEY=VALUE instead of the recipe's, e.g. mixup=0.8. Repeatable; a wrong key lists all."
        ),
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Instead of the recipe's.")] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Of all processes together, instead of the recipe's.")
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate, instead of the recipe's.")] = None,
    patch_size: Annotated[int | None, typer.Option(min=1, help="Instead of the recipe's.")] = None,
    amp: Annotated[Amp | None, typer.Option(help="Precision on CUDA, instead of the recipe's.")] = None,
    adversarial: Annotated[
        Adversarial | None, typer.Option(help="Train on attacked images, which costs as many passes as steps.")
    ] = None,
    eps: Annotated[
        str | None, typer.Option(help="L-inf budget of adversarial training, in pixels. Default: 8/255.")
    ] = None,
    attack_steps: Annotated[int | None, typer.Option(min=1, help="Of adversarial training. Default: 10.")] = None,
    beta: Annotated[float | None, typer.Option(help="TRADES: weight of the divergence. Default: 6.")] = None,
    img_size: Annotated[int | None, typer.Option(min=1, help="Side to which images are brought.")] = None,
    limit: Limit = None,
    holdout: Annotated[int, typer.Option(help="Keep N images out and score them after each epoch.")] = 0,
    projection_loss: Annotated[
        int, typer.Option(min=0, help="Log kernel PCA's projection loss on N fixed images (see `analyze --log`).")
    ] = 0,
    board: Annotated[
        Path | None, typer.Option("--tensorboard", help="Folder for TensorBoard, whose package must be there.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over, whatever state is there.")] = False,
    workers: Annotated[
        int | None, typer.Option(min=0, help="Processes that open pictures. Default: 0 on the CPU, up to 8 a GPU.")
    ] = None,
    seed: Seed = 0,
    device: Device = "auto",
) -> None:
    """Train a model by a recipe; the checkpoint carries all that eval needs. The same command goes on after an
    interruption. For several processes: torchrun --nproc-per-node N -m robustkpca train ..."""
    from robustkpca import train as training

    flags = {
        "epochs": epochs,
        "batch_size": batch_size,
        "lr": lr,
        "patch_size": patch_size,
        "amp": amp,
        "adversarial": adversarial,
        "eps": eps,
        "attack_steps": attack_steps,
        "beta": beta,
    }
    overrides = training.parse_settings(changes or []) | {k: v for k, v in flags.items() if v is not None}
    chosen = training.load_recipe(recipe) if recipe else None
    method = overrides.get("adversarial", chosen.adversarial if chosen else "none")
    _refuse_idle(method, {"--eps": eps, "--attack-steps": attack_steps, "--beta": beta})
    rpc = _rpc_settings(model, iterations, lam, layers, needed=start is None)
    asked_data(data)
    where = pick_device(device)
    from robustkpca.datasets.sources import load_images
    from robustkpca.runtime.place import cpus, place
    from robustkpca.train.training import TrainingOptions

    here = place()
    initial = None if start is None else _initial(model, start, iterations, lam, layers, img_size)
    samples = load_images(data, split="train", limit=limit, seed=seed)
    if workers is None:
        workers = 0 if where == "cpu" else min(8, cpus() // here.local_world)
    with _shown(f"train {model}", out_file, quiet=here.rank > 0) as (on_step, on_epoch):
        options = TrainingOptions(
            rpc=rpc,
            recipe=chosen,
            overrides=overrides,
            start=initial,
            seed=seed,
            holdout=holdout,
            projection_loss=projection_loss,
            img_size=img_size,
            device=where,
            workers=workers,
            here=here,
            fresh=fresh,
            board=board,
            on_epoch=on_epoch,
            on_step=on_step,
            on_notice=say if here.rank == 0 else None,
        )
        training.run(model, samples, out_file, options)
    if here.rank == 0:
        wrote(out_file)


def _refuse_idle(method: str, values: Mapping[str, object]) -> None:
    """Raises SpecError for flags of adversarial training beside a `method` that is none."""
    if method == "none" and (idle := [flag for flag, value in values.items() if value is not None]):
        raise SpecError(
            f"{', '.join(idle)}: of adversarial training; expected --adversarial pgd-at or trades beside it"
        )


def _rpc_settings(
    model: str, iterations: int | None, lam: float | None, layers: str | None, *, needed: bool
) -> RPCSettings | None:
    """Settings of RPC-Attention from the flags; None for a model without it, and where they are not `needed`."""
    from robustkpca.models.settings import PURSUING, RPCSettings, parse_layers, split_name

    pursues = split_name(model)[0] in PURSUING
    flags = {"--iterations": iterations, "--lambda": lam, "--layers": layers}
    given = [flag for flag, value in flags.items() if value is not None]
    if given and not pursues:
        raise SpecError(f"{', '.join(given)}: settings of {' and '.join(PURSUING)}, but the model is {model}")
    if not (pursues and needed):
        return None
    if iterations is None or lam is None:
        raise SpecError(f"train {model}: expected --iterations and --lambda (the paper's tiny models: 4 and 4)")
    values = {"iterations": iterations, "lambda": lam, "layers": parse_layers(layers or "first")}
    settings: RPCSettings = RPCSettings.parse(values, "RPC settings")
    return settings


def _initial(
    model: str, file: Path, iterations: int | None, lam: float | None, layers: str | None, img_size: int | None
) -> Classifier:
    """The model of the weights to start from."""
    from robustkpca.models.checkpoints import load_classifier
    from robustkpca.models.settings import parse_layers

    parsed = None if layers is None else parse_layers(layers)
    return load_classifier(model, file, iterations=iterations, lam=lam, layers=parsed, img_size=img_size)


@contextlib.contextmanager
def _shown(
    title: str, out_file: Path, *, quiet: bool
) -> Iterator[tuple[Callable[[int, int], None], Callable[[dict[str, Any]], None]]]:
    """What is told each step and each epoch: a progress bar, and the epoch's row. An interruption says what is left."""
    progress = progress_bar(disable=quiet)
    bar = progress.add_task(title, total=None)

    def on_step(step: int, total: int) -> None:
        progress.start()  # not before: what is refused has no bar
        progress.update(bar, completed=step, total=total)

    def on_epoch(row: dict[str, Any]) -> None:
        shown = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items() if k != "model"}
        progress.console.print("  ".join(f"{k} {v}" for k, v in shown.items()), highlight=False, soft_wrap=True)

    def left() -> str:
        state = out_file.with_suffix(".pth")
        if not state.exists():
            return "nothing was kept yet"
        return f"complete epochs are kept in {state}; the same command goes on"

    try:
        with interruptible(left):
            yield on_step, on_epoch
    finally:
        if progress.live.is_started:
            progress.stop()
