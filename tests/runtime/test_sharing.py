"""Several processes that share a run: how they are told from one, what they share, and how it ends when one is lost."""

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pandas as pd
import pytest
import torch

from robustkpca.errors import ProcessError, RunError
from robustkpca.runs.run import Run
from robustkpca.runtime import sharing
from robustkpca.runtime.sharing import ALONE, Peers, Place, divide_threads, place

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "99",
}
SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}


def test_torchrun_and_slurm_are_read():
    assert place(TORCHRUN) == Place(1, 4, 1, 2, "a", 99)
    assert place(SLURM | {"MASTER_ADDR": "n0"}) == Place(5, 8, 1, 4, "n0", sharing.DEFAULT_PORT)
    assert place(SLURM | TORCHRUN) == place(TORCHRUN)  # torchrun inside a job


@pytest.mark.parametrize("environment", [
    {}, {"WORLD_SIZE": "1"}, {"WORLD_SIZE": "1", "RANK": "0"}, {"SLURM_PROCID": "0"}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
    {"MASTER_ADDR": "stale", "MASTER_PORT": "1"}, {"LOCAL_RANK": "0"}, {"WORLD_SIZE": ""},
])  # fmt: skip
def test_stray_variables_are_one_process(environment):
    assert place(environment) == ALONE


def test_a_shell_inside_a_slurm_job_is_one_process_and_is_told_so():
    found = place({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"})
    assert found.alone
    assert "set MASTER_ADDR" in found.notice


@pytest.mark.parametrize(("environment", "missing"), [
    ({"RANK": "0"}, "WORLD_SIZE: expected"),
    ({"WORLD_SIZE": "4"}, "RANK: expected"),
    ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR: expected"),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "MASTER_PORT: expected"),
    ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK: expected 0 to 1"),
    ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK: expected a number, got 'x'"),
])  # fmt: skip
def test_half_of_what_is_needed_is_named(environment, missing):
    with pytest.raises(ProcessError, match=missing):
        place(environment)


def test_threads_are_divided(monkeypatch):
    monkeypatch.setattr(sharing, "cpus", lambda: 8)
    had = torch.get_num_threads()
    try:
        divide_threads(Place(0, 4, 0, 4), {})
        assert torch.get_num_threads() == 2
        divide_threads(Place(0, 16, 0, 16), {"OMP_NUM_THREADS": "1"})
        assert torch.get_num_threads() == 1
        divide_threads(Place(0, 4, 0, 4), {"OMP_NUM_THREADS": "3"})  # said by the user
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(had)


@pytest.fixture
def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def together(world, port, act):
    """`act(rank, peers)` in a thread for each rank; what each returned or raised, by rank."""
    found = {}

    def run(rank):
        try:
            with Peers(Place(rank, world, rank, world, "127.0.0.1", port), "name") as peers:
                found[rank] = act(rank, peers)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a process hangs"
    return found


@pytest.fixture
def numbered(monkeypatch):
    """In the tests all ranks are threads of one process, and count their runs together."""
    monkeypatch.setattr(sharing, "_RUNS", iter(lambda: 0, 1))
    monkeypatch.setattr(sharing, "BEAT", 0.05)
    yield
    sharing._stores.clear()


@pytest.mark.parametrize(("world", "n"), [(2, 5), (4, 2), (3, 0)])
def test_numbers_are_shared_out_once_each(port, numbered, world, n):
    def act(rank, peers):
        mine = peers.share(lambda: list(range(10, 10 + n)))
        return mine, peers.end({"rank": rank}, lambda: None)

    found = together(world, port, act)
    assert sorted(number for mine, _ in found.values() for number in mine) == list(range(10, 10 + n))
    assert found[0][1] == [{"rank": rank} for rank in range(1, world)]
    assert all(not found[rank][1] for rank in range(1, world))


def test_a_process_that_fails_is_named_and_costs_the_others_nothing(port, numbered):
    def act(rank, peers):
        mine = peers.share(lambda: [1, 2, 3])
        if rank == 1:
            raise RuntimeError("no kernel\nsecond line")
        return mine, peers.end(None, lambda: None)

    found = together(3, port, act)
    assert str(found[0]) == "process 1 of 3 stopped: no kernel; what is done is kept"
    assert isinstance(found[0], ProcessError)
    assert found[2] == ([3], [])


def test_when_the_first_process_cannot_begin_the_others_hear_why(port, numbered):
    def act(rank, peers):
        def plan():
            raise RunError("run x holds another request")

        return peers.share(plan)

    found = together(2, port, act)
    assert isinstance(found[0], RunError)
    assert "process 0 of 2 stopped: run x holds another request" in str(found[1])


def test_a_process_that_falls_silent_is_given_up(port, numbered, monkeypatch):
    monkeypatch.setattr(sharing, "SILENCE", 0.5)

    def act(rank, peers):
        peers.share(lambda: [1, 2])
        if rank == 1:
            peers._stopped.set()  # killed: no more signs of life, no word at its end
            return None
        return peers.end(None, lambda: None)

    found = together(2, port, act)
    assert "process 1 of 2 has given no sign of life for 0.5 s" in str(found[0])


def test_processes_that_do_not_come_are_not_waited_for_forever(port, numbered, monkeypatch):
    monkeypatch.setattr(sharing, "START", 1)
    begun = time.monotonic()
    for rank in (0, 1):  # the first waits for the second, and the second for the first
        with pytest.raises(ProcessError, match=rf"expected 2 processes at 127.0.0.1:{port} within 1 s"):
            Peers(Place(rank, 2, rank, 2, "127.0.0.1", port), "name")
    assert time.monotonic() - begun < 20


def test_padding_adds_no_samples(tmp_path):
    """Ten images for four processes in batches of three; the first is wrong and the others are right."""
    command = [sys.executable, "-m", "tests.helpers.killed", "padding", str(tmp_path), "0", "4"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    whole, shared = Run.open(tmp_path / "whole"), Run.open(tmp_path / "cut")
    pd.testing.assert_frame_equal(shared.rows, whole.rows)
    clean = shared.cell_rows("oracle", shared.cells[0])
    assert sorted(clean.index) == sorted({f"s{i}" for i in (10, *range(9))})
    assert clean["correct"].tolist() == [False] + [True] * 9


def test_the_command_line_under_torchrun(tmp_path):
    options = (
        "eval",
        "--model",
        "symvit",
        "--attack",
        "fgsm",
        "--attack",
        "pgd",
        "--steps",
        "2",
        "--limit",
        "40",
        "--batch-size",
        "8",
    )
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "-m",
        "robustkpca",
        *options,
        "--out",
        "two",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("rows and receipt: two") == 1  # one process reports
    assert "shared   among 2 processes" in done.stderr
    one = subprocess.run(
        [sys.executable, "-m", "robustkpca", *options, "--out", "one"], cwd=tmp_path, capture_output=True, text=True,
        env=os.environ | {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "WORLD_SIZE": "1"},
    )  # fmt: skip
    assert one.returncode == 0, one.stderr
    assert "one process, though Slurm counts 4 tasks" in one.stderr
    shared, alone = Run.open(tmp_path / "two"), Run.open(tmp_path / "one")
    pd.testing.assert_frame_equal(shared.rows, alone.rows)
    assert shared.probes == alone.probes
    images = {key: n for key, (_, n) in shared.manifest.times.items()}
    assert images == {key: n for key, (_, n) in alone.manifest.times.items()}
