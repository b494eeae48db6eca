"""Files of our own are whole or not there, also when the power goes or the disk is full; and the lines that say so."""

import errno
import os

import pytest

from robustkpca.errors import DataError, OutputError, brief
from robustkpca.files import write_whole
from robustkpca.kpca import plots
from robustkpca.models import checkpoints
from tests.helpers.oracles import tiny


@pytest.fixture
def calls(monkeypatch):
    """The calls of fsync and replace, in order, with the size of what is synchronised and the name it gets."""
    fsync, replace, seen = os.fsync, os.replace, []

    def synchronise(descriptor):
        seen.append(("fsync", os.fstat(descriptor).st_size))
        fsync(descriptor)

    def rename(source, target):
        seen.append(("replace", os.path.basename(target)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synchronise)
    monkeypatch.setattr(os, "replace", rename)
    return seen


def test_a_checkpoint_is_on_the_disk_before_it_gets_its_name(tmp_path, calls):
    made = tiny()
    checkpoints.save(tmp_path / "m.safetensors", made.network.state_dict(), made.settings, {})
    size = (tmp_path / "m.safetensors").stat().st_size
    assert calls == [("fsync", size), ("replace", "m.safetensors")]


def test_a_full_disk_keeps_the_old_checkpoint(tmp_path, monkeypatch):
    file, made = tmp_path / "m.safetensors", tiny()
    file.write_bytes(b"old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match=r"cannot write .*m.safetensors: No space left on device"):
        checkpoints.save(file, made.network.state_dict(), made.settings, {})
    with pytest.raises(OutputError, match="No space left"):
        write_whole(file, lambda part: part.write(b"new"))
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("m.safetensors", b"old")]


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError(), "ValueError"),
        (OSError("\n"), "OSError"),
        (RuntimeError("one\ntwo"), "one"),
        (KeyError("k"), "'k'"),
    ],
)
def test_an_error_in_one_line(error, line):
    assert brief(error) == line


def test_an_error_without_a_message_is_still_one_line(tmp_path, monkeypatch):
    def silent(path):
        raise ValueError

    monkeypatch.setattr(plots.pd, "read_csv", silent)
    with pytest.raises(DataError, match=r"log .*m.csv: ValueError"):
        plots.read_log(tmp_path / "m.csv")
