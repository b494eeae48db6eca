"""Input without end or without sense is one line, in a moment, whatever it is."""

import json
import shutil
import time
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from robustkpca.config import read_toml
from robustkpca.errors import RunError, SpecError
from robustkpca.evaluation.loop import evaluate
from robustkpca.gate.check import INVALID, check
from robustkpca.runs.files import sealed_text
from robustkpca.runs.request import Request
from robustkpca.runs.run import Run
from robustkpca.suites.budget import eps_budget, exact
from robustkpca.suites.suite import load_suite
from robustkpca.train.recipes import load_recipe, parse_settings
from tests.helpers.oracles import noise, tiny


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    suites = [load_suite("fgsm").with_eps(["8/255"])]
    return evaluate([tiny()], noise(), suites, tmp_path_factory.mktemp("made") / "run", batch_size=10)


@pytest.fixture
def quick():
    """No test takes longer than this, however large the numbers are that it is given."""
    started = time.monotonic()
    yield
    assert time.monotonic() - started < 10


def one_line(error):
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600


def forged(run, path, **data):
    """A run.json whose request was changed and whose checksums fit, in a folder with the rows of `run`."""
    shutil.copytree(run.path, path)
    plain = json.loads((path / "run.json").read_text())
    del plain["checksum"]
    for name, value in data.items():
        (plain["request"] if name in plain["request"] else plain["request"]["data"])[name] = value
    request = Request.parse(plain["request"], "request")
    (path / "run.json").write_text(sealed_text({**plain, "fingerprint": request.fingerprint}))
    return path


@pytest.mark.parametrize("depth", [900, 100_000, 5_000_000])
@pytest.mark.parametrize("form", ['{"a":', "["])
def test_a_run_json_that_is_nested_without_end(tmp_path, quick, depth, form):
    (tmp_path / "run.json").write_text(form * depth)
    with pytest.raises(RunError, match="cannot be read") as error:
        Run.open(tmp_path)
    one_line(error)


def test_a_request_that_is_nested_below_the_limit_of_json(made, tmp_path, quick):
    deep = "{}"
    for _ in range(400):
        deep = f'{{"a": {deep}}}'
    text = (made.path / "run.json").read_text().replace('"environment": {', f'"environment": {{"deep": {deep},', 1)
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(RunError) as error:
        Run.open(tmp_path)
    one_line(error)


def test_a_run_json_without_end(tmp_path, quick):
    with (tmp_path / "run.json").open("wb") as file:
        file.truncate(2**40)  # takes no space
    with pytest.raises(RunError, match="cannot be read") as error:
        Run.open(tmp_path)
    one_line(error)


def test_a_number_of_thousands_of_digits(made, tmp_path, quick):
    text = (made.path / "run.json").read_text().replace('"seed": 0', f'"seed": {"9" * 10_000}')
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(RunError, match="cannot be read") as error:
        Run.open(tmp_path)
    one_line(error)


@pytest.mark.parametrize("values", [{"n": 10**9}, {"n": 10**18}, {"n": 10**9, "batch_size": 1}])
def test_a_run_that_claims_very_many_samples(made, tmp_path, quick, values):
    path = forged(made, tmp_path / "run", **values, conditions=[["clean", "", values["n"]]])
    with pytest.raises(RunError, match=r"of another request|at most 1 rows"):
        _ = Run.open(path).rows
    shutil.rmtree(path / "rows")
    run = Run.open(path)
    there, asked = run.progress
    assert (there, asked > 10**6) == (0, True)
    assert {status.text for status in run.statuses} == {"not run"}
    verdict = check(run, made)
    assert verdict.code == INVALID


def test_a_record_of_another_model_is_refused(made, tmp_path):
    shutil.copytree(made.path, tmp_path / "run")
    file = tmp_path / "run" / "records" / "0" / "model.json"
    plain = {k: v for k, v in json.loads(file.read_text()).items() if k != "checksum"}
    file.write_text(sealed_text({**plain, "model": "another"}))
    with pytest.raises(RunError, match="expected a record of SymViT"):
        Run.open(tmp_path / "run")


@pytest.mark.parametrize("text", [
    "1e-99999999", "1e99999999", "1E+100000000", "0.1e-1_000_000", "1e400", "1e-400", "9" * 10_000, "1/" + "9" * 400,
    "1/0", "nan", "inf", "١e٩٩٩٩٩٩٩٩",
])  # fmt: skip
def test_budgets_without_sense(quick, text):
    with pytest.raises(SpecError, match="expected a number such as 8/255") as error:
        eps_budget(text)
    one_line(error)


def test_budgets_with_sense():
    assert float(exact("1e-300")) == 1e-300
    assert float(exact(2.0**-1000)) == 2.0**-1000
    assert exact(exact(1 / 3)) == exact(1 / 3)


@pytest.mark.parametrize(("text", "word"), [
    ("a = " + "[" * 100_000, "nested too deeply"),
    ("a" + ".a" * 200_000 + " = 1", "larger"),
    ("a = 1" + "\n[a" + ".a" * 100_000 + "]", "nested too deeply"),
    ("a = {" + "a." * 400 + "a = 1}\n" * 200, "not TOML"),
    ("a = " + "9" * 5_000, "not TOML"),
    ("a = 1\n" * 3, "not TOML"),
    ("# " + "x" * 2**21, "larger than 262144 bytes"),
])  # fmt: skip
def test_toml_without_end(tmp_path, quick, text, word):
    (tmp_path / "f.toml").write_text(text)
    for read in (lambda: read_toml(tmp_path / "f.toml", "suite"), lambda: load_recipe(str(tmp_path / "f.toml"))):
        with pytest.raises(SpecError, match=word) as error:
            read()
        one_line(error)


def test_a_device_without_end_is_no_toml(quick):
    with pytest.raises(SpecError, match="larger than") as error:
        read_toml(Path("/dev/zero"), "suite")
    one_line(error)


def test_a_setting_without_end(quick):
    with pytest.raises(SpecError):
        load_recipe("fashion-mnist").but(**parse_settings(["mixup=" + "[" * 50_000]))


def repeated(run, path, rows):
    """An exported file with a run's manifest and so many rows, none of which differ; it takes little space."""
    run.export(path)
    table = pq.read_table(path)
    columns = [pa.repeat(table[name][0], rows) for name in table.column_names]
    new = pa.table(columns, names=table.column_names, metadata=table.schema.metadata)
    pq.write_table(new, path, compression="zstd")
    return path


def test_a_baseline_of_very_many_rows(made, tmp_path, quick):
    path = repeated(made, tmp_path / "b.parquet", 1_000_000)
    assert path.stat().st_size < 2**20
    with pytest.raises(RunError, match="expected at most 60 rows, got 1000000") as error:
        _ = Run.open(path).rows
    one_line(error)


def test_a_chunk_of_very_many_rows(made, tmp_path, quick):
    shutil.copytree(made.path, tmp_path / "run")
    repeated(made, tmp_path / "b.parquet", 200_000).rename(tmp_path / "run/rows/0/fgsm/0000000.parquet")
    with pytest.raises(RunError, match="expected at most 10 rows, got 200000"):
        _ = Run.open(tmp_path / "run").rows
    again = evaluate([tiny()], noise(), made.suites, tmp_path / "run", batch_size=10)
    pd.testing.assert_frame_equal(again.rows, made.rows)


@pytest.mark.parametrize("metadata", [b"{" * 10**6, b"[" * 10**6, b"null", b"\xff", b'{"format": 2}', b"9" * 10**5])
def test_an_exported_file_with_forged_metadata(made, tmp_path, quick, metadata):
    path = tmp_path / "b.parquet"
    made.export(path)
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({**table.schema.metadata, b"robustkpca": metadata}), path)
    with pytest.raises(RunError) as error:
        Run.open(path)
    one_line(error)
