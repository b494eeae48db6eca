"""What CI systems read of a verdict, and the GitHub action that writes it."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import pytest

from robustkpca.datasets.sources import load_samples
from robustkpca.evaluation.loop import evaluate
from robustkpca.gate import ci
from robustkpca.gate.check import COLUMNS, HOLDS, REGRESSED, Verdict
from robustkpca.models.checkpoints import load_classifier
from robustkpca.suites.suite import load_suite

ACTION = Path(__file__).parents[2] / ".github" / "actions" / "check" / "action.yml"
ROWS = [
    ["a|b<c>", "clean", "", 100, 90.0, 90.0, 0.0, -1.0, 1.0, 1.0, 1.0, "holds"],
    ["a|b<c>", "pgd", "8/255", 100, 60.0, 50.0, -10.0, -15.0, -5.0, 0.001, 1.0, "regressed"],
]


@pytest.fixture
def verdict() -> Verdict:
    return Verdict(
        REGRESSED,
        pd.DataFrame(ROWS, columns=COLUMNS),
        ["a|b<c>, pgd: 100 % worse\nsecond line"],
        notes=["other device"],
    )


def test_junit_has_a_case_for_each_cell(verdict):
    suite = ElementTree.fromstring(ci.junit(verdict))
    cases = {(c.get("classname"), c.get("name")): [e.tag for e in c] for c in suite}
    assert cases == {
        ("a|b<c>", "clean"): [],
        ("a|b<c>", "pgd 8/255"): ["failure"],
        ("robustkpca", "verdict"): ["failure"],
    }
    assert (suite.get("tests"), suite.get("failures")) == ("3", "2")
    assert "second line" in suite[2][0].text
    invalid = ElementTree.fromstring(ci.junit(Verdict.invalid(["torn \x00 file"])))
    assert (invalid.get("tests"), invalid.get("failures")) == ("1", "1")
    fine = ElementTree.fromstring(ci.junit(Verdict(HOLDS, pd.DataFrame(ROWS[:1], columns=COLUMNS))))
    assert (fine.get("tests"), fine.get("failures")) == ("2", "0")


def test_annotations_are_one_line_each(verdict):
    lines = ci.github_annotations(verdict)
    assert lines[0] == "::error title=robustkpca%3A regressed::regressed: a|b<c>, pgd: 100 %25 worse%0Asecond line"
    assert lines[1] == "::notice title=robustkpca::other device"


def test_the_summary_has_the_bad_cells_first(verdict):
    lines = ci.summary(verdict).splitlines()
    assert lines[0] == "### robustkpca: regressed"
    table = [line for line in lines if line.startswith("|")]
    assert "pgd 8/255" in table[2]
    assert "-10.0 (-15.0 to -5.0)" in table[2]
    assert len({line.replace("\\|", "").count("|") for line in table}) == 1
    assert "a\\|b\\<c\\>" in table[2]


@pytest.mark.slow
@pytest.mark.parametrize(("tolerance", "code"), [("", 0), ("--tolerance nan", 2)])
def test_the_action_runs(tmp_path, tolerance, code):
    """The action's own script, with the environment GitHub gives it."""
    yaml = pytest.importorskip("yaml")
    action = yaml.safe_load(ACTION.read_text())
    assert action["runs"]["using"] == "composite"
    step = action["runs"]["steps"][-1]
    for name, source in step["env"].items():
        assert source == "${{ inputs." + name.lower() + " }}"
        assert name.lower() in action["inputs"]
    options = "--model symvit --attack fgsm --eps 8/255 --limit 10 --data fashion-mnist --seed '0'"
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
        "RUNNER_TEMP": str(tmp_path), "EVAL": options,
        "CHECK": tolerance, "BASELINE": str(tmp_path / "base.parquet"), "JUNIT": str(tmp_path / "out" / "junit.xml"),
    }  # fmt: skip
    evaluate([load_classifier("symvit")], load_samples("fashion-mnist", limit=10),
             [load_suite("fgsm").with_eps(["8/255"])], tmp_path / "base").export(tmp_path / "base.parquet")  # fmt: skip
    done = subprocess.run(["bash", "-c", step["run"]], env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    if code == 0:
        assert "### robustkpca: holds" in (tmp_path / "summary.md").read_text()
        assert ElementTree.parse(tmp_path / "out" / "junit.xml").getroot().get("failures") == "0"
    else:
        assert "--tolerance: expected points from 0 to 100, got nan" in done.stderr
        assert "not comparable: --tolerance: expected points" in (tmp_path / "summary.md").read_text()
        assert "::error title=robustkpca%3A not comparable::" in done.stdout
        assert ElementTree.parse(tmp_path / "out" / "junit.xml").getroot().get("failures") == "1"
