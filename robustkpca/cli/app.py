"""The application: its commands in the order of --help, and how it ends."""

from __future__ import annotations

import contextlib
import difflib
import errno
import io
import os
import re
import shlex
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Annotated, Any

import typer

from robustkpca.cli import (
    analyze,
    attacks,
    bench,
    check,
    datasets,
    diagnose,
    export,
    models,
    profile,
    report,
    runs,
    table,
    train,
)
from robustkpca.cli import eval as evaluation
from robustkpca.cli.show import err, say
from robustkpca.errors import FAILED, OutputError, RobustKPCAError, SpecError
from robustkpca.escape import ASCII

# What writing to a terminal, pipe or file that was opened by the shell may end in.
_UNPRINTED = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)

app = typer.Typer(
    name="robustkpca",
    help="How robust is a vision transformer, and does attention with robust principal components make it more so?",
    no_args_is_help=True,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
)


@app.callback()
def common(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if version:
        from robustkpca._version import __version__

        print(__version__)
        raise typer.Exit


COMMANDS: dict[str, Callable[..., Any]] = {
    "eval": evaluation.evaluate,
    "diagnose": diagnose.diagnose,
    "bench": bench.bench,
    "train": train.train,
    "analyze": analyze.analyze,
    "profile": profile.profile,
    "table": table.table,
    "report": report.report,
    "export": export.export,
    "check": check.check,
    "models": models.models,
    "attacks": attacks.attacks,
    "datasets": datasets.datasets,
    "runs": runs.runs,
}
# Under --help.
EXAMPLES = {
    "eval": "Example: robustkpca eval --model symvit --model rpc-symvit --attack pgd --limit 200",
    "check": "Example: robustkpca check runs/now --baseline baseline.parquet --summary summary.md --junit junit.xml",
    "train": "Example: robustkpca train --model symvit --data digits --out symvit.safetensors",
    "export": "Example: robustkpca export runs/pgd --images attacked --budget 8/255 --first 20",
    "table": "Example: robustkpca table runs/pgd runs/fgsm --layout attacks --reference",
}
for name, command in COMMANDS.items():
    app.command(name=name, epilog=EXAMPLES.get(name))(command)


def run() -> int:
    """Run the command of sys.argv and return the exit code;
    what the user can fix is one line, a traceback is our own bug."""
    _encode_whatever_comes()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # of a lost process we print one line, torch a stack trace
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()  # so that what cannot be printed is an error here, not when Python ends
    except RobustKPCAError as error:
        return _failed(error)
    except typer.TyperException as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # the help is printed
            return 2
        return _failed(SpecError(usage(error)))
    except (Exception, SystemExit) as error:
        if (reason := _unprinted(error)) is not None:
            return _failed(OutputError(f"cannot write the output: {reason}"))
        if isinstance(error, SystemExit):
            raise
        with contextlib.suppress(OSError, ValueError):
            _report_fault(error)
        return FAILED
    return code if isinstance(code, int) else 0


def _encode_whatever_comes() -> None:
    """What the encoding of an output lacks is printed in ASCII instead; files are UTF-8 in any case."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=ASCII)


def _unprinted(error: BaseException) -> str | None:
    """Why nothing could be printed, where that is what an error says; typer and rich end by SystemExit(1) then."""
    if isinstance(error, SystemExit):
        error = error.__context__ or error
    if isinstance(error, UnicodeEncodeError):
        return f"its encoding, {error.encoding}, has no {error.object[error.start : error.end]!a}"
    if isinstance(error, OSError) and error.filename is None and error.errno in _UNPRINTED:
        with contextlib.suppress(OSError, ValueError):  # what is left of it must not be printed when Python ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return error.strerror
    return None


def _report_fault(error: BaseException) -> None:
    """What to do about an error that nobody foresaw. The traceback goes to a file, and is printed where no one sits
    before a terminal: in a job of CI the file is gone with the machine."""
    from robustkpca._version import __version__

    trace = "".join(traceback.format_exception(error))
    facts = f"robustkpca {__version__}, Python {sys.version.split()[0]}, {sys.platform}"
    command = shlex.join(["robustkpca", *sys.argv[1:]])
    number, log = tempfile.mkstemp(prefix="robustkpca-", suffix=".log")
    with open(number, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(f"{facts}\n{command}\n\n{trace}")
    if not sys.stderr.isatty():
        sys.stderr.write(trace)
    say(
        f"unexpected {type(error).__name__}: {' '.join(str(error).split())[:200]}. Where it does not come from code of "
        f"your own (a model, data, an attack), it is a fault of robustkpca: please open an issue with {log}. A run or "
        "training that was begun is kept; the same command goes on."
    )


def _failed(error: RobustKPCAError) -> int:
    with contextlib.suppress(OSError, ValueError, SystemExit):  # nobody may hear of it: the exit code says it
        err.print(f"[red]error:[/red] {type(error).__name__}: ", end="", highlight=False)
        say(" ".join(str(error).splitlines()))
    return error.exit_code


def usage(error: typer.TyperException) -> str:
    """One line for what the parser refuses: `--dtype: expected float32 or bf16, got 'fp8'`."""
    text = " ".join(error.format_message().split())
    parameter = getattr(error, "param", None)
    if parameter is None or text.startswith("Missing"):
        return f"{text[0].lower()}{text[1:].rstrip('.')}; see --help"
    flag = next((name for name in parameter.opts if name.startswith("--")), parameter.name.upper())
    text = error.message.removeprefix("Value error, ").rstrip(".")
    if choice := re.fullmatch(r"('.*') is not one of (.*)", text, flags=re.DOTALL):
        *others, last = known = choice[2].replace("'", "").split(", ")
        close = difflib.get_close_matches(choice[1].strip("'"), known, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        text = f"expected {', '.join(others)} or {last}, got {choice[1]}{hint}"
    return f"{flag}: {text[0].lower()}{text[1:]}"
