"""The command that prints stored runs as a table of the paper."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from robustkpca.cli.options import Format, Layout, Reference, StoredRuns
from robustkpca.cli.show import print_results, write, wrote
from robustkpca.errors import SpecError


def table(
    runs: StoredRuns,
    layout: Annotated[Layout, typer.Option(help="Which of the paper's tables.")],
    form: Annotated[Format, typer.Option("--format", help="rich is for the terminal.")] = "rich",
    intervals: Annotated[bool, typer.Option(help="95 % Wilson intervals.")] = False,
    significance: Annotated[
        bool, typer.Option(help="Mark what differs from the first row on the same samples.")
    ] = False,
    reference: Reference = False,
    caption: Annotated[
        str | None, typer.Option(help="LaTeX: the caption, plain text, instead of the table's title.")
    ] = None,
    label: Annotated[str | None, typer.Option(help="LaTeX: the label instead of tab:LAYOUT.")] = None,
    out_file: Annotated[Path | None, typer.Option("--out", help="Write to this file instead of the terminal.")] = None,
) -> None:
    """Print stored runs as one of the paper's tables: models as rows, best results bold."""
    from robustkpca.report import paper_tables
    from robustkpca.report.formats import render
    from robustkpca.runs.run import Run

    if form != "latex" and (caption is not None or label is not None):
        raise SpecError("--caption, --label: they are of --format latex")
    results = paper_tables.LAYOUTS[layout]([Run.open(path) for path in runs])
    options = {"intervals": intervals, "significance": significance, "reference": reference}
    if form == "rich" and out_file is None:
        print_results(results, **options)
        return
    text = render(
        results, "markdown" if form == "rich" else form, caption, f"tab:{layout}" if label is None else label, **options
    )
    if out_file is None:
        print(text, end="")
        return
    write(out_file, text)
    wrote(out_file)
