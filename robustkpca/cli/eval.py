"""The command that attacks models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from robustkpca.cli.options import (
    ATTACKS,
    DATA,
    WORK,
    AsJson,
    BatchSize,
    Cache,
    CacheLimit,
    Checkpointing,
    Compile,
    Data,
    Device,
    Dtype,
    InDistribution,
    Limit,
    ModelFlags,
    OutFolder,
    Protocol,
    Quiet,
    Seed,
    Workers,
    complete_suites,
    takes_models,
)
from robustkpca.cli.show import keep_receipt, run_as_json, say_missing, show, show_json, show_run
from robustkpca.cli.start import asked_data, asked_models, import_code, load, pick_device, repeatable, start
from robustkpca.errors import SpecError

if TYPE_CHECKING:
    from robustkpca.suites.suite import Suite


@takes_models
def evaluate(
    flags: ModelFlags,
    attack: Annotated[
        list[str] | None,
        typer.Option(
            help="Suite name (see `attacks`) or a .toml file. Repeatable.",
            autocompletion=complete_suites,
            rich_help_panel=ATTACKS,
        ),
    ] = None,
    data: Data = "fashion-mnist",
    in_distribution: InDistribution = None,
    full_argmax: Annotated[
        bool,
        typer.Option(
            help="Answers among all classes, also for imagenet-a, -r and -o (default: among their 200).",
            rich_help_panel=DATA,
        ),
    ] = False,
    protocol: Annotated[
        Protocol | None, typer.Option(help="Which of the suites pgd and pgd-paper.", rich_help_panel=ATTACKS)
    ] = None,
    eps: Annotated[
        list[str] | None,
        typer.Option(help="Budget instead of the suite's, e.g. 8/255. Repeatable.", rich_help_panel=ATTACKS),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Number of attack steps instead of the suite's.", rich_help_panel=ATTACKS)
    ] = None,
    limit: Limit = None,
    batch_size: BatchSize = 100,
    workers: Workers = None,
    cache: Cache = None,
    cache_limit: CacheLimit = 50,
    dtype: Dtype = "float32",
    compiled: Compile = False,
    checkpointed: Checkpointing = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Also attack RPC models in bf16, where gradients are wrong.", rich_help_panel=ATTACKS
        ),
    ] = False,
    seed: Seed = 0,
    device: Device = "auto",
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic",
            help="On CUDA too the same bits every time; an operation that cannot is named.",
            rich_help_panel=WORK,
        ),
    ] = False,
    out_dir: OutFolder = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Attack models and print accuracy tables. The same command continues a run that was interrupted."""
    import time

    started = time.monotonic()
    # Whatever is misspelt is found before torch is imported.
    asked = asked_models(flags, dtype=dtype, compile=compiled, grad_checkpointing=checkpointed)
    source = asked_data(data, in_distribution)
    import_code(asked[0], data)  # it may register what a suite names
    suites = _suites(attack, protocol, eps, steps)
    if source is not None:
        _refuse_no_attack(attack, attacked=not source.conditioned)
    where = pick_device(device)
    from robustkpca.datasets.sources import load_samples
    from robustkpca.evaluation.plan import Plan
    from robustkpca.tasks.base import Options

    samples = load_samples(data, limit=limit, seed=seed, in_distribution=in_distribution)
    _refuse_no_attack(attack, attacked=not samples.conditioned)
    loaded = load(asked, where)
    plan = Plan(loaded, samples, suites, Options(seed, batch_size, full_argmax, force))
    with repeatable(deterministic):
        run = start(plan, where, out_dir, workers, cache, cache_limit, quiet=quiet)
    keep_receipt(run)
    if as_json:
        show_json(run_as_json(run))
        healthy = say_missing(run)
    else:
        healthy = say_missing(run) if quiet else show_run(run)
        show(f"rows and receipt: {run.path}  ({time.monotonic() - started:.0f} s)")
    if not healthy:
        raise typer.Exit(1)


def _refuse_no_attack(names: list[str] | None, *, attacked: bool) -> None:
    """Raises SpecError where an attack is missing; data that comes perturbed (`attacked` false) needs none."""
    from robustkpca.suites.cell import CLEAN
    from robustkpca.suites.suite import suite_names

    if not names and attacked:
        known = ", ".join([CLEAN, *suite_names()])
        raise SpecError(f"--attack: expected at least one of {known}, or a .toml file")


def _suites(
    names: list[str] | None, protocol: Protocol | None, eps: list[str] | None, steps: int | None
) -> list[Suite]:
    """The suites by name; `clean` asks for none."""
    from robustkpca.suites.cell import CLEAN
    from robustkpca.suites.suite import load_suite

    suites = [load_suite(name, protocol) for name in names or [] if name != CLEAN]
    # Each option changes the suites that have it; one that no suite has is an error.
    if eps:
        have = [suite.threat.has_eps for suite in suites]
        suites = [s.with_eps(eps) if has or not any(have) else s for s, has in zip(suites, have, strict=True)]
    if steps is not None:
        have = [suite.has_steps for suite in suites]
        suites = [s.with_steps(steps) if has or not any(have) else s for s, has in zip(suites, have, strict=True)]
    return suites
