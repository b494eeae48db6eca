"""Several processes that share a run through its folder: the result of one, whoever does what, fails or is killed."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest

from robustkpca.errors import RunError
from robustkpca.evaluation.loop import evaluate
from robustkpca.files import write_whole
from robustkpca.runs import store
from robustkpca.runs.records import Record, Summary
from robustkpca.runs.run import Run
from robustkpca.suites.suite import load_suite
from tests.helpers.oracles import noise, tiny

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FGSM = [load_suite("fgsm").with_eps(["1/255", "4/255"])]


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    """A folder with the runs of each scenario of the helper, which is started once."""
    folder = tmp_path_factory.mktemp("forks")
    command = [sys.executable, "-m", "tests.helpers.together", "forks", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


def results(folder):
    """Runs by one and by two processes, and how many chunks each of the two wrote, by attack."""
    assert not list((folder / "two" / "claims").iterdir())
    wrote = Counter(tuple(line.split()[:2]) for line in (folder / "log").read_text().splitlines())
    return Run.open(folder / "one"), Run.open(folder / "two"), wrote


def counts(run):
    """Samples times budgets that were timed, by model and perturbation."""
    return {key: n for key, (_, n) in run.summary.times.items()}


def same(shared, alone):
    pd.testing.assert_frame_equal(shared.rows, alone.rows)
    assert shared.summary.failures == alone.summary.failures
    assert shared.health == alone.health
    assert counts(shared) == counts(alone)
    assert [s.text for s in shared.statuses] == [s.text for s in alone.statuses]


def test_two_processes_give_what_one_gives_failures_included(forks):
    one, two, wrote = results(forks / "equal")
    same(two, one)
    assert all(wrote[who, "fgsm"] for who in "01")
    assert list(one.rows[one.rows["perturbation"] == "own"].groupby("model").size()) == [8, 8]
    first, lost, last = one.models
    assert {key: (f.reason, f.first) for key, f in two.summary.failures.items()} == {
        (first, "own"): ("RuntimeError: no kernel", 8),
        (last, "own"): ("RuntimeError: no kernel", 8),
        (lost, "clean"): ("CheckpointError: torn", 0),
    }
    # Rows beyond the failure were written, and do not count.
    beyond = [file for file in (forks / "equal" / "two" / "rows").glob("*/own/*.parquet") if int(file.stem) > 8]
    assert beyond
    assert counts(two)[first, "own"] == 8


def test_what_failed_in_another_process_has_failed(forks):
    _, two, _ = results(forks / "other_fails")
    failed = int((forks / "other_fails" / "failed").read_text())
    failure = two.summary.failures[two.models[0], "own"]
    assert (failure.reason, failure.first) == ("RuntimeError: only here", failed)
    assert not list((forks / "other_fails" / "two" / "rows").glob(f"*/own/{failed:07d}.parquet"))  # nor tried again
    assert [s.text for s in two.statuses if str(s.cell.attack) == "own"] == ["failed: RuntimeError: only here"]
    assert all(s.complete for s in two.statuses if str(s.cell.attack) != "own")


def test_the_chunk_of_a_killed_process_is_taken_over(forks):
    one, two, wrote = results(forks / "killed")
    assert (forks / "killed" / "killed").exists()
    pd.testing.assert_frame_equal(two.rows, one.rows)
    assert two.health == one.health
    assert all(s.complete for s in two.statuses)
    assert wrote["1", "own"] == 0
    assert wrote["0", "own"] == 15


def test_a_slow_process_does_less(forks):
    one, two, wrote = results(forks / "slow")
    same(two, one)
    assert wrote["0", "own"] + wrote["1", "own"] == 15
    assert 1 <= wrote["1", "own"] < wrote["0", "own"]


@pytest.mark.slow
def test_padding_adds_no_samples(tmp_path):
    """Ten images for four processes in batches of three; the first is wrong and the others are right."""
    command = [sys.executable, "-m", "tests.helpers.killed", "padding", str(tmp_path), "0", "4"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    whole, shared = Run.open(tmp_path / "whole"), Run.open(tmp_path / "cut")
    same(shared, whole)
    clean = shared.cell_rows("oracle", shared.cells[0])
    assert sorted(clean.index) == sorted({f"s{i}" for i in (10, *range(9))})
    assert clean["correct"].tolist() == [False] + [True] * 9


@pytest.mark.parametrize("workers", [0, 1])
def test_an_interrupted_process_gives_back_what_it_holds(tmp_path, workers):
    seen = []

    def stop(progress):
        seen.append(len(list((tmp_path / "run" / "claims").iterdir())))
        if len(seen) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate([tiny()], noise(), FGSM, tmp_path / "run", batch_size=7, workers=workers, on_progress=stop)
    assert max(seen) >= 1
    assert not list((tmp_path / "run" / "claims").iterdir())


def test_what_was_left_half_written_is_removed_when_all_is_there(tmp_path):
    evaluate([tiny()], noise(), FGSM, tmp_path / "run", batch_size=7)
    left = tmp_path / "run" / "rows" / "0" / "fgsm" / "0000007.parquet.0123abcd.part"
    left.write_bytes(b"PAR1")
    evaluate([tiny()], noise(), FGSM, tmp_path / "run", batch_size=7)
    assert not left.exists()


def test_two_processes_may_write_one_file_at_once(tmp_path):
    def outer(part):
        part.write(b"outer")
        write_whole(tmp_path / "file", lambda other: other.write(b"inner"))
        assert (tmp_path / "file").read_text() == "inner"

    write_whole(tmp_path / "file", outer)
    assert (tmp_path / "file").read_text() == "outer"
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_two_requests_begun_in_one_moment_do_not_share_a_folder(tmp_path, monkeypatch):
    """Another process writes its run.json after ours was found to be missing."""
    evaluate([tiny()], noise(), FGSM, tmp_path / "other", batch_size=7, seed=1)
    write = store.Folder.write

    def late(folder, path, content):
        write(folder, path, content)
        path.write_bytes((tmp_path / "other" / "run.json").read_bytes())

    monkeypatch.setattr(store.Folder, "write", late)
    with pytest.raises(RunError, match=r"holds another request .*seed"):
        evaluate([tiny()], noise(), FGSM, tmp_path / "run", batch_size=7)


def test_times_count_up_to_the_first_failure():
    records = [
        Record(model="m", first=4, times={"a": (1.0, 2), "b": (1.0, 2)}, failures={"a": "late"}),
        Record(model="m", first=0, times={"a": (1.0, 2), "b": (1.0, 2)}),
        Record(model="m", first=2, times={"b": (1.0, 2)}, failures={"a": "early"}),
        Record(model="m", first=6, times={"a": (1.0, 2), "b": (1.0, 2)}),
    ]
    summary = Summary.of(records)
    assert summary == Summary.of(reversed(records))
    assert summary.times == {("m", "a"): (1.0, 2), ("m", "b"): (4.0, 8)}
    assert (summary.failures["m", "a"].reason, summary.failures["m", "a"].first) == ("early", 2)


OPTIONS = ["eval", "--model", "symvit", "--attack", "fgsm", "--limit", "40", "--batch-size", "8"]


def clean_environment(**more):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {k: v for k, v in os.environ.items() if k not in names and not k.startswith("SLURM_")}
    return kept | {"PYTHONPATH": str(ROOT)} | more


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run of one command, in the shell of a Slurm job."""
    folder = tmp_path_factory.mktemp("alone")
    done = subprocess.run(
        [sys.executable, "-m", "robustkpca", *OPTIONS, "--out", "one"], cwd=folder, capture_output=True, text=True,
        env=clean_environment(SLURM_PROCID="0", SLURM_NTASKS="4", WORLD_SIZE="1"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "shared " not in done.stderr
    return Run.open(folder / "one")


@pytest.mark.slow
def test_the_command_line_under_torchrun(tmp_path, alone):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "robustkpca", *OPTIONS]
    done = subprocess.run(
        [*command, "--out", "two"], cwd=tmp_path, capture_output=True, text=True, timeout=300, env=clean_environment()
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("rows and receipt: two") == 1  # one process reports
    assert "shared   among 2 processes" in done.stderr
    same(Run.open(tmp_path / "two"), alone)


@pytest.mark.slow
def test_tasks_of_a_slurm_array_share_a_run(tmp_path, alone):
    """Two commands that know nothing of each other; each waits for the whole run and shows it."""
    tasks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.together", "command", str(tmp_path), *OPTIONS, "--out", "run"],
            cwd=tmp_path, env=clean_environment(SLURM_ARRAY_TASK_ID=number), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for number in "12"
    ]  # fmt: skip
    for task in tasks:
        out, error = task.communicate(timeout=300)
        assert task.returncode == 0, error
        assert "rows and receipt: run" in out
    wrote = Counter(line.split()[0] for line in (tmp_path / "log").read_text().splitlines())
    assert wrote["1"] >= 1 and wrote["2"] >= 1
    assert wrote.total() == 10  # nothing twice
    same(Run.open(tmp_path / "run"), alone)
