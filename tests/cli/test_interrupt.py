"""Ctrl-C in the first seconds, while modules are imported: one line, exit code 130, no traceback."""

import signal
import subprocess
import sys

import pytest

# As the installed command does it, and as a module.
SCRIPT = ("-c", "import sys; from robustkpca.cli import main; sys.exit(main())")
MODULE = ("-m", "robustkpca")
COMMAND = ("eval", "--model", "symvit", "--attack", "pgd", "--limit", "2", "--out", "never")


def interrupted(way, module, folder):
    """The exit code and what was printed, when Ctrl-C comes as soon as `module` is imported."""
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", *way, *COMMAND],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    for line in process.stderr:
        if line.rsplit("|", 1)[-1].strip() == module:
            process.send_signal(signal.SIGINT)
            break
    else:
        pytest.fail(f"{module} was never imported")
    lines = [line for line in process.stderr if not line.startswith("import time:")]
    return process.wait(timeout=60), "".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize("way", [SCRIPT, MODULE], ids=["script", "module"])
@pytest.mark.parametrize("module", ["signal", "typer", "rich.console", "numpy", "torch._C", "timm.layers"])
def test_ctrl_c_while_modules_are_imported_is_one_line(tmp_path, way, module):
    assert interrupted(way, module, tmp_path) == (130, "interrupted\n")
    assert not list(tmp_path.iterdir())
