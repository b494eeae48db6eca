"""Runs that are killed, cut short or given torn files go on,
and end with the rows of a run that nothing happened to."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from robustkpca.errors import RunError
from robustkpca.evaluation.loop import evaluate
from robustkpca.evaluation.units import Unit
from robustkpca.runs.run import Run
from robustkpca.runtime.claims import Claims
from robustkpca.runtime.place import Place
from robustkpca.suites.suite import load_suite
from tests.helpers.oracles import noise, tiny

ROOT = Path(__file__).parents[2]
SUITES = [load_suite("fgsm").with_eps(["1/255", "4/255"])]


def run(folder, **options):
    return evaluate([tiny()], noise(), SUITES, folder, batch_size=7, **options)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_twenty_kills_change_nothing(tmp_path, processes):
    command = [sys.executable, "-m", "tests.helpers.killed", "kills", str(tmp_path), "20", str(processes)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 20, "the evaluation was over before it was killed 20 times"
    whole, cut = Run.open(tmp_path / "whole"), Run.open(tmp_path / "cut")
    pd.testing.assert_frame_equal(cut.rows, whole.rows)
    assert cut.health == whole.health
    assert {s.text for s in cut.statuses} == {"complete"}


def spoil(path, how):
    content = path.read_bytes()
    if how == "half":
        path.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "zeros":  # what a file may hold after the power has gone
        path.write_bytes(content[:4] + bytes(len(content) - 4))
    elif how == "a bit":
        middle = len(content) // 3
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    else:
        rows = pd.read_parquet(path)
        if how == "one twice, one missing":
            rows.iloc[1] = rows.iloc[0]
        elif how == "one less":
            rows = rows.iloc[1:]
        elif how == "a column less":
            rows = rows.drop(columns="flags")
        elif how == "another attack":
            rows = rows.assign(perturbation="pgd")
        elif how == "another answer":
            rows.loc[0, "correct"] = not rows.loc[0, "correct"]
        rows.to_parquet(path)


@pytest.mark.parametrize("how", ["half", "empty", "zeros", "a bit", "one twice, one missing", "one less",
                                 "a column less", "another attack", "another answer"])  # fmt: skip
def test_files_that_are_not_whole_are_made_again(tmp_path, how):
    whole = run(tmp_path / "whole").rows
    run(tmp_path / "torn")
    files = sorted((tmp_path / "torn" / "rows").rglob("*.parquet"))
    for file in (files[1], files[-2]):  # of the clean images, and of the attack
        spoil(file, how)
    pd.testing.assert_frame_equal(run(tmp_path / "torn").rows, whole)


def test_a_full_disk_is_one_line_and_costs_nothing(tmp_path, monkeypatch):
    whole = run(tmp_path / "whole").rows
    fsync, left = os.fsync, [6]

    def full(descriptor):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match=r"cannot write .*: No space left on device"):
        run(tmp_path / "cut")
    monkeypatch.undo()
    assert not list((tmp_path / "cut").rglob("*.part"))
    assert 0 < len(Run.open(tmp_path / "cut").rows) < len(whole)
    pd.testing.assert_frame_equal(run(tmp_path / "cut").rows, whole)


def test_a_second_process_shares_the_work(tmp_path):
    """What another living process holds is left to it; whoever is not the first does not wait for it."""
    whole = run(tmp_path / "whole").rows
    cut = run(tmp_path / "cut")
    for chunk in (tmp_path / "cut" / "rows").rglob("0000007.parquet"):
        chunk.unlink()
    with Claims(tmp_path / "cut" / "claims") as others:
        assert others.take(Unit(0, range(7, 14)).key)
        part = run(tmp_path / "cut", here=Place(1, 2, 1, 2))
        assert {s.text for s in part.statuses} == {"incomplete 23/30"}
        assert others.held_by_others() == []
    pd.testing.assert_frame_equal(run(tmp_path / "cut").rows, whole)
    pd.testing.assert_frame_equal(cut.rows, whole)


def test_a_run_killed_in_its_first_moment_can_be_begun_again(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json.part").write_text('{"format"')
    assert {s.text for s in run(tmp_path / "run").statuses} == {"complete"}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "results.csv").write_text("mine")
    with pytest.raises(RunError, match="holds something else"):
        run(tmp_path / "other")
    assert [p.name for p in (tmp_path / "other").iterdir()] == ["results.csv"]


@pytest.mark.parametrize("content", ["", '{"format": 1, "fing', None])
def test_a_lost_run_json_is_made_again_and_chunks_of_other_requests_are_not_taken(tmp_path, content):
    whole = run(tmp_path / "run").rows
    file = tmp_path / "run" / "run.json"
    file.unlink() if content is None else file.write_text(content)
    kept = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*.parquet")}
    pd.testing.assert_frame_equal(run(tmp_path / "run").rows, whole)
    assert {p: p.stat().st_mtime_ns for p in kept} == kept
    file.unlink()
    other = run(tmp_path / "run", seed=1, full_argmax=True)
    assert other.request.seed == 1
    assert {p: p.stat().st_mtime_ns for p in kept}.items().isdisjoint(kept.items())


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    done = run(tmp_path / "run")
    rows = tmp_path / "run" / "rows"
    shutil.rmtree(rows)
    rows.write_text("")  # nothing can be made in it, by root either
    with pytest.raises(RunError, match="cannot make") as error:
        run(tmp_path / "run")
    assert "\n" not in str(error.value)
    rows.unlink()
    (tmp_path / "run" / "claims").rmdir()
    (tmp_path / "run" / "claims").write_text("")
    with pytest.raises(RunError, match="cannot make") as error:
        run(tmp_path / "run")
    assert "\n" not in str(error.value)
    (tmp_path / "run" / "claims").unlink()
    pd.testing.assert_frame_equal(run(tmp_path / "run").rows, done.rows)


def test_no_sample_is_there_twice_or_missing(tmp_path):
    ids = noise().ids
    rows = run(tmp_path / "run").rows
    for _, cell in rows.groupby(["perturbation", "budget"]):
        assert list(cell["sample"]) == ids
    assert np.isfinite(rows["confidence"]).all()
