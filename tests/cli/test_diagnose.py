"""`diagnose`: a verdict of every rule, and its exit code."""

import pytest

from robustkpca.diagnosis.findings import RULES
from robustkpca.runs.run import Run
from tests.helpers.cli import call


@pytest.mark.slow
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
        if not rule.startswith("autoattack") and rule != "sparse-part":
            assert f"{rule}, SymViT-w16d2h2: " in said, rule
    assert "not judged, SymViT-w16d2h2: autoattack-square, autoattack-standard" in said
    failed = " 0 fail" not in said
    assert done.returncode == (1 if failed else 0), done.stderr
    assert [str(b) for b in Run.open(place / "battery").suites[0].budgets] == ["0", "2/255", "1"]
    again = call("diagnose", *flags, cwd=place)
    assert again.stdout == done.stdout
