"""Commands that compute: eval, diagnose, bench."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from robustkpca.cli.app import (
    BOLD,
    Device,
    Lambda,
    Layers,
    Limit,
    Seed,
    app,
    choice,
    out,
    pick_device,
    print_table,
    show_run,
)
from robustkpca.cli.models import (
    BatchSize,
    Cache,
    CacheLimit,
    Checkpoint,
    Checkpointing,
    Classes,
    Compile,
    Data,
    Dtype,
    Heads,
    ImageSize,
    Iterations,
    Model,
    OutFolder,
    Weights,
    Workers,
    classifiers,
    repeatable,
    start,
    watched,
)
from robustkpca.errors import SpecError

if TYPE_CHECKING:
    from robustkpca.suites.suite import Suite


@app.command(name="eval")
def evaluate(
    model: Model = None,
    attack: Annotated[
        list[str] | None, typer.Option(help="Suite name (see `attacks`) or a .toml file. Repeatable.")
    ] = None,
    checkpoint: Checkpoint = None,
    data: Data = "fashion-mnist",
    in_distribution: Annotated[
        str | None, typer.Option(help="imagenet:DIR that imagenet-o is told apart from.")
    ] = None,
    full_argmax: Annotated[
        bool, typer.Option(help="Answers among all classes, also for imagenet-a, -r and -o (default: among their 200).")
    ] = False,
    protocol: Annotated[
        str | None, typer.Option(help="standard or paper: which of the suites pgd and pgd-paper.")
    ] = None,
    eps: Annotated[
        list[str] | None, typer.Option(help="Budget instead of the suite's, e.g. 8/255. Repeatable.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Number of attack steps instead of the suite's.")] = None,
    weights: Weights = "raw",
    iterations: Iterations = None,
    lam: Lambda = None,
    layers: Layers = None,
    heads: Heads = None,
    img_size: ImageSize = None,
    classes: Classes = None,
    limit: Limit = None,
    batch_size: BatchSize = 100,
    workers: Workers = None,
    cache: Cache = None,
    cache_limit: CacheLimit = 50,
    dtype: Dtype = "float32",
    compiled: Compile = False,
    checkpointed: Checkpointing = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also attack RPC models in bf16, where gradients are wrong.")
    ] = False,
    seed: Seed = 0,
    device: Device = "auto",
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic", help="On CUDA too the same bits every time; an operation that cannot is named."
        ),
    ] = False,
    out_dir: OutFolder = None,
) -> None:
    """Attack models and print accuracy tables. The same command continues a run that was interrupted."""
    import time

    from robustkpca.datasets.sources import load_samples
    from robustkpca.evaluation.plan import Plan
    from robustkpca.tasks.base import Options

    started = time.monotonic()
    where = pick_device(device)
    samples = load_samples(data, limit=limit, seed=seed, in_distribution=in_distribution)
    suites = _suites(attack, protocol, eps, steps, attacked=not samples.conditioned)
    models_ = classifiers(
        model,
        checkpoint,
        iterations=iterations,
        layers=layers,
        classes=classes,
        weights=weights,
        lam=lam,
        heads=heads,
        img_size=img_size,
        device=where,
        dtype=dtype,
        compiled=compiled,
        checkpointed=checkpointed,
    )
    plan = Plan(models_, samples, suites, Options(seed, batch_size, full_argmax, force))
    with repeatable(deterministic):
        run = start(plan, where, out_dir, workers, cache, cache_limit)
    healthy = show_run(run)
    out.print(
        f"rows and receipt: {run.path}  ({time.monotonic() - started:.0f} s)",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    if not healthy:
        raise typer.Exit(1)


@app.command()
def diagnose(
    model: Model = None,
    checkpoint: Checkpoint = None,
    data: Data = "fashion-mnist",
    eps: Annotated[
        list[str] | None,
        typer.Option(help="L-inf budgets in pixels, beside 0 and 1. Repeatable; default 4/255, 8/255."),
    ] = None,
    weights: Weights = "raw",
    iterations: Iterations = None,
    lam: Lambda = None,
    layers: Layers = None,
    heads: Heads = None,
    img_size: ImageSize = None,
    classes: Classes = None,
    limit: Limit = 100,
    batch_size: BatchSize = 100,
    workers: Workers = None,
    seed: Seed = 0,
    device: Device = "auto",
    out_dir: OutFolder = None,
) -> None:
    """Can the robustness of these models be measured by attacks? Runs a battery and says pass, warn or fail. Exit code 1: a finding says fail."""
    from robustkpca.datasets.sources import load_samples
    from robustkpca.diagnosis.findings import findings
    from robustkpca.evaluation.plan import Plan
    from robustkpca.suites.suite import load_suite
    from robustkpca.tasks.base import Options

    where = pick_device(device)
    samples = load_samples(data, limit=limit, seed=seed)
    if samples.conditioned:
        raise SpecError(f"--data: diagnose attacks the images, {samples.name} is evaluated as it is")
    battery, predicted = load_suite("diagnose"), load_suite("diagnose-predicted")
    if eps:
        battery, predicted = battery.with_eps(["0", *eps, "1"]), predicted.with_eps(eps[-1:])
    models_ = classifiers(
        model,
        checkpoint,
        iterations=iterations,
        layers=layers,
        classes=classes,
        weights=weights,
        lam=lam,
        heads=heads,
        img_size=img_size,
        device=where,
    )
    plan = Plan(models_, samples, [battery, predicted], Options(seed, batch_size))
    run = start(plan, where, out_dir, workers)
    healthy = show_run(run, verdicts=True)
    out.print(f"rows and receipt: {run.path}", markup=False, highlight=False, soft_wrap=True)
    if not healthy or any(f.level == "fail" for f in findings(run)):
        raise typer.Exit(1)


def _suites(
    names: list[str] | None, protocol: str | None, eps: list[str] | None, steps: int | None, *, attacked: bool
) -> list[Suite]:
    """The suites by name; `clean` asks for none, and data that comes corrupted (`attacked` false) needs none."""
    from robustkpca.suites.cell import CLEAN
    from robustkpca.suites.suite import load_suite, suite_names

    if not names and attacked:
        known = ", ".join([CLEAN, *suite_names()])
        raise SpecError(f"--attack: expected at least one of {known}, or a .toml file")
    if protocol is not None:
        choice("--protocol", protocol, ("standard", "paper"))
    suites = [load_suite(name, protocol) for name in names or [] if name != CLEAN]  # type: ignore[arg-type]
    # Each option changes the suites that have it; one that no suite has is an error.
    if eps:
        have = [suite.threat.budget_word == "eps" for suite in suites]
        suites = [s.with_eps(eps) if has or not any(have) else s for s, has in zip(suites, have, strict=True)]
    if steps is not None:
        have = [suite.has_steps for suite in suites]
        suites = [s.with_steps(steps) if has or not any(have) else s for s, has in zip(suites, have, strict=True)]
    return suites


@app.command()
def bench(
    experiment: Annotated[str, typer.Argument(help="Name (see `benchmarks/`, e.g. paper-attacks) or a .toml file.")],
    models_file: Annotated[
        Path, typer.Option("--models", help="TOML file with a table `model` for each: name, checkpoint, ...")
    ],
    data: Annotated[list[str], typer.Option(help="NAME or NAME:DIR for each kind the experiment needs. Repeatable.")],
    out_dir: Annotated[
        Path, typer.Option("--out", help="Folder of its runs and its table; a started one is continued.")
    ],
    in_distribution: Annotated[
        str | None, typer.Option(help="imagenet:DIR that imagenet-o is told apart from.")
    ] = None,
    reference: Annotated[bool, typer.Option(help="The paper's figures for the same protocol, data and model.")] = False,
    limit: Limit = None,
    batch_size: BatchSize = 100,
    workers: Workers = None,
    seed: Seed = 0,
    device: Device = "auto",
) -> None:
    """Run or resume an experiment and write its table (Markdown, LaTeX, CSV)."""
    from robustkpca import experiments
    from robustkpca.report import paper_tables
    from robustkpca.report.formats import notes, render
    from robustkpca.runtime.sharing import place

    plan = experiments.load_experiment(experiment)
    entries = experiments.load_models(models_file)
    here = place()
    with watched(plan.name, out_dir) as show:
        runs = experiments.run(
            plan,
            entries,
            data,
            out_dir,
            in_distribution=in_distribution,
            limit=limit,
            seed=seed,
            batch_size=batch_size,
            workers=workers,
            device=pick_device(device),
            here=here,
            on_progress=show,
        )
    if here.rank > 0:
        raise typer.Exit
    found = paper_tables.LAYOUTS[plan.layout](runs)
    found.title = plan.title
    print_table(found.title, found.texts(bold=BOLD, reference=reference), notes(found, reference=reference))
    for form, suffix in (("markdown", "md"), ("latex", "tex"), ("csv", "csv")):
        file = out_dir / f"{plan.name}.{suffix}"
        file.write_text(render(found, form, reference=reference), encoding="utf-8")
        out.print(f"wrote {file}", markup=False, highlight=False, soft_wrap=True)
    if any(not status.complete for run in runs for status in run.statuses):
        raise typer.Exit(1)
