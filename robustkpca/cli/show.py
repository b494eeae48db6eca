"""How results are shown: the two consoles, tables, and a run with its findings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from robustkpca.errors import OutputError
from robustkpca.escape import terminal, visible

if TYPE_CHECKING:
    import pandas as pd
    from rich.text import Text

    from robustkpca.diagnosis.findings import Finding
    from robustkpca.report.paper_tables import Table
    from robustkpca.runs.run import Run

out = Console(emoji=False)
err = Console(stderr=True, emoji=False)
_MARKS = "\ue000\ue001"
BOLD = "{}".join(_MARKS)  # how a table's text marks its best results, for `print_table`
_COLOURS = {"fail": "bold red", "warn": "bold yellow", "pass": "green"}


def say(text: str, style: str | None = None) -> None:
    """A line for the user beside the progress bar."""
    err.print(_line(text, err), style=style, markup=False, highlight=False, soft_wrap=True)


def show(text: str, style: str | None = None) -> None:
    """A line of the result, as it is."""
    out.print(_line(text, out), style=style, markup=False, highlight=False, soft_wrap=True)


def note(text: str) -> None:
    """A line under a result, folded at words."""
    out.print(_line(text, out), style="dim", markup=False, highlight=False)


def _line(text: str, console: Console) -> str:
    """Text as the console's encoding has it; names in it cannot steer the terminal or begin a line."""
    return terminal(text, console.encoding)


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
    """A table with its notes. One that is wider than the console is turned or cut into blocks of columns, so that no
    number and no head is folded within a word; a longer word of a head stands in a legend instead."""
    import pandas as pd

    texts = cells.map(lambda cell: _two_lines(_marked(str(cell))))
    texts.index = pd.Index([_line(str(name), out) for name in cells.index], name=_line(str(cells.index.name), out))
    legend: dict[str, str] = {}
    texts.columns = pd.Index([_head(_line(str(head), out), legend) for head in cells.columns])
    blocks = _blocks(texts, out.width)
    if len(blocks) > 1:
        turned = texts.T.rename_axis(index=cells.columns.name or "")
        if len(_blocks(turned, out.width)) == 1:
            texts, blocks = turned, [list(range(len(turned.columns)))]
    for number, block in enumerate(blocks):
        part = "" if len(blocks) == 1 else f" ({number + 1} of {len(blocks)})"
        _print_block(f"{_line(title, out)}{part}", texts.iloc[:, block])
    for short, long in legend.items():
        note(f"{short}: {long}")
    for text in notes:
        note(text)
    out.print()


def print_results(results: Table, **options: bool) -> None:
    """A table of stored runs with its notes and the receipts in brief; options are those of `Table.texts`."""
    from robustkpca.report.formats import notes
    from robustkpca.report.provenance import receipt_in_brief

    brief = [line for run in results.rows for line in receipt_in_brief(run)]
    print_table(results.title, results.texts(bold=BOLD, **options), [*notes(results, **options), *brief])


_BORDER = 3  # characters of a column beside its text; one more for the whole table
_LONGEST = 18  # word of a head
_NAMES = 24  # characters that names of rows may be folded to


def _head(head: str, legend: dict[str, str]) -> str:
    """A head whose words fit in a column: one of a longer word is a letter, which `legend` explains."""
    if max(map(len, head.split()), default=0) <= _LONGEST:
        return head
    short = f"({chr(ord('a') + len(legend) % 26)}{len(legend) // 26 or ''})"
    legend[short] = head
    return short


def _width(head: str, column: Sequence[str]) -> int:
    """Characters that a column needs at least: its longest line and the longest word of its head."""
    lines = [line for cell in column for line in _plain(cell).splitlines()]
    return max(map(_cells, [*lines, *head.split()]), default=1)


def _cells(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(text)


def _plain(text: str) -> str:
    return "".join(c for c in text if c not in _MARKS)


def _blocks(texts: pd.DataFrame, width: int) -> list[list[int]]:
    """The numbers of the columns of each block; a block has at least one."""
    names = max((_cells(name) for name in [*texts.index, texts.index.name]), default=1)
    room = width - 1 - _BORDER - min(names, _NAMES)
    blocks: list[list[int]] = [[]]
    left = room
    for number, head in enumerate(texts.columns):
        needed = _BORDER + _width(head, texts.iloc[:, number])
        if needed > left and blocks[-1]:
            blocks.append([])
            left = room
        blocks[-1].append(number)
        left -= needed
    return blocks


def _print_block(title: str, texts: pd.DataFrame) -> None:
    from rich.table import Table
    from rich.text import Text

    needed = [_width(head, texts.iloc[:, i]) for i, head in enumerate(texts.columns)]
    names = max((_cells(name) for name in [*texts.index, texts.index.name]), default=1)
    room = out.width - 1 - _BORDER * (len(needed) + 1)
    names = max(1, min(names, room - sum(needed)))
    room -= names
    widths = [max(least, _cells(head)) for least, head in zip(needed, texts.columns, strict=True)]
    if sum(widths) > room:  # heads stand on one line where there is room for all of them
        widths = needed
    shown = Table(title=Text(title), title_justify="left", title_style="bold")
    shown.add_column(Text(str(texts.index.name)), overflow="fold", width=names)
    for head, width in zip(texts.columns, widths, strict=True):
        shown.add_column(Text(head), justify="right", overflow="fold", width=width)
    for name, row in zip(texts.index, texts.to_numpy().tolist(), strict=True):
        shown.add_row(Text(name), *map(_styled, row))
    out.print(shown)


def _marked(cell: str) -> str:
    """As `_line`; the marks of BOLD stay."""
    return "".join(part if part and part in _MARKS else _line(part, out) for part in re.split(f"([{_MARKS}])", cell))


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
    from robustkpca.diagnosis.rules import ENOUGH
    from robustkpca.report import run_tables
    from robustkpca.report.provenance import receipt_in_brief

    for view in run_tables.views(run, compared=not verdicts):
        print_table(view.title, view.cells, view.notes)
    for line in receipt_in_brief(run):
        note(line)
    out.print()
    all_findings = findings(run)
    shown = [f for f in all_findings if verdicts or f.level != "pass"]
    for f in shown:
        out.print(f.level, style=_COLOURS[f.level], end=" ")
        out.print(_line(finding_text(f), out), markup=False, highlight=False)
    for model in run.models if verdicts else ():
        missing = [rule for rule in rules_of(run) if not any(f.rule == rule and f.model == model for f in all_findings)]
        if missing:
            note(f"not judged, {model}: {', '.join(missing)}")
    if run.n < ENOUGH:
        note(f"n = {run.n} is too few for most rules to pass: they are not judged")
    counts = {level: sum(f.level == level for f in all_findings) for level in _COLOURS}
    out.print(f"findings: {', '.join(f'{n} {level}' for level, n in counts.items())}", highlight=False)
    return say_missing(run)


def keep_receipt(run: Run) -> None:
    """Write the whole receipt into the run's folder, as `receipt.txt`."""
    from robustkpca.files import write_files
    from robustkpca.report.provenance import receipt_lines

    if run.path is not None:
        lines = [visible(line) for line in receipt_lines(run)]
        write_files({run.path / "receipt.txt": ("\n".join(lines) + "\n").encode()})


def say_missing(run: Run) -> bool:
    """Say which cells have no result, and why; False where there are any."""
    missing = [status for status in run.statuses if not status.complete]
    for status in missing:
        say(f"no result: {status.model}, {status.cell}: {status.text}", style="red")
    return not missing


def finding_text(finding: Finding) -> str:
    """A finding in words."""
    return f"{finding.rule}, {finding.model}: {finding.message}. {finding.advice}".strip()


def run_as_json(run: Run) -> dict[str, Any]:
    """A run for programs: what it was, its results, comparison and findings. Shares in [0, 1]; null: not complete."""
    from dataclasses import asdict

    from robustkpca.diagnosis.findings import findings
    from robustkpca.results.accuracy import accuracy_table
    from robustkpca.results.comparison import compare
    from robustkpca.suites.cell import CLEAN_CELL

    request, clean = run.request, CLEAN_CELL in run.conditions
    return {
        "run": None if run.path is None else str(run.path),
        "id": run.manifest.fingerprint,
        "complete": all(status.complete for status in run.statuses),
        "data": request.data.model_dump(mode="json"),
        "seed": request.seed,
        "dtype": request.dtype,
        "device": request.device,
        "software": request.software,
        "models": [{"label": m.label, "weights": m.weights, "source": m.source} for m in request.models],
        "suites": {suite.name: suite.describe() for suite in run.suites},
        "results": records(accuracy_table(run)) if clean else [],
        "comparison": records(compare(run)) if clean and len(run.models) > 1 else [],
        "findings": [asdict(finding) for finding in findings(run)],
    }


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a frame as JSON has them; missing values are null."""
    import json

    rows: list[dict[str, Any]] = json.loads(frame.to_json(orient="records", double_precision=15))
    return rows


def show_json(result: dict[str, Any]) -> None:
    """One JSON object on stdout, in ASCII: any encoding has it."""
    import json

    out.print(json.dumps(result, indent=1), markup=False, highlight=False, soft_wrap=True)
