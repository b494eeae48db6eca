import json

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from robustkpca.errors import RunError
from robustkpca.evaluation.loop import evaluate
from robustkpca.runs.files import write_table
from robustkpca.runs.folder import RunFolder, chunk_ranges
from robustkpca.runs.request import differences, fingerprint
from robustkpca.runs.run import Run
from robustkpca.runs.schema import schema_of
from robustkpca.suites.cell import AttackId
from robustkpca.suites.suite import load_suite
from tests.helpers.oracles import tiny


@pytest.fixture
def run(noise_samples, tmp_path):
    suites = [load_suite("fgsm").with_eps(["1/255", "8/255"])]
    return evaluate([tiny(), tiny("vit")], noise_samples, suites, tmp_path / "run", batch_size=7)


def chunk(run, first):
    """The file with the rows of the first model under fgsm from this sample on."""
    return RunFolder(run.path, run.request).rows(run.models[0], AttackId("fgsm"), first)


def test_rows_come_in_the_order_asked_for(run, noise_samples):
    assert list(dict.fromkeys(run.rows["model"])) == run.models
    cells = run.rows[["perturbation", "budget"]].drop_duplicates().to_numpy().tolist()
    assert cells == [["clean", ""], ["fgsm", "1/255"], ["fgsm", "8/255"]]
    for _, part in run.rows.groupby(["model", "perturbation", "budget"]):
        assert part["sample"].tolist() == noise_samples.ids


def test_export_is_the_run_in_one_file(run, tmp_path):
    run.export(tmp_path / "baseline.parquet")
    other = Run.open(tmp_path / "baseline.parquet")
    assert other.manifest == run.manifest
    pd.testing.assert_frame_equal(other.rows, run.rows)
    assert pd.read_parquet(tmp_path / "baseline.parquet").shape == run.rows.shape
    assert Run.open(run.path / "run.json").manifest == run.manifest


def test_a_torn_chunk_is_an_error_and_not_a_smaller_run(run):
    file = chunk(run, 7)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(RunError, match="torn"):
        _ = Run.open(run.path).rows


def test_a_missing_chunk_shows(run):
    chunk(run, 7).unlink()
    texts = {(s.model, str(s.cell.attack)): s.text for s in Run.open(run.path).statuses}
    assert texts[run.models[0], "fgsm"] == "incomplete 23/30"
    assert texts[run.models[1], "fgsm"] == "complete"


def test_doubled_and_strange_rows_are_refused(run):
    file, other = (chunk(run, first) for first in (7, 0))
    file.write_bytes(other.read_bytes())
    with pytest.raises(RunError, match="twice"):
        _ = Run.open(run.path).rows
    table = pa.Table.from_pandas(
        pq.read_table(file).to_pandas().assign(perturbation="mine"), schema_of(run.task), preserve_index=False
    )
    with file.open("wb") as new:
        write_table(new, table, {})
    with pytest.raises(RunError, match="does not name"):
        _ = Run.open(run.path).rows
    pq.write_table(table, file)
    with pytest.raises(RunError, match="changed by hand"):
        _ = Run.open(run.path).rows


def test_files_that_nobody_asked_for_do_not_count(run):
    before, progress = run.rows, run.progress
    file = chunk(run, 7)
    (file.parent / "0000099.parquet").write_bytes(file.read_bytes())
    (file.parents[2] / "9" / "fgsm").mkdir(parents=True)
    (file.parents[2] / "9" / "fgsm" / file.name).write_bytes(file.read_bytes())
    pd.testing.assert_frame_equal(Run.open(run.path).rows, before)
    assert Run.open(run.path).progress == progress


def test_a_changed_run_json_is_refused(run):
    path = run.path / "run.json"
    manifest = json.loads(path.read_text())
    manifest["request"]["seed"] = 7
    path.write_text(json.dumps(manifest))
    with pytest.raises(RunError, match="changed by hand"):
        Run.open(run.path)


@pytest.mark.parametrize("content", ["", "[]", '{"format": 1}', '{"format": 2}', "null", "{"])
def test_files_that_are_no_run(tmp_path, content):
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(RunError, match="cannot be read"):
        Run.open(tmp_path)


@pytest.mark.parametrize("content", ["{}", '{"format": 3}'])
def test_formats_of_another_time(tmp_path, content):
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(RunError, match=r"expected format 1 or 2, got (None|3)"):
        Run.open(tmp_path)


def test_nothing_there(tmp_path):
    with pytest.raises(RunError, match="expected a run folder"):
        Run.open(tmp_path / "none")
    (tmp_path / "text.parquet").write_text("hello")
    with pytest.raises(RunError, match="cannot be read"):
        Run.open(tmp_path / "text.parquet")
    pd.DataFrame({"a": [1]}).to_parquet(tmp_path / "other.parquet")
    with pytest.raises(RunError, match="cannot be read"):
        Run.open(tmp_path / "other.parquet")


def test_fingerprint_and_differences():
    a = {"x": {"y": [1, 2]}, "z": 1}
    assert fingerprint(a) == fingerprint({"z": 1, "x": {"y": [1, 2]}})
    assert fingerprint(a) != fingerprint({"x": {"y": [1, 3]}, "z": 1})
    assert differences(a, {"x": {"y": [1, 3]}, "z": 1}) == ["x.y[1]: 2 here, 3 there"]
    with pytest.raises(ValueError, match="JSON"):
        fingerprint({"x": float("nan")})


def test_chunks_cover_each_sample_once():
    assert [list(r) for r in chunk_ranges(5, 2)] == [[0, 1], [2, 3], [4]]
