"""Checkpoints of one model, trained several times: means over them and comparisons that count the training as chance, too."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from robustkpca.models.settings import TRAINED_AS, ModelSettings
from robustkpca.results.accuracy import accuracy_table, columns_of
from robustkpca.results.comparison import compared_columns
from robustkpca.runs.run import Run
from robustkpca.statistics import proportions, training_runs
from robustkpca.suites.cell import CLEAN, Cell

MEAN = "mean"


def groups(run: Run) -> dict[str, list[str]]:
    """Labels of a run's models by what they are trainings of, in the order met.

    Models of the same settings and other weights, trained with the same RPC settings, are trainings of one; mean and std of the training
    images, which differ with the images drawn, do not count. The same weights again, or a model that could not be loaded, stand alone.
    Titles are told apart by lambda, then by a number.
    """
    members: dict[str, dict[str, str]] = {}
    titles: dict[str, str] = {}
    for model in run.request["models"]:
        settings, weights, label = model["settings"], model["weights"], model["label"]
        key, title = label, label
        if settings is not None:
            chosen = settings | {"preprocessing": settings["preprocessing"] | {"mean": None, "std": None}}
            trained = _trained(model)
            known = json.dumps([chosen, trained], sort_keys=True)
            if weights not in members.get(known, {}):
                key, title = known, ", ".join([ModelSettings.parse(settings, f"run {run.path}").long_title, *trained])
        titles[key] = title
        members.setdefault(key, {})[weights or label] = label
    names = [titles[key] for key in members]
    counted = [
        f"{name} [{names[:i].count(name) + 1}]" if names.count(name) > 1 else name for i, name in enumerate(names)
    ]
    return {name: list(own.values()) for name, own in zip(counted, members.values(), strict=True)}


def _trained(model: dict[str, Any]) -> list[str]:
    """What a model of a request was trained as, where it runs with other RPC settings."""
    return [note for note in model["notes"] if note.startswith(TRAINED_AS)]


def of_seeds(run: Run) -> bool:
    """Whether a model of the run has several trainings: then its figures are shown as those of models, not of checkpoints."""
    return Cell(CLEAN, "") in run.conditions and any(len(labels) > 1 for labels in groups(run).values())


def shown_table(run: Run) -> pd.DataFrame:
    """`over_seeds` where a model has several trainings, else `accuracy_table`: what tables and figures of a report show."""
    return over_seeds(run) if of_seeds(run) else accuracy_table(run)


def over_seeds(run: Run) -> pd.DataFrame:
    """The mean of every figure over the trainings of a model (see `groups`), in the form of `accuracy_table`.

    Columns: model, seeds, suite, attack, budget, status, n, accuracy (mean), low, high (its 95 % interval: `stats.over_seeds`; of one training
    Wilson's), top5 (mean), least, most. Shares, empty (NA) unless the cell is complete for every seed.
    """
    long = accuracy_table(run)
    columns = {(suite, cell.attack, cell.budget): (cell, parts) for suite, cell, parts in columns_of(run)}
    records = []
    for title, labels in groups(run).items():
        own = long[long["model"].isin(labels)]
        for (suite, attack, budget), part in own.groupby(["suite", "attack", "budget"], sort=False):
            record = {"model": title, "seeds": len(labels), "suite": suite, "attack": attack, "budget": budget}
            if bad := [text for text in part["status"] if text != "complete"]:
                records.append(record | {"status": bad[0]})
                continue
            shares, first = part["accuracy"].to_numpy(float), part.iloc[0]
            mean, low, high = (first["accuracy"], first["low"], first["high"])
            if len(labels) > 1:
                mean, low, high = training_runs.over_seeds(_scores(run, labels, *columns[suite, attack, budget]))
            record |= {"status": "complete", "n": first["n"], "accuracy": mean, "low": low, "high": high}
            record |= {"top5": part["top5"].mean(skipna=False), "least": shares.min(), "most": shares.max()}
            records.append(record)
    names = [
        "model",
        "seeds",
        "suite",
        "attack",
        "budget",
        "status",
        "n",
        "accuracy",
        "low",
        "high",
        "top5",
        "least",
        "most",
    ]
    frame = pd.DataFrame(records, columns=names)
    return frame.astype({"seeds": "Int64", "n": "Int64", **dict.fromkeys(names[7:], "Float64")})


def compare_seeds(run: Run) -> pd.DataFrame:
    """Every model of several trainings against the first of them, on the same samples, cell by cell.

    A model that runs with other RPC settings than it was trained with is compared with the same trainings as they were trained, where the
    run has them, training by training.

    Columns: model, baseline, suite, attack, budget, n, difference (share, mean over trainings, model minus baseline), low, high, p_value
    (`stats.SeedDifference`), p_holm (Holm-adjusted over this table). Of a suite of several attacks the worst case is compared, of a suite of
    corruptions the mean over all of them. Cells that are not complete are left out. Empty where fewer than two models have several trainings.
    """
    several = {title: labels for title, labels in groups(run).items() if len(labels) > 1}
    models = {model["label"]: model for model in run.request["models"]}
    weights = {title: [models[label]["weights"] for label in labels] for title, labels in several.items()}
    plain = [title for title, labels in several.items() if not _trained(models[labels[0]])]
    first = next(iter(plain or several), None)
    records = []
    for title in several:
        as_trained = [other for other in plain if title not in plain and weights[other] == weights[title]]
        baseline = as_trained[0] if as_trained else first
        if baseline is None or baseline == title:
            continue
        for suite, cell, parts in headline_columns(run):
            labels = [*several[title], *several[baseline]]
            if any(run.status(label, part).text != "complete" for label in labels for part in parts):
                continue
            ours, theirs = (_scores(run, several[name], cell, parts) for name in (title, baseline))
            found = training_runs.SeedDifference.of(theirs, ours, paired=weights[title] == weights[baseline])
            records.append(
                {"model": title, "baseline": baseline, "suite": suite, "attack": cell.attack, "budget": cell.budget,
                 "n": ours.shape[1], "difference": found.difference, "low": found.low, "high": found.high, "p_value": found.p_value}
            )  # fmt: skip
    names = ["model", "baseline", "suite", "attack", "budget", "n", "difference", "low", "high", "p_value"]
    frame = pd.DataFrame(records, columns=names)
    return frame.assign(p_holm=proportions.holm(frame["p_value"].to_numpy(float)))


def headline_columns(run: Run) -> list[tuple[str, Cell, list[Cell]]]:
    """`compared_columns`, each suite of corruptions as one column."""
    corruptions = {suite.name: suite for suite in run.suites if suite.corruptions}
    columns = [column for column in compared_columns(run) if column[0] not in corruptions]
    return columns + [(name, Cell(f"{name}/{MEAN}", ""), list(suite.cells)) for name, suite in corruptions.items()]


def _scores(run: Run, labels: list[str], cell: Cell, parts: list[Cell]) -> NDArray[np.float64]:
    """(trainings, samples), samples in one order: right under all parts, or of a mean the share of parts. All of them are complete."""
    rows = []
    for label in labels:
        frame = pd.concat([run.cell_rows(label, part)["correct"].astype(float) for part in parts], axis=1).sort_index()
        rows.append((frame.mean(axis=1) if cell.attack.endswith(f"/{MEAN}") else frame.min(axis=1)).to_numpy(float))
    return np.stack(rows)
