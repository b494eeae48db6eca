"""Checkpoints of one model, trained several times: means over training runs,
and comparisons that count the training as chance, too."""

from __future__ import annotations

import hashlib
import json
from itertools import takewhile
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from robustkpca.results.accuracy import VALUE, Results, results_of
from robustkpca.results.columns import Column, columns_of, headline_columns, spelt_out
from robustkpca.runs.names import base_name, names
from robustkpca.runs.request import ModelRecord
from robustkpca.runs.run import Run
from robustkpca.statistics.proportions import holm
from robustkpca.suites.cell import CLEAN_CELL


def groups(run: Run) -> dict[str, list[str]]:
    """Labels of a run's models by what they are training runs of, in the order met.

    Models are training runs of one where the user says so (ModelRecord.group), or where their files say that they were
    trained by one recipe and differ in the seed alone; and where their weights differ, the rest of their settings does
    not, and both are raw or both EMA. Mean and std of the training images, which differ with the images drawn, do not
    count. All others stand alone. A group is named as `robustkpca.runs.names` names models, by what its files' paths
    have in common.
    """
    members: dict[str, list[ModelRecord]] = {}
    for model in run.request.models:
        members.setdefault(_recipe_of(model), []).append(model)
    parts = [part for models in members.values() for part in _told_apart(models)]
    if all(len(part) == 1 for part in parts):
        return {label: [label] for label in run.models}
    parts.sort(key=lambda part: run.models.index(part[0].label))
    named = names([_together(part) for part in parts])
    # A model that stands alone keeps the name of its rows.
    titles = [part[0].label if len(part) == 1 else name for part, name in zip(parts, named, strict=True)]
    return {
        f"{title} [mean]" if titles.count(title) > 1 and len(part) > 1 else title: [model.label for model in part]
        for title, part in zip(titles, parts, strict=True)
    }


def _recipe_of(model: ModelRecord) -> str:
    """Equal for models that may be training runs of one."""
    settings = model.vision
    if not model.usable or settings is None or (model.group is None and model.recipe is None):
        return json.dumps([model.label])
    chosen = settings.model_dump(mode="json", by_alias=True)
    chosen["preprocessing"] |= {"mean": None, "std": None}
    by = [model.group] if model.group else [model.recipe, base_name(model)]
    facts = [by, chosen, model.overridden, model.weight_choice, model.dtype, model.attention]
    return json.dumps(facts, sort_keys=True)


def _told_apart(models: list[ModelRecord]) -> list[list[ModelRecord]]:
    """Models of one recipe as training runs of one, or each alone where they are not: the same weights again add
    nothing, and two trainings with one seed that differ all the same differ in something that nobody recorded."""
    different: dict[str | None, ModelRecord] = {}
    again = [[model] for model in models if different.setdefault(model.weights, model) is not model]
    seeds = [model.training_seed for model in different.values()]
    if models[0].group is None and len(set(seeds)) < len(seeds):
        return [[model] for model in models]
    return [list(different.values()), *again]


def _together(models: list[ModelRecord]) -> ModelRecord:
    """Training runs as one model, to be named: its source is what their paths have in common."""
    first = models[0]
    if len(models) == 1:
        return first
    sources = sorted(model.source for model in models)
    start = _beginning(sources)
    end = _beginning([source[len(start) :][::-1] for source in sources])[::-1]
    weights = hashlib.sha256("".join(sorted(str(model.weights) for model in models)).encode()).hexdigest()
    base = {"given_name": first.group} if first.group else {}
    return first.model_copy(update={"source": f"{start}*{end}", "weights": weights, **base})


def _beginning(texts: list[str]) -> str:
    """What all of them begin with."""
    alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*texts, strict=False))
    return "".join(letters[0] for letters in alike)


def trained_as(model: ModelRecord) -> bool:
    """Whether a model runs with other settings than it was trained with."""
    return bool(model.overridden)


def averaged(run: Run) -> list[str]:
    """For each model of several training runs, which checkpoints its numbers are means of, in words."""
    return [f"{title} is the mean of {', '.join(labels)}" for title, labels in groups(run).items() if len(labels) > 1]


def has_training_runs(run: Run) -> bool:
    """Whether a model of the run has several training runs: then its results are shown as those of models."""
    return CLEAN_CELL in run.conditions and any(len(labels) > 1 for labels in groups(run).values())


def shown_table(run: Run) -> pd.DataFrame:
    """Over training runs where a model has several, else of checkpoints: what tables and plots of a report show.
    Columns as `Results.table`, or as `over_seeds` with `value` in place of the score's name."""
    return _over_training_runs(run) if has_training_runs(run) else results_of(run).table


def over_seeds(run: Run) -> pd.DataFrame:
    """The mean of every result over the training runs of a model (see `groups`), in the form of `accuracy_table`.

    Columns: model, seeds, suite, attack, budget, status, n, accuracy (mean), low, high (its 95 % interval:
    `statistics.training_runs.over_seeds`; of one training run the score's own), top5 (mean), least, most. Empty (NA)
    unless the cell is complete for every training run.
    """
    return spelt_out(_over_training_runs(run).rename(columns={VALUE: run.task.score.name}))


def _over_training_runs(run: Run) -> pd.DataFrame:
    results = results_of(run)
    long, extras = results.table, [name for name in results.score.extra_columns if name != "success_rate"]
    records = []
    for title, labels in groups(run).items():
        by_column = long[long["model"].isin(labels)].groupby(["suite", "attack", "budget"], sort=False)
        for column in columns_of(run):
            attack, budget = column.texts
            part = by_column.get_group((column.suite, attack, budget))
            record = {"model": title, "seeds": len(labels), "suite": column.suite, "attack": attack, "budget": budget}
            if bad := [text for text in part["status"] if text != "complete"]:
                records.append(record | {"status": bad[0]})
                continue
            values, first = part[VALUE].to_numpy(float), part.iloc[0]
            mean, low, high = (first[VALUE], first["low"], first["high"])
            if len(labels) > 1:
                mean, low, high = results.score.over_training_runs(contributions(results, labels, column))
            record |= {"status": "complete", "n": first["n"], VALUE: mean, "low": low, "high": high}
            record |= {name: part[name].mean(skipna=False) for name in extras}
            records.append(record | {"least": values.min(), "most": values.max()})
    names = ["model", "seeds", "suite", "attack", "budget", "status", "n"]
    numbers = [VALUE, "low", "high", *extras, "least", "most"]
    frame = pd.DataFrame(records, columns=[*names, *numbers])
    return frame.astype({"seeds": "Int64", "n": "Int64", **dict.fromkeys(numbers, "Float64")})


def compare_seeds(run: Run) -> pd.DataFrame:
    """Every model of several training runs against the first of them, on the same samples, cell by cell.

    A model that runs with other RPC settings than it was trained with is compared with the same training runs as they
    were trained, where the run has them, training run by training run.

    Columns: model, baseline, suite, attack, budget, n, difference (mean over training runs, model minus baseline), low,
    high, p_value (`statistics.training_runs.SeedDifference`), p_holm (Holm-adjusted over this table). Of a suite of
    several attacks the worst case is compared, of a suite of corruptions the mean over all of them. Cells that are not
    complete are left out. Empty where fewer than two models have several training runs. Suite and budget are words as
    in `accuracy_table`.
    """
    return spelt_out(compared_training_runs(run))


def compared_training_runs(run: Run) -> pd.DataFrame:
    """`compare_seeds`, with suite and budget as columns have them: empty for clean samples and means."""
    results = results_of(run)
    several = {title: labels for title, labels in groups(run).items() if len(labels) > 1}
    records: list[dict[str, Any]] = []
    for title, baseline, paired in _pairs(run, several):
        labels = [*several[title], *several[baseline]]
        for column in headline_columns(run):
            if any(results.incomplete(label, column) for label in labels):
                continue
            ours, theirs = (contributions(results, several[name], column) for name in (title, baseline))
            difference = results.score.compare_training_runs(theirs, ours, paired=paired)
            attack, budget = column.texts
            records.append(
                {"model": title, "baseline": baseline, "suite": column.suite, "attack": attack, "budget": budget,
                 "n": ours.shape[1], "difference": difference.difference, "low": difference.low,
                 "high": difference.high, "p_value": difference.p_value}
            )  # fmt: skip
    names = ["model", "baseline", "suite", "attack", "budget", "n", "difference", "low", "high", "p_value"]
    frame = pd.DataFrame(records, columns=names)
    return frame.assign(p_holm=holm(frame["p_value"].to_numpy(float)))


def _pairs(run: Run, several: dict[str, list[str]]) -> list[tuple[str, str, bool]]:
    """(model, what it is compared with, whether both are the same training runs) for every comparison."""
    models = {model.label: model for model in run.request.models}
    weights = {title: [models[label].weights for label in labels] for title, labels in several.items()}
    plain = [title for title, labels in several.items() if not trained_as(models[labels[0]])]
    first = next(iter(plain or several), None)
    pairs = []
    for title in several:
        as_trained = [other for other in plain if title not in plain and weights[other] == weights[title]]
        baseline = as_trained[0] if as_trained else first
        if baseline is not None and baseline != title:
            pairs.append((title, baseline, weights[title] == weights[baseline]))
    return pairs


def contributions(results: Results, labels: list[str], column: Column) -> NDArray[np.float64]:
    """(training runs, samples), samples in one order: what each adds to the score of a column.
    All of it is complete."""
    score = results.score
    if column.how == "mean":
        return np.stack([score.mean_contributions(results.parts(label, column)) for label in labels])
    rows = [score.contributions(results.rows(label, column)).sort_index() for label in labels]
    return np.stack([part.to_numpy(float) for part in rows])
