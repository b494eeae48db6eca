"""What CI systems read of a verdict, and the GitHub action that writes it."""

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import pytest
import yaml
from typer.main import get_command

from robustkpca.cli.app import app
from robustkpca.datasets.sources import load_samples
from robustkpca.evaluation.loop import evaluate
from robustkpca.gate import ci
from robustkpca.gate.check import COLUMNS, HOLDS, REGRESSED, Verdict
from robustkpca.models.checkpoints import load_classifier
from robustkpca.suites.suite import load_suite

ROOT = Path(__file__).parents[2]
ACTION = ROOT / ".github" / "actions" / "check" / "action.yml"
ACTION_YAML = yaml.safe_load(ACTION.read_text())
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


@pytest.fixture(scope="module")
def baseline(tmp_path_factory):
    folder = tmp_path_factory.mktemp("baseline")
    suite = load_suite("fgsm").with_eps(["8/255"])
    run = evaluate([load_classifier("symvit")], load_samples("fashion-mnist", limit=10), [suite], folder / "run")
    run.export(folder / "base.parquet")
    return folder / "base.parquet"


def _action_step(folder: Path, baseline: Path, evaluated: str, checked: str = "") -> subprocess.CompletedProcess[str]:
    """The step that evaluates, as GitHub runs it: in a workspace with modules that nobody asked for."""
    step = next(s for s in ACTION_YAML["runs"]["steps"] if "gate.py" in s.get("run", ""))
    inputs = {name: str(spec.get("default", "")) for name, spec in ACTION_YAML["inputs"].items()}
    inputs |= {"eval": evaluated, "check": checked, "baseline": str(baseline), "junit": "out/junit.xml"}
    given = {
        name: inputs[source.removeprefix("${{ inputs.").removesuffix(" }}")] for name, source in step["env"].items()
    }
    workspace = folder / "workspace"
    for module in ("shlex.py", "subprocess.py", "pip/__init__.py", "robustkpca/__init__.py", "torch.py"):
        (workspace / module).parent.mkdir(parents=True, exist_ok=True)
        (workspace / module).write_text("open('taken', 'w')\nraise SystemExit('a module of the workspace was run')\n")
    environment = os.environ | given | {
        "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "GITHUB_ACTIONS": "true",
        "GITHUB_STEP_SUMMARY": str(folder / "summary.md"), "GITHUB_ACTION_PATH": str(ACTION.parent),
    }  # fmt: skip
    done = subprocess.run(["bash", "-c", step["run"]], cwd=workspace, env=environment, capture_output=True, text=True)
    assert not (workspace / "taken").exists()
    return done


FGSM = "--model symvit --attack fgsm --eps 8/255 --limit 10 --data fashion-mnist --seed '0'"


@pytest.mark.slow
def test_the_action_holds_and_makes_a_report(tmp_path, baseline):
    done = _action_step(tmp_path, baseline, FGSM)
    assert done.returncode == 0, done.stderr
    assert "### robustkpca: holds" in (tmp_path / "summary.md").read_text()
    workspace = tmp_path / "workspace"
    assert ElementTree.parse(workspace / "out" / "junit.xml").getroot().get("failures") == "0"
    assert "<html" in (workspace / "robustkpca-check" / "report" / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("evaluated", "checked", "said"),
    [
        (FGSM, "--tolerance nan", "--tolerance: expected points from 0 to 100, got nan"),
        ("--checkpoint missing.safetensors --attack fgsm", "", "robustkpca-check/run"),
        (FGSM.replace("--limit 10", "--limit 9"), "", "other number of samples: 9 here, 10 in the baseline"),
    ],
)
def test_the_action_always_reports(tmp_path, baseline, evaluated, checked, said):
    done = _action_step(tmp_path, baseline, evaluated, checked)
    assert done.returncode == 2, done.stderr
    assert said in (tmp_path / "summary.md").read_text()
    assert "::error title=robustkpca%3A not comparable::" in done.stdout
    assert ElementTree.parse(tmp_path / "workspace" / "out" / "junit.xml").getroot().get("failures") == "1"


@pytest.mark.parametrize("name", ["eval", "check"])
def test_the_action_refuses_an_open_quote_and_a_used_folder(tmp_path, baseline, name):
    options = {"evaluated": FGSM, "checked": ""} | {f"{name}ed".replace("evaled", "evaluated"): "--tolerances 'a b"}
    done = _action_step(tmp_path, baseline, **options)
    assert (done.returncode, done.stderr) == (2, "")
    assert f"::error title=robustkpca::{name}: expected options as in a shell, got" in done.stdout
    (tmp_path / "workspace" / "robustkpca-check").mkdir()
    (tmp_path / "workspace" / "robustkpca-check" / "mine.txt").write_text("mine")
    done = _action_step(tmp_path, baseline, FGSM)
    assert done.returncode == 2
    assert "expected an empty folder or none" in done.stdout
    assert (tmp_path / "workspace" / "robustkpca-check" / "mine.txt").exists()


def test_the_action_installs_its_own_checkout_and_runs_on_any_bash():
    steps = ACTION_YAML["runs"]["steps"]
    install = next(s for s in steps if s["name"] == "Install")
    assert (ACTION.parent / "../../.." / "pyproject.toml").resolve() == ROOT / "pyproject.toml"
    assert "${WHAT:-$GITHUB_ACTION_PATH/../../..}" in install["run"]
    scripts = "\n".join(s.get("run", "") for s in steps)
    assert "mapfile" not in scripts  # macOS has bash 3.2
    assert "python -m" not in scripts
    assert "python -c" not in scripts  # they would import from the workspace


def test_templates_name_options_that_exist():
    """Each option and command in the templates for GitLab, Slurm and pre-commit is one of the command line."""
    gitlab = yaml.safe_load((ACTION.parent / "gitlab-ci.yml").read_text())["robustkpca"]
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    sbatch = (ACTION.parent / "slurm.sbatch").read_text()
    assert subprocess.run(["bash", "-n", ACTION.parent / "slurm.sbatch"]).returncode == 0
    lines = [
        *gitlab["script"],
        *gitlab["after_script"],
        f"{hook['entry']} {' '.join(hook['args'])}",
        *sbatch.splitlines(),
    ]
    used = re.findall(r"robustkpca (eval|check|report)\b([^|\n]*)", "\n".join(lines))
    assert {command for command, _ in used} == {"eval", "check", "report"}
    for command, rest in used:
        known = {option for p in get_command(app).commands[command].params for option in p.opts}
        assert set(re.findall(r"(?<!\S)--[a-z-]+", rest)) <= known
    assert {"eval", "check"} <= ACTION_YAML["inputs"].keys()
