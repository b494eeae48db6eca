"""The command that asks whether attacks can measure robustness."""

from __future__ import annotations

from typing import Annotated

import typer

from robustkpca.cli.options import (
    BatchSize,
    Data,
    Device,
    Limit,
    ModelFlags,
    OutFolder,
    Seed,
    Workers,
    takes_models,
)
from robustkpca.cli.show import keep_receipt, show, show_run
from robustkpca.cli.start import asked_data, asked_models, load, pick_device, start
from robustkpca.errors import SpecError


@takes_models
def diagnose(
    flags: ModelFlags,
    data: Data = "fashion-mnist",
    eps: Annotated[
        list[str] | None,
        typer.Option(help="L-inf budgets in pixels, beside 0 and 1. Repeatable; default 4/255, 8/255."),
    ] = None,
    limit: Limit = 100,
    batch_size: BatchSize = 100,
    workers: Workers = None,
    seed: Seed = 0,
    device: Device = "auto",
    out_dir: OutFolder = None,
) -> None:
    """Can the robustness of these models be measured by attacks? Runs a battery and says pass, warn or fail. Exit code
    1: a finding says fail."""
    from robustkpca.diagnosis.findings import findings
    from robustkpca.suites.suite import load_suite

    asked = asked_models(flags)
    asked_data(data)
    battery, predicted = load_suite("diagnose"), load_suite("diagnose-predicted")
    if eps:
        battery, predicted = battery.with_eps(["0", *eps, "1"]), predicted.with_eps(eps[-1:])
    where = pick_device(device)
    from robustkpca.datasets.sources import load_images
    from robustkpca.evaluation.plan import Plan
    from robustkpca.tasks.base import Options

    samples = load_images(data, limit=limit, seed=seed)
    if samples.conditioned:
        raise SpecError(f"--data: diagnose attacks the images, {samples.name} is evaluated as it is")
    loaded = load(asked, where)
    plan = Plan(loaded, samples, [battery, predicted], Options(seed, batch_size))
    run = start(plan, where, out_dir, workers)
    healthy = show_run(run, verdicts=True)
    keep_receipt(run)
    show(f"rows and receipt: {run.path}")
    if not healthy or any(f.level == "fail" for f in findings(run)):
        raise typer.Exit(1)
