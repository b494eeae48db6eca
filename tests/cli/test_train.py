"""The command `train` as a person meets it."""

import json
import signal
import subprocess
import sys

import pytest
import torch

from robustkpca.train import loop
from tests.helpers.cli import call

ARGUMENTS = ("train", "--model", "rpc-symvit", "--iterations", "1", "--lambda", "4", "--data", "digits",
             "--limit", "60", "--batch-size", "30", "--device", "cpu")  # fmt: skip


def test_it_trains_goes_on_and_says_what_it_wrote(tmp_path, monkeypatch):
    out = tmp_path / "m.safetensors"
    command = (
        *ARGUMENTS,
        "--out",
        out,
        "--epochs",
        "2",
        "--set",
        "mixup=0.2",
        "--set",
        "clip_grad=none",
        "--holdout",
        "10",
    )
    epoch = loop.Trainer.epoch

    def interrupted(self, number, *rest):
        if number == 2:
            signal.raise_signal(signal.SIGTERM)
        return epoch(self, number, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "epoch", interrupted)
        done = call(*command)
    assert done.returncode == 143
    assert f"complete epochs are kept in {tmp_path / 'm.pth'}; the same command goes on" in done.stderr
    done = call(*command)
    assert done.returncode == 0, done.stderr
    assert "holds 1 of 2 epochs: going on from there" in done.stderr
    assert "epoch 2" in done.stderr
    assert "epoch 1 " not in done.stderr
    assert f"wrote {out}" in done.stdout
    recipe = json.loads(torch.load(tmp_path / "m.pth", weights_only=True)["robustkpca"])["training"]["recipe"]
    assert (recipe["mixup"], recipe["clip_grad"], recipe["epochs"]) == (0.2, None, 2)
    refused = call(*command, "--seed", "1")
    assert refused.returncode == 2
    assert "seed was 0, now 1" in refused.stderr
    onward = call(*ARGUMENTS, "--start", out, "--out", tmp_path / "n.safetensors", "--epochs", "1",
                  "--set", "adversarial=trades", "--eps", "4/255", "--attack-steps", "1", "--beta", "1",
                  "--set", "mixup=0")  # fmt: skip
    assert onward.returncode == 0, onward.stderr
    recipe = json.loads(torch.load(tmp_path / "n.pth", weights_only=True)["robustkpca"])["training"]["recipe"]
    assert (recipe["adversarial"], recipe["eps"], recipe["attack_steps"], recipe["beta"]) == ("trades", "4/255", 1, 1.0)


@pytest.mark.parametrize(("options", "message"), [
    (("--set", "mixupp=1"), "--set: expected KEY=VALUE with one of epochs"),
    (("--recipe", "diet"), "unknown recipe 'diet'. Did you mean 'deit'"),
    (("--amp", "fp8"), "--amp: expected none, bf16 or fp16, got 'fp8'"),
    (("--set", "amp=fp8"), "recipe: amp: Input should be 'none', 'bf16' or 'fp16' (got 'fp8')"),
    (("--patch-size", "3"), "patch size 3: expected one that divides the image size 8"),
    (("--out", "m.pth"), "--out: expected a name such as m.safetensors"),
    (("--out", "m.txt"), "--out: expected a name such as m.safetensors"),
    (("--eps", "4/255", "--beta", "1"), "--eps, --beta: of adversarial training; expected --adversarial"),
    (("--start", "embedded.safetensors"), "expected a file, found nothing there"),
    (("--adversarial", "trades", "--set", "mixup=1"), "expected mixup, cutmix and erasing 0"),
])  # fmt: skip
def test_what_cannot_be_is_one_line(tmp_path, options, message):
    done = call(*ARGUMENTS, "--out", "m.safetensors", *options, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_one_line_and_leaves_nothing_half_written(tmp_path):
    """The system's own limit on the size of a file stands for the disk; torch reports it by an error of its own."""
    code = (
        "import resource, sys; from robustkpca.cli import main;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000)); sys.argv[0] = 'robustkpca'; main()"
    )
    command = (*ARGUMENTS, "--epochs", "1", "--out", "m.safetensors")
    done = subprocess.run([sys.executable, "-c", code, *command], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, "Traceback" in done.stderr) == (3, False)
    assert done.stderr.splitlines()[-1] == "error: OutputError: cannot write m.pth: File too large"
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_moved_while_a_model_trains_is_not_made_again(tmp_path, monkeypatch):
    epoch = loop.Trainer.epoch

    def moved(self, number, *rest):
        if number == 2:
            (tmp_path / "models").rename(tmp_path / "moved")
        return epoch(self, number, *rest)

    monkeypatch.setattr(loop.Trainer, "epoch", moved)
    done = call(*ARGUMENTS, "--epochs", "2", "--out", tmp_path / "models" / "m.safetensors")
    assert done.returncode == 2
    assert "models was moved or removed while it was written" in done.stderr
    assert [folder.name for folder in tmp_path.iterdir()] == ["moved"]
    monkeypatch.undo()
    done = call(*ARGUMENTS, "--epochs", "2", "--out", tmp_path / "moved" / "m.safetensors")
    assert (done.returncode, "holds 1 of 2 epochs" in done.stderr) == (0, True)
