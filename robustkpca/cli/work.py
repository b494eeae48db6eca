"""Commands that compute: eval, bench, train."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    err,
    out,
    pick_device,
    print_table,
    progress_bar,
    show_run,
)
from robustkpca.errors import CheckpointError, SpecError

if TYPE_CHECKING:
    from robustkpca.evaluation import Plan
    from robustkpca.models import Classifier, Unusable
    from robustkpca.spec import Suite


@app.command(name="eval")
def evaluate(
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Embedded name, vit|symvit|rpc-symvit[-SIZE] with --checkpoint, or timm:NAME. Repeat to compare."
        ),
    ] = None,
    attack: Annotated[
        list[str] | None, typer.Option(help="Suite name (see `attacks`) or a .toml file. Repeatable.")
    ] = None,
    checkpoint: Annotated[
        list[str] | None, typer.Option(help="Weights of the model in the same place; `embedded` for embedded ones.")
    ] = None,
    data: Annotated[str, typer.Option(help="Data set (see `datasets`): NAME or NAME:DIR.")] = "fashion-mnist",
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
    weights: Annotated[str, typer.Option(help="raw (what was optimised) or ema, of files that hold both.")] = "raw",
    iterations: Annotated[
        str | None, typer.Option(help="RPC-Attention: iterations n of PAP; 1,2,4 evaluates each of them.")
    ] = None,
    lam: Lambda = None,
    layers: Layers = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Attention heads, for weights of no known size.")] = None,
    img_size: Annotated[int | None, typer.Option(min=1, help="Image side other than the weights'.")] = None,
    classes: Annotated[
        Path | None, typer.Option(help="Names of the logits, one a line, for weights without names.")
    ] = None,
    limit: Limit = None,
    batch_size: Annotated[int, typer.Option(help="Samples a batch; the unit of work that is kept.")] = 100,
    workers: Annotated[int, typer.Option(min=0, help="Processes that decode images ahead.")] = 0,
    seed: Seed = 0,
    device: Device = "auto",
    out_dir: Annotated[
        Path | None, typer.Option("--out", help="Run folder. Default: one under runs/, named after the request.")
    ] = None,
) -> None:
    """Attack models and print accuracy tables. The same command continues a run that was interrupted."""
    import time

    from robustkpca import evaluation
    from robustkpca.datasets import load_samples
    from robustkpca.outcomes import fingerprint

    started = time.monotonic()
    where = pick_device(device)
    samples = load_samples(data, limit=limit, seed=seed, in_distribution=in_distribution)
    suites = _suites(attack, protocol, eps, steps, attacked=not samples.conditioned)
    models_ = _classifiers(
        model,
        checkpoint,
        iterations=iterations,
        layers=layers,
        classes=classes,
        weights=choice("--weights", weights, ("raw", "ema")),
        lam=lam,
        heads=heads,
        img_size=img_size,
        device=where,
    )
    plan = evaluation.Plan(models_, samples, suites, seed=seed, batch_size=batch_size, full_argmax=full_argmax)
    if out_dir is None:
        parts = [s.name for s in suites] or [samples.name.partition(":")[0]]
        out_dir = Path("runs") / f"{'-'.join(parts)}-{fingerprint(plan.request)[:8]}"
    for line in _announcement(plan, where):
        err.print(line, markup=False, highlight=False)
    try:
        with progress_bar() as progress:
            bar = progress.add_task("starting", total=None)

            def show(now: evaluation.Progress) -> None:
                progress.update(bar, completed=now.done, total=now.total, description=f"{now.model}  {now.attack}")

            run = plan.run(out_dir, workers=workers, on_progress=show)
    except KeyboardInterrupt:
        kept = len(list((out_dir / "rows").glob("*/*/*.parquet")))
        err.print(
            f"interrupted: {kept} chunks are kept in {out_dir}; the same command goes on from there",
            markup=False,
            soft_wrap=True,
        )
        sys.exit(130)
    healthy = show_run(run)
    out.print(
        f"rows and receipt: {run.path}  ({time.monotonic() - started:.0f} s)",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    if not healthy:
        raise typer.Exit(1)


def _announcement(plan: Plan, device: str) -> list[str]:
    """What is about to be run, one line each."""
    from robustkpca.models import Classifier

    samples = plan.samples
    lines = []
    for label, model in zip(plan.labels, plan.models, strict=True):
        if isinstance(model, Classifier):
            p = model.settings.preprocessing
            notes = "".join(f"; {note}" for note in model.notes)
            size = f"{p.channels}x{p.img_size}x{p.img_size}, crop {p.crop_pct:g} {p.interpolation}"
            lines.append(f"model    {label}: {size}, weights {model.weights}{notes}")
        else:
            lines.append(f"model    {label}: failed: {model.reason}")
    argmax = f", answers {plan.request['data']['argmax']}" if samples.among else ""
    lines.append(f"data     {samples.name}, n = {len(samples)}{argmax}")
    if samples.ignored:
        shown = ", ".join(samples.ignored[:5]) + (", ..." if len(samples.ignored) > 5 else "")
        lines.append(f"ignored  {len(samples.ignored)} entries that are no samples: {shown}")
    lines += [f"attack   {suite.name}: {suite.describe()}" for suite in plan.suites]
    return [*lines, f"device   {device}, float32, seed {plan.seed}, batch size {plan.batch_size}"]


def _suites(
    names: list[str] | None, protocol: str | None, eps: list[str] | None, steps: int | None, *, attacked: bool
) -> list[Suite]:
    """The suites by name; `clean` asks for none, and data that comes corrupted (`attacked` false) needs none."""
    from robustkpca.spec import CLEAN, load_suite, suite_names

    if not names and attacked:
        known = ", ".join([CLEAN, *suite_names()])
        raise SpecError(f"--attack: expected at least one of {known}, or a .toml file")
    if protocol is not None:
        choice("--protocol", protocol, ("standard", "paper"))
    suites = [load_suite(name, protocol) for name in names or [] if name != CLEAN]  # type: ignore[arg-type]
    if eps:
        suites = [suite.with_eps(eps) for suite in suites]
    return [suite.with_steps(steps) for suite in suites] if steps is not None else suites


def _classifiers(
    models: list[str] | None,
    files: list[str] | None,
    *,
    iterations: str | None,
    layers: str | None,
    classes: Path | None,
    **settings: Any,
) -> list[Classifier | Unusable]:
    """A classifier for each model and number of iterations. Of several, one whose weights do not load is Unusable."""
    from robustkpca.checkpoints import EMBEDDED, load_classifier
    from robustkpca.models import Unusable
    from robustkpca.settings import parse_iterations, parse_layers

    if not models and not files:
        known = ", ".join(EMBEDDED)
        raise SpecError(f"--model: expected at least one of {known}, another name with --checkpoint, or timm:NAME")
    if models and files and len(models) != len(files):
        raise SpecError(
            f"--checkpoint: expected one for each --model ({len(models)}), got {len(files)}; `embedded` is one"
        )
    names: list[str | None] = [*models] if models else [None] * len(files or [])
    paths = [None if f == "embedded" else f for f in files or []] or [None] * len(names)
    settings["layers"] = None if layers is None else parse_layers(layers)
    settings["classes"] = _read_names(classes) if classes else ()
    counts: tuple[int | None, ...] = (None,) if iterations is None else parse_iterations(iterations)
    found: list[Classifier | Unusable] = []
    for name, path in zip(names, paths, strict=True):
        for count in counts:
            try:
                found.append(load_classifier(name, path, iterations=count, **settings))
            except CheckpointError as error:
                if len(names) == 1:
                    raise
                found.append(Unusable(name or Path(path or "").stem, str(path or name), str(error)))
    if all(isinstance(m, Unusable) for m in found):
        raise CheckpointError("; ".join(m.reason for m in found if isinstance(m, Unusable)))
    return found


def _read_names(path: Path) -> tuple[str, ...]:
    try:
        return tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"--classes {path}: {error}") from None


@app.command()
def bench(
    experiment: Annotated[str, typer.Argument(help="Name (see `benchmarks/`, e.g. paper-attacks) or a .toml file.")],
    models_file: Annotated[Path, typer.Option("--models", help="TOML file of [[model]] tables: name, checkpoint, ...")],
    data: Annotated[list[str], typer.Option(help="NAME or NAME:DIR for each kind the experiment needs. Repeatable.")],
    out_dir: Annotated[
        Path, typer.Option("--out", help="Folder of its runs and its table; a started one is continued.")
    ],
    in_distribution: Annotated[
        str | None, typer.Option(help="imagenet:DIR that imagenet-o is told apart from.")
    ] = None,
    reference: Annotated[bool, typer.Option(help="The paper's figures for the same protocol, data and model.")] = False,
    limit: Limit = None,
    batch_size: Annotated[int, typer.Option(help="Samples a batch; the unit of work that is kept.")] = 100,
    workers: Annotated[int, typer.Option(min=0, help="Processes that decode images ahead.")] = 0,
    seed: Seed = 0,
    device: Device = "auto",
) -> None:
    """Run or resume an experiment and write its table (Markdown, LaTeX, CSV)."""
    from robustkpca import experiments, layouts
    from robustkpca.render import notes, render

    plan = experiments.load_experiment(experiment)
    entries = experiments.load_models(models_file)
    with progress_bar() as progress:
        bar = progress.add_task(plan.name, total=None)
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
            on_progress=lambda now: progress.update(
                bar, completed=now.done, total=now.total, description=f"{now.model}  {now.attack}"
            ),
        )
    found = layouts.LAYOUTS[plan.layout](runs)
    found.title = plan.title
    print_table(found.title, found.texts(bold=BOLD, reference=reference), notes(found, reference=reference))
    for form, suffix in (("markdown", "md"), ("latex", "tex"), ("csv", "csv")):
        file = out_dir / f"{plan.name}.{suffix}"
        file.write_text(render(found, form, reference=reference), encoding="utf-8")
        out.print(f"wrote {file}", markup=False, highlight=False, soft_wrap=True)
    if any(status.text != "complete" for run in runs for status in run.statuses):
        raise typer.Exit(1)


@app.command()
def train(
    model: Annotated[
        str, typer.Option(help="vit, symvit or rpc-symvit, with -micro (default), -tiny, -small or -base.")
    ],
    data: Annotated[str, typer.Option(help="digits, fashion-mnist:DIR or folder:DIR.")],
    out_file: Annotated[Path, typer.Option("--out", help="Checkpoint to write (.safetensors).")],
    iterations: Annotated[int | None, typer.Option(help="RPC-Attention: iterations n of PAP.")] = None,
    lam: Lambda = None,
    layers: Layers = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Instead of the recipe's.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Instead of the recipe's.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate, instead of the recipe's.")] = None,
    patch_size: Annotated[int | None, typer.Option(min=1, help="Instead of the recipe's.")] = None,
    img_size: Annotated[int | None, typer.Option(min=1, help="Side to which images are brought.")] = None,
    limit: Limit = None,
    holdout: Annotated[int, typer.Option(help="Keep N images out and score them after each epoch.")] = 0,
    seed: Seed = 0,
    device: Device = "auto",
) -> None:
    """Train a model with a fixed recipe; the checkpoint carries all that eval needs."""
    from robustkpca import train as training
    from robustkpca.datasets import load_samples
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
    samples = load_samples(data, split="train", limit=limit, seed=seed)
    with progress_bar() as progress:
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
    out.print(f"wrote {out_file}", markup=False, highlight=False, soft_wrap=True)
