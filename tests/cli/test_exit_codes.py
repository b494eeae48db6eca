"""1 is a regression and nothing else: a command that fails itself ends with 3, one line, and the run kept."""

import os
import subprocess
import sys
import tempfile

import pytest

from robustkpca.cli import show
from robustkpca.errors import FAILED
from robustkpca.gate import check as gate
from robustkpca.runs.run import Run
from tests.helpers.cli import call


@pytest.fixture(scope="module")
def base(run, place):
    if not (place / "codes.parquet").exists():
        assert call("check", "run", "--baseline", "codes.parquet", "--update-baseline", cwd=place).returncode == 0
    return place


def shell(command, cwd, **environment):
    """A command line in a shell of its own, in which `robustkpca` is this one: exit code and standard error."""
    text = f'robustkpca() {{ {sys.executable} -m robustkpca "$@"; }}\n{command}'
    done = subprocess.run(
        ["bash", "-c", text], cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True
    )
    return done.returncode, done.stderr


CHECK = "robustkpca check run --baseline codes.parquet"


@pytest.mark.parametrize(("command", "line"), [
    (f"{CHECK} > /dev/full", "error: OutputError: cannot write the output: No space left on device"),
    (f"{CHECK} | true; exit ${{PIPESTATUS[0]}}", "error: OutputError: cannot write the output: Broken pipe"),
    (f"{CHECK} --summary /dev/full", "error: OutputError: cannot write /dev/full: No space left on device"),
    (f"{CHECK} --junit nothing/there/../../codes.parquet/j.xml", "error: OutputError: cannot write "),
])  # fmt: skip
def test_check_whose_output_cannot_be_written_is_no_regression(base, command, line):
    code, said = shell(command, base)
    assert code == 3, said
    assert said.splitlines()[-1].startswith(line)
    assert "Traceback" not in said
    assert "Exception ignored" not in said


def test_a_table_whose_encoding_lacks_a_letter(base, monkeypatch):
    def fail(*_, **__):
        raise UnicodeEncodeError("latin-1", "a→b", 1, 2, "no")

    monkeypatch.setattr(show.out, "print", fail)
    done = call("check", "run", "--baseline", "codes.parquet", cwd=base)
    assert done.returncode == 3
    assert done.stderr == "error: OutputError: cannot write the output: its encoding, latin-1, has no '\\u2192'\n"


def test_a_verdict_is_in_the_files_when_nobody_reads_what_is_printed(base, monkeypatch):
    def fail(*_, **__):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(show.out, "print", fail)
    files = ("--summary", "s.md", "--junit", "j.xml")
    assert call("check", "run", "--baseline", "codes.parquet", *files, cwd=base).returncode == 3
    assert "holds" in (base / "s.md").read_text()
    assert "testcase" in (base / "j.xml").read_text()


@pytest.mark.parametrize("error", [RuntimeError("never seen"), MemoryError(), KeyError("k"), RecursionError()])
def test_an_error_nobody_foresaw_is_no_regression(base, tmp_path, monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(gate, "check", fail)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    done = call("check", "run", "--baseline", "codes.parquet", cwd=base)
    assert done.returncode == FAILED == 3
    (log,) = tmp_path.glob("robustkpca-*.log")
    text = log.read_text()
    assert "robustkpca check run --baseline codes.parquet" in text
    assert "Traceback" in text
    last = done.stderr.splitlines()[-1]  # the traceback is above it where there is no terminal
    assert last.startswith(f"unexpected {type(error).__name__}: ")
    assert f"please open an issue with {log}." in last


def test_eval_whose_output_cannot_be_written_keeps_the_run(place, monkeypatch):
    """1 says that a cell has no result; here they all have."""

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(show.out, "print", fail)
    arguments = ("--checkpoint", "sym.safetensors", "--data", "folder:pictures", "--out", "unprinted")
    done = call("eval", *arguments, "--attack", "noise", cwd=place)
    assert done.returncode == 3
    assert done.stderr.endswith("error: OutputError: cannot write the output: No space left on device\n")
    assert all(status.complete for status in Run.open(place / "unprinted").statuses)


def test_a_file_that_is_missing_is_not_taken_for_the_output(base, monkeypatch):
    """An error of the system that names a file is not about what is printed."""

    def fail(*_, **__):
        raise OSError(28, "No space left on device", "some/file")

    monkeypatch.setattr(gate, "check", fail)
    done = call("check", "run", "--baseline", "codes.parquet", cwd=base)
    assert done.returncode == 3
    assert "cannot write the output" not in done.stderr


def test_a_package_that_cannot_be_imported_is_no_regression(base, tmp_path):
    (tmp_path / "typer.py").write_text("raise RuntimeError('a broken package')\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    code, said = shell(CHECK, base, PYTHONPATH=path)
    assert (code, "a broken package" in said) == (3, True)
