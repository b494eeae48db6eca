"""Processes share a run through its folder: nothing listens. Only training meets at an address, as torch does it."""

import ast
import json
import socket
from pathlib import Path

import pandas as pd
import pytest

import robustkpca
from robustkpca.errors import RunError
from robustkpca.evaluation.loop import evaluate
from robustkpca.runs.files import sealed_text
from robustkpca.runs.run import Run
from robustkpca.runtime.place import Place
from robustkpca.suites.suite import load_suite
from tests.helpers.oracles import noise, tiny

PACKAGE = Path(robustkpca.__file__).parent
OPENING = {"init_process_group", "TCPStore", "bind", "listen", "create_server", "HTTPServer", "start_server"}


def test_only_training_opens_anything():
    found = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            if name in OPENING:
                found.add((str(file.relative_to(PACKAGE)), name))
    assert found == {("train/training.py", "init_process_group")}


def test_one_of_two_processes_opens_no_socket(tmp_path, monkeypatch):
    """Even where a launcher gives an address for all of them."""

    def refuse(*arguments):
        raise AssertionError(f"a socket is opened: {arguments}")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "listen", refuse)
    here = Place(0, 2, 0, 2, "127.0.0.1", 29500)
    run = evaluate([tiny()], noise(), [load_suite("fgsm")], tmp_path / "run", here=here)
    assert all(status.complete for status in run.statuses)


@pytest.mark.parametrize("change", [
    {"model": "nobody"}, {"failures": {"fgsm": 3}}, {"times": {"fgsm": "long"}}, {"surprise": 1}, {"health": []},
])  # fmt: skip
def test_what_other_processes_leave_is_validated(tmp_path, change):
    """A record that another made, with a checksum that fits: one line, and the run goes on without it."""
    run = evaluate([tiny()], noise(), [load_suite("fgsm")], tmp_path / "run")
    file = tmp_path / "run" / "records" / "0" / "0000000.json"
    plain = {key: value for key, value in json.loads(file.read_text()).items() if key != "checksum"}
    file.write_text(sealed_text({**plain, **change}))
    with pytest.raises(RunError) as error:
        Run.open(run.path)
    assert "\n" not in str(error.value)
    again = evaluate([tiny()], noise(), [load_suite("fgsm")], tmp_path / "run")
    pd.testing.assert_frame_equal(again.rows, run.rows)
