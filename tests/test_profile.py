"""Costs against what can be counted by hand."""

import gc
import subprocess
import sys

import pytest
import torch

from robustkpca.cli import main
from robustkpca.errors import SpecError
from robustkpca.models.settings import RPCSettings
from robustkpca.profile import medians, peak_bytes, profile, untrained
from tests.helpers.oracles import tiny

CPU = torch.device("cpu")


def test_operations_are_those_of_the_products():
    n, d, depth, classes, patch = 17, 16, 2, 10, 7
    linear = 2 * n * d * (2 * d + d + 8 * d) + 2 * 2 * n * n * d  # qkv, proj, mlp; K K^T and P V
    expected = depth * linear + 2 * (n - 1) * patch * patch * d + 2 * d * classes
    symmetric, pursuing = profile(
        [tiny(), tiny("rpc-symvit", RPCSettings(iterations=3, lam=1.0))], batch_size=4, repeats=1
    )
    assert symmetric.flops == expected
    assert pursuing.flops == expected + 2 * 4 * n * n * d  # two iterations more, in one layer
    assert symmetric.parameters == pursuing.parameters == sum(p.numel() for p in tiny().network.parameters())
    assert (
        profile([tiny("rpc-symvit", RPCSettings(iterations=1, lam=1.0))], batch_size=8, repeats=1)[0].flops == expected
    )


def test_peak_memory_of_known_tensors():
    def task():
        a = torch.zeros(1000)  # 4,000 bytes
        b = a + 1
        del a
        c = b * 2  # at most two at once
        del b
        view = c[10:]
        return view.sum()

    gc.collect()
    assert peak_bytes(task, CPU) == 8000

    def keeps():
        x = torch.zeros(1000, requires_grad=True)
        return torch.autograd.grad(x.exp().sin().exp().sum(), x)  # backward needs what forward made

    def forgets():
        with torch.no_grad():
            return torch.zeros(1000).exp().sin().exp().sum()

    assert peak_bytes(keeps, CPU) >= 16000
    assert peak_bytes(forgets, CPU) == 8000


def test_checkpointed_blocks_take_less_memory():
    made = untrained("symvit-tiny", img_size=32)
    plain, less = profile([made, made.variant(checkpointed=True)], batch_size=4, repeats=1)
    assert less.gradient_bytes < 0.5 * plain.gradient_bytes


def test_medians_take_turns_and_leave_out_the_first_round():
    order = []
    found = medians({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 2, CPU)
    assert order == ["a", "b"] * 3
    assert set(found) == {"a", "b"}


def test_names_without_a_size_are_refused():
    with pytest.raises(SpecError, match="expected a size, symvit-micro, symvit-tiny"):
        untrained("symvit")
    with pytest.raises(SpecError, match="unknown timm model"):
        untrained("timm:no_such_model")


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = (
        "profile --model symvit-tiny --model rpc-symvit-tiny --iterations 1,2 --lambda 4 --layers first --layers all "
        "--img-size 32 --repeats 1"
    )
    monkeypatch.setattr(sys, "argv", ["robustkpca", *line.split(), "--batch-size", "4", "--out", "cost.csv"])
    main_code = 0
    try:
        main()
    except SystemExit as stop:
        main_code = stop.code or 0
    assert main_code == 0
    rows = (tmp_path / "cost.csv").read_text().splitlines()
    assert len(rows) == 6
    assert rows[0].startswith("title,parameters,flops,forward_ms")
    printed = capsys.readouterr().out
    assert "1.00" in printed
    assert "gradient" in printed


@pytest.mark.slow
def test_without_a_model_it_says_what_is_expected(tmp_path):
    done = subprocess.run([sys.executable, "-m", "robustkpca", "profile"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "--model: expected at least one" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_settings_of_rpc_are_used_or_refused(tmp_path):
    def run(*arguments):
        command = [sys.executable, "-m", "robustkpca", "profile", *arguments, "--repeats", "1", "--batch-size", "4"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    taken = run("--model", "rpc-symvit", "--iterations", "2", "--out", "cost.csv")
    assert taken.returncode == 0, taken.stderr
    assert "2iter/layer1" in (tmp_path / "cost.csv").read_text()
    for arguments in (("--model", "symvit", "--iterations", "2"), ("--model", "rpc-symvit", "--lambda", "nan")):
        refused = run(*arguments)
        assert refused.returncode == 2, refused.stdout
        assert "Traceback" not in refused.stderr
