"""The command that reads a model's attention as kernel PCA."""

from __future__ import annotations

import contextlib
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from robustkpca.cli.options import (
    MODEL_HELP,
    Analysis,
    Data,
    Device,
    Limit,
    ModelFlags,
    Seed,
    Workers,
    complete_models,
    takes_models,
)
from robustkpca.cli.show import print_table, say, show
from robustkpca.cli.start import asked_data, asked_models, interruptible, load, pick_device, progress_bar, split_loaded

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd
    from rich.progress import TaskID

    from robustkpca.datasets.samples import Samples
    from robustkpca.evaluation.loop import Progress
    from robustkpca.kpca.analysis import Analysis as Analysis_
    from robustkpca.models.classifier import Classifier


@takes_models
def analyze(
    flags: ModelFlags,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL",
            help=MODEL_HELP,
            show_default=False,
            autocompletion=complete_models,
        ),
    ] = None,
    data: Data = "fashion-mnist",
    only: Annotated[list[Analysis] | None, typer.Option(help="Default: all that apply. Repeatable.")] = None,
    log: Annotated[
        list[Path] | None,
        typer.Option(
            help="CSV log of a training (epoch, model, projection_loss) for the figure of the loss. Repeatable."
        ),
    ] = None,
    limit: Limit = 100,
    batch_size: Annotated[int, typer.Option(help="Images a batch; changes no result beyond rounding.")] = 20,
    workers: Workers = None,
    seed: Seed = 0,
    device: Device = "auto",
    out_dir: Annotated[
        Path | None, typer.Option("--out", help="Folder of page, figures and tables. Default: one under runs/.")
    ] = None,
) -> None:
    """Attention as kernel PCA: projection loss, whether values hold eigenvectors, spectrum;
    for RPC-Attention what it pursues."""
    from robustkpca.kpca.plots import read_log

    asked = asked_models(flags, names or ())
    asked_data(data)
    for path in log or ():
        read_log(path)  # a fault in it is found before the work is done
    where = pick_device(device)
    from robustkpca.datasets.sources import load_images
    from robustkpca.kpca import analysis
    from robustkpca.kpca import page as kpca_page
    from robustkpca.runs.request import fingerprint
    from robustkpca.runtime.claims import alone
    from robustkpca.runtime.place import place

    samples = load_images(data, limit=limit, seed=seed)
    usable, unusable = split_loaded(load(asked, where))
    failed = [f"{m.title}: failed: {m.reason}" for m in unusable]
    labels = _labels(usable)
    for model in usable:
        analysis.attention_layers(model, only or ())  # raises before another model's work is done
    receipt = _receipt(labels, samples, [*(only or analysis.ANALYSES)], seed, batch_size, where)
    mark = fingerprint(receipt)[:8]
    if out_dir is None:
        out_dir = Path("runs") / f"analysis-{mark}"
    outputs, chunks = kpca_page.claim(out_dir), out_dir / kpca_page.CHUNKS
    # Of several processes the first holds the folder for all.
    with alone(chunks / "claims", f"--out {out_dir}") if place().rank == 0 else contextlib.nullcontext():
        results = _analyze(labels, samples, only or (), batch_size, chunks, mark, workers)
        if place().rank > 0:
            raise typer.Exit
        tables = _tables(results)
        warnings = failed + [f"{label}: {text}" for label, result in results.items() for text in result.warnings]
        command = "robustkpca " + shlex.join(sys.argv[1:])
        files = kpca_page.write(outputs, tables, {**receipt, "command": command}, warnings, log or ())
    if place().alone:  # others may still read them
        kpca_page.remove_chunks(out_dir)
    _print_views([view for label in labels for view in kpca_page.model_views(tables, label)])
    for text in warnings:
        say(f"warning: {text}", style="yellow")
    show(f"page, figures and tables: {files[0]}")
    if failed:
        raise typer.Exit(1)


def _analyze(
    labels: dict[str, Classifier],
    samples: Samples,
    only: Sequence[str],
    batch_size: int,
    chunks: Path,
    mark: str,
    workers: int | None,
) -> dict[str, Analysis_]:
    """The analysis of each model. What is done is kept in the folder `chunks`, from which the same command goes on."""
    from robustkpca.evaluation.loop import Resources
    from robustkpca.evaluation.passes import Keep
    from robustkpca.kpca import analysis
    from robustkpca.runtime.place import place

    here, results = place(), {}

    def left() -> str:
        done = sum(1 for _ in chunks.glob("*.safetensors"))
        return f"{done} chunks are kept in {chunks}; the same command goes on from there"

    with interruptible(left), progress_bar(disable=here.rank > 0) as progress:
        for number, (label, model) in enumerate(labels.items()):
            bar = progress.add_task(label, total=len(samples))

            def show(now: Progress, bar: TaskID = bar) -> None:
                progress.update(bar, completed=now.done, total=now.total)

            resources = Resources(workers or 0, here=here, on_progress=show, on_notice=say)
            keep = Keep(chunks, f"{mark}-{number}")
            results[label] = analysis.analyze(
                model, samples, only, batch_size=batch_size, keep=keep, resources=resources
            )
    return results


def _tables(results: dict[str, Analysis_]) -> dict[str, pd.DataFrame]:
    """The tables of all models, by name, each with the column `model` in front."""
    import pandas as pd

    parts: dict[str, list[pd.DataFrame]] = {}
    for label, result in results.items():
        for name, table in result.tables.items():
            table.insert(0, "model", label)
            parts.setdefault(name, []).append(table)
    return {name: pd.concat(tables, ignore_index=True) for name, tables in parts.items()}


def _print_views(views: list[tuple[str, pd.DataFrame, list[str]]]) -> None:
    """Print tables; a note that several have is printed once, below the last of them."""
    last = {note: i for i, (_, _, notes) in enumerate(views) for note in notes}
    for i, (title, cells, notes) in enumerate(views):
        print_table(title, cells, [note for note in notes if last[note] == i])


def _labels(models: list[Classifier]) -> dict[str, Classifier]:
    """Models by their names."""
    from robustkpca.evaluation.plan import labels_of
    from robustkpca.tasks.classification.task import CLASSIFICATION

    return dict(zip(labels_of(models, CLASSIFICATION), models, strict=True))


def _receipt(
    labels: dict[str, Classifier], samples: Samples, only: list[str], seed: int, batch_size: int, device: str
) -> dict[str, Any]:
    """Everything that decides a number, setting to text."""
    from importlib import metadata

    import torch

    from robustkpca._version import __version__

    described = {
        f"model {label}": "; ".join([f"weights {m.weights}", f"from {m.source}", *m.notes])
        for label, m in labels.items()
    }
    versions = {"robustkpca": __version__, "torch": torch.__version__}
    versions |= {name: metadata.version(name) for name in ("timm", "numpy", "pandas")}
    return {
        **described,
        "data": f"{samples.name}, n = {len(samples)}, ids {samples.ids_hash}, "
        f"{samples.hash_covers} {samples.content_hash}",
        "analyses": ", ".join(only),
        "seed": str(seed),
        "batch size": f"{batch_size} (changes no figure beyond rounding)",
        "dtype": "model float32, analysis float64",
        "device": device,
        "software": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }
