"""Commands that read stored runs: table, report, check."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from robustkpca.cli.app import BOLD, app, err, out, print_table
from robustkpca.errors import RobustKPCAError, RunError, SpecError


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
    from robustkpca.errors import unknown
    from robustkpca.report import paper_tables
    from robustkpca.report.formats import notes, render
    from robustkpca.runs.run import Run

    if layout not in paper_tables.LAYOUTS:
        raise SpecError(unknown("layout", layout, paper_tables.LAYOUTS))
    found = paper_tables.LAYOUTS[layout]([Run.open(path) for path in runs])
    options = {"intervals": intervals, "significance": significance, "reference": reference}
    if form == "rich" and out_file is None:
        print_table(found.title, found.texts(bold=BOLD, **options), notes(found, **options))
        return
    text = render(found, "markdown" if form == "rich" else form, **options)
    if out_file is None:
        print(text, end="")
        return
    _write(out_file, text)
    out.print(f"wrote {out_file}", markup=False, highlight=False, soft_wrap=True)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders or exported .parquet files.")],
    out_file: Annotated[
        Path, typer.Option("--out", help="A .md file, with plots beside it, or one self-contained .html file.")
    ],
) -> None:
    """Write a report of stored runs: summary in words, tables, plots, findings, receipt."""
    from robustkpca.report import report
    from robustkpca.runs.run import Run

    for file in report.write([Run.open(path) for path in runs], out_file):
        out.print(f"wrote {file}", markup=False, highlight=False, soft_wrap=True)


@app.command()
def check(
    run: Annotated[Path, typer.Argument(help="Run folder or exported .parquet file to judge.")],
    baseline: Annotated[Path, typer.Option(help="Run folder or .parquet file to compare with.")],
    tolerance: Annotated[
        float | None, typer.Option(help="Points of accuracy that a cell may lose (default 1).")
    ] = None,
    tolerances: Annotated[
        Path | None,
        typer.Option(help="TOML file with limits of single cells, instead of --tolerance."),
    ] = None,
    alpha: Annotated[float, typer.Option(help="Level of the one-sided paired test, over all cells together.")] = 0.05,
    summary: Annotated[
        Path | None, typer.Option(help="Append a Markdown summary to this file, e.g. $GITHUB_STEP_SUMMARY.")
    ] = None,
    junit: Annotated[Path | None, typer.Option(help="Write JUnit XML to this file.")] = None,
    update_baseline: Annotated[
        bool, typer.Option(help="Write the run to --baseline as one .parquet file instead.")
    ] = False,
) -> None:
    """Compare a run with a baseline. Exit code 0: holds, 1: regressed, 2: not comparable or not to be believed."""
    from robustkpca.gate import check, ci
    from robustkpca.runs.run import Run

    if update_baseline:
        now = Run.open(run)
        if baseline.suffix != ".parquet":
            raise SpecError(f"--update-baseline: expected --baseline to end in .parquet, got {baseline}")
        if faults := [*check.faults(now), *check.failures(now)]:
            raise RunError(f"--update-baseline: {run} is no baseline: {'; '.join(faults)}")
        now.export(baseline)
        out.print(f"wrote {baseline}", markup=False, highlight=False, soft_wrap=True)
        return
    broken: RobustKPCAError | None = None
    try:
        if not baseline.exists():
            raise RunError(f"--baseline {baseline}: nothing there; `--update-baseline` makes one of a run you trust")
        if tolerance is not None and tolerances is not None:
            raise SpecError("--tolerances: expected it or --tolerance, got both")
        limits = check.Tolerances.load(tolerances) if tolerances else None
        verdict = check.check(
            Run.open(run),
            Run.open(baseline),
            tolerance=1.0 if tolerance is None else tolerance,
            alpha=alpha,
            tolerances=limits,
        )
    except RobustKPCAError as error:  # CI must hear of it as of any other verdict
        broken, verdict = error, check.Verdict.invalid([str(error)])
    for note in verdict.notes:
        err.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)
    for line in verdict.lines if broken is None else ():
        err.print(line, style="red", markup=False, highlight=False, soft_wrap=True)
    if len(verdict.cells):
        counts = verdict.cells["verdict"].value_counts()
        out.print(
            f"{verdict.text}: {len(verdict.cells)} cells compared, {counts.get('regressed', 0)} regressed, "
            f"{counts.get('suspicious', 0)} suspiciously better (alpha {alpha:g})",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for line in ci.github_annotations(verdict):
            print(line)
    if summary is not None:
        _write(summary, ci.summary(verdict), append=True)
    if junit is not None:
        _write(junit, ci.junit(verdict))
    if broken is not None:
        raise broken
    raise typer.Exit(verdict.code)


def _write(path: Path, text: str, *, append: bool = False) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if append else "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from None
