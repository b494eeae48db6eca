"""The command line: parse, call, print, exit code.

This module imports only what Python has loaded anyway: what takes time is imported within `main`, where Ctrl-C is one
line. Heavy imports (torch, pandas) stand inside the commands, so that --help is instant.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

FAILED = 3  # as in robustkpca.errors
INTERRUPTED = 130  # as a shell counts a process that SIGINT ended


def main() -> None:
    """Entry point. Ends the process: 0, the command's own exit code, 2 for what the user gave, 3 for what failed
    itself, 130 for Ctrl-C."""
    _wait_passively()
    try:
        import signal

        # A shell that starts a process in the background has it ignore Ctrl-C: then it stays ignored.
        ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if ours:
            signal.signal(signal.SIGINT, _stop)
        try:
            from robustkpca.cli.app import run

            code = run()
        finally:
            if ours:
                signal.signal(signal.SIGINT, signal.default_int_handler)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception:  # a package that cannot be imported: Python itself would end with 1, which says regressed
        sys.excepthook(*sys.exc_info())
        code = FAILED
    if code == INTERRUPTED:
        print("interrupted", file=sys.stderr)
    sys.exit(code)


def _wait_passively() -> None:
    """Threads of OpenMP that wait give the processor up, unless the user says how they wait: by default they spin, and
    where other work has a core, on which one of them then waits its turn, all others spin for it. Before torch is
    imported, when OpenMP reads it."""
    ours = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
    if not ours.keys() & os.environ.keys():
        os.environ.update(ours)


def _stop(number: int, frame: FrameType | None) -> None:
    """Ctrl-C while a module is imported ends the process at once: nothing is at stake,
    and libraries wrap or swallow an exception there."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            os.write(2, b"interrupted\n")
            os._exit(INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt
