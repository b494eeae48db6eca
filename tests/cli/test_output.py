"""What commands print for programs, for scripts, and in logs."""

import json

import pytest

from robustkpca.runs.run import Run
from robustkpca.runtime import progress
from tests.helpers.cli import BOTH, call


@pytest.fixture(scope="module")
def asked(place):
    """A run whose result was asked for as JSON."""
    done = call("eval", *BOTH, "--attack", "fgsm", "--out", "json", "--json", cwd=place)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_eval_as_json(asked, place):
    run = Run.open(place / "json")
    assert (asked["run"], asked["id"], asked["complete"]) == ("json", run.manifest.fingerprint, True)
    assert [m["label"] for m in asked["models"]] == run.models
    assert [m["weights"] for m in asked["models"]] == [m.weights for m in run.request.models]
    for row in asked["results"]:
        assert row["n"] == run.n
        assert row["accuracy"] == row["correct"] / row["n"]
    assert {(r["model"], r["attack"]) for r in asked["results"]} == {
        (m, a) for m in run.models for a in ("clean", "fgsm")
    }
    assert {r["model"] for r in asked["comparison"]} == set(run.models[1:])
    assert {f["level"] for f in asked["findings"]} <= {"pass", "warn", "fail"}
    assert "L-inf" in asked["suites"]["fgsm"]


def test_eval_in_quiet_says_where_the_rows_are(asked, place):
    done = call("eval", *BOTH, "--attack", "fgsm", "--out", "json", "--quiet", cwd=place)
    assert done.stdout.startswith("rows and receipt: json  (")
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""
    assert (place / "json" / "receipt.txt").is_file()


def test_check_prints_figures_and_json(asked, place):
    call("check", "json", "--baseline", "json.parquet", "--update-baseline", cwd=place)
    done = call("check", "json", "--baseline", "json.parquet", cwd=place)
    assert (done.returncode, "holds: 8 cells compared" in done.stdout) == (0, True)
    assert done.stdout.count("+0.0") >= 8
    quiet = call("check", "json", "--baseline", "json.parquet", "-q", cwd=place)
    assert quiet.stdout.count("\n") == 1
    verdict = json.loads(call("check", "json", "--baseline", "json.parquet", "--json", cwd=place).stdout)
    assert (verdict["verdict"], verdict["code"], verdict["reasons"]) == ("holds", 0, [])
    assert [cell["change"] for cell in verdict["cells"]] == [0.0] * 8
    broken = call("check", "none", "--baseline", "json.parquet", "--json", cwd=place)
    assert broken.returncode == 2
    assert json.loads(broken.stdout)["reasons"] == [
        "run none: expected a run folder with run.json, or an exported .parquet file"
    ]


def test_progress_in_a_log_is_lines(place, monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 0.0)
    done = call("eval", *BOTH, "--attack", "fgsm", "--batch-size", "2", "--out", "log", cwd=place)
    assert done.returncode == 0
    lines = [line for line in done.stderr.splitlines() if " left" in line]
    assert any("fgsm: " in line and " %, 0:" in line for line in lines)
    assert "━" not in done.stderr


@pytest.mark.parametrize("command", ["eval", "check", "train", "table"])
def test_help_has_an_example(command):
    text = " ".join(call(command, "--help").stdout.split())
    assert f"Example: robustkpca {command} " in text
