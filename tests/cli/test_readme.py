"""What README shows is what the main command prints, and its figures are those of the gate's baseline."""

import io
import re
from pathlib import Path

import pandas as pd
from rich.console import Console

from robustkpca.cli import show
from robustkpca.models.checkpoints import load_classifier
from robustkpca.runs.run import Run

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_stored_main_run_prints_what_readme_shows(monkeypatch):
    """Every figure, word and hash, as 80 columns have them."""
    run = Run.open(ROOT / "reports" / "main.parquet")
    printed = Console(emoji=False, file=io.StringIO(), width=80)
    monkeypatch.setattr(show, "out", printed)
    assert show.show_run(run)
    section = README.partition("## What it prints")[2]
    shown, _, last = re.search(r"```text\n(.*?)\n```", section, re.DOTALL)[1].rpartition("\n")
    assert [line.rstrip() for line in printed.file.getvalue().strip().splitlines()] == shown.splitlines()
    assert last == f"rows and receipt: runs/pgd-{run.manifest.fingerprint[:8]}"


def test_the_stored_main_run_is_that_of_the_models_and_of_the_baseline():
    """The baseline's images are among its images, and draws are keyed: the rows are the same, and CI's gate compares
    the baseline with what the models do now."""
    main, baseline = (Run.open(ROOT / "reports" / f"{name}.parquet") for name in ("main", "baseline"))
    assert [load_classifier(name).weights for name in ("symvit", "rpc-symvit")] == [
        model.weights for model in main.request.models
    ]
    compared = 0
    for cell in main.cells:
        for model in main.models:
            ours, theirs = main.cell_rows(model, cell), baseline.cell_rows(model, cell)
            assert len(ours) == 1000
            shared = ours.loc[theirs.index]
            compared += len(shared)
            pd.testing.assert_series_equal(shared["prediction"], theirs["prediction"])
            pd.testing.assert_series_equal(shared["label"], theirs["label"])
    assert compared == 2 * 4 * 400
