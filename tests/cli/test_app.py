"""The application: help, version, and errors of one line."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.cli import BOTH, call, start

EVAL = ("eval", "--checkpoint", "sym.safetensors", "--data", "folder:pictures", "--attack", "pgd", "--out", "never")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("eval",), "--model: expected at least one of"),
        (("eval", "--model", "symvit"), "--attack: expected at least one of"),
        (("eval", "--attack", "pgd"), "--model: expected at least one of"),
        ((*EVAL, "--weights", "best"), "--weights: expected raw or ema, got 'best'"),
        ((*EVAL, "--iterations", "two"), "--iterations: expected a whole number"),
        ((*EVAL, "--img-size", "30"), "multiple of the patch size 7, got 30"),
        ((*EVAL, "--classes", "none.txt"), "--classes none.txt"),
        ((*EVAL, "--in-distribution", "imagenet:x"), "it goes with imagenet-o"),
        (("table", "run", "--layout", "attack"),
         "--layout: expected robustness, attacks, budgets, corruptions or runtime, "
         "got 'attack'; did you mean attacks?"),
        (("table", "run", "--layout", "attacks", "--format", "word"),
         "--format: expected rich, markdown, latex, csv or html, got 'word'"),
        ((*EVAL, "--dtype", "fp8"), "--dtype: expected float32 or bf16, got 'fp8'"),
        (("analyze", "symvit", "--only", "lost"),
         "--only: expected loss, gamma, spectrum or pursuit, got 'lost'; did you mean loss?"),
        ((*EVAL, "--seed", "-1"), "--seed: input should be greater than or equal to 0"),
        ((*EVAL, "--limit", "some"), "--limit: input should be a valid integer"),
        ((*EVAL, "--sed", "1"), "no such option: --sed (Possible options: --"),
        (("evil",), "no such command 'evil'. Did you mean 'eval'?"),
        (("table", "run"), "missing option '--layout'"),
        (("report", "--out", "r.md"), "missing argument 'runs'"),
        (("train", "--model", "vit", "--data", "digits", "--out", "x.safetensors", "--amp", "fp8"),
         "--amp: expected none, bf16 or fp16"),
        (("train", "--model", "vit", "--data", "digits", "--out", "x.safetensors", "--adversarial", "trade"),
         "did you mean trades?"),
        (("models", "--inspect", "none.pth"), "nothing there"),
        (("bench", "paper-attack", "--models", "m.toml", "--data", "digits", "--out", "b"),
         "Did you mean 'paper-attacks'"),
        (("bench", "paper-attacks", "--models", "none.toml", "--data", "digits", "--out", "b"), "No such file"),
        (("eval", "--attack", "pdg", "--model", "symvit"), "Did you mean 'pgd'"),
        (("eval", "--attack", "pgd", "--model", "rpc-symvti"), "Did you mean 'rpc-symvit'"),
        (("eval", "--attack", "pgd", "--model", "symvit-tiny"), "needs --checkpoint"),
        (("eval", "--attack", "pgd", "--checkpoint", "none.pth"), "nothing there"),
        (("eval", "--attack", "pgd", "--checkpoint", "plain.pth", "--heads", "2"), "say which with --model"),
        (("eval", "--attack", "pgd", "--model", "vit", "--model", "symvit", "--checkpoint", "plain.pth"),
         "expected one for each"),
        ((*EVAL, "--eps", "8"), "did you mean 8/255"),
        ((*EVAL, "--eps=-1/255"), "expected 0 or more"),
        ((*EVAL, "--eps", "nan"), "expected a number"),
        ((*EVAL, "--steps", "0"), "at least 1"),
        ((*EVAL, "--protocol", "papers"), "expected standard or paper"),
        ((*EVAL, "--limit", "0"), "at least 1"),
        ((*EVAL, "--batch-size", "0"), "at least 1"),
        ((*EVAL, "--device", "gpu"), "expected auto, cpu, cuda"),
        ((*EVAL, "--device", "cuda:99"), "CUDA devices are visible"),
        ((*EVAL, "--layers", "last"), "--layers"),
        ((*EVAL, "--data", "folder:none"), "not a folder"),
        ((*EVAL, "--data", "folder:."), "unknown to SymViT"),
        (("eval", *BOTH, "--attack", "corruptions", "--eps", "1/255", "--out", "never"), "severities, not eps"),
        ((*EVAL, "--attack", "none.toml"), "No such file"),
        (("report", "none", "--out", "r.md"), "expected a run folder"),
        (("report", "run", "--out", "r.txt"), "ending in .md"),
        (("check", "run", "--baseline", "none"), "nothing there; `--update-baseline` makes one"),
        (("check", "none", "--baseline", "run"), "expected a run folder"),
        (("eval", "--model", "symvit", "--checkpoint", "plain.pth", "--heads", "5", "--attack", "pgd"),
         "divide the width 16, got 5"),

        (("check", "run", "--baseline", "run", "--tolerance", "nan"), "--tolerance"),
        (("check", "run", "--baseline", "run", "--update-baseline"), "end in .parquet"),
        (("train", "--model", "rpc-symvit", "--data", "digits", "--out", "x.safetensors"), "--iterations and --lambda"),
        (("train", "--model", "symvit", "--data", "digits", "--lambda", "1", "--out", "x.safetensors"),
         "settings of rpc-symvit"),
        (("train", "--model", "symvit", "--data", "fashion-mnist", "--out", "x.safetensors"), "fashion-mnist:DIR"),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_line(run, place, arguments, message):
    done = call(*arguments, cwd=place)
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert done.returncode == 2
    assert message in lines[-1]
    assert lines[-1].startswith("error: ")
    assert len(lines) == 1
    assert "Traceback" not in done.stderr
    assert not (place / "never").exists()


def test_version_and_module(place):
    from robustkpca._version import __version__

    assert start("--version").communicate(timeout=60)[0].strip() == __version__
    script = Path(sys.executable).with_name("robustkpca")
    assert subprocess.run([script, "--version"], capture_output=True, text=True).stdout.strip() == __version__


def test_help_is_instant_and_complete():
    times = []  # of the processor: a busy machine must not fail this
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        said, _ = start("--help").communicate(timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    names = ("eval", "bench", "table", "report", "check", "train", "models", "attacks", "datasets")
    assert all(name in said for name in names)
    loaded = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import robustkpca.cli"], capture_output=True, text=True
    ).stderr
    assert not any(f" {heavy}\n" in loaded for heavy in ("torch", "pandas", "numpy", "pydantic", "matplotlib"))
    assert min(times) < 0.5
