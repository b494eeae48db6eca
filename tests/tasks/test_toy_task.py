"""A second task runs through everything without a change elsewhere.

Evaluation, resume, two processes, tables, report, check.
"""

import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

from robustkpca import accuracy_table, check, compare, evaluate, findings
from robustkpca.gate.check import HOLDS, REGRESSED
from robustkpca.report import report, run_tables
from robustkpca.runs.run import Run
from robustkpca.runtime.place import Place
from robustkpca.suites.suite import Suite
from tests.helpers.toy_task import Copier, good, poor, signals

ROOT = Path(__file__).parents[2]
MOVED = {
    "name": "moved", "version": 1, "title": "Values moved", "threat": {"kind": "shift", "shares": ["0.05", "0.25"]},
    "attack": [{"name": "up", "method": "up"}, {"name": "down", "method": "down"}],
}  # fmt: skip


@pytest.fixture
def moved() -> Suite:
    return Suite.parse(MOVED, "suite")


def test_scores_are_those_worked_out_by_hand(moved, tmp_path):
    table = accuracy_table(evaluate([good(), poor()], signals(), [moved], tmp_path, batch_size=7))
    values = table.set_index(["model", "attack", "budget"])["mae"]
    assert table.columns.tolist() == ["model", "suite", "attack", "budget", "status", "n", "mae", "low", "high"]
    assert set(table["n"]) == {60}
    for model, bias in (("good", 0.01), ("poor", 0.2)):
        assert values[model, "clean", "clean"] == pytest.approx(bias, abs=1e-6)
        assert values[model, "moved/up", "0.25"] == pytest.approx(0.25 + bias, abs=1e-6)
        assert values[model, "moved/down", "0.25"] == pytest.approx(abs(0.25 - bias), abs=1e-6)
        assert values[model, "moved/worst case", "0.25"] == pytest.approx(0.25 + bias, abs=1e-6)


def test_rows_have_clusters_and_do_not_depend_on_the_batch_size(moved, tmp_path):
    small, large = (
        evaluate([good()], signals(), [moved], tmp_path / str(size), batch_size=size).rows for size in (7, 60)
    )
    pd.testing.assert_frame_equal(small, large)
    assert small["cluster"].nunique() == 15
    assert small.loc[small["perturbation"] == "clean", "broken"].isna().all()


def test_an_interrupted_run_goes_on(moved, tmp_path):
    whole = evaluate([good(), poor()], signals(), [moved], tmp_path / "whole", batch_size=7)

    class Stops(Copier):
        def __init__(self) -> None:
            super().__init__("good", 0.01)
            self.left = 9

        @property
        def bias(self):
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
            return 0.01

        @bias.setter
        def bias(self, value):
            pass

    with pytest.raises(KeyboardInterrupt):
        evaluate([Stops(), poor()], signals(), [moved], tmp_path / "cut", batch_size=7)
    done, of = Run.open(tmp_path / "cut").progress
    assert 0 < done < of
    again = evaluate([good(), poor()], signals(), [moved], tmp_path / "cut", batch_size=7)
    pd.testing.assert_frame_equal(again.rows, whole.rows)


@pytest.mark.slow
def test_two_processes_share_it(moved, tmp_path):
    whole = evaluate([good(), poor()], signals(), [moved], tmp_path / "whole", batch_size=2)
    children = []
    for rank in range(2):
        if (child := os.fork()) == 0:
            torch.set_num_threads(1)
            evaluate([good(), poor()], signals(), [moved], tmp_path / "two", batch_size=2, here=Place(rank, 2, rank, 2))
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    pd.testing.assert_frame_equal(Run.open(tmp_path / "two").rows, whole.rows)


def test_comparison_findings_and_check(moved, tmp_path):
    run = evaluate([good(), poor()], signals(), [moved], tmp_path / "run")
    worse = compare(run).set_index(["attack", "budget"]).loc[("clean", "clean")]
    assert worse["difference"] == pytest.approx(0.19, abs=1e-6)
    assert worse["p_holm"] < 0.05
    assert {f.rule for f in findings(run)} == {"rows", "eps-order"}
    # "down" brings the poor model nearer to the truth: a perturbation that helps.
    assert {(f.rule, f.model) for f in findings(run) if f.level != "pass"} == {("eps-order", "poor")}
    up = Suite.parse(MOVED | {"attack": MOVED["attack"][:1]}, "suite")
    before = evaluate([good()], signals(), [up], tmp_path / "before")
    after = evaluate([Copier("good", 0.03)], signals(), [up], tmp_path / "after")
    assert check(before, before).code == HOLDS
    verdict = check(after, before, tolerance=0.005)
    assert verdict.code == REGRESSED
    assert "good, clean: 0.010 -> 0.030 (+0.020 units" in verdict.reasons[0]
    assert check(after, before, tolerance=0.05).code == HOLDS


def test_tables_and_report_speak_of_signals(moved, tmp_path):
    run = evaluate([good(), poor()], signals(), [moved], tmp_path / "run")
    view = run_tables.views(run)[0]
    assert view.cells.loc["up shift 0.25", "good"].startswith("0.260 (")
    assert "Mean absolute error over all 60 samples" in view.notes[0]
    files = report.write([run], tmp_path / "report.html")
    text = files[0].read_text()
    assert "signals" in text
    assert "accuracy" not in text.lower()


@pytest.mark.slow
def test_the_command_line_takes_it_by_import_paths(moved, tmp_path):
    suite = tmp_path / "moved.toml"
    suite.write_text(
        'name = "moved"\nversion = 1\ntitle = "Values moved"\n[threat]\nkind = "shift"\nshares = ["0.05", "0.25"]\n'
        '[[attack]]\nname = "up"\nmethod = "up"\n'
    )
    command = [sys.executable, "-m", "robustkpca"]
    toy = "tests.helpers.toy_task"
    done = subprocess.run(
        [*command, "eval", "--model", f"{toy}:good", "--model", f"{toy}:poor", "--data", f"{toy}:signals",
         "--attack", str(suite), "--out", str(tmp_path / "run")],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "0.260" in done.stdout
    shown = subprocess.run(
        [*command, "table", str(tmp_path / "run"), "--layout", "budgets", "--format", "csv"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.splitlines()[1].startswith("good,60,0.01")
    checked = subprocess.run(
        [*command, "check", str(tmp_path / "run"), "--baseline", str(tmp_path / "run")],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stderr
