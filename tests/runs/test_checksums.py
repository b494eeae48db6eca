"""What decides a verdict is under a checksum: the request, the records beside the rows, and the rows themselves."""

import json
import shutil

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from robustkpca.errors import RunError
from robustkpca.evaluation.loop import evaluate
from robustkpca.gate.check import HOLDS, INVALID, check, faults
from robustkpca.runs.files import sealed_text, table_checksum
from robustkpca.runs.run import Run
from robustkpca.suites.suite import load_suite
from tests.helpers.oracles import DATA, noise, tiny

FGSM = [load_suite("fgsm").with_eps(["8/255"])]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return evaluate([tiny()], noise(), FGSM, tmp_path_factory.mktemp("made") / "run", batch_size=15)


@pytest.fixture
def folder(made, tmp_path):
    shutil.copytree(made.path, tmp_path / "run")
    return tmp_path / "run"


def changed(file, change):
    """Change the JSON of a file as an editor would, and leave its checksum as it is."""
    plain = json.loads(file.read_text())
    change(plain)
    file.write_text(json.dumps(plain))


def test_a_run_that_nobody_touched_holds(made, folder):
    verdict = check(Run.open(folder), made)
    assert (verdict.code, verdict.lines, verdict.notes) == (HOLDS, [], [])


@pytest.mark.parametrize("name", ["model.json", "0000000.json", "0000015.json"])
def test_a_changed_record_is_refused_and_made_again(made, folder, name):
    file = folder / "records" / "0" / name
    before = json.loads(file.read_text())
    field = "health" if name == "model.json" else "times"
    changed(file, lambda plain: plain[field].clear())
    with pytest.raises(RunError, match=rf"{name}: changed by hand or damaged"):
        Run.open(folder)
    evaluate([tiny()], noise(), FGSM, folder, batch_size=15)
    check_again = check(Run.open(folder), made)
    assert check_again.code == HOLDS
    if field == "health":
        assert json.loads(file.read_text()) == before


def test_a_record_without_its_checksum_is_refused(folder):
    changed(folder / "records" / "0" / "model.json", lambda plain: plain.pop("checksum"))
    with pytest.raises(RunError, match="changed by hand or damaged"):
        Run.open(folder)


@pytest.mark.parametrize("content", [None, "", '{"model"'])
def test_a_model_that_ran_and_has_no_health_is_a_fault(made, folder, content):
    file = folder / "records" / "0" / "model.json"
    file.unlink() if content is None else file.write_text(content)
    verdict = check(Run.open(folder), made)
    assert verdict.code == INVALID
    assert verdict.reasons == [f"here: {made.models[0]}: no record of its health; the command that made the run "
                               "makes it again"]  # fmt: skip
    assert check(made, Run.open(folder)).code == INVALID
    assert faults(evaluate([tiny()], noise(), FGSM, folder, batch_size=15)) == []


def test_health_that_is_empty_is_a_fault_in_runs_without_checksums(made, folder):
    """Such as were made before there were any: they read as ever, and check says that they have none."""
    changed(folder / "run.json", lambda plain: [plain.pop(name) for name in ("sealed", "checksum")])
    for file in folder.glob("records/*/*.json"):
        changed(file, lambda plain: plain.pop("checksum"))
    for file in folder.glob("rows/*/*/*.parquet"):
        pq.write_table(pq.read_table(file).replace_schema_metadata(), file, write_page_checksum=True)
    verdict = check(Run.open(folder), made)
    assert verdict.code == HOLDS
    assert "begun before records had checksums" in verdict.notes[0]
    changed(folder / "records" / "0" / "model.json", lambda plain: plain["health"].clear())
    assert check(Run.open(folder), made).code == INVALID


@pytest.mark.parametrize("change", [
    lambda plain: plain["environment"].clear(),
    lambda plain: plain["request"].update(searches={}),
    lambda plain: plain.update(sealed=False),
    lambda plain: plain.pop("checksum"),
])  # fmt: skip
def test_all_of_run_json_is_under_the_checksum(folder, change):
    changed(folder / "run.json", change)
    with pytest.raises(RunError, match="changed by hand or damaged"):
        Run.open(folder)


def test_rows_changed_by_another_program_are_refused(folder):
    file = folder / "rows" / "0" / "fgsm" / "0000000.parquet"
    table = pq.read_table(file)
    frame = table.to_pandas()
    frame["correct"] = True
    new = pa.Table.from_pandas(frame, table.schema, preserve_index=False)
    pq.write_table(new.replace_schema_metadata(table.schema.metadata), file, write_page_checksum=True)
    with pytest.raises(RunError, match="changed by hand"):
        _ = Run.open(folder).rows


def test_records_of_an_exported_file_are_under_its_checksum(made, tmp_path):
    made.export(tmp_path / "base.parquet")
    table = pq.read_table(tmp_path / "base.parquet")
    plain = json.loads(table.schema.metadata[b"robustkpca"])
    plain["records"][0]["health"] = {}
    metadata = {**table.schema.metadata, b"robustkpca": json.dumps(plain)}
    pq.write_table(table.replace_schema_metadata(metadata), tmp_path / "other.parquet", write_page_checksum=True)
    with pytest.raises(RunError, match="changed by hand"):
        Run.open(tmp_path / "other.parquet")


@pytest.mark.parametrize("kind", ["exported", "chunk"])
def test_no_bit_flip_changes_a_column_in_silence(made, folder, tmp_path, kind):
    """Page checksums leave the table of contents open, by which one column can be read as another."""
    made.export(tmp_path / "base.parquet")
    file = tmp_path / "base.parquet" if kind == "exported" else folder / "rows" / "0" / "fgsm" / "0000000.parquet"
    place = file if kind == "exported" else folder
    whole, size = file.read_bytes(), file.stat().st_size
    draws = np.random.default_rng(0)
    noticed = 0
    for bit in draws.choice(size * 8, 400, replace=False):
        content = bytearray(whole)
        content[bit // 8] ^= 1 << int(bit % 8)
        file.write_bytes(content)
        try:
            run = Run.open(place)
            rows = run.rows
        except RunError:
            noticed += 1
            continue
        pd.testing.assert_frame_equal(rows, made.rows)
        assert (run.request, run.health, run.summary.failures) == (made.request, made.health, made.summary.failures)
    assert noticed > 200


def test_the_checksum_of_a_table_is_of_what_it_says():
    columns = {"s": ["a", None, "bc"], "b": [True, None, False], "f": [1.0, None, float("nan")], "n": [None] * 3}
    table = pa.table(columns, schema=pa.schema([("s", pa.string()), ("b", pa.bool_()), ("f", pa.float32()),
                                                ("n", pa.int64())]))  # fmt: skip
    parts = pa.concat_tables([table.slice(0, 1), table.slice(1)])
    assert table_checksum(parts) == table_checksum(table)
    others = [
        {**columns, "s": ["ab", None, "c"]}, {**columns, "s": ["a", "", "bc"]}, {**columns, "b": [True, False, False]},
        {**columns, "f": [1.0, 0.0, float("nan")]}, {**columns, "f": [1.0, None, None]},
        {**columns, "n": [None, 0, None]},
    ]  # fmt: skip
    checksums = {table_checksum(pa.table(other, schema=table.schema)) for other in others}
    checksums |= {table_checksum(table.rename_columns(["s", "b", "n", "f"])), table_checksum(table.slice(0, 2))}
    assert len(checksums | {table_checksum(table)}) == 9


def test_sealed_text_is_the_same_for_the_same_data():
    assert sealed_text({"a": 1.5, "b": [None, "ä"]}) == sealed_text({"b": [None, "ä"], "a": 1.5})


def test_the_files_of_before_read(tmp_path):
    """Format 1, as committed: no checksums, health as it was."""
    run = Run.open(DATA / "format1-run.parquet")
    assert not run.manifest.sealed
    assert faults(run) == []
