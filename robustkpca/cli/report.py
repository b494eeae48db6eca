"""The command that writes a report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from robustkpca.cli.options import StoredRuns
from robustkpca.cli.show import wrote


def report(
    runs: StoredRuns,
    out_file: Annotated[
        Path, typer.Option("--out", help="A .md file, with plots beside it, or one self-contained .html file.")
    ],
) -> None:
    """Write a report of stored runs: summary in words, tables, plots, findings, receipt."""
    from robustkpca.report import report
    from robustkpca.runs.run import Run

    for file in report.write([Run.open(path) for path in runs], out_file):
        wrote(file)
