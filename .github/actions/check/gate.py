"""What the action does once robustkpca is installed: eval, check and report, each whatever became of the one before.

Standard library only, run with `python -I`: nothing of the workspace is imported, and no shell runs what options hold.
Exit code: that of `check` (1: lost robustness, 2: nothing to believe, 3: our own failure); 2 where only eval failed.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path


def options(name: str) -> list[str]:
    """An input of the action, split and unquoted as a shell would.

    Raises:
        ValueError: a quote is left open.
    """
    text = os.environ[name]
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{name.lower()}: expected options as in a shell, got {text!r} ({error})") from None


def robustkpca(*arguments: str) -> int:
    """Run the command and return its exit code; what it prints goes to the job's log."""
    program = shutil.which("robustkpca", path=str(Path(sys.executable).parent)) or "robustkpca"
    print("+", shlex.join(["robustkpca", *arguments]), flush=True)
    return subprocess.run([program, *arguments], check=False).returncode


def main() -> int:
    """Evaluate, check, report."""
    folder = Path(os.environ["FOLDER"])
    run = folder / "run"
    try:
        what, how = options("EVAL"), options("CHECK")
    except ValueError as error:
        print(f"::error title=robustkpca::{str(error).replace('%', '%25')}", flush=True)
        return 2
    if folder.exists() and any(folder.iterdir()):
        print(f"::error title=robustkpca::folder: expected an empty folder or none, got {folder}", flush=True)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    evaluated = robustkpca("eval", *what, "--out", str(run))
    # Whatever eval said: check knows what is missing, and writes the summary, the annotations and JUnit XML.
    code = robustkpca(
        "check", str(run), "--baseline", os.environ["BASELINE"],
        "--summary", os.environ["GITHUB_STEP_SUMMARY"], "--junit", os.environ["JUNIT"], *how,
    )  # fmt: skip
    if run.exists():
        robustkpca("report", str(run), "--out", str(folder / "report" / "report.html"))
    return code or (2 if evaluated else 0)


if __name__ == "__main__":
    sys.exit(main())
