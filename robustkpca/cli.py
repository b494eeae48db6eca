"""The command line: parse, call, print, exit code. Heavy imports live inside the commands, so that --help is instant."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from robustkpca.errors import CheckpointError, RobustKPCAError, RunError, SpecError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd
    from rich.progress import Progress

    from robustkpca.evaluation import Plan
    from robustkpca.models import Classifier, Unusable
    from robustkpca.outcomes import Run
    from robustkpca.spec import Suite

app = typer.Typer(
    name="robustkpca",
    help="How robust is a vision transformer, and does attention with robust principal components make it more so?",
    no_args_is_help=True,
    invoke_without_command=True,
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


@app.callback()
def common(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if version:
        from robustkpca import __version__

        print(__version__)
        raise typer.Exit


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


Limit = Annotated[int | None, typer.Option(help="Use at most N samples, spread over the classes, drawn with --seed.")]


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
        weights=_choice("--weights", weights, ("raw", "ema")),
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
        with _progress() as progress:
            bar = progress.add_task("starting", total=None)

            def show(now: evaluation.Progress) -> None:
                progress.update(bar, completed=now.done, total=now.total, description=f"{now.model}  {now.attack}")

            run = plan.run(out_dir, workers=workers, on_progress=show)
    except KeyboardInterrupt:
        kept = len(list((out_dir / "rows").glob("*/*/*.parquet")))
        err.print(
            f"interrupted: {kept} chunks are kept in {out_dir}; the same command goes on from there", soft_wrap=True
        )
        sys.exit(130)
    healthy = _show_run(run)
    out.print(f"rows and receipt: {run.path}  ({time.monotonic() - started:.0f} s)", highlight=False, soft_wrap=True)
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


def _choice(option: str, value: str, known: tuple[str, ...]) -> Any:
    if value not in known:
        raise SpecError(f"{option}: expected {' or '.join(known)}, got {value!r}")
    return value


def _suites(
    names: list[str] | None, protocol: str | None, eps: list[str] | None, steps: int | None, *, attacked: bool
) -> list[Suite]:
    """The suites by name; `clean` asks for none, and data that comes corrupted (`attacked` false) needs none."""
    from robustkpca.spec import CLEAN, load_suite, suite_names

    if not names and attacked:
        known = ", ".join([CLEAN, *suite_names()])
        raise SpecError(f"--attack: expected at least one of {known}, or a .toml file")
    if protocol is not None:
        _choice("--protocol", protocol, ("standard", "paper"))
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


def _progress() -> Progress:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=err,
    )


def _two_lines(cell: str) -> str:
    """`87.1 (84.9–89.0)` as a figure with its interval below it, which keeps a table within a terminal."""
    figure, bracket, rest = cell.partition(" (")
    return f"{figure}\n{rest.removesuffix(')')}" if bracket and cell.endswith(")") else cell


def _print_table(title: str, cells: pd.DataFrame, notes: Sequence[str], *, markup: bool = False) -> None:
    from rich.table import Table
    from rich.text import Text

    shown = Table(title=Text(title), title_justify="left", title_style="bold")
    shown.add_column(Text(str(cells.index.name)), overflow="fold")
    for head in cells.columns:
        shown.add_column(Text(str(head)), justify="right", overflow="fold")
    for name, row in cells.iterrows():
        lines = [_two_lines(str(cell)) for cell in row]
        shown.add_row(Text(str(name)), *(Text.from_markup(line) if markup else Text(line) for line in lines))
    out.print(shown)
    for note in notes:
        out.print(note, style="dim", markup=False, highlight=False)
    out.print()


def _show_run(run: Run) -> bool:
    """Print the tables; False when a cell has no figure or a row must not be believed."""
    from robustkpca import tables

    for view in tables.views(run):
        _print_table(view.title, view.cells, view.notes)
    healthy = True
    for status in run.statuses:
        if status.text != "complete":
            healthy = False
            cell = f"{status.cell.attack} {status.cell.budget}".strip()
            err.print(f"no figure: {status.model}, {cell}: {status.text}", style="red", markup=False, highlight=False)
    for row in tables.flagged(run).itertuples():
        healthy = False
        text = f"error finding: {row.rows} rows of {row.model}, {row.attack} {row.budget}: {row.meaning}"
        err.print(text, style="red", markup=False, highlight=False)
    return healthy


@app.command()
def table(
    runs: Annotated[list[Path], typer.Argument(help="Run folders or exported .parquet files.")],
    layout: Annotated[str, typer.Option(help="robustness, attacks, budgets or corruptions.")],
    form: Annotated[str, typer.Option("--format", help="rich, markdown, latex, csv or html.")] = "rich",
    intervals: Annotated[bool, typer.Option(help="95 % Wilson intervals.")] = False,
    significance: Annotated[
        bool, typer.Option(help="Mark what differs from the first row on the same samples.")
    ] = False,
    reference: Annotated[bool, typer.Option(help="The paper's figures for the same protocol, data and model.")] = False,
    out_file: Annotated[Path | None, typer.Option("--out", help="Write to this file instead of the terminal.")] = None,
) -> None:
    """Print stored runs as one of the paper's tables: models as rows, best figures bold."""
    from robustkpca import layouts
    from robustkpca.errors import unknown
    from robustkpca.outcomes import Run

    if layout not in layouts.LAYOUTS:
        raise SpecError(unknown("layout", layout, layouts.LAYOUTS))
    found = layouts.LAYOUTS[layout]([Run.open(path) for path in runs])
    options = {"intervals": intervals, "significance": significance, "reference": reference}
    if form == "rich" and out_file is None:
        _print_table(found.title, found.texts(bold="[b]{}[/b]", **options), found.notes, markup=True)
        return
    text = layouts.render(found, "markdown" if form == "rich" else form, **options)
    if out_file is None:
        print(text, end="")
        return
    try:
        out_file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(f"cannot write {out_file}: {error.strerror or error}") from None
    out.print(f"wrote {out_file}", highlight=False, soft_wrap=True)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders or exported .parquet files.")],
    out_file: Annotated[Path, typer.Option("--out", help="Markdown file to write; plots go beside it.")],
) -> None:
    """Write a Markdown report of stored runs: tables, plots, receipt."""
    from robustkpca import report as reporting
    from robustkpca.outcomes import Run

    if out_file.suffix != ".md":
        raise SpecError(f"--out: expected a file ending in .md, got {out_file}")
    for file in reporting.write([Run.open(path) for path in runs], out_file):
        out.print(f"wrote {file}", highlight=False, soft_wrap=True)


@app.command()
def check(
    run: Annotated[Path, typer.Argument(help="Run folder or exported .parquet file to judge.")],
    baseline: Annotated[Path, typer.Option(help="Run folder or .parquet file to compare with.")],
    tolerance: Annotated[float, typer.Option(help="Points of accuracy that a cell may lose.")] = 1.0,
    alpha: Annotated[float, typer.Option(help="Level of the one-sided paired test, over all cells together.")] = 0.05,
    update_baseline: Annotated[
        bool, typer.Option(help="Write the run to --baseline as one .parquet file instead.")
    ] = False,
) -> None:
    """Compare a run with a baseline. Exit code 0: holds, 1: regressed, 2: not comparable or invalid."""
    from robustkpca import regression
    from robustkpca.outcomes import Run

    now = Run.open(run)
    if update_baseline:
        if baseline.suffix != ".parquet":
            raise SpecError(f"--update-baseline: expected --baseline to end in .parquet, got {baseline}")
        if faults := regression.faults(now):
            raise RunError(f"--update-baseline: {run} is no baseline: {'; '.join(faults)}")
        now.export(baseline)
        out.print(f"wrote {baseline}", highlight=False, soft_wrap=True)
        return
    verdict = regression.check(now, Run.open(baseline), tolerance=tolerance, alpha=alpha)
    for note in verdict.notes:
        err.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)
    for reason in verdict.reasons:
        err.print(f"{verdict.text}: {reason}", style="red", markup=False, highlight=False, soft_wrap=True)
    if verdict.code != regression.NOT_COMPARABLE:
        lost = len(verdict.reasons)
        out.print(
            f"{verdict.text}: {len(verdict.cells)} cells compared, {lost} worse by more than {tolerance:g} points (alpha {alpha:g})",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    raise typer.Exit(verdict.code)


@app.command()
def models(
    inspect: Annotated[Path | None, typer.Option(help="Say what this weight file is, instead of listing.")] = None,
) -> None:
    """List the models, or say what a weight file is."""
    from robustkpca import checkpoints
    from robustkpca.checkpoints import EMBEDDED, embedded_path, read
    from robustkpca.settings import FAMILIES, SIZES, ModelSettings

    if inspect is not None:
        for fact, value in checkpoints.inspect(inspect):
            out.print(f"{fact:10} {value}", markup=False, highlight=False, soft_wrap=True)
        return
    for name in EMBEDDED:
        file = read(embedded_path(name))
        settings = ModelSettings.parse(file.settings or {}, name)
        count = sum(t.numel() for t in file.state.values())
        _line(name, f"{settings.title}, {count:,} parameters, embedded, trained on {file.training['data']['name']}")
    for family, title in FAMILIES.items():
        for size, (width, depth, heads) in SIZES.items():
            _line(
                f"{family}-{size}",
                f"{title}, width {width}, depth {depth}, {heads} heads: give --checkpoint FILE, or train",
            )
    _line("timm:NAME", "any timm model, with its pretrained weights or --checkpoint FILE")


@app.command()
def attacks() -> None:
    """List the attack suites."""
    from robustkpca.spec import load_suite, suite_names

    for name in suite_names():
        suite = load_suite(name)
        _line(name, f"{suite.title}: {suite.describe()}")


@app.command()
def datasets() -> None:
    """List the data sets."""
    from robustkpca.datasets import DATASETS

    for name, source in DATASETS.items():
        _line(name, source.title)


def _line(name: str, text: str) -> None:
    out.print(f"{name:22} {text}", markup=False, highlight=False, soft_wrap=True)


@app.command()
def train(
    model: Annotated[
        str, typer.Option(help="vit, symvit or rpc-symvit, with -micro (default), -tiny, -small or -base.")
    ],
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
    with _progress() as progress:
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
