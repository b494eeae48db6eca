"""A command writes only into what it made itself, and one at a time."""

import contextlib
import json
import os
import time

import pandas as pd
import pytest

from robustkpca.errors import RunError
from robustkpca.files import Outputs
from robustkpca.runtime.claims import Claims, alone
from tests.helpers.cli import call

ANALYZE = ("analyze", "symvit", "--limit", 2, "--only", "loss")
TRAIN = ("train", "--model", "vit", "--data", "digits", "--limit", "40", "--batch-size", "20", "--epochs", "1",
         "--device", "cpu", "--out", "m.safetensors")  # fmt: skip


def contents(folder):
    """Every file below a folder, links followed, with what it holds."""
    return {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def refused(done, *words):
    assert done.returncode == 2, done.stdout + done.stderr
    assert all(word in done.stderr for word in words), done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


# -- analyze


@pytest.mark.parametrize("names", [("analysis.md", "figures/photo.png"), ("chunks/mine.txt",), ("heads.csv",)])
def test_analyze_leaves_a_folder_of_the_users_alone(tmp_path, names):
    for name in names:
        (tmp_path / "o" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "o" / name).write_text("mine")
    before = contents(tmp_path)
    refused(call(*ANALYZE, "--out", tmp_path / "o"), "expected a new or empty folder", "it holds something else")
    assert contents(tmp_path) == before


def test_analyze_replaces_its_own_files_and_no_others(tmp_path):
    folder, elsewhere = tmp_path / "o", tmp_path / "photos"
    elsewhere.mkdir()
    (elsewhere / "photo.png").write_text("mine")
    assert call(*ANALYZE, "--only", "gamma", "--out", folder).returncode == 0
    (folder / "figures" / "photo.png").write_text("mine")
    (folder / "notes.txt").write_text("mine")
    assert call(*ANALYZE, "--out", folder).returncode == 0
    assert {str(p) for p in contents(folder)} == {
        ".robustkpca", "analysis.md", "heads.csv", "heads.parquet", "figures/photo.png", "notes.txt"
    }  # fmt: skip
    # What a link leads to stays, and so does a file of the user's under a name of ours.
    (folder / "figures" / "photo.png").unlink()
    (folder / "figures").rmdir()
    (folder / "figures").symlink_to(elsewhere)
    before = contents(tmp_path)
    refused(call(*ANALYZE, "--only", "gamma", "--out", folder), "figures", "got a link")
    (folder / "figures").unlink()
    (folder / "gamma.csv").write_text("mine")
    late = call(*ANALYZE, "--only", "gamma", "--out", folder)  # after the work, which is kept
    assert (late.returncode, "gamma.csv: is there and was not made by this command" in late.stderr) == (2, True)
    assert contents(elsewhere) == {p.relative_to("photos"): c for p, c in before.items() if p.parts[0] == "photos"}
    assert (folder / "gamma.csv").read_text() == "mine"
    assert (folder / "heads.csv").exists()


@pytest.mark.parametrize(
    "text", ["{", '{"files": ["../photo.png"]}', '{"files": ["/etc/hosts"]}', "[]", '{"files": 3}']
)
def test_a_list_that_names_files_elsewhere_is_refused(tmp_path, text):
    (tmp_path / "o").mkdir()
    (tmp_path / "photo.png").write_text("mine")
    (tmp_path / "o" / ".robustkpca").write_text(text)
    with pytest.raises(RunError, match=r"\.robustkpca: (torn|expected files in this folder)"):
        Outputs(tmp_path / "o").replace({})
    assert (tmp_path / "photo.png").read_text() == "mine"


def test_a_second_analysis_is_refused_while_the_first_runs(tmp_path):
    with alone(tmp_path / "o" / "chunks" / "claims", f"--out {tmp_path / 'o'}", beat=0.2):
        (tmp_path / "o" / ".robustkpca").write_text(json.dumps({"files": []}))
        refused_now = call(*ANALYZE, "--out", tmp_path / "o")
    assert refused_now.returncode == 2
    assert "is at work on it; choose another --out" in refused_now.stderr
    assert call(*ANALYZE, "--out", tmp_path / "o").returncode == 0
    assert not (tmp_path / "o" / "chunks").exists()


# -- train


@pytest.mark.parametrize(("name", "options"), [
    ("m.safetensors", ()), ("m.csv", ()), ("m.csv", ("--fresh",)), ("m.pth", ()), ("m.pth", ("--fresh",)),
])  # fmt: skip
def test_train_leaves_files_of_the_users_alone(tmp_path, name, options):
    (tmp_path / name).write_text("epoch,loss\n1,2\n")
    before = contents(tmp_path)
    done = call(*TRAIN, *options, cwd=tmp_path)
    refused(done, name)
    assert contents(tmp_path) == before


def test_train_leaves_the_checkpoint_of_another_program_alone(tmp_path):
    from safetensors.torch import save_file
    from torch import zeros

    save_file({"a": zeros(2)}, tmp_path / "m.safetensors")
    before = contents(tmp_path)
    refused(call(*TRAIN, cwd=tmp_path), "m.safetensors: is there and is no checkpoint of ours")
    assert contents(tmp_path) == before


def test_a_second_training_into_one_file_is_refused_while_the_first_runs(tmp_path):
    with alone(tmp_path / "m.safetensors.claims", "--out m.safetensors", beat=0.2):
        refused(call(*TRAIN, cwd=tmp_path), "--out m.safetensors: ", f"/{os.getpid()} is at work on it")
        assert [file.name for file in tmp_path.iterdir()] == ["m.safetensors.claims"]
    done = call(*TRAIN, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(file.name for file in tmp_path.iterdir()) == ["m.csv", "m.pth", "m.safetensors"]
    assert call(*TRAIN, "--fresh", "--seed", "1", cwd=tmp_path).returncode == 0


# -- who holds what


def test_what_a_process_that_ended_held_is_taken_over(tmp_path):
    if (child := os.fork()) == 0:
        with contextlib.suppress(BaseException), alone(tmp_path / "lock", "it"):
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert list((tmp_path / "lock").iterdir())
    started = time.monotonic()
    with alone(tmp_path / "lock", "it"):
        assert time.monotonic() - started < 2
    assert not (tmp_path / "lock").exists()


def test_a_claim_that_shows_no_sign_of_life_is_taken_over(tmp_path):
    """Of another machine, whose processes cannot be asked."""
    (tmp_path / "lock").mkdir()
    Claims(tmp_path / "lock")._path("it").write_text(
        '{"key": "it", "host": "far", "pid": 1, "machine": "far", "owner": "x"}'
    )
    with alone(tmp_path / "lock", "it", stale=0.6, beat=0.2):
        pass
    assert not (tmp_path / "lock").exists()


# -- reports and exports


@pytest.fixture
def stored(run, place):
    return place / "run"


@pytest.mark.parametrize("name", ["r.md", "r.html"])
def test_report_replaces_its_own_page_only(stored, tmp_path, name):
    (tmp_path / name).write_text("mine")
    refused(call("report", stored, "--out", tmp_path / name), f"{name} is there and was not made by `report`")
    assert (tmp_path / name).read_text() == "mine"
    (tmp_path / name).unlink()
    for _ in range(2):
        assert call("report", stored, "--out", tmp_path / name).returncode == 0


def test_report_leaves_a_folder_of_the_users_alone(stored, tmp_path):
    (tmp_path / "r_files").mkdir()
    (tmp_path / "r_files" / "1-pgd.png").write_text("mine")
    refused(call("report", stored, "--out", tmp_path / "r.md"), "r_files is there and was not made by `report`")
    (tmp_path / "r_files").rename(tmp_path / "photos")
    (tmp_path / "r_files").symlink_to(tmp_path / "photos")
    refused(call("report", stored, "--out", tmp_path / "r.md"), "got a link")
    assert contents(tmp_path / "photos") == {
        next((tmp_path / "photos").iterdir()).relative_to(tmp_path / "photos"): b"mine"
    }


def test_a_baseline_replaces_a_baseline_and_nothing_else(stored, tmp_path):
    update = ("check", stored, "--update-baseline", "--baseline", tmp_path / "b.parquet")
    pd.DataFrame({"a": [1]}).to_parquet(tmp_path / "b.parquet")
    before = contents(tmp_path)
    refused(call(*update), "b.parquet: is there and is no exported run")
    assert contents(tmp_path) == before
    (tmp_path / "b.parquet").write_bytes(b"")
    assert call(*update).returncode == 0
    assert call(*update).returncode == 0
