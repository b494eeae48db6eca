"""Threads that wait must not take the processor from what runs beside them."""

import os
import re
import subprocess
import sys

import pytest

TORCH = ["eval", "--model", "torch:float32", "--attack", "fgsm"]  # refused, once torch is imported


def openmp(**given: str) -> tuple[str | None, str | None]:
    """Wait policy and spin count that OpenMP itself has after a command imported torch."""
    plain = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    environment = plain | {"OMP_DISPLAY_ENV": "VERBOSE"} | given
    command = [sys.executable, "-m", "robustkpca", *TORCH]
    shown = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert shown.returncode == 2, shown.stderr
    values = [re.search(rf"{name} = '(\w+)'", shown.stderr) for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")]
    return tuple(value and value[1] for value in values)


@pytest.mark.skipif(sys.platform != "linux", reason="OpenMP of another kind shows other names")
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ("PASSIVE", "0")),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, ("ACTIVE", "30000000000")),
        ({"GOMP_SPINCOUNT": "12345"}, ("PASSIVE", "12345")),  # what is shown where no policy is set, too
    ],
)
def test_openmp_waits_as_the_user_says_else_passively(given, expected):
    assert openmp(**given) == expected


def test_python_alone_is_left_as_it_is():
    code = "import os, robustkpca, robustkpca.cli; print(os.environ.get('OMP_WAIT_POLICY'))"
    plain = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=plain, check=True)
    assert shown.stdout.strip() == "None"
