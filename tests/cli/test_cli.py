"""The command line as a person meets it: what it prints, its exit codes, and what bad input does."""

import contextlib
import io
import json
import os
import resource
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from robustkpca.cli import main
from robustkpca.cli.app import pick_device
from robustkpca.diagnosis.findings import RULES
from robustkpca.models import checkpoints
from robustkpca.models.settings import RPCSettings
from robustkpca.runs.run import Run
from tests.helpers.oracles import tiny


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


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with two small checkpoints whose classes are Fashion-MNIST's, and pictures to evaluate them on."""
    folder = tmp_path_factory.mktemp("place")
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


BOTH = ("--checkpoint", "sym.safetensors", "--checkpoint", "rpc.safetensors", "--data", "folder:pictures")


@pytest.fixture(scope="module")
def run(place):
    done = call("eval", *BOTH, "--attack", "pgd", "--attack", "fgsm", "--out", "run", cwd=place)
    assert done.returncode == 0, done.stderr
    return done


def test_eval_prints_what_it_runs_and_a_table(run, place):
    said = " ".join(run.stderr.split())
    for fact in (
        "SymViT-w16d2h2",
        "RPC-SymViT-w16d2h2 (2iter/layer1)",
        "n = 20",
        "L-inf",
        "8/255",
        "cpu, float32, seed 0",
    ):
        assert fact in said, fact
    for fact in ("clean", "eps 8/255", "95 % Wilson", "McNemar", "rows and receipt: run"):
        assert fact in " ".join(run.stdout.split()), fact
    assert len(Run.open(place / "run").rows) == 2 * 20 * 7


def test_the_same_command_finds_the_run_again(run, place):
    before = {p: p.stat().st_mtime_ns for p in (place / "run").rglob("*.parquet")}
    again = call("eval", *BOTH, "--attack", "pgd", "--attack", "fgsm", "--out", "run", cwd=place)
    assert again.returncode == 0
    assert {p: p.stat().st_mtime_ns for p in (place / "run").rglob("*.parquet")} == before


def test_report_and_check(run, place):
    assert call("report", "run", "--out", "r.md", cwd=place).returncode == 0
    assert (place / "r.md").read_text().startswith("# Robustness report")
    assert (place / "r_files" / "1-pgd.png").is_file()
    written = call("check", "run", "--baseline", "base.parquet", "--update-baseline", cwd=place)
    assert written.returncode == 0, written.stderr
    same = call("check", "run", "--baseline", "base.parquet", cwd=place)
    assert (same.returncode, "holds: 14 cells" in same.stdout) == (0, True)
    other = call("eval", *BOTH, "--attack", "pgd", "--attack", "fgsm", "--seed", "1", "--out", "other", cwd=place)
    assert other.returncode == 0
    unlike = call("check", "other", "--baseline", "base.parquet", cwd=place)
    assert (unlike.returncode, "other seed" in unlike.stderr) == (2, True)
    lost = Run.open(place / "run").rows
    better = Run.start(place / "better", Run.open(place / "run").request, {})
    for (model, attack), part in lost.groupby(["model", "attack"], sort=False):
        better.write_chunk(model, attack, 0, part.assign(correct=True, prediction=part["label"]))
    fallen = call("check", "run", "--baseline", "better", cwd=place)
    assert (fallen.returncode, "regressed: " in fallen.stderr) == (1, True)


def test_check_writes_what_ci_reads(run, place):
    call("check", "run", "--baseline", "base.parquet", "--update-baseline", cwd=place)
    (place / "limits.toml").write_text('[[cell]]\nattack = "pgd"\ntolerance = 5\n')
    done = call(
        "check", "run", "--baseline", "base.parquet", "--tolerances", "limits.toml", "--summary", "out/s.md", "--junit", "out/j.xml",
        cwd=place,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "### robustkpca: holds" in (place / "out" / "s.md").read_text()
    assert (place / "out" / "j.xml").read_text().count("<testcase") == 15
    both = call(
        "check", "run", "--baseline", "base.parquet", "--tolerance", "1", "--tolerances", "limits.toml", cwd=place
    )
    assert (both.returncode, "got both" in both.stderr) == (2, True)
    (place / "limits.toml").write_text("tolerence = 5\n")
    wrong = call("check", "run", "--baseline", "base.parquet", "--tolerances", "limits.toml", cwd=place)
    assert (wrong.returncode, "tolerence" in wrong.stderr) == (2, True)


def test_report_as_one_page(run, place):
    done = call("report", "run", "--out", "page.html", cwd=place)
    assert done.returncode == 0
    assert (place / "page.html").read_text().startswith("<!DOCTYPE html>")


def test_diagnose_says_pass_warn_or_fail_and_goes_on(place):
    flags = (
        "--checkpoint",
        "sym.safetensors",
        "--data",
        "folder:pictures",
        "--eps",
        "2/255",
        "--out",
        "battery",
    )
    done = call("diagnose", *flags, cwd=place)
    said = " ".join(done.stdout.split())
    for rule in RULES:
        if not rule.startswith("autoattack"):
            assert f"{rule}, SymViT-w16d2h2: " in said, rule
    assert "not judged, SymViT-w16d2h2: autoattack-square, autoattack-standard" in said
    failed = " 0 fail" not in said
    assert done.returncode == (1 if failed else 0), done.stderr
    assert Run.open(place / "battery").suites[0].budgets == ("0", "2/255", "1")
    again = call("diagnose", *flags, cwd=place)
    assert again.stdout == done.stdout


def test_findings_stand_under_the_table_of_eval(place):
    (place / "weak.toml").write_text(
        'name = "weak"\nversion = 1\ntitle = "t"\n[threat]\nnorm = "linf"\neps = ["64/255"]\nspace = "pixel"\nclip = true\n'
        'labels = "true"\n[[attack]]\nname = "pgd"\nmethod = "PGD"\nparameters = { steps = 1, alpha = 1e-6, random_start = false }\n'
    )
    done = call(
        "eval",
        "--checkpoint",
        "sym.safetensors",
        "--data",
        "folder:pictures",
        "--attack",
        "weak.toml",
        "--out",
        "weak",
        cwd=place,
    )
    assert done.returncode == 0, done.stderr
    assert "warn settings, SymViT-w16d2h2: weak at eps 64/255: 1 steps of 1e-06 do not reach" in " ".join(
        done.stdout.split()
    )
    assert "findings: 0 fail, 2 warn" in done.stdout  # the other: its answers are guesses


def test_options_reach_the_request(place):
    done = call(
        "eval", "--model", "rpc-symvit", "--checkpoint", "sym.safetensors", "--iterations", "3", "--lambda", "0.5",
        "--layers", "all", "--data", "folder:pictures", "--attack", "pgd", "--protocol", "paper", "--eps", "2/255",
        "--steps", "2", "--limit", "10", "--seed", "4", "--batch-size", "3", "--out", "options", cwd=place,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    request = json.loads((place / "options" / "run.json").read_text())["request"]
    assert request["models"][0]["settings"]["rpc"] == {"iterations": 3, "lambda": 0.5, "layers": "all"}
    (suite,) = request["suites"]
    assert (suite["name"], suite["threat"]["eps"], suite["attack"][0]["parameters"]["steps"]) == (
        "pgd-paper",
        ["2/255"],
        2,
    )
    assert (request["seed"], request["batch_size"], request["data"]["n"]) == (4, 3, 10)


def test_without_out_the_run_is_named_after_its_request(place):
    flags = ("--checkpoint", "sym.safetensors", "--data", "folder:pictures", "--attack", "fgsm", "--eps", "1/255")
    for seed in (0, 0, 1):
        assert call("eval", *flags, "--seed", seed, cwd=place).returncode == 0
    assert len(list((place / "runs").iterdir())) == 2


EVAL = ("eval", "--checkpoint", "sym.safetensors", "--data", "folder:pictures", "--attack", "pgd", "--out", "never")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("eval",), "--attack: expected at least one of"),
        (("eval", "--attack", "pgd"), "--model: expected at least one of"),
        ((*EVAL, "--weights", "best"), "--weights: expected raw or ema, got 'best'"),
        ((*EVAL, "--iterations", "two"), "--iterations: expected a whole number"),
        ((*EVAL, "--img-size", "30"), "multiple of the patch size 7, got 30"),
        ((*EVAL, "--classes", "none.txt"), "--classes none.txt"),
        ((*EVAL, "--in-distribution", "imagenet:x"), "it goes with imagenet-o"),
        (("table", "run", "--layout", "attack"), "Did you mean 'attacks'"),
        (("table", "run", "--layout", "attacks", "--format", "word"), "unknown format 'word'"),
        (("models", "--inspect", "none.pth"), "nothing there"),
        (("bench", "paper-attack", "--models", "m.toml", "--data", "digits", "--out", "b"), "Did you mean 'paper-attacks'"),
        (("bench", "paper-attacks", "--models", "none.toml", "--data", "digits", "--out", "b"), "No such file"),
        (("eval", "--attack", "pdg", "--model", "symvit"), "Did you mean 'pgd'"),
        (("eval", "--attack", "pgd", "--model", "rpc-symvti"), "Did you mean 'rpc-symvit'"),
        (("eval", "--attack", "pgd", "--model", "symvit-tiny"), "needs --checkpoint"),
        (("eval", "--attack", "pgd", "--checkpoint", "none.pth"), "nothing there"),
        (("eval", "--attack", "pgd", "--checkpoint", "plain.pth", "--heads", "2"), "say which with --model"),
        (("eval", "--attack", "pgd", "--model", "vit", "--model", "symvit", "--checkpoint", "plain.pth"), "expected one for each"),
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
        (("eval", "--model", "symvit", "--checkpoint", "plain.pth", "--heads", "5", "--attack", "pgd"), "divide the width 16, got 5"),

        (("check", "run", "--baseline", "run", "--tolerance", "nan"), "--tolerance"),
        (("check", "run", "--baseline", "run", "--update-baseline"), "end in .parquet"),
        (("train", "--model", "rpc-symvit", "--data", "digits", "--out", "x.safetensors"), "--iterations and --lambda"),
        (("train", "--model", "symvit", "--data", "digits", "--lambda", "1", "--out", "x.safetensors"), "settings of rpc-symvit"),
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


def test_a_torn_picture_stops_with_its_path_and_keeps_what_is_done(place):
    import shutil

    shutil.copytree(place / "pictures", place / "torn")
    path = place / "torn" / "c7" / "1.png"
    path.write_bytes(path.read_bytes()[:200])
    arguments = ("eval", "--checkpoint", "sym.safetensors", "--data", "folder:torn", "--attack", "fgsm", "--batch-size", "4",
                 "--out", "torn-run")  # fmt: skip
    done = call(*arguments, cwd=place)
    assert done.returncode == 2
    assert "c7/1.png: cannot be decoded" in done.stderr
    assert len(list((place / "torn-run").rglob("*.parquet"))) == 6
    shutil.copy(place / "pictures" / "c7" / "1.png", path)  # mended data are other data: kept apart
    again = call(*arguments, cwd=place)
    assert (again.returncode, "data.content" in again.stderr) == (2, True)
    assert call(*arguments[:-1], "mended-run", cwd=place).returncode == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_sigterm_keep_whole_chunks_and_say_how_to_go_on(place, number, code):
    folder = place / f"cut{code}"
    arguments = ("eval", *BOTH, "--attack", "pgd", "--steps", "400", "--batch-size", "2", "--out", folder.name)
    # A shell that started the tests in the background had their Ctrl-C ignored: not so here.
    process = start(*arguments, cwd=place, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    deadline = time.monotonic() + 120
    while len(list(folder.rglob("*.parquet"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code
    assert "the same command goes on from there" in said
    assert "Traceback" not in said
    rows = Run.open(folder).rows
    assert 0 < len(rows) < 200
    assert not list(folder.rglob("*.part"))
    listed = call("runs", str(place), cwd=place)
    assert listed.returncode == 0
    line = next(x for x in listed.stdout.splitlines() if x.startswith(str(folder)))
    assert "of 40 chunks" in line
    assert not line.endswith("complete")


def test_torchattacks_needs_no_old_requests(place):
    """It pins requests to 2.25 and imports it nowhere, so a newer one beside it does no harm: nor does none at all."""
    assert any(line.startswith("requests") for line in metadata.requires("torchattacks"))
    (place / "decoy").mkdir()
    (place / "decoy" / "requests.py").write_text("raise ImportError('not wanted')")
    arguments = ("eval", *BOTH, "--attack", "pgd", "--steps", "1", "--out", "without")
    process = start(*arguments, cwd=place, env=os.environ | {"PYTHONPATH": str(place / "decoy")})
    printed, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert "eps 8/255" in printed


def test_a_device_is_kept_and_processes_take_one_each(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [pick_device(name) for name in ("auto", "cuda", "cuda:1")] == ["cuda", "cuda", "cuda:1"]
    for name, value in {
        "RANK": 3,
        "WORLD_SIZE": 4,
        "LOCAL_RANK": 3,
        "LOCAL_WORLD_SIZE": 4,
        "MASTER_ADDR": "a",
        "MASTER_PORT": 1,
    }.items():
        monkeypatch.setenv(name, str(value))
    assert [pick_device(name) for name in ("auto", "cuda", "cuda:0")] == ["cuda:1", "cuda:1", "cuda:0"]


def test_deterministic_mode_works_with_resampled_position_embeddings(place):
    done = call("eval", "--checkpoint", "sym.safetensors", "--img-size", "42", "--data", "folder:pictures", "--attack", "fgsm",
                "--deterministic", "--out", "same", cwd=place)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert Run.open(place / "same").manifest.environment["deterministic"] is True
    assert not torch.are_deterministic_algorithms_enabled()


def test_precision_cache_and_checkpointing_from_the_command_line(place):
    arguments = ("eval", "--checkpoint", "sym.safetensors", "--data", "folder:pictures", "--attack", "fgsm")
    for out, options in {
        "plain": (),
        "kept": ("--cache", "pixels"),
        "less": ("--grad-checkpointing", "--workers", "0"),
    }.items():
        done = call(*arguments, *options, "--out", out, cwd=place)
        assert done.returncode == 0, done.stderr
    rows = [Run.open(place / out).rows for out in ("plain", "kept", "less")]
    assert rows[0].equals(rows[1])
    assert rows[0].equals(rows[2])
    assert len(list((place / "pixels").iterdir())) == 1
    half = call(*arguments, "--dtype", "bf16", "--out", "half", cwd=place)
    assert (half.returncode, "bfloat16, cpu" in half.stdout) == (0, True)
    rpc = (
        "eval",
        "--checkpoint",
        "rpc.safetensors",
        "--data",
        "folder:pictures",
        "--attack",
        "fgsm",
        "--dtype",
        "bf16",
    )
    refused = call(*rpc, cwd=place)
    assert (refused.returncode, "--force for figures that are marked" in " ".join(refused.stderr.split())) == (2, True)
    forced = call(*rpc, "--force", "--out", "forced", cwd=place)
    assert "attacked by force with gradients in bfloat16" in " ".join(forced.stdout.split())
    assert "fail gradient-precision" in forced.stdout


def test_one_checkpoint_under_several_iterations(place):
    done = call("eval", "--checkpoint", "rpc.safetensors", "--iterations", "1,2,4", "--layers", "all", "--data", "folder:pictures",
                "--attack", "fgsm", "--eps", "1/255", "--out", "transfer", cwd=place)  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = Run.open(place / "transfer")
    assert found.models == [f"RPC-SymViT-w16d2h2 ({n}iter/all)" for n in (1, 2, 4)]
    assert len({m["weights"] for m in found.request.models}) == 1


def test_of_several_models_the_loadable_are_evaluated(place):
    (place / "torn.pth").write_bytes((place / "plain.pth").read_bytes()[:2000])
    done = call("eval", "--model", "symvit", "--checkpoint", "sym.safetensors", "--model", "vit", "--checkpoint", "torn.pth",
                "--data", "folder:pictures", "--attack", "fgsm", "--out", "sweep", cwd=place)  # fmt: skip
    assert done.returncode == 1
    assert "no figure: vit" in done.stderr
    assert "torn" in done.stderr
    texts = {s.model: s.text for s in Run.open(place / "sweep").statuses}
    assert texts["SymViT-w16d2h2"] == "complete"
    assert texts["vit"].startswith("failed: checkpoint torn.pth (2000 bytes)")
    assert call("check", "sweep", "--baseline", "sweep", cwd=place).returncode == 2


def test_clean_only(place):
    done = call(
        "eval",
        "--checkpoint",
        "sym.safetensors",
        "--data",
        "folder:pictures",
        "--attack",
        "clean",
        "--out",
        "clean",
        cwd=place,
    )
    assert done.returncode == 0, done.stderr
    assert "top-5" in done.stdout
    assert len(Run.open(place / "clean").rows) == 20


def test_inspect(place):
    text = call("models", "--inspect", "rpc.safetensors", cwd=place).stdout
    assert "RPC-SymViT-w16d2h2 (2iter/layer1)" in text
    assert "iterations 2, lambda 1" in text


def test_tables_of_stored_runs(run, place):
    text = call(
        "table", "run", "--layout", "attacks", "--format", "markdown", "--intervals", "--significance", cwd=place
    ).stdout
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 4
    assert "fgsm 8/255 top-1 ↑" in rows[0]
    assert "**" in text
    written = call("table", "run", "--layout", "budgets", "--format", "latex", "--out", "t.tex", cwd=place)
    assert written.returncode == 0
    assert r"\toprule" in (place / "t.tex").read_text()
    assert "RPC-SymViT" in call("table", "run", "--layout", "runtime", cwd=place).stdout


def test_bench_runs_resumes_and_writes_its_table(place):
    (place / "models.toml").write_text(
        '[[model]]\ncheckpoint = "sym.safetensors"\n\n[[model]]\ncheckpoint = "rpc.safetensors"\niterations = 1\n'
    )
    arguments = (
        "bench",
        "paper-attacks",
        "--models",
        "models.toml",
        "--data",
        "folder:pictures",
        "--out",
        "bench",
        "--reference",
    )
    done = call(*arguments, cwd=place)
    assert done.returncode == 0, done.stderr
    text = (place / "bench" / "paper-attacks.md").read_text()
    assert "(1iter/layer1)" in text.replace("\\", "")
    assert "No figure here has a published counterpart" in text
    assert (place / "bench" / "paper-attacks.tex").is_file()
    before = {p: p.stat().st_mtime_ns for p in (place / "bench").rglob("*.parquet")}
    assert call(*arguments, cwd=place).returncode == 0
    assert {p: p.stat().st_mtime_ns for p in (place / "bench").rglob("*.parquet")} == before
    wrong = call(
        "bench", "paper-robustness", "--models", "models.toml", "--data", "folder:pictures", "--out", "b2", cwd=place
    )
    assert (wrong.returncode, "expected --data for imagenet" in wrong.stderr) == (2, True)
    (place / "wrong.toml").write_text('[[model]]\nname = "symvit"\nlambda = "x"\n')
    wrong = call("bench", "paper-attacks", "--models", "wrong.toml", "--data", "digits", "--out", "b3", cwd=place)
    assert (wrong.returncode, "number 1: lambda" in wrong.stderr) == (2, True)


def test_odd_paths_are_printed_as_they_are(place):
    done = call(
        "eval",
        "--checkpoint",
        "sym.safetensors",
        "--data",
        "folder:pictures",
        "--attack",
        "clean",
        "--out",
        "[/b] [red]x",
        cwd=place,
    )
    assert (done.returncode, "[/b] [red]x" in done.stdout) == (0, True)
    (place / "[/bold].pth").write_bytes(b"PK")
    done = call("eval", "--model", "symvit", "--checkpoint", "sym.safetensors", "--model", "vit", "--checkpoint", "[/bold].pth",
                "--data", "folder:pictures", "--attack", "fgsm", "--out", "odd", cwd=place)  # fmt: skip
    assert done.returncode == 1
    shown = call("table", "odd", "--layout", "budgets", cwd=place)
    assert shown.returncode == 0
    assert "[/bold]" in shown.stdout.replace("\n", "")


def test_a_torn_chunk_is_made_again(place):
    arguments = ("eval", "--checkpoint", "sym.safetensors", "--data", "folder:pictures", "--attack", "fgsm", "--batch-size", "7",
                 "--out", "mended")  # fmt: skip
    assert call(*arguments, cwd=place).returncode == 0
    before = Run.open(place / "mended").rows
    file = Run.open(place / "mended").chunk_path(before["model"][0], "fgsm", 7)
    file.write_bytes(file.read_bytes()[:500])
    torn = call("report", "mended", "--out", "m.md", cwd=place)
    assert (torn.returncode, "0000007.parquet: torn" in torn.stderr) == (2, True)
    assert call(*arguments, cwd=place).returncode == 0
    assert Run.open(place / "mended").rows.equals(before)


def test_a_negative_seed_is_a_usage_error(place):
    done = call(*EVAL, "--seed", "-1", cwd=place)
    assert (done.returncode, "--seed" in done.stderr) == (2, True)


def test_lists(place):
    text = call("models").stdout
    for name in ("rpc-symvit-2iter-all", "RPC-SymViT-micro (6iter/layer1)", "symvit-base", "timm:NAME"):
        assert name in text
    text = call("attacks").stdout
    for name in ("clean", "pgd-paper", "fgsm", "corruptions", "normalised space, not clipped"):
        assert name in text
    text = call("datasets").stdout
    for name in ("fashion-mnist", "MIT licence", "digits", "folder"):
        assert name in text
    assert all(len(line.split()) > 2 for line in text.splitlines())


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
