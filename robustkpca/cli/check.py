"""The command that compares a run with a baseline."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from robustkpca.cli.options import AsJson, Quiet
from robustkpca.cli.show import out, print_table, records, say, show_json, write, wrote
from robustkpca.errors import RobustKPCAError, RunError, SpecError

if TYPE_CHECKING:
    import pandas as pd


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
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Compare a run with a baseline. Exit code 0: holds, 1: regressed, 2: not comparable or not to be believed, 3:
    check itself failed."""
    from robustkpca.gate import check, ci
    from robustkpca.runs.run import Run

    if update_baseline:
        _update(run, baseline)
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
    if as_json:
        what = {
            "verdict": verdict.text,
            "code": verdict.code,
            "run": str(run),
            "baseline": str(baseline),
            "alpha": alpha,
        }
        why = {"reasons": verdict.reasons, "doubts": verdict.doubts, "notes": verdict.notes}
        show_json(what | why | {"cells": records(verdict.cells)})
    for note in verdict.notes:
        say(f"note: {note}")
    for line in verdict.lines if broken is None else ():
        say(line, style="red")
    if len(verdict.cells) and not as_json:
        if not quiet:
            _print_cells(verdict.cells)
        counts = verdict.cells["verdict"].value_counts()
        out.print(
            f"{verdict.text}: {len(verdict.cells)} cells compared, {counts.get('regressed', 0)} regressed, "
            f"{counts.get('suspicious', 0)} suspiciously better (alpha {alpha:g})",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    if os.environ.get("GITHUB_ACTIONS") == "true" and not as_json:
        for line in ci.github_annotations(verdict):
            print(line)
    if broken is not None:
        raise broken
    raise typer.Exit(verdict.code)


def _update(run: Path, baseline: Path) -> None:
    """Make a run the baseline. Raises RunError where it is not to be believed."""
    from robustkpca.gate import check
    from robustkpca.runs.run import Run

    now = Run.open(run)
    if baseline.suffix != ".parquet":
        raise SpecError(f"--update-baseline: expected --baseline to end in .parquet, got {baseline}")
    if faults := [*check.faults(now), *check.failures(now)]:
        raise RunError(f"--update-baseline: {run} is no baseline: {'; '.join(faults)}")
    now.export(baseline)
    wrote(baseline)


_SHOWN = 10  # cells that the terminal shows


def _print_cells(cells: pd.DataFrame) -> None:
    """The cells with the worst changes."""
    import pandas as pd

    worst = cells.sort_values("change", kind="stable")
    if len(cells) > _SHOWN:
        worst = worst.head(_SHOWN)
    text = pd.DataFrame(
        {
            "n": worst["n"].astype(str),
            "baseline": worst["baseline"].map("{:.1f}".format),
            "now": worst["now"].map("{:.1f}".format),
            "change": [f"{r.change:+.1f} ({r.low:+.1f} to {r.high:+.1f})" for r in worst.itertuples()],
            "verdict": worst["verdict"],
        }
    )
    text.index = pd.Index((worst["model"] + ", " + worst["attack"] + " " + worst["budget"]).str.strip(), name="cell")
    of = (
        f"The {_SHOWN} largest losses of {len(cells)} cells; --summary and --json have all."
        if len(cells) > _SHOWN
        else ""
    )
    print_table("Now and then", text, [f"{of} Changes with 95 % interval, paired.".strip()])
