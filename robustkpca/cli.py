"""The command line: parse, call, print, exit code. Heavy imports live inside the commands, so that --help is instant."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from robustkpca.errors import RobustKPCAError, SpecError

app = typer.Typer(
    name="robustkpca",
    help="How robust is a vision transformer, and does attention with robust principal components make it more so?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
out = Console()
err = Console(stderr=True)


def main() -> None:
    """Entry point: one line for what the user can mend, 130 for Ctrl-C, a traceback only for our own bugs."""
    try:
        app()
    except RobustKPCAError as error:
        err.print(f"[red]error:[/red] {type(error).__name__}: ", end="")
        err.print(str(error), markup=False, highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        err.print("interrupted")
        sys.exit(130)


Iterations = Annotated[int | None, typer.Option(help="RPC-Attention: iterations n of PAP.")]
Lambda = Annotated[float | None, typer.Option("--lambda", help="RPC-Attention: weight of the sparse part.")]
Layers = Annotated[str | None, typer.Option(help="RPC-Attention: first, all, or numbers counted from 1, e.g. 1,3.")]
Seed = Annotated[int, typer.Option(help="Seed of every random draw.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]


def pick_device(name: str) -> str:
    """`auto` is CUDA where it works, else the CPU."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return name
    kind, _, number = name.partition(":")
    if kind != "cuda" or (number and not number.isdigit()):
        raise SpecError(f"--device: expected auto, cpu, cuda or cuda:N, got {name!r}")
    if int(number or 0) >= torch.cuda.device_count():
        raise SpecError(f"--device {name}: {torch.cuda.device_count()} CUDA devices are visible here; use --device cpu")
    return name


@app.command()
def train(
    model: Annotated[str, typer.Option(help="vit, symvit or rpc-symvit, with -micro (default), -tiny, -small or -base.")],
    data: Annotated[str, typer.Option(help="digits, fashion-mnist:DIR or folder:DIR.")],
    out_file: Annotated[Path, typer.Option("--out", help="Checkpoint to write (.safetensors).")],
    iterations: Iterations = None,
    lam: Lambda = None,
    layers: Layers = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Instead of the recipe's.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Instead of the recipe's.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate, instead of the recipe's.")] = None,
    patch_size: Annotated[int | None, typer.Option(min=1, help="Instead of the recipe's.")] = None,
    img_size: Annotated[int | None, typer.Option(min=1, help="Side to which images are brought.")] = None,
    limit: Annotated[int | None, typer.Option(help="Use at most N images, spread over the classes.")] = None,
    holdout: Annotated[int, typer.Option(help="Keep N images out and score them after each epoch.")] = 0,
    seed: Seed = 0,
    device: Device = "auto",
) -> None:
    """Train a model with a fixed recipe; the checkpoint carries all that eval needs."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from robustkpca import datasets
    from robustkpca import train as training
    from robustkpca.settings import RPCSettings, parse_layers, split_name

    rpc_flags = {"--iterations": iterations, "--lambda": lam, "--layers": layers}
    rpc = None
    if split_name(model)[0] == "rpc-symvit":
        if iterations is None or lam is None:
            raise SpecError("train rpc-symvit: expected --iterations and --lambda (the paper's tiny models: 4 and 4)")
        settings = {"iterations": iterations, "lambda": lam, "layers": parse_layers(layers or "first")}
        rpc = RPCSettings.parse(settings, "RPC settings")
    elif given := [flag for flag, value in rpc_flags.items() if value is not None]:
        raise SpecError(f"{', '.join(given)}: settings of rpc-symvit, but the model is {model}")
    flags = {"epochs": epochs, "batch_size": batch_size, "lr": lr, "patch_size": patch_size}
    samples = datasets.load_samples(data, split="train", limit=limit, seed=seed)
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeRemainingColumn(), console=err
    ) as progress:
        bar = progress.add_task(f"train {model}", total=None)

        def on_epoch(figures: dict[str, float]) -> None:
            progress.console.print("  ".join(f"{k} {v}" for k, v in figures.items()), highlight=False)

        training.run(
            model,
            samples,
            out_file,
            rpc=rpc,
            overrides={k: v for k, v in flags.items() if v is not None},
            seed=seed,
            holdout=holdout,
            img_size=img_size,
            device=pick_device(device),
            on_epoch=on_epoch,
            on_step=lambda step, total: progress.update(bar, completed=step, total=total),
        )
    out.print(f"wrote {out_file}", highlight=False)
