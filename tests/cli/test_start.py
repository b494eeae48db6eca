"""What comes before the work, and what ends it early."""

import signal
import time

import pytest
import torch

from robustkpca.cli.start import pick_device
from robustkpca.runs.run import Run
from tests.helpers.cli import BOTH, call, start


def test_a_device_is_kept_and_processes_take_one_each(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [pick_device(name) for name in ("auto", "cuda", "cuda:1")] == ["cuda", "cuda", "cuda:1"]
    for name, value in {
        "RANK": 3,
        "WORLD_SIZE": 4,
        "LOCAL_RANK": 3,
        "LOCAL_WORLD_SIZE": 4,
        "MASTER_ADDR": "a",
        "MASTER_PORT": 1,
    }.items():
        monkeypatch.setenv(name, str(value))
    assert [pick_device(name) for name in ("auto", "cuda", "cuda:0")] == ["cuda:1", "cuda:1", "cuda:0"]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_sigterm_keep_whole_chunks_and_say_how_to_go_on(place, number, code):
    folder = place / f"cut{code}"
    arguments = ("eval", *BOTH, "--attack", "pgd", "--steps", "400", "--batch-size", "2", "--out", folder.name)
    # A shell that started the tests in the background had their Ctrl-C ignored: not so here.
    process = start(*arguments, cwd=place, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    deadline = time.monotonic() + 120
    while len(list(folder.rglob("*.parquet"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code
    assert "the same command goes on from there" in said
    assert "Traceback" not in said
    rows = Run.open(folder).rows
    assert 0 < len(rows) < 200
    assert not list(folder.rglob("*.part"))
    listed = call("runs", str(place), cwd=place)
    assert listed.returncode == 0
    line = next(x for x in listed.stdout.splitlines() if x.startswith(str(folder)))
    assert "of 40 chunks" in line
    assert not line.endswith("complete")
