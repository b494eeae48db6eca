import re

import pytest

from robustkpca import report
from robustkpca.errors import RunError
from robustkpca.evaluation import evaluate
from robustkpca.settings import RPCSettings
from robustkpca.spec import Suite, load_suite
from tests.conftest import tiny


@pytest.fixture
def run(noise_samples, tmp_path):
    data = {"name": "some", "version": 1, "title": "Some | corruptions", "corruptions": ["fog", "contrast"]}
    suites = [load_suite("fgsm"), Suite.parse(data, "suite")]
    models = [tiny(), tiny("rpc-symvit", RPCSettings(iterations=2, lam=1.0))]
    return evaluate(models, noise_samples, suites, tmp_path / "run")


def test_the_same_run_gives_the_same_bytes(run, tmp_path):
    first = report.write([run], tmp_path / "a" / "r.md")
    second = report.write([type(run).open(run.path)], tmp_path / "b" / "r.md")
    assert [p.name for p in first] == ["r.md", "1-fgsm.png", "1-some.png"]
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]


def test_it_says_what_decides_its_numbers(run, tmp_path):
    text = report.write([run], tmp_path / "r.md")[0].read_text()
    plain = text.replace("\\", "")
    for fact in (
        "L-inf", "8/255 (0.0314)", "pixel space", "clipped to [0, 1]", "true labels", "n = 30", run.request["data"]["ids"],
        run.request["models"][0]["weights"], run.request["models"][1]["weights"], "float32", "torch", "McNemar", "Wilson",
        "not the released ImageNet-C", "| seed | 0 |", "| layer1 |",
    ):  # fmt: skip
        assert fact in plain, fact


def test_every_image_exists_and_every_table_is_straight(run, tmp_path):
    path = report.write([run, run], tmp_path / "my report.md")[0]
    text = path.read_text()
    images = re.findall(r"!\[.*?\]\(<(.*?)>\)", text)
    assert len(images) == 4
    assert all((path.parent / image).is_file() for image in images)
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.M):
        assert len({line.replace("\\|", "").count("|") for line in block.splitlines()}) == 1


def test_cells_without_a_figure_are_announced(run, tmp_path):
    for path in (run.path / "rows" / "0" / "fgsm").glob("*.parquet"):
        path.unlink()
    text = report.write([type(run).open(run.path)], tmp_path / "r.md")[0].read_text()
    assert "**3 of 28 cells have no figure**" in text
    assert "not run" in text


def test_no_permission(run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write"):
        report.write([run], tmp_path / "file" / "r.md")
