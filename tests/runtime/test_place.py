"""Which of several processes this one is, read from the variables of torchrun and of Slurm."""

import pytest
import torch

from robustkpca.errors import ProcessError
from robustkpca.runtime import place as module
from robustkpca.runtime.place import ALONE, DEFAULT_PORT, Place, divide_threads, place

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "99",
}
STEP = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}
JOB = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_PROCID": "0"}


def test_torchrun_and_a_step_of_srun_are_read():
    assert place(TORCHRUN) == Place(1, 4, 1, 2, "a", 99)
    assert place(JOB | STEP) == Place(5, 8, 1, 4)
    assert place(STEP | {"MASTER_ADDR": "n0"}) == Place(5, 8, 1, 4, "n0", DEFAULT_PORT)
    assert place(STEP | {"SLURM_STEP_TASKS_PER_NODE": "3,2"}).local_world == 3
    assert place(JOB | STEP | TORCHRUN) == place(TORCHRUN)  # torchrun inside a step


def test_no_address_is_needed():
    environment = {name: value for name, value in TORCHRUN.items() if not name.startswith("MASTER")}
    assert place(environment) == Place(1, 4, 1, 2, "", DEFAULT_PORT)


@pytest.mark.parametrize("environment", [
    {}, {"WORLD_SIZE": "1"}, {"WORLD_SIZE": "1", "RANK": "0"}, {"WORLD_SIZE": ""}, {"LOCAL_RANK": "0"},
    {"MASTER_ADDR": "stale", "MASTER_PORT": "1"},
    {"SLURM_PROCID": "0"}, STEP | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
    JOB,  # a shell inside a job of eight tasks
    JOB | {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "9", "MASTER_ADDR": "n0"},  # a task of an array
])  # fmt: skip
def test_all_else_is_one_process(environment):
    assert place(environment) == Place(host="", port=DEFAULT_PORT) == ALONE


@pytest.mark.parametrize(("environment", "message"), [
    ({"RANK": "0"}, "WORLD_SIZE: expected"),
    ({"WORLD_SIZE": "4"}, "RANK: expected"),
    ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK: expected 0 to 1"),
    ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK: expected 0 to 1"),
    ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK: expected a number, got 'x'"),
    (STEP | {"SLURM_PROCID": "8"}, "SLURM_PROCID: expected 0 to 7"),
])  # fmt: skip
def test_what_does_not_fit_is_named(environment, message):
    with pytest.raises(ProcessError, match=message):
        place(environment)


def test_threads_are_divided(monkeypatch):
    monkeypatch.setattr(module, "cpus", lambda: 8)
    before = torch.get_num_threads()
    try:
        divide_threads(Place(0, 4, 0, 4), {})
        assert torch.get_num_threads() == 2
        divide_threads(Place(0, 16, 0, 16), {"OMP_NUM_THREADS": "1"})
        assert torch.get_num_threads() == 1
        divide_threads(Place(0, 4, 0, 4), {"SLURM_CPUS_PER_TASK": "3"})
        assert torch.get_num_threads() == 3
        divide_threads(Place(0, 4, 0, 4), {"OMP_NUM_THREADS": "2"})  # what the user asks for stays
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
