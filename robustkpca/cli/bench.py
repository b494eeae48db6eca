"""The command that runs the experiments of the paper's tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from robustkpca.cli.options import (
    MODELS_HELP,
    BatchSize,
    Device,
    InDistribution,
    Limit,
    Reference,
    Seed,
    Workers,
    complete_data,
    complete_experiments,
)
from robustkpca.cli.show import print_results, write, wrote
from robustkpca.cli.start import asked_data, pick_device, refuse_missing, watched


def bench(
    experiment: Annotated[
        str,
        typer.Argument(
            help="Name (see `benchmarks/`, e.g. paper-attacks) or a .toml file.", autocompletion=complete_experiments
        ),
    ],
    models_file: Annotated[Path, typer.Option("--models", help=MODELS_HELP)],
    data: Annotated[
        list[str],
        typer.Option(
            help="NAME or NAME:DIR for each kind the experiment needs. Repeatable.", autocompletion=complete_data
        ),
    ],
    out_dir: Annotated[
        Path, typer.Option("--out", help="Folder of its runs and its table; a started one is continued.")
    ],
    in_distribution: InDistribution = None,
    reference: Reference = False,
    limit: Limit = None,
    batch_size: BatchSize = 100,
    workers: Workers = None,
    seed: Seed = 0,
    device: Device = "auto",
) -> None:
    """Run or resume an experiment and write its table (Markdown, LaTeX, CSV)."""
    from robustkpca import experiments
    from robustkpca.models.options import read_models_file
    from robustkpca.report import paper_tables
    from robustkpca.report.formats import render

    plan = experiments.load_experiment(experiment)
    models = read_models_file(models_file)
    refuse_missing([model.checkpoint for model in models])
    for spec, inside in experiments.data_of(plan, data, in_distribution):
        asked_data(spec, inside)
    where = pick_device(device)
    from robustkpca.evaluation.loop import Resources
    from robustkpca.runtime.place import place

    here = place()
    with watched(plan.name, out_dir) as show:
        setup = experiments.Setup(in_distribution, limit, seed, batch_size, where)
        runs = experiments.run(plan, models, data, out_dir, setup, Resources(workers, here=here, on_progress=show))
    if here.rank > 0:
        raise typer.Exit
    results = paper_tables.LAYOUTS[plan.layout](runs)
    results.title = plan.title
    print_results(results, reference=reference)
    for form, suffix in (("markdown", "md"), ("latex", "tex"), ("csv", "csv")):
        file = out_dir / f"{plan.name}.{suffix}"
        write(file, render(results, form, label=f"tab:{plan.name}", reference=reference))
        wrote(file)
    if any(not status.complete for run in runs for status in run.statuses):
        raise typer.Exit(1)
