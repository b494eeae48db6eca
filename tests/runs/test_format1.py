"""Runs that were written before tasks existed: they are read and compared as they were measured, and never continued.

`tests/data/format1-run.parquet` was made by the version of that time: fgsm and two corruptions on 20 embedded images.
"""

import json

import pandas as pd
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from robustkpca.datasets.sources import load_samples
from robustkpca.errors import RunError
from robustkpca.evaluation.loop import evaluate
from robustkpca.gate.check import HOLDS, check
from robustkpca.models.checkpoints import load_classifier
from robustkpca.results.accuracy import accuracy_table
from robustkpca.runs.run import Run
from robustkpca.runs.schema import schema_of
from robustkpca.suites.cell import Cell
from robustkpca.suites.suite import Suite, load_suite
from robustkpca.suites.threat import Ball, Corruptions
from tests.helpers.oracles import DATA

FILE = DATA / "format1-run.parquet"
MODELS = ["SymViT-micro", "RPC-SymViT-micro (6iter/layer1)"]
CELLS = [("clean", ""), ("fgsm", "2/255"), ("fgsm", "4/255"), ("fgsm", "8/255"),
         ("two-corruptions/fog", "1"), ("two-corruptions/fog", "5"),
         ("two-corruptions/shot_noise", "1"), ("two-corruptions/shot_noise", "5")]  # fmt: skip
CORRECT = {
    MODELS[0]: [17, 17, 13, 7, 2, 2, 17, 14],
    MODELS[1]: [18, 16, 16, 13, 3, 2, 17, 15],
}  # of 20, by that version
TWO = {"name": "two-corruptions", "version": 1, "title": "Two corruptions, as format 1 wrote them",
       "corruptions": ["fog", "shot_noise"], "severities": [1, 5]}  # fmt: skip


def again(out, **options):
    """The same evaluation, by the version of today."""
    models = [load_classifier("symvit"), load_classifier("rpc-symvit")]
    suites = [load_suite("fgsm"), Suite.parse(TWO, "suite")]
    return evaluate(models, load_samples("fashion-mnist", limit=20), suites, out, **options)


@pytest.fixture
def folder(tmp_path):
    """The run as the folder it was exported from: run.json, a lock, and one file for each model and attack."""
    path, table = tmp_path / "old", pq.read_table(FILE)
    plain = json.loads(table.schema.metadata[b"robustkpca"])
    for number, model in enumerate(m["label"] for m in plain["request"]["models"]):
        for attack in pc.unique(table["attack"]).to_pylist():
            file = path / "rows" / str(number) / attack.replace("/", "+") / "0000000.parquet"
            file.parent.mkdir(parents=True)
            rows = table.filter(pc.and_(pc.equal(table["model"], model), pc.equal(table["attack"], attack)))
            pq.write_table(rows.replace_schema_metadata(), file)
    (path / "run.json").write_text(json.dumps(plain, indent=1, sort_keys=True))
    (path / ".lock").write_text("")
    return path


def contents(path):
    return {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in path.rglob("*") if file.is_file()}


def test_the_file_is_of_format_1_and_its_request_is_typed():
    assert json.loads(pq.read_schema(FILE).metadata[b"robustkpca"])["format"] == 1
    run = Run.open(FILE)
    assert (run.manifest.format, run.request.task, run.models) == (1, "classification", MODELS)
    assert [cell.texts for cell in run.cells] == CELLS
    fgsm, two = run.suites
    assert fgsm == load_suite("fgsm")
    assert isinstance(fgsm.threat, Ball)
    assert two == Suite.parse(TWO, "suite")
    assert two.threat == Corruptions(names=("fog", "shot_noise"), severities=(1, 5))
    assert run.request.model(MODELS[1]).vision.rpc.iterations == 6
    assert run.request.batch_decides == ()


def test_rows_are_in_the_columns_of_today():
    run = Run.open(FILE)
    rows, old = run.rows, pq.read_table(FILE).to_pandas()
    assert list(rows.columns) == schema_of(run.task).names
    assert len(rows) == len(old) == 2 * 8 * 20
    clean = rows["perturbation"] == "clean"
    assert rows["broken"].isna().equals(clean)
    expected = (rows["clean_prediction"] == rows["label"]) & ~rows["correct"]
    assert rows.loc[~clean, "broken"].astype(bool).equals(expected[~clean])
    assert 0 < expected[~clean].sum() < (~clean).sum()
    assert rows[["cluster", "queries"]].isna().all(axis=None)
    same = ["model", "budget", "sample", "label", "prediction", "correct", "confidence", "distance", "flags"]
    pd.testing.assert_frame_equal(rows[same], old[same], check_dtype=False)
    assert rows["perturbation"].tolist() == old["attack"].tolist()


def test_its_accuracies_are_what_they_were():
    table = accuracy_table(Run.open(FILE))
    table = table.replace({"budget": {"clean": ""}})
    found = {(r.model, r.attack, r.budget): (r.correct, r.n, r.status) for r in table.itertuples()}
    assert found == {
        (model, *cell): (correct, 20, "complete")
        for model in MODELS
        for cell, correct in zip(CELLS, CORRECT[model], strict=True)
    }


def test_times_and_health_are_kept():
    run = Run.open(FILE)
    plain = json.loads(pq.read_schema(FILE).metadata[b"robustkpca"])
    assert run.health == plain["probes"]
    times = {tuple(key.split("\t")): tuple(value) for key, value in plain["times"].items()}
    assert len(times) == 8
    assert run.summary.times == times
    assert run.summary.failures == {}


def test_the_version_of_today_measures_the_same(tmp_path):
    old, new = Run.open(FILE), again(tmp_path / "new")
    verdict = check(new, old)
    assert (verdict.code, verdict.lines) == (HOLDS, [])
    assert len(verdict.cells) == 16
    assert (verdict.cells["change"] == 0).all()
    assert (verdict.cells["verdict"] == "holds").all()
    assert new.rows["prediction"].tolist() == old.rows["prediction"].tolist()
    turned = check(old, new)
    assert (turned.code, turned.lines) == (HOLDS, [])


def test_a_folder_reads_as_the_file_does(folder):
    run = Run.open(folder)
    pd.testing.assert_frame_equal(run.rows, Run.open(FILE).rows)
    assert run.progress == (8, 8)
    assert {s.text for s in run.statuses} == {"complete"}
    (folder / "rows" / "1" / "fgsm" / "0000000.parquet").unlink()
    assert Run.open(folder).status(MODELS[1], Cell.parse("fgsm", "2/255")).text == "not run"


def test_a_folder_is_not_continued_and_nothing_in_it_changes(folder):
    (folder / "rows" / "1" / "fgsm" / "0000000.parquet").unlink()  # something to do
    before = contents(folder)
    assert len(before) == 9
    with pytest.raises(RunError, match=r"was made in format 1: .* not continued; choose another --out$") as error:
        again(folder)
    assert "\n" not in str(error.value)
    assert contents(folder) == before


def test_an_export_is_of_the_format_of_today_and_has_the_same_rows(tmp_path):
    old = Run.open(FILE)
    old.export(tmp_path / "new.parquet")
    new = Run.open(tmp_path / "new.parquet")
    assert new.manifest.format == 2
    assert (new.request, new.health, new.summary.times) == (old.request, old.health, old.summary.times)
    pd.testing.assert_frame_equal(new.rows, old.rows)
    assert check(new, old).code == HOLDS


def test_a_request_that_was_changed_by_hand_is_refused(folder):
    plain = json.loads((folder / "run.json").read_text())
    plain["request"]["seed"] = 7
    (folder / "run.json").write_text(json.dumps(plain))
    with pytest.raises(RunError, match="changed by hand"):
        Run.open(folder)
