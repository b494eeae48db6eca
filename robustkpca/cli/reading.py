"""Commands that read stored runs: table, report, check."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from robustkpca.cli.app import BOLD, app, err, out, print_table
from robustkpca.errors import RunError, SpecError


@app.command()
def table(
    runs: Annotated[list[Path], typer.Argument(help="Run folders or exported .parquet files.")],
    layout: Annotated[str, typer.Option(help="robustness, attacks, budgets, corruptions or runtime.")],
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
    from robustkpca.render import notes, render

    if layout not in layouts.LAYOUTS:
        raise SpecError(unknown("layout", layout, layouts.LAYOUTS))
    found = layouts.LAYOUTS[layout]([Run.open(path) for path in runs])
    options = {"intervals": intervals, "significance": significance, "reference": reference}
    if form == "rich" and out_file is None:
        print_table(found.title, found.texts(bold=BOLD, **options), notes(found, **options))
        return
    text = render(found, "markdown" if form == "rich" else form, **options)
    if out_file is None:
        print(text, end="")
        return
    try:
        out_file.parent.mkdir(parents=True, exist_ok=True)
        out_file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(f"cannot write {out_file}: {error.strerror or error}") from None
    out.print(f"wrote {out_file}", markup=False, highlight=False, soft_wrap=True)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders or exported .parquet files.")],
    out_file: Annotated[
        Path, typer.Option("--out", help="A .md file, with plots beside it, or one self-contained .html file.")
    ],
) -> None:
    """Write a report of stored runs: summary in words, tables, plots, findings, receipt."""
    from robustkpca import report as reporting
    from robustkpca.outcomes import Run

    for file in reporting.write([Run.open(path) for path in runs], out_file):
        out.print(f"wrote {file}", markup=False, highlight=False, soft_wrap=True)


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
    if not update_baseline and not baseline.exists():
        raise RunError(f"--baseline {baseline}: nothing there; `--update-baseline` makes one of a run you trust")
    if update_baseline:
        if baseline.suffix != ".parquet":
            raise SpecError(f"--update-baseline: expected --baseline to end in .parquet, got {baseline}")
        if faults := regression.faults(now):
            raise RunError(f"--update-baseline: {run} is no baseline: {'; '.join(faults)}")
        now.export(baseline)
        out.print(f"wrote {baseline}", markup=False, highlight=False, soft_wrap=True)
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
