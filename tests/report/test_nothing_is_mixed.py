"""Two random requests that differ in anything that decides a number never share a row, a column, a mean or a comparison
without a label that tells them apart."""

import itertools
import json

import numpy as np
import pandas as pd
import pytest

from robustkpca.gate.check import HOLDS, INVALID, check
from robustkpca.models.settings import RPCSettings
from robustkpca.report import paper_tables
from robustkpca.report.formats import render
from robustkpca.results import trainings
from robustkpca.runs.names import labelled
from robustkpca.runs.request import ModelRecord
from robustkpca.runs.run import Run
from robustkpca.suites.suite import load_suite
from tests.helpers.oracles import tiny_settings
from tests.helpers.requests import request_of, run_of

TRIES = 120
FGSM = load_suite("fgsm").with_eps(["8/255"])
MODEL = {
    "weights": ["a" * 16, "b" * 16, "c" * 16],
    "source": ["m.pth", "x/m.pth", "y/m.pth", "n.safetensors"],
    "lam": [None, 1.0, 4.0],
    "iterations": [2, 3],
    "img_size": [28, 56],
    "mean": [(0.3,), (0.4,)],
    "crop_pct": [1.0, 0.9],
    "given_name": [None, None, "ours"],
    "weight_choice": [None, "ema"],
    "overrides": [None, None, ("lambda 1 (file: 4)",)],
    "dtype": [None, "bfloat16"],
    "attention": ["fused", "fused, compiled", "fused, gradients by hand"],
    "recipe": [None, "r" * 16, "s" * 16],
    "training_seed": [0, 1, 2],
    "group": [None, None, None, "g"],
}
REQUEST = {
    "n": [4, 12],
    "name": ["noise", "other"],
    "ids": ["1" * 16, "2" * 16],
    "content": ["3" * 16, "4" * 16],
    "argmax": ["among all classes of the model", "among 3 classes"],
    "resized": [True, False],
    "seed": [0, 1],
    "dtype": ["float32", "bfloat16"],
    "device": ["cpu", "cuda"],
    "software": [{"torch": "2"}, {"torch": "3"}],
    "batch_size": [10, 20],
    "batch_decides": [(), ("FGSM",)],
    "suite": [{}, {"clip": False}, {"space": "normalized"}, {"labels": "predicted"}, {"eps": ("4/255", "8/255")}],
}


def pick(draws, choices):
    return choices[draws.integers(len(choices))]


def drawn(draws, table):
    return {name: pick(draws, choices) for name, choices in table.items()}


def changed(draws, facts, table):
    """The same facts, but one or two of them drawn again."""
    names = draws.choice(list(table), size=draws.integers(1, 3), replace=False)
    return {**facts, **{str(name): pick(draws, table[str(name)]) for name in names}}


def model_of(lam, iterations, img_size, mean, crop_pct, **facts):
    rpc = None if lam is None else RPCSettings(iterations=iterations, lam=lam)
    settings = tiny_settings("symvit" if rpc is None else "rpc-symvit", rpc)
    sized = settings.preprocessing.model_copy(update={"img_size": img_size, "mean": mean, "crop_pct": crop_pct})
    settings = settings.model_copy(update={"preprocessing": sized})
    if facts["recipe"] is None:
        facts["training_seed"] = None
    return ModelRecord(label=settings.title, title=settings.title, settings=settings, **facts)


def asked(models, suite, **facts):
    fgsm = FGSM.model_copy(update={"threat": FGSM.threat.model_copy(update=suite)})
    return request_of(labelled([model_of(**model) for model in models]), [fgsm], **facts)


def pairs(tries):
    """Pairs of requests: the first is drawn, the second is it with little changed."""
    draws = np.random.default_rng(13)
    for _ in range(tries):
        models = [drawn(draws, MODEL)]
        models += [changed(draws, models[0], MODEL) for _ in range(draws.integers(0, 4))]
        facts = drawn(draws, REQUEST)
        others = [changed(draws, model, MODEL) if draws.random() < 0.5 else model for model in models]
        both = changed(draws, facts, REQUEST) if draws.random() < 0.7 else facts
        yield asked(models, **facts), asked(others, **both)


def decides_a_model(request, model):
    """What decides a model's numbers, apart from the data. Written here again, not taken from the package."""
    settings = model.settings.model_dump(mode="json")
    kernel = "compiled" in model.attention
    return json.dumps([model.weights, settings, model.dtype or request.dtype, kernel, model.overrides])


def decides_a_column(request, attacked):
    """What decides the numbers of a column, apart from the model."""
    facts = [request.data.model_dump(mode="json"), request.seed, request.device, dict(request.software)]
    if attacked:
        suite = request.suites[0].model_dump(mode="json")
        facts += [suite, request.batch_size if "FGSM" in request.batch_decides else None]
    return json.dumps(facts, sort_keys=True)


PAIRS = list(pairs(TRIES))
NO_ROWS = pd.DataFrame()


@pytest.fixture(scope="module")
def runs():
    return [(run_of(first), run_of(second)) for first, second in PAIRS]


def test_the_pairs_are_worth_trying():
    """Many are alike in models, in columns, in both and in neither."""
    kinds = set()
    for a, b in PAIRS:
        models = decides_a_model(a, a.models[0]) == decides_a_model(b, b.models[0])
        kinds.add((models, decides_a_column(a, True) == decides_a_column(b, True)))
    assert len(kinds) == 4


def test_names_tell_models_of_one_run_apart():
    for request in itertools.chain(*PAIRS):
        assert len(set(request.labels)) == len(request.models)
        again = labelled([m.model_copy(update={"label": m.vision.title}) for m in reversed(request.models)])
        assert sorted(m.label for m in again) == sorted(request.labels)


@pytest.mark.parametrize("layout", ["attacks", "budgets", "robustness"])
def test_rows_and_columns_join_only_what_is_alike(layout, runs, monkeypatch):
    put = paper_tables.Table.put
    places = []

    def noted(table, run, label, column, entry):
        places.append((run, label, column))
        return put(table, run, label, column, entry)

    monkeypatch.setattr(paper_tables.Table, "put", noted)
    joined = 0
    for pair in runs:
        first, second = (run.request for run in pair)
        places.clear()
        try:
            table = paper_tables.LAYOUTS[layout](pair)
        except paper_tables.SpecError as error:  # one cell cannot hold two results: the requests are alike in all of it
            assert "leave one of the runs out" in str(error)
            assert decides_a_column(first, False) == decides_a_column(second, False)
            continue
        rows = [(run, m, table.rows[run][m.label]) for run in pair for m in run.request.models]
        for (run, model, row), (other, theirs, same) in itertools.combinations(rows, 2):
            if row == same:
                joined += 1
                assert run is not other
                assert decides_a_model(run.request, model) == decides_a_model(other.request, theirs)
        heads = table.heads
        assert len(set(heads.values())) == len(heads)
        for (run, _, column), (other, _, same) in itertools.combinations(places, 2):
            if heads[column] == heads[same]:
                attacked = column.head.startswith("fgsm")
                assert decides_a_column(run.request, attacked) == decides_a_column(other.request, attacked)
        if first.data.n != second.data.n:
            assert all("n = " in head for head in heads.values())
        if first.data.n == second.data.n:
            assert ",n," in render(table, "csv").splitlines()[0]
        turned = paper_tables.LAYOUTS[layout](pair[::-1])
        assert table.rows == turned.rows
    assert joined > 20


def test_means_are_over_trainings_of_one_recipe():
    averaged = 0
    for request in itertools.chain(*pairs(4 * TRIES)):
        run = Run.in_memory(request, NO_ROWS)
        groups = trainings.groups(run)
        assert sorted(label for labels in groups.values() for label in labels) == sorted(run.models)
        turned = Run.in_memory(request.model_copy(update={"models": request.models[::-1]}), NO_ROWS)
        assert {name: set(labels) for name, labels in trainings.groups(turned).items()} == {
            name: set(labels) for name, labels in groups.items()
        } or len({m.weights for m in request.models}) < len(request.models)  # which of two that are alike stands alone
        for labels in groups.values():
            members = [request.model(label) for label in labels]
            if len(members) == 1:
                continue
            averaged += 1
            assert len({m.weights for m in members}) == len(members)
            for name in ("weight_choice", "overrides", "dtype", "attention", "group"):
                assert len({getattr(m, name) for m in members}) == 1
            plain = [m.settings.model_dump(mode="json") for m in members]
            for settings in plain:
                settings["preprocessing"].pop("mean")
            assert all(settings == plain[0] for settings in plain)
            if members[0].group is None:
                assert len({m.recipe for m in members}) == 1
                assert members[0].recipe is not None
                assert len({m.training_seed for m in members}) == len(members)
    assert averaged > 10


def comparable(first, second):
    """Whether one run may be a baseline of the other."""
    decides = "FGSM" in (*first.batch_decides, *second.batch_decides)
    facts = [
        (r.data.model_dump(exclude={"name"}), r.seed, r.dtype, r.suites, r.batch_size if decides else None)
        for r in (first, second)
    ]
    return facts[0] == facts[1]


def test_check_compares_only_what_is_alike(runs):
    held = 0
    for run, baseline in runs[::2]:
        first, second = run.request, baseline.request
        verdict = check(run, baseline, tolerance=100.0)
        if not comparable(first, second):
            assert verdict.code == INVALID
        for row in verdict.cells.itertuples():
            now = first.model(row.model)
            assert now.dtype in (None, first.dtype) or now.dtype in {m.dtype for m in second.models}
        for fact in ("device", "software"):
            if getattr(first, fact) != getattr(second, fact):
                assert any(note.startswith(f"other {fact}") for note in verdict.notes)
        assert check(run, run).code == HOLDS
        held += verdict.code == HOLDS
    assert held > 5
