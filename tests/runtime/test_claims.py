"""Claims on a shared folder: exclusive while a holder lives, never lost when it dies, nothing left behind."""

import contextlib
import errno
import json
import multiprocessing
import os
import resource
import signal
import threading
import time
from pathlib import Path

import pytest

from robustkpca.errors import RunError
from robustkpca.runtime import claims as module
from robustkpca.runtime.claims import Claims

STALE, BEAT = 0.5, 0.1
FORK = multiprocessing.get_context("fork")


def quick(folder, **times):
    return Claims(folder, **{"stale": STALE, "beat": BEAT, **times})


def claim_files(folder):
    return sorted(path.name for path in folder.iterdir())


@contextlib.contextmanager
def process(target, *arguments):
    """A child that is running `target(pipe, *arguments)`; killed at the end if it has not ended."""
    here, there = FORK.Pipe()
    child = FORK.Process(target=target, args=(there, *arguments), daemon=True)
    child.start()
    there.close()
    try:
        yield child, here
    finally:
        child.kill()
        child.join()


def elsewhere():
    """From now on this process looks like one of another machine: its number tells others nothing."""
    module._machine = lambda: "another machine"


def hold(pipe, folder, far):
    """Hold "unit" until told to stop."""
    if far:
        elsewhere()
    with quick(folder, beat=0.05) as claims:
        pipe.send(claims.take("unit"))
        pipe.recv()
    pipe.send("released")


def plant(folder, key="unit", **changes):
    """A claim as a process of another machine leaves it that has ended."""
    path = Claims(folder)._path(key)
    holder = {"key": key, "host": "far", "pid": 1, "machine": "another machine", "owner": "somebody", **changes}
    path.write_text(json.dumps(holder))
    return path


def wait_until_taken(claims, key="unit", within=5.0):
    """Seconds until `take` succeeds."""
    start = time.monotonic()
    while not claims.take(key):
        assert time.monotonic() - start < within, "never taken over"
        time.sleep(0.02)
    return time.monotonic() - start


# -- sharing


def work(pipe, folder, seconds):
    """Do 200 units as a command would: result by rename, one file a unit."""
    results = folder / "results"
    keys = [f"chunk {i}" for i in range(200)]
    pipe.recv()
    mine = []
    with Claims(folder / "claims") as claims:
        for key in claims.units(keys, lambda key: (results / key).exists(), wait=True):
            time.sleep(seconds)
            part = results / f"{key}.{os.getpid()}"
            part.write_text(key)
            part.rename(results / key)
            mine.append(key)
    pipe.send(mine)


def test_two_processes_share_units_and_the_faster_one_does_more(tmp_path):
    (tmp_path / "results").mkdir()
    with process(work, tmp_path, 0.001) as (_, fast), process(work, tmp_path, 0.02) as (_, slow):
        fast.send("go")
        slow.send("go")
        fast_units, slow_units = fast.recv(), slow.recv()
    everything = fast_units + slow_units
    assert sorted(everything) == sorted({f"chunk {i}" for i in range(200)})  # each once: nobody died
    assert len(fast_units) > len(slow_units) > 0
    assert claim_files(tmp_path / "claims") == []


def test_two_objects_of_one_process_exclude_each_other(tmp_path):
    with quick(tmp_path) as one, quick(tmp_path) as two:
        assert one.take("unit")
        assert one.take("unit")
        assert not two.take("unit")
        assert two.take("other")
        (holder,) = two.held_by_others()
        assert (holder.key, holder.pid) == ("unit", os.getpid())
        assert str(holder) == f"{holder.host}/{os.getpid()}"
        one.release("unit")
        assert two.held_by_others() == []
        assert two.take("unit")
        assert two.taken_over == []


KEYS = [
    "",
    "/",
    "..",
    "../up",
    "a b",
    "a-b",
    "a/b",
    "a\nb",
    "\0",
    "éß",
    "\ud800",
    "?",
    "x" * 5000,
    ".",
    "*?[",
    "a.claim",
]


def test_any_text_is_a_key_of_its_own(tmp_path):
    folder = tmp_path / "claims"
    with quick(folder) as one, quick(folder) as two:
        for key in KEYS:
            assert one.take(key)
        assert not any(two.take(key) for key in KEYS)
        assert sorted(holder.key for holder in two.held_by_others()) == sorted(KEYS)
        assert len(claim_files(folder)) == len(KEYS)
    assert claim_files(tmp_path) == ["claims"]


# -- death and takeover


def test_the_unit_of_a_killed_process_of_another_machine_is_taken_over_when_stale(tmp_path):
    with quick(tmp_path) as claims, process(hold, tmp_path, True) as (child, pipe):
        assert pipe.recv()
        assert not claims.take("unit")
        os.kill(child.pid, signal.SIGKILL)
        start = time.monotonic()
        calls = []
        taken = list(claims.units(["unit"], lambda key: False, wait=True, meanwhile=lambda: calls.append(1)))
        assert taken == ["unit"]
        assert STALE - BEAT <= time.monotonic() - start < STALE + 2
        assert calls
        assert [holder.pid for holder in claims.taken_over] == [child.pid]


def test_a_process_of_this_machine_that_has_ended_is_not_waited_for(tmp_path):
    if not module._machine():
        pytest.skip("the system does not tell where process numbers are unique")
    with Claims(tmp_path) as claims, process(hold, tmp_path, False) as (child, pipe):
        assert pipe.recv()
        assert not claims.take("unit")
        child.kill()
        child.join()
        assert claims.held_by_others() == []
        assert claims.take("unit")


def test_the_process_number_of_another_machine_tells_nothing(tmp_path):
    with process(lambda pipe: None) as (child, _):
        child.join()
        plant(tmp_path, pid=child.pid)  # no process of this machine has it
    with quick(tmp_path) as claims:
        assert not claims.take("unit")
        assert len(claims.held_by_others()) == 1


def test_a_slow_living_process_keeps_its_unit(tmp_path):
    with quick(tmp_path) as claims, process(hold, tmp_path, True) as (_, pipe):
        assert pipe.recv()
        end = time.monotonic() + 2.5 * STALE
        while time.monotonic() < end:
            assert not claims.take("unit")
            time.sleep(0.05)
        assert [holder.key for holder in claims.held_by_others()] == ["unit"]
        pipe.send("stop")
        assert pipe.recv() == "released"
        assert claims.take("unit")
        assert claims.taken_over == []


def test_a_stopped_process_loses_its_unit_and_does_not_touch_the_next_claim(tmp_path):
    with quick(tmp_path) as claims, process(hold, tmp_path, False) as (child, pipe):
        assert pipe.recv()
        os.kill(child.pid, signal.SIGSTOP)
        assert wait_until_taken(claims) >= STALE - BEAT
        path = claims._path("unit")
        content = path.read_bytes()
        os.kill(child.pid, signal.SIGCONT)
        pipe.send("stop")
        assert pipe.recv() == "released"
        assert path.read_bytes() == content


@pytest.mark.parametrize("shift", [-10 * 365 * 86400, 10 * 365 * 86400])
def test_the_clock_of_a_file_says_nothing_only_its_changes_do(tmp_path, shift):
    """A claim of ten years ago is not stale at once, and one of ten years ahead does not live forever."""
    path = plant(tmp_path)
    os.utime(path, (time.time() + shift,) * 2)
    with quick(tmp_path) as claims:
        assert not claims.take("unit")
        assert wait_until_taken(claims) >= STALE - 0.1


def test_every_change_of_the_time_is_a_sign_of_life(tmp_path):
    path = plant(tmp_path)
    with quick(tmp_path, stale=0.3) as claims:
        for i in range(6):
            os.utime(path, (1e9 - i, 1e9 - i))  # a clock that runs backwards
            assert not claims.take("unit")
            time.sleep(0.1)
        assert wait_until_taken(claims) >= 0.15


def garbage(path, kind):
    if kind == "directory":
        path.mkdir()
        (path / "file").touch()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(kind)


HALF = b'{"key": "unit", "host": "far", "pid": 12'
WRONG = [{"pid": "1"}, {"pid": -1}, {"pid": True}, {"host": None}, {"more": 1}]


@pytest.mark.parametrize(
    "kind", [b"", HALF, b"\xff\x00", b"[]", b"null", b"[" * 60000, b"x" * 100_000, "directory", "pipe"]
)
def test_torn_and_foreign_files_count_as_claims_that_go_stale(tmp_path, kind):
    garbage(Claims(tmp_path)._path("unit"), kind)
    with quick(tmp_path, stale=0.15, beat=0.05) as claims:
        assert not claims.take("unit")
        assert claims.held_by_others() == []
        assert wait_until_taken(claims) >= 0.1
        assert claims.taken_over == []


@pytest.mark.parametrize("changes", WRONG)
def test_a_claim_with_a_wrong_field_names_nobody(tmp_path, changes):
    path = plant(tmp_path, **changes)
    assert module._look(path).holder is None


def test_a_number_too_large_for_a_process_has_ended(tmp_path):
    plant(tmp_path, machine=module._machine() or "x", pid=10**30)
    with quick(tmp_path, stale=0.15, beat=0.05) as claims:
        wait_until_taken(claims)


@pytest.mark.parametrize("target", ["file", "nowhere", "folder"])
def test_a_planted_link_is_not_followed(tmp_path, target):
    folder = tmp_path / "claims"
    folder.mkdir()
    (tmp_path / "file").write_text("keep me")
    os.utime(tmp_path / "file", (1e9, 1e9))
    (tmp_path / "folder").mkdir()
    Claims(folder)._path("unit").symlink_to(tmp_path / target)
    with quick(folder, stale=0.15, beat=0.05) as claims:
        assert not claims.take("unit")
        wait_until_taken(claims)
        time.sleep(0.12)  # two beats
        assert not claims._path("unit").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["claims", "file", "folder"]
    assert (tmp_path / "file").read_text() == "keep me"
    assert (tmp_path / "file").stat().st_mtime == 1e9
    assert list((tmp_path / "folder").iterdir()) == []


def test_a_link_planted_over_a_held_claim_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    folder = tmp_path / "claims"
    with quick(folder) as claims:
        assert claims.take("unit")
        path = claims._path("unit")
        path.rename(victim)  # with our name in it, so that only the link tells them apart
        os.utime(victim, (1e9, 1e9))
        path.symlink_to(victim)
        time.sleep(3 * BEAT)
    assert victim.stat().st_mtime == 1e9


def storm(pipe, folder):
    with quick(folder) as claims:
        path = claims._path("unit")
        claims._seen[path.name] = (module._look(path).sign, time.monotonic() - 2 * STALE)
        pipe.send("ready")
        pipe.recv()
        taken = claims.take("unit")
        pipe.send((os.getpid(), taken))
        pipe.recv()  # until all have tried
    pipe.send("released")


def test_many_that_take_over_at_once(tmp_path):
    """At least one gets it; that no more than two do is what creation and putting back leave as a rare case."""
    plant(tmp_path)
    with contextlib.ExitStack() as stack:
        pipes = [stack.enter_context(process(storm, tmp_path))[1] for _ in range(6)]
        for pipe in pipes:
            assert pipe.recv() == "ready"
        for pipe in pipes:
            pipe.send("go")
        tries = [pipe.recv() for pipe in pipes]
        winners = [pid for pid, taken in tries if taken]
        assert 1 <= len(winners) <= 2
        holder = module._look(Claims(tmp_path)._path("unit")).holder
        assert holder.pid in winners
        for pipe in pipes:
            pipe.send("stop")
        assert {pipe.recv() for pipe in pipes} == {"released"}
    assert claim_files(tmp_path) == []


@pytest.mark.parametrize("links", [True, False])
def test_who_is_late_with_a_takeover_puts_the_newer_claim_back(tmp_path, monkeypatch, links):
    stale = module._look(plant(tmp_path))
    if not links:
        monkeypatch.setattr(os, "link", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.EOPNOTSUPP, "no")))
    with quick(tmp_path) as late, quick(tmp_path) as faster:
        path = faster._path("unit")
        assert faster._discard(path, stale)
        assert faster.take("unit")
        assert not late._discard(path, stale)
        assert module._look(path).holder.owner == faster._me.owner
        assert not late.take("unit")
        assert claim_files(tmp_path) == [path.name]


# -- the way out


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_everything_is_released_and_no_thread_left(tmp_path, error):
    threads = threading.active_count()
    with pytest.raises(error), Claims(tmp_path) as claims:
        assert claims.take("one")
        assert claims.take("two")
        assert threading.active_count() == threads + 1  # one thread for all claims
        assert len(claim_files(tmp_path)) == 2
        raise error
    assert claim_files(tmp_path) == []
    assert threading.active_count() == threads


def test_what_someone_removed_is_no_error(tmp_path):
    folder = tmp_path / "claims"
    with quick(folder) as claims:
        assert claims.take("one")
        claims._path("one").unlink()
        folder.rmdir()
        time.sleep(2 * BEAT)
        assert claims.held_by_others() == []
        assert claims.take("two")
        claims.release("one")
        claims.release("never held")
    assert claim_files(folder) == []


def test_the_claim_of_a_successor_is_not_kept_alive(tmp_path):
    with quick(tmp_path, beat=0.05) as claims:
        assert claims.take("unit")
        path = plant(tmp_path)  # taken over while this process was stopped
        os.utime(path, (1e9, 1e9))
        time.sleep(0.2)
        assert path.stat().st_mtime == 1e9
    assert path.exists()


def test_an_object_made_before_a_fork_serves_the_child(tmp_path):
    claims = quick(tmp_path)

    def enter(pipe):
        with claims:
            pipe.send(claims.take("unit"))
            pipe.recv()

    with claims, process(enter) as (child, pipe):
        assert pipe.recv()
        assert not claims.take("unit")
        assert [holder.pid for holder in claims.held_by_others()] == [child.pid]


def test_a_forked_child_releases_nothing(tmp_path):
    with quick(tmp_path) as claims:
        assert claims.take("unit")

        def leave(pipe):
            with pytest.raises(RuntimeError, match="process"):
                claims.take("other")
            claims.__exit__(None, None, None)
            pipe.send("left")

        with process(leave) as (_, pipe):
            assert pipe.recv() == "left"
        assert len(claim_files(tmp_path)) == 1
        time.sleep(2 * BEAT)
        assert claims._thread.is_alive()


def full(pipe, folder):
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
    with quick(folder) as claims:
        try:
            claims.take("unit")
        except RunError as error:
            pipe.send(str(error))
    pipe.send("ended")


def test_a_disk_that_takes_no_more_is_one_line_and_leaves_nothing(tmp_path):
    with process(full, tmp_path) as (_, pipe):
        message = pipe.recv()
        assert pipe.recv() == "ended"
    assert message.startswith("cannot claim 'unit' in ")
    assert "\n" not in message
    assert claim_files(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with (
        pytest.raises(RunError, match=r"^cannot make .*file: File exists$"),
        Claims(tmp_path / "file" / "claims"),
    ):
        pass

    def read_only(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    plant(tmp_path, "stale")
    with quick(tmp_path, stale=0.15, beat=0.05) as claims:
        assert not claims.take("stale")
        time.sleep(0.25)
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", read_only)
            with pytest.raises(RunError, match=r"cannot take over .*: Read-only file system$"):
                claims.take("stale")
            patch.setattr(os, "open", read_only)
            with pytest.raises(RunError, match=r"^cannot claim 'new\\nline' in .*: Read-only file system$"):
                claims.take("new\nline")
            assert claims._held == {}


def test_times_and_use_are_checked(tmp_path):
    for stale, beat in ((1, 0.6), (1, 0), (0, 0), (-1, -2)):
        with pytest.raises(ValueError, match=r"expected 0 < 2 \* beat <= stale, got"):
            Claims(tmp_path, stale=stale, beat=beat)
    Claims(tmp_path, stale=1, beat=0.5)
    with pytest.raises(RuntimeError, match="with"):
        Claims(tmp_path).take("unit")


# -- units


def test_units_come_in_order_with_their_claim_and_what_is_done_or_held_is_passed_over(tmp_path):
    finished = {"b"}
    with quick(tmp_path) as claims, quick(tmp_path) as other:
        assert other.take("d")
        seen = []
        for key in claims.units(["a", "b", "c", "d", "e", "a"], finished.__contains__):
            assert [holder.key for holder in other.held_by_others()] == [key]
            seen.append(key)  # none of them is ever done: each comes once
        assert seen == ["a", "c", "e"]
        assert other.held_by_others() == []


def test_a_unit_finished_while_it_was_being_claimed_is_not_done_again(tmp_path):
    answers = iter([False, True])
    with quick(tmp_path) as claims:
        assert list(claims.units(["a"], lambda key: next(answers))) == []
        assert claim_files(tmp_path) == []


def test_claims_are_kept_for_consumers_that_fetch_ahead(tmp_path):
    with quick(tmp_path) as claims, quick(tmp_path) as other:
        units = claims.units(["a", "b", "c"], lambda key: False, keep=True)
        assert [next(units), next(units)] == ["a", "b"]
        claims.release("a")
        assert [holder.key for holder in other.held_by_others()] == ["b"]
        units.close()
        assert [holder.key for holder in other.held_by_others()] == ["b"]
        assert other.take("a")


def test_a_consumer_that_leaves_gives_up_its_unit(tmp_path):
    with quick(tmp_path) as claims:
        units = claims.units(["a", "b"], lambda key: False)
        assert next(units) == "a"
        units.close()
        assert claim_files(tmp_path) == []


def test_waiting_ends_when_others_are_done_and_takes_what_they_give_back(tmp_path):
    finished: set[str] = set()
    calls = []
    with quick(tmp_path, stale=10) as claims, quick(tmp_path, stale=10) as other:
        assert other.take("done by other")
        assert other.take("given back")

        def meanwhile():
            calls.append([holder.key for holder in claims.held_by_others()])
            if len(calls) == 2:
                other.release("given back")
            if len(calls) == 4:
                finished.add("done by other")
                other.release("done by other")

        keys = ["done by other", "mine", "given back"]
        assert list(claims.units(keys, finished.__contains__, wait=True, meanwhile=meanwhile)) == ["mine", "given back"]
    assert calls == [["done by other", "given back"]] * 2 + [["done by other"]] * 2


def test_the_claim_file_tells_who_holds_what(tmp_path):
    with quick(tmp_path) as claims:
        assert claims.take("pgd 4/255, images 0-99")
        (path,) = Path(tmp_path).iterdir()
        assert path.name.startswith("pgd-4-255-images-0-99.")
        content = json.loads(path.read_text())
        assert content["key"] == "pgd 4/255, images 0-99"
        assert content["pid"] == os.getpid()
        assert content["host"]
        assert len(content["owner"]) == 32
