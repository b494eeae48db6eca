"""`report`, and `check` on the same run."""

import pytest

from robustkpca.runs.records import Record
from robustkpca.runs.run import Run
from robustkpca.runs.store import RunStore
from robustkpca.suites.cell import AttackId
from tests.helpers.cli import BOTH, call


@pytest.mark.slow
def test_report_and_check(run, place):
    assert call("report", "run", "--out", "r.md", cwd=place).returncode == 0
    assert (place / "r.md").read_text().startswith("# Robustness report")
    assert (place / "r_files" / "1-pgd.svg").is_file()
    written = call("check", "run", "--baseline", "base.parquet", "--update-baseline", cwd=place)
    assert written.returncode == 0, written.stderr
    same = call("check", "run", "--baseline", "base.parquet", cwd=place)
    assert (same.returncode, "holds: 14 cells" in same.stdout) == (0, True)
    other = call("eval", *BOTH, "--attack", "pgd", "--attack", "fgsm", "--seed", "1", "--out", "other", cwd=place)
    assert other.returncode == 0
    unlike = call("check", "other", "--baseline", "base.parquet", cwd=place)
    assert (unlike.returncode, "other seed" in unlike.stderr) == (2, True)
    lost = Run.open(place / "run")
    better = RunStore.start(place / "better", lost.request, lost.manifest.environment)
    for model, health in lost.health.items():
        better.write_record(Record(model=model, health=health))
    for (model, attack), part in lost.rows.groupby(["model", "perturbation"], sort=False):
        right = part.assign(correct=True, prediction=part["label"])
        better.write_rows(model, AttackId.parse(attack), 0, right)
    fallen = call("check", "run", "--baseline", "better", cwd=place)
    assert (fallen.returncode, "regressed: " in fallen.stderr) == (1, True)


def test_report_as_one_page(run, place):
    done = call("report", "run", "--out", "page.html", cwd=place)
    assert done.returncode == 0
    assert (place / "page.html").read_text().startswith("<!DOCTYPE html>")
