"""Checkpoints of one model, trained several times: means over training runs,
and comparisons that count the training as chance, too."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from robustkpca.models.settings import TRAINED_AS
from robustkpca.results.accuracy import VALUE, Results, results_of
from robustkpca.results.columns import Column, columns_of, headline_columns
from robustkpca.runs.request import ModelRecord
from robustkpca.runs.run import Run
from robustkpca.statistics.proportions import holm
from robustkpca.suites.cell import CLEAN_CELL


def groups(run: Run) -> dict[str, list[str]]:
    """Labels of a run's models by what they are training runs of, in the order met.

    Models of the same settings and other weights, trained with the same RPC settings, are training runs of one; mean
    and std of the training images, which differ with the images drawn, do not count. The same weights again, or a model
    that could not be loaded, stand alone. Titles are told apart by lambda, then by a number.
    """
    members: dict[str, dict[str, str]] = {}
    titles: dict[str, str] = {}
    for model in run.request.models:
        key = title = model.label
        settings = model.vision
        if settings is not None:
            chosen = settings.model_dump(mode="json", by_alias=True)
            chosen["preprocessing"] |= {"mean": None, "std": None}
            trained = trained_as(model)
            known = json.dumps([chosen, trained], sort_keys=True)
            if model.weights not in members.get(known, {}):
                key, title = known, ", ".join([settings.long_title, *trained])
        titles[key] = title
        members.setdefault(key, {})[model.weights or model.label] = model.label
    names = [titles[key] for key in members]
    counted = [
        f"{name} [{names[:i].count(name) + 1}]" if names.count(name) > 1 else name for i, name in enumerate(names)
    ]
    return {name: list(labels.values()) for name, labels in zip(counted, members.values(), strict=True)}


def trained_as(model: ModelRecord) -> list[str]:
    """What a model was trained as, where it runs with other RPC settings."""
    return [note for note in model.notes if note.startswith(TRAINED_AS)]


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
    return _over_training_runs(run).rename(columns={VALUE: run.task.score.name})


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
    complete are left out. Empty where fewer than two models have several training runs.
    """
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
