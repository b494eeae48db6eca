"""The command that trains."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from robustkpca.cli.options import (
    Adversarial,
    Amp,
    Device,
    Lambda,
    Layers,
    Limit,
    Seed,
    complete_data,
    complete_families,
    complete_recipes,
)
from robustkpca.cli.show import say, wrote
from robustkpca.cli.start import interruptible, pick_device, progress_bar
from robustkpca.errors import SpecError


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
    lam: Lambda = None,
    layers: Layers = None,
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
    from robustkpca.models.checkpoints import load_classifier
    from robustkpca.models.settings import PURSUING, RPCSettings, parse_layers, split_name
    from robustkpca.runtime.place import cpus, place

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
    attacks = {"--eps": eps, "--attack-steps": attack_steps, "--beta": beta}
    method = overrides.get("adversarial", chosen.adversarial if chosen else "none")
    if method == "none" and (idle := [flag for flag, value in attacks.items() if value is not None]):
        raise SpecError(
            f"{', '.join(idle)}: of adversarial training; expected --adversarial pgd-at or trades beside it"
        )
    pursues = split_name(model)[0] in PURSUING
    rpc_flags = {"--iterations": iterations, "--lambda": lam, "--layers": layers}
    given = [flag for flag, value in rpc_flags.items() if value is not None]
    rpc = None
    if given and not pursues:
        raise SpecError(f"{', '.join(given)}: settings of {' and '.join(PURSUING)}, but the model is {model}")
    if pursues and start is None:
        if iterations is None or lam is None:
            raise SpecError(f"train {model}: expected --iterations and --lambda (the paper's tiny models: 4 and 4)")
        rpc = RPCSettings.parse(
            {"iterations": iterations, "lambda": lam, "layers": parse_layers(layers or "first")}, "RPC settings"
        )
    where, here = pick_device(device), place()
    begin = None
    if start is not None:
        begin = load_classifier(
            model,
            start,
            iterations=iterations,
            lam=lam,
            layers=None if layers is None else parse_layers(layers),
            img_size=img_size,
        )
    from robustkpca.datasets.sources import load_images

    samples = load_images(data, split="train", limit=limit, seed=seed)
    if workers is None:
        workers = 0 if where == "cpu" else min(8, cpus() // here.local_world)
    progress = progress_bar(disable=here.rank > 0)
    bar = progress.add_task(f"train {model}", total=None)

    def on_step(step: int, total: int) -> None:
        progress.start()  # not before: what is refused has no bar
        progress.update(bar, completed=step, total=total)

    def on_epoch(figures: dict[str, float]) -> None:
        shown = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in figures.items() if k != "model"}
        progress.console.print("  ".join(f"{k} {v}" for k, v in shown.items()), highlight=False, soft_wrap=True)

    def kept() -> str:
        state = out_file.with_suffix(".pth")
        return (
            f"complete epochs are kept in {state}; the same command goes on"
            if state.exists()
            else "nothing was kept yet"
        )

    try:
        with interruptible(kept):
            training.run(
                model,
                samples,
                out_file,
                rpc=rpc,
                recipe=chosen,
                overrides=overrides,
                start=begin,
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
    finally:
        if progress.live.is_started:
            progress.stop()
    if here.rank == 0:
        wrote(out_file)
