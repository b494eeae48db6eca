"""What a run writes stays in its folder: no planted link is followed, and a folder that moves is not made again."""

import errno
import os
import shutil
import threading

import pytest

from robustkpca.errors import OutputError, RunError
from robustkpca.evaluation.loop import evaluate
from robustkpca.files import Folder, write_whole
from robustkpca.runs.run import Run
from robustkpca.runs.store import RunStore
from robustkpca.runtime.claims import Claims
from robustkpca.suites.suite import load_suite
from tests.helpers.oracles import noise, tiny

FGSM = [load_suite("fgsm").with_eps(["8/255"])]


def run(out, **options):
    return evaluate([tiny()], noise(), FGSM, out, batch_size=10, **options)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return run(tmp_path_factory.mktemp("made") / "run").path


@pytest.fixture
def elsewhere(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine.txt").write_text("mine")
    return tmp_path / "elsewhere"


@pytest.mark.parametrize("name", ["rows", "rows/0/fgsm", "records", "records/0", "examples", "claims"])
def test_no_link_to_a_folder_is_followed(made, tmp_path, elsewhere, name):
    """Neither when it is written, nor when it is read."""
    shutil.copytree(made, tmp_path / "run")
    if name == "examples":
        shutil.rmtree(tmp_path / "run" / "rows")
    shutil.rmtree(tmp_path / "run" / name, ignore_errors=True)
    (tmp_path / "run" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "run" / name).symlink_to(elsewhere)
    with pytest.raises(RunError, match="got a link, which is not followed"):
        run(tmp_path / "run")
    if name == "examples":
        with pytest.raises(RunError, match="got a link, which is not followed"):
            stored = Run.open(tmp_path / "run")
            stored.examples(stored.models[0], next(iter(stored.request.attacks)))
    assert [file.name for file in elsewhere.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("name", ["run.json", "rows", "records", "rows/0/fgsm/0000000.parquet", "records/0/model.json"])
def test_no_link_is_read(made, tmp_path, name):
    shutil.copytree(made, tmp_path / "run")
    (tmp_path / "run" / name).rename(tmp_path / "other")
    (tmp_path / "run" / name).symlink_to(tmp_path / "other")
    with pytest.raises(RunError, match="got a link, which is not followed"):
        _ = Run.open(tmp_path / "run").rows


@pytest.mark.parametrize("name", ["run.json.part", "run.json", "rows/0/fgsm/0000000.parquet.0123abcd.part"])
def test_no_planted_file_is_written_through(made, tmp_path, elsewhere, name):
    shutil.copytree(made, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "rows" / "0" / "fgsm")
    (tmp_path / "run" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "run" / name).unlink(missing_ok=True)
    (tmp_path / "run" / name).symlink_to(elsewhere / "mine.txt")
    try:
        run(tmp_path / "run")
    except RunError as error:
        assert name == "run.json", error
    assert (elsewhere / "mine.txt").read_text() == "mine"


def test_a_temporary_name_that_is_taken_is_not_written_to(tmp_path, monkeypatch):
    monkeypatch.setattr("robustkpca.files.secrets.token_hex", lambda n: "0123abcd")
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "file.0123abcd.part").symlink_to(tmp_path / "mine")
    with pytest.raises(OutputError, match=r"cannot write .*file: File exists"):
        write_whole(tmp_path / "file", lambda file: file.write(b"ours"))
    assert (tmp_path / "mine").read_text() == "mine"
    assert (tmp_path / "file.0123abcd.part").is_symlink()


def test_what_others_call_part_is_not_removed(made, tmp_path):
    shutil.copytree(made, tmp_path / "run")
    (tmp_path / "run" / "rows" / "notes.part").write_text("mine")
    run(tmp_path / "run")
    assert (tmp_path / "run" / "rows" / "notes.part").read_text() == "mine"


@pytest.mark.parametrize("how", ["moved", "removed", "replaced"])
def test_a_run_that_is_moved_while_it_is_written_stops(made, tmp_path, how):
    seen = []

    def move(progress):
        seen.append(progress)
        if len(seen) == 4:
            (tmp_path / "run").rename(tmp_path / "moved")
            if how == "removed":
                shutil.rmtree(tmp_path / "moved")
            if how == "replaced":
                (tmp_path / "run").mkdir()

    with pytest.raises(RunError, match="run was moved or removed while it was written") as error:
        run(tmp_path / "run", on_progress=move)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())
    if how != "removed":
        assert len(run(tmp_path / "moved").rows) == len(Run.open(made).rows)


def test_a_folder_below_is_made_again_and_the_folder_itself_is_not(tmp_path):
    folder = Folder(tmp_path / "a" / "b")
    folder.write(tmp_path / "a" / "b" / "c" / "file", lambda file: file.write(b"1"))
    shutil.rmtree(tmp_path / "a" / "b" / "c")
    folder.write(tmp_path / "a" / "b" / "c" / "file", lambda file: file.write(b"2"))
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(RunError, match="moved or removed"):
        folder.write(tmp_path / "a" / "b" / "c" / "file", lambda file: file.write(b"3"))
    assert not (tmp_path / "a").exists()


def test_nothing_is_written_before_the_claim_is_held(tmp_path):
    """Who begins a run waits while another begins one in the same folder, and then reads what it wrote."""
    request = Run.open(run(tmp_path / "made").path).request
    stores = []
    with Claims(tmp_path / "run" / "claims") as first:
        assert first.take("run.json")
        late = threading.Thread(target=lambda: stores.append(RunStore.start(tmp_path / "run", request, {})))
        late.start()
        late.join(1)
        assert late.is_alive()
        assert [file.name for file in (tmp_path / "run").iterdir()] == ["claims"]
    late.join(30)
    assert stores[0].request == request


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), ValueError("no")])
def test_what_cannot_be_written_leaves_nothing(tmp_path, error):
    def fill(file):
        file.write(b"some")
        raise error

    with pytest.raises(OutputError if isinstance(error, OSError) else ValueError):
        write_whole(tmp_path / "file", fill)
    assert not list(tmp_path.iterdir())
