"""The application, options that commands share, and how results are shown."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from robustkpca.errors import RobustKPCAError, SpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import pandas as pd
    from rich.progress import Progress
    from rich.text import Text

    from robustkpca.runs.run import Run

app = typer.Typer(
    name="robustkpca",
    help="How robust is a vision transformer, and does attention with robust principal components make it more so?",
    no_args_is_help=True,
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
out = Console(emoji=False)
err = Console(stderr=True, emoji=False)


def main() -> None:
    """Entry point: one line for what the user can mend, 130 for Ctrl-C, a traceback only for our own bugs."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a lost process is our line to say, not a stack trace's
    try:
        app()
    except RobustKPCAError as error:
        err.print(f"[red]error:[/red] {type(error).__name__}: ", end="", highlight=False)
        err.print(str(error), markup=False, highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        err.print("interrupted")
        sys.exit(130)


@app.callback()
def common(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if version:
        from robustkpca._version import __version__

        print(__version__)
        raise typer.Exit


Lambda = Annotated[float | None, typer.Option("--lambda", help="RPC-Attention: weight of the sparse part.")]
Layers = Annotated[str | None, typer.Option(help="RPC-Attention: first, all, or numbers counted from 1, e.g. 1,3.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of every random draw.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]


Limit = Annotated[int | None, typer.Option(help="Use at most N samples, spread over the classes, drawn with --seed.")]


def pick_device(name: str) -> str:
    """`auto` is CUDA where it works, else the CPU. Of several processes on one machine each takes a GPU of its own, or its share of the CPUs."""
    import torch

    from robustkpca.runtime.sharing import divide_threads, place

    here = place()
    if here.notice:
        err.print(here.notice, markup=False, highlight=False, soft_wrap=True)
    devices = torch.cuda.device_count()
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        divide_threads(here)
        return name
    kind, _, number = name.partition(":")
    if kind != "cuda" or (number and not number.isdigit()):
        raise SpecError(f"--device: expected auto, cpu, cuda or cuda:N, got {name!r}")
    if int(number or 0) >= devices:
        raise SpecError(f"--device {name}: {devices} CUDA devices are visible here; use --device cpu")
    if number or here.alone:
        return name
    return f"cuda:{here.local_rank % devices}"


def choice(option: str, value: str, known: tuple[str, ...]) -> Any:
    if value not in known:
        raise SpecError(f"{option}: expected {' or '.join(known)}, got {value!r}")
    return value


def progress_bar(*, disable: bool = False) -> Progress:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=err,
        disable=disable,
    )


def say(text: str) -> None:
    """A line for the user beside the progress bar."""
    err.print(text, markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def interruptible(kept: Callable[[], str]) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the process with 130 and 143, and `kept` says what is left of its work."""
    received = signal.SIGINT

    def terminate(number: int, frame: object) -> None:  # a scheduler takes the machine back: end as on Ctrl-C
        nonlocal received
        received = signal.Signals(number)
        signal.signal(number, signal.SIG_IGN)  # torchrun and some schedulers say it twice
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except KeyboardInterrupt:
        say(f"interrupted: {kept()}")
        sys.exit(128 + received)
    finally:
        signal.signal(signal.SIGTERM, before)


def _two_lines(cell: str) -> str:
    """`87.1 (84.9–89.0)` as a figure with its interval below it, which keeps a table within a terminal."""
    figure, bracket, rest = cell.partition(" (")
    return f"{figure}\n{rest.removesuffix(')')}" if bracket and cell.endswith(")") else cell


def print_table(title: str, cells: pd.DataFrame, notes: Sequence[str]) -> None:
    from rich.table import Table
    from rich.text import Text

    shown = Table(title=Text(title), title_justify="left", title_style="bold")
    shown.add_column(Text(str(cells.index.name)), overflow="fold")
    for head in cells.columns:
        shown.add_column(Text(str(head)), justify="right", overflow="fold")
    for name, row in cells.iterrows():
        lines = [_two_lines(str(cell)) for cell in row]
        shown.add_row(Text(str(name)), *map(_styled, lines))
    out.print(shown)
    for note in notes:
        out.print(note, style="dim", markup=False, highlight=False)
    out.print()


BOLD = "\ue000{}\ue001"  # how a table's text marks its best figures, for `print_table`


def _styled(line: str) -> Text:
    """Text whose parts between the marks of BOLD are bold; nothing else in it is read as markup."""
    from rich.text import Text

    on, off = BOLD.split("{}")
    text = Text()
    for number, part in enumerate(line.replace(off, on).split(on)):
        text.append(part, style="bold" if number % 2 else "")
    return text


def show_run(run: Run, *, verdicts: bool = False) -> bool:
    """Print tables, receipt and findings; False when a cell has no figure. `verdicts`: what every rule says matters, not which model is better."""
    from robustkpca.diagnosis.findings import findings, rules_of
    from robustkpca.report import run_tables
    from robustkpca.report.provenance import receipt_lines

    for view in run_tables.views(run, compared=not verdicts):
        print_table(view.title, view.cells, view.notes)
    for line in receipt_lines(run):
        out.print(line, style="dim", markup=False, highlight=False)
    out.print()
    found = findings(run)
    shown = [f for f in found if verdicts or f.level != "pass"]
    for f in shown:
        out.print(f.level, style=_COLOURS[f.level], end=" ")
        out.print(f"{f.rule}, {f.model}: {f.message}. {f.advice}".strip(), markup=False, highlight=False)
    for model in run.models if verdicts else ():
        missing = [rule for rule in rules_of(run) if not any(f.rule == rule and f.model == model for f in found)]
        if missing:
            out.print(f"not judged, {model}: {', '.join(missing)}", style="dim", markup=False, highlight=False)
    counts = {level: sum(f.level == level for f in found) for level in _COLOURS}
    out.print(f"findings: {', '.join(f'{n} {level}' for level, n in counts.items())}", highlight=False)
    healthy = True
    for status in run.statuses:
        if not status.complete:
            healthy = False
            err.print(
                f"no figure: {status.model}, {status.cell}: {status.text}", style="red", markup=False, highlight=False
            )
    return healthy


_COLOURS = {"fail": "bold red", "warn": "bold yellow", "pass": "green"}
