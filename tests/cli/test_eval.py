"""`eval` as a person meets it: what it prints, what it keeps, and what bad input does."""

import json
import os
import shutil
from importlib import metadata

import pytest
import torch

from robustkpca.runs.run import Run
from tests.helpers.cli import BOTH, call, start


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


def test_findings_stand_under_the_table_of_eval(place):
    (place / "weak.toml").write_text(
        'name = "weak"\nversion = 1\ntitle = "t"\n[threat]\nnorm = "linf"\neps = ["64/255"]\n'
        'space = "pixel"\nclip = true\nlabels = "true"\n[[attack]]\nname = "pgd"\nmethod = "PGD"\n'
        "parameters = { steps = 1, alpha = 1e-6, random_start = false }\n"
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


def test_a_torn_picture_stops_with_its_path_and_keeps_what_is_done(place):
    shutil.copytree(place / "pictures", place / "torn")
    path = place / "torn" / "c7" / "1.png"
    path.write_bytes(path.read_bytes()[:200])
    arguments = ("eval", "--checkpoint", "sym.safetensors", "--data", "folder:torn", "--attack", "fgsm",
                 "--batch-size", "4", "--out", "torn-run")  # fmt: skip
    done = call(*arguments, cwd=place)
    assert done.returncode == 2
    assert "c7/1.png: cannot be decoded" in done.stderr
    assert len(list((place / "torn-run").rglob("*.parquet"))) == 6
    shutil.copy(place / "pictures" / "c7" / "1.png", path)  # mended data are other data: kept apart
    again = call(*arguments, cwd=place)
    assert (again.returncode, "data.content" in again.stderr) == (2, True)
    assert call(*arguments[:-1], "mended-run", cwd=place).returncode == 0


@pytest.mark.slow
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


def test_deterministic_mode_works_with_resampled_position_embeddings(place):
    done = call("eval", "--checkpoint", "sym.safetensors", "--img-size", "42", "--data", "folder:pictures",
                "--attack", "fgsm", "--deterministic", "--out", "same", cwd=place)  # fmt: skip
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
    assert (refused.returncode, "--force for results that are marked" in " ".join(refused.stderr.split())) == (2, True)
    forced = call(*rpc, "--force", "--out", "forced", cwd=place)
    assert "attacked by force with gradients in bfloat16" in " ".join(forced.stdout.split())
    assert "fail gradient-precision" in forced.stdout


def test_one_checkpoint_under_several_iterations(place):
    done = call("eval", "--checkpoint", "rpc.safetensors", "--iterations", "1,2,4", "--layers", "all", "--data",
                "folder:pictures", "--attack", "fgsm", "--eps", "1/255", "--out", "transfer", cwd=place)  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = Run.open(place / "transfer")
    changed = {1: ", iterations 1 (file: 2)", 2: "", 4: ", iterations 4 (file: 2)"}
    assert found.models == [
        f"RPC-SymViT-w16d2h2 ({n}iter/all){text}, layers all (file: first)" for n, text in changed.items()
    ]
    assert len({m.weights for m in found.request.models}) == 1


def test_of_several_models_the_loadable_are_evaluated(place):
    (place / "torn.pth").write_bytes((place / "plain.pth").read_bytes()[:2000])
    done = call("eval", "--model", "symvit", "--checkpoint", "sym.safetensors", "--model", "vit", "--checkpoint",
                "torn.pth", "--data", "folder:pictures", "--attack", "fgsm", "--out", "sweep", cwd=place)  # fmt: skip
    assert done.returncode == 1
    assert "no result: vit" in done.stderr
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


def test_a_torn_chunk_is_made_again(place):
    arguments = ("eval", "--checkpoint", "sym.safetensors", "--data", "folder:pictures", "--attack", "fgsm",
                 "--batch-size", "7", "--out", "mended")  # fmt: skip
    assert call(*arguments, cwd=place).returncode == 0
    before = Run.open(place / "mended").rows
    file = place / "mended" / "rows" / "0" / "fgsm" / "0000007.parquet"
    file.write_bytes(file.read_bytes()[:500])
    torn = call("report", "mended", "--out", "m.md", cwd=place)
    assert (torn.returncode, "0000007.parquet: torn" in torn.stderr) == (2, True)
    assert call(*arguments, cwd=place).returncode == 0
    assert Run.open(place / "mended").rows.equals(before)


def test_eps_goes_to_suites_that_have_one():
    from robustkpca.cli.eval import _suites
    from robustkpca.errors import SpecError

    pgd, cw = _suites(["pgd", "cw"], None, ["2/255"], None)
    assert [*map(str, pgd.budgets)] == ["2/255"]
    assert (cw.threat.budget_word, [*map(str, cw.budgets)]) == ("confidence", ["0"])
    with pytest.raises(SpecError, match="this one has confidence 0"):
        _suites(["cw"], None, ["2/255"], None)
