"""The command that compares a run with a baseline."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from robustkpca.cli.show import out, say, write, wrote
from robustkpca.errors import RobustKPCAError, RunError, SpecError


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
    """Compare a run with a baseline. Exit code 0: holds, 1: regressed, 2: not comparable or not to be believed, 3:
    check itself failed."""
    from robustkpca.gate import check, ci
    from robustkpca.runs.run import Run

    if update_baseline:
        now = Run.open(run)
        if baseline.suffix != ".parquet":
            raise SpecError(f"--update-baseline: expected --baseline to end in .parquet, got {baseline}")
        if faults := [*check.faults(now), *check.failures(now)]:
            raise RunError(f"--update-baseline: {run} is no baseline: {'; '.join(faults)}")
        now.export(baseline)
        wrote(baseline)
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
    # Files first: who reads them must not miss a verdict because nobody reads what is printed.
    if summary is not None:
        write(summary, ci.summary(verdict), append=True)
    if junit is not None:
        write(junit, ci.junit(verdict))
    for note in verdict.notes:
        say(f"note: {note}")
    for line in verdict.lines if broken is None else ():
        say(line, style="red")
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
    if broken is not None:
        raise broken
    raise typer.Exit(verdict.code)
