"""How results are shown: the two consoles, tables, and a run with its findings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from robustkpca.errors import OutputError

if TYPE_CHECKING:
    import pandas as pd
    from rich.text import Text

    from robustkpca.runs.run import Run

out = Console(emoji=False)
err = Console(stderr=True, emoji=False)
BOLD = "\ue000{}\ue001"  # how a table's text marks its best results, for `print_table`
_COLOURS = {"fail": "bold red", "warn": "bold yellow", "pass": "green"}


def say(text: str) -> None:
    """A line for the user beside the progress bar."""
    err.print(text, markup=False, highlight=False, soft_wrap=True)


def show(text: str) -> None:
    """A line of the result, as it is."""
    out.print(text, markup=False, highlight=False, soft_wrap=True)


def wrote(file: Path) -> None:
    """Say which file was written."""
    show(f"wrote {file}")


def write(path: Path, text: str, *, append: bool = False) -> None:
    """Write (or append) a text file and the folders above it. Raises OutputError where that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if append else "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from None


def entry(name: str, text: str) -> None:
    """A line of a list of what exists."""
    show(f"{name:22} {text}")


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


def _two_lines(cell: str) -> str:
    """`87.1 (84.9–89.0)` as a number with its interval below it, which keeps a table within a terminal."""
    value, bracket, rest = cell.partition(" (")
    return f"{value}\n{rest.removesuffix(')')}" if bracket and cell.endswith(")") else cell


def _styled(line: str) -> Text:
    """Text whose parts between the marks of BOLD are bold; nothing else in it is read as markup."""
    from rich.text import Text

    on, off = BOLD.split("{}")
    text = Text()
    for number, part in enumerate(line.replace(off, on).split(on)):
        text.append(part, style="bold" if number % 2 else "")
    return text


def show_run(run: Run, *, verdicts: bool = False) -> bool:
    """Print tables, receipt and findings; False when a cell has no result. `verdicts`: what every rule says matters,
    not which model is better."""
    from robustkpca.diagnosis.findings import findings, rules_of
    from robustkpca.report import run_tables
    from robustkpca.report.provenance import receipt_lines

    for view in run_tables.views(run, compared=not verdicts):
        print_table(view.title, view.cells, view.notes)
    for line in receipt_lines(run):
        out.print(line, style="dim", markup=False, highlight=False)
    out.print()
    all_findings = findings(run)
    shown = [f for f in all_findings if verdicts or f.level != "pass"]
    for f in shown:
        out.print(f.level, style=_COLOURS[f.level], end=" ")
        out.print(f"{f.rule}, {f.model}: {f.message}. {f.advice}".strip(), markup=False, highlight=False)
    for model in run.models if verdicts else ():
        missing = [rule for rule in rules_of(run) if not any(f.rule == rule and f.model == model for f in all_findings)]
        if missing:
            out.print(f"not judged, {model}: {', '.join(missing)}", style="dim", markup=False, highlight=False)
    counts = {level: sum(f.level == level for f in all_findings) for level in _COLOURS}
    out.print(f"findings: {', '.join(f'{n} {level}' for level, n in counts.items())}", highlight=False)
    healthy = True
    for status in run.statuses:
        if not status.complete:
            healthy = False
            err.print(
                f"no result: {status.model}, {status.cell}: {status.text}", style="red", markup=False, highlight=False
            )
    return healthy
