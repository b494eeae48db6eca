"""Claims: processes that see one folder share its units of work, without a port, a leader or an address.

Each process runs the same command. A unit belongs to the process that created the unit's claim file; while it works, a
thread renews the file's time, which is its sign of life. A claim without a sign of life for `stale` seconds is taken
over. A process takes the next unit when it is free, so faster devices do more.

Two processes may do one unit in rare cases (a takeover of a process that was only slow, three processes in one
instant). That costs time and nothing else: the caller writes results that do not depend on who made them, and renames
them into place. A unit is never lost.

Clocks need not agree. No time in a file is compared with a clock: a process watches whether a claim changes while
`stale` seconds pass on its own monotonic clock. On the same machine a holder that has ended is recognised at once by
its process number.

Written here because `filelock` (SoftFileLease, 4.3.1) takes over only where the file system can exchange two names,
which NFS cannot, and never takes over an empty file of a process killed before it wrote; `flufl.lock` compares clocks,
gives no signs of life and keeps unreadable files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from robustkpca.errors import OutputError, RunError
from robustkpca.files import Folder

STALE = 60.0  # seconds without a sign of life after which a claim is taken over
BEAT = 5.0  # seconds between signs of life
POLL = 0.5  # seconds between two looks at what others hold; at most a beat
_LONGEST = 65_536  # bytes read of a claim
_NO_LINKS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # nor wait for the other end of a planted pipe


@dataclass(frozen=True)
class Holder:
    """What a claim file says, as JSON: the unit's key and the process that holds it."""

    key: str
    host: str
    pid: int
    machine: str  # the space of process numbers, "" where the system does not tell
    owner: str  # random; tells apart two `Claims` of one process and two processes of one number

    def __str__(self) -> str:
        return f"{self.host}/{self.pid}"


@dataclass(frozen=True)
class _Sight:
    """One look at a claim file. `sign` differs between two looks after a sign of life or a change of holder."""

    sign: tuple[int, bytes | None]  # time of modification in ns, content (None: not a regular file)
    holder: Holder | None  # None: torn or foreign


class Claims:
    """The claims of one process in `folder`; a context. On exit, also by an exception, everything held is released.

    `stale` and `beat` are in seconds, 0 < 2 * beat <= stale, and should be equal in all processes. Methods other than
    `held_by_others` need the context entered. Several claims may be held at once. A child made by `fork` holds nothing
    and releases nothing.
    """

    def __init__(self, folder: Path, *, stale: float = STALE, beat: float = BEAT) -> None:
        if not 0 < 2 * beat <= stale:
            raise ValueError(f"claims: expected 0 < 2 * beat <= stale, got beat {beat} and stale {stale} seconds")
        self.folder = folder
        self.stale = stale
        self.beat = beat
        self.taken_over: list[Holder] = []  # stale claims of known holders that this process has taken over
        self._me = _this_process()
        self._held: dict[str, Path] = {}
        self._seen: dict[str, tuple[tuple[int, bytes | None], float]] = {}  # file name -> sign, since when
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Claims:
        """Raises RunError if the folder cannot be made, or is a link."""
        self._parent = Folder(self.folder.parent)
        self._parent.make(self.folder)
        self._me = _this_process()  # which may be a child of the one that made the object
        self._stopped.clear()
        self._thread = threading.Thread(target=self._renew_all, name="claims", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for key in list(self._held):
            self.release(key)
        if self._thread is not None and os.getpid() == self._me.pid:
            self._thread.join(2 * self.beat)  # ends at once, unless the file system does not answer
        self._thread = None

    def take(self, key: str) -> bool:
        """Whether this process now holds `key` (any text). False: another living process does, as far as is known.

        Does not wait. Raises RunError if the folder cannot be written.
        """
        if self._thread is None or os.getpid() != self._me.pid:
            raise RuntimeError("claims: expected to be used inside `with`, by the process that entered it")
        if key in self._held:
            return True
        path = self._path(key)
        stale = None
        for _ in range(2):  # again after a takeover, or where the holder has just released
            if self._create(key, path):
                if stale is not None:
                    self.taken_over.append(stale)
                return True
            sight = _look(path)
            if sight is None:
                continue
            if not self._is_stale(path.name, sight) or not self._discard(path, sight):
                return False
            stale = sight.holder
        return False

    def release(self, key: str) -> None:
        """Give up `key`; nothing happens if it is not held, or if its file is gone or was taken over."""
        path = self._held.pop(key, None)
        if path is None or os.getpid() != self._me.pid:
            return
        with contextlib.suppress(OSError):  # what cannot be removed goes stale
            sight = _look(path)
            if sight is not None and self._is_mine(sight):
                path.unlink()

    def held_by_others(self) -> list[Holder]:
        """Claims of others that are not known to be stale, sorted by key; torn files are left out."""
        holders = []
        with contextlib.suppress(OSError):
            for path in self.folder.glob("*.claim"):
                sight = _look(path)
                if sight is None or sight.holder is None or self._is_mine(sight):
                    continue
                if not self._is_stale(path.name, sight):
                    holders.append(sight.holder)
        return sorted(holders, key=lambda holder: holder.key)

    def units(
        self,
        keys: Sequence[str],
        done: Callable[[str], bool],
        *,
        keep: bool = False,
        wait: bool = False,
        meanwhile: Callable[[], None] | None = None,
    ) -> Iterator[str]:
        """Yield each key that is not done and can be claimed, in order, at most once; it is claimed when it is yielded.

        done: whether a unit's result is there, asked before and again after claiming. It must look at the disk, not at
            a list made earlier. (NFS remembers for up to a minute that a name was not there, until its folder is listed
            again. Who forgets that computes twice.)
        keep: claims stay until `release(key)`, for consumers that fetch ahead. Otherwise a claim is released when the
            next key is asked for.
        wait: do not end while a key is neither done nor yielded, but wait for its holder: until it is done, released or
            stale. Otherwise end after one pass.
        meanwhile: called between two looks at what others hold, about twice a second.

        A unit that stays undone after it was yielded (the consumer failed) is left to the other processes.
        """
        waiting = list(dict.fromkeys(keys))
        while True:
            held_by_others = []
            for key in waiting:
                if done(key):
                    continue
                if not self.take(key):
                    held_by_others.append(key)
                    continue
                if done(key):  # the former holder finished between the two questions
                    self.release(key)
                    continue
                try:
                    yield key
                finally:
                    if not keep:
                        self.release(key)
            waiting = held_by_others
            if not wait or not waiting:
                return
            if meanwhile is not None:
                meanwhile()
            time.sleep(min(POLL, self.beat))

    def _path(self, key: str) -> Path:
        """Readable for people, unique by the hash, and never a path out of the folder."""
        readable = re.sub(r"[^A-Za-z0-9_-]+", "-", key)[:60].strip("-") or "unit"
        return self.folder / f"{readable}.{hashlib.sha256(key.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}.claim"

    def _create(self, key: str, path: Path) -> bool:
        """Whether the claim's file was not there and now is, with our name in it."""
        content = json.dumps({**asdict(self._me), "key": key}).encode()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINKS
        self._held[key] = path  # first, so that an interrupt in between leaves nothing behind
        created = False
        try:
            try:
                file = os.open(path, flags, 0o644)
            except FileNotFoundError:  # someone has removed the folder
                self._parent.make(self.folder)
                file = os.open(path, flags, 0o644)
            created = True
            with open(file, "wb", buffering=0) as stream:
                while content:
                    content = content[stream.write(content) or 0 :]
        except BaseException as error:
            self._held.pop(key, None)
            if created:
                with contextlib.suppress(OSError):
                    path.unlink()
            elif isinstance(error, FileExistsError):
                return False
            if isinstance(error, OSError):
                raise OutputError(f"cannot claim {key[:80]!r} in {self.folder}: {error.strerror or error}") from None
            raise
        self._seen.pop(path.name, None)
        return True

    def _is_mine(self, sight: _Sight) -> bool:
        return sight.holder is not None and sight.holder.owner == self._me.owner

    def _is_stale(self, name: str, sight: _Sight) -> bool:
        """Whether the holder has ended, or the claim has not changed for `stale` seconds since it was first seen so."""
        holder = sight.holder
        if holder is not None and holder.machine and holder.machine == self._me.machine and _has_ended(holder.pid):
            return True
        now = time.monotonic()
        sign, since = self._seen.get(name, (None, now))
        if sign != sight.sign:
            self._seen[name] = (sight.sign, now)
            return False
        return now - since >= self.stale

    def _discard(self, path: Path, sight: _Sight) -> bool:
        """Remove a stale claim, unless it is no longer the one that was seen.

        Renamed before it is looked at again, as only one of several processes can rename it. Who then has something
        newer puts it back.
        """
        aside = path.with_suffix(f".{self._me.owner}.stale")
        try:
            os.rename(path, aside)
        except FileNotFoundError:  # another was faster; who creates the next claim is decided by its creation
            return True
        except OSError as error:
            raise OutputError(f"cannot take over {path}: {error.strerror or error}") from None
        moved = _look(aside)
        is_the_one = moved is None or moved.sign == sight.sign
        with contextlib.suppress(OSError):
            if not is_the_one:
                try:
                    os.link(aside, path, follow_symlinks=False)
                except FileExistsError:
                    pass
                except OSError:  # a file system without hard links
                    os.rename(aside, path)
            aside.unlink()
        return is_the_one

    def _renew_all(self) -> None:
        while not self._stopped.wait(self.beat):
            for path in list(self._held.values()):
                with contextlib.suppress(OSError):  # removed by someone, or the disk does not answer for now: next time
                    self._renew(path)

    def _renew(self, path: Path) -> None:
        file = os.open(path, os.O_RDONLY | _NO_LINKS)
        try:
            holder = _parse(os.read(file, _LONGEST))
            if holder is not None and holder.owner == self._me.owner:
                os.utime(file if os.utime in os.supports_fd else path)  # the file server's time, where there is one
        finally:
            os.close(file)


@contextlib.contextmanager
def alone(folder: Path, what: str, *, stale: float = STALE, beat: float = BEAT) -> Iterator[None]:
    """Hold `what`, alone among all processes that ask for it in `folder`, which is removed at the end.

    Raises RunError where another process shows a sign of life, after a beat at most; one that has ended is taken over.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(_remove_empty, folder)
        claims = stack.enter_context(Claims(folder, stale=stale, beat=beat))
        path = claims._path(what)
        seen = _look(path)
        while not claims.take(what):
            now = _look(path)
            if now is not None and seen is not None and now.sign != seen.sign:
                raise RunError(f"{what}: {now.holder or 'another process'} is at work on it; choose another --out")
            seen = seen or now
            time.sleep(min(POLL, beat))
        yield


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _look(path: Path) -> _Sight | None:
    """What is at a claim's name; None: nothing. Opened, as network file systems answer `stat` from memory."""
    try:
        file = os.open(path, os.O_RDONLY | _NO_LINKS)
    except FileNotFoundError:
        return None
    except OSError:  # a link, a socket, a file that may not be read
        return _look_outside(path)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            return _Sight((status.st_mtime_ns, None), None)
        content = os.read(file, _LONGEST)
    except OSError:  # NFS: removed since it was opened
        return _look_outside(path)
    finally:
        os.close(file)
    return _Sight((status.st_mtime_ns, content), _parse(content))


def _look_outside(path: Path) -> _Sight | None:
    try:
        return _Sight((os.lstat(path).st_mtime_ns, None), None)
    except OSError:
        return None


def _parse(content: bytes) -> Holder | None:
    """The holder that a claim names; None for what a killed process left half written, or what others put there."""
    try:
        holder = Holder(**json.loads(content))
    except (ValueError, TypeError, RecursionError):
        return None
    texts = (holder.key, holder.host, holder.machine, holder.owner)
    return holder if type(holder.pid) is int and holder.pid > 0 and all(isinstance(t, str) for t in texts) else None


def _this_process() -> Holder:
    return Holder("", socket.gethostname(), os.getpid(), _machine(), secrets.token_hex(16))


def _machine() -> str:
    """Where process numbers are unique: this start of this machine, and the container. "" if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except (OSError, ValueError):
        return ""


def _has_ended(pid: int) -> bool:
    """Whether no process of this machine has the number. One that has it may be another: signs of life tell."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:  # it is another user's
        return False
    return False
