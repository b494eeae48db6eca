"""The command that lists stored runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from robustkpca.cli.show import entry


def runs(folder: Annotated[Path, typer.Argument(help="Where to look, at any depth.")] = Path("runs")) -> None:
    """List stored runs with how far they came."""
    from robustkpca.errors import RunError
    from robustkpca.runs.run import Run

    if not folder.is_dir():
        raise RunError(f"runs {folder}: no such folder")
    for file in sorted(folder.rglob("run.json")):
        try:
            run = Run.open(file)
            done, total = run.progress
        except RunError as error:
            entry(str(file.parent), str(error))
            continue
        failed = len(run.summary.failures)
        state = "complete" if done == total else f"{failed} failed" if failed else "to be continued"
        what = ", ".join(s.name for s in run.suites) or "clean"
        entry(str(file.parent), f"{what}; {', '.join(run.models)}; n = {run.n}; {done} of {total} chunks, {state}")
