"""The command line for tests, in this process and in one of its own, and what its commands work on."""

import contextlib
import io
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from robustkpca.cli import main
from robustkpca.models import checkpoints
from robustkpca.models.settings import RPCSettings
from tests.helpers.oracles import tiny

# Two models on the pictures of `make_place`.
BOTH = ("--checkpoint", "sym.safetensors", "--checkpoint", "rpc.safetensors", "--data", "folder:pictures")


def call(*arguments, cwd=None):
    """The command line in this process: its exit code and what it printed."""
    printed, said = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(cwd or "."),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(said),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(sys, "argv", ["robustkpca", *map(str, arguments)])
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code
    return SimpleNamespace(returncode=code or 0, stdout=printed.getvalue(), stderr=said.getvalue())


def start(*arguments, **options):
    """The command line in a process of its own."""
    command = [sys.executable, "-m", "robustkpca", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def make_place(folder):
    """Two small checkpoints whose classes are Fashion-MNIST's, a plain state dict, and pictures to evaluate them on."""
    rpc = RPCSettings(iterations=2, lam=1.0)
    for name, made in (("sym", tiny()), ("rpc", tiny("rpc-symvit", rpc))):
        checkpoints.save(folder / f"{name}.safetensors", made.network.state_dict(), made.settings, {})
    torch.save(tiny().network.state_dict(), folder / "plain.pth")
    draws = np.random.default_rng(0)
    for label in range(10):
        (folder / "pictures" / f"c{label}").mkdir(parents=True)
        for i in range(2):
            pixels = draws.integers(0, 256, (28, 28), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "pictures" / f"c{label}" / f"{i}.png")
    return folder
