"""Checkpoints of one model, trained several times: means over them and comparisons that count the training as chance, too."""

from __future__ import annotations

import json
from itertools import chain

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from robustkpca import stats
from robustkpca.outcomes import Run
from robustkpca.settings import ModelSettings
from robustkpca.spec import CLEAN, Cell
from robustkpca.tables import accuracy_table, compared_columns

MEAN = "mean"


def groups(run: Run) -> dict[str, list[str]]:
    """Labels of a run's models by what they are trainings of, where there are at least two.

    Models of the same settings and other weights are trainings of one; mean and std of the training images, which differ with the images
    drawn, do not count. Titles are told apart by lambda, then by a number.
    """
    members: dict[str, dict[str, str]] = {}
    titles: dict[str, str] = {}
    for model in run.request["models"]:
        if model["settings"] is None:
            continue
        measured = {"mean": None, "std": None}
        chosen = model["settings"] | {"preprocessing": model["settings"]["preprocessing"] | measured}
        key = json.dumps(chosen, sort_keys=True)
        members.setdefault(key, {})[model["weights"]] = model["label"]
        titles[key] = _title(ModelSettings.parse(model["settings"], f"run {run.path}"))
    several = {key: list(own.values()) for key, own in members.items() if len(own) > 1}
    names = [titles[key] for key in several]
    counted = [
        f"{name} [{names[:i].count(name) + 1}]" if names.count(name) > 1 else name for i, name in enumerate(names)
    ]
    return dict(zip(counted, several.values(), strict=True))


def _title(settings: ModelSettings) -> str:
    rpc = settings.rpc
    return settings.title if rpc is None else settings.title.replace(rpc.label, f"{rpc.label}, lambda {rpc.lam:g}")


def of_seeds(run: Run) -> bool:
    """Whether every model of a run is one of several trainings: then its figures are those of models, not of checkpoints."""
    return Cell(CLEAN, "") in run.conditions and sorted(run.models) == sorted(chain.from_iterable(groups(run).values()))


def shown_table(run: Run) -> pd.DataFrame:
    """`over_seeds` where every model has several trainings, else `accuracy_table`: what tables and figures of a report show."""
    return over_seeds(run) if of_seeds(run) else accuracy_table(run)


def over_seeds(run: Run) -> pd.DataFrame:
    """The mean of every figure over the trainings of a model (see `groups`), in the form of `accuracy_table`.

    Columns: model, seeds, suite, attack, budget, status, n, accuracy (mean), low, high (its 95 % Student t interval, not cut to [0, 1]),
    top5 (mean), least, most. Shares, empty (NA) unless the cell is complete for every seed.
    """
    long = accuracy_table(run)
    records = []
    for title, labels in groups(run).items():
        own = long[long["model"].isin(labels)]
        for (suite, attack, budget), part in own.groupby(["suite", "attack", "budget"], sort=False):
            record = {"model": title, "seeds": len(labels), "suite": suite, "attack": attack, "budget": budget}
            if bad := [text for text in part["status"] if text != "complete"]:
                records.append(record | {"status": bad[0]})
                continue
            shares = part["accuracy"].to_numpy(float)
            mean, low, high = stats.over_seeds(shares)
            record |= {"status": "complete", "n": part["n"].iloc[0], "accuracy": mean, "low": low, "high": high}
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

    Columns: model, baseline, suite, attack, budget, n, difference (share, mean over trainings, model minus baseline), low, high, p_value
    (`stats.SeedDifference`: trainings and samples count as drawn), p_holm (Holm-adjusted over this table). Of a suite of several attacks
    the worst case is compared, of a suite of corruptions the mean over all of them. Cells that are not complete are left out.
    """
    found_groups = groups(run)
    records = []
    for title in list(found_groups)[1:]:
        baseline = next(iter(found_groups))
        for suite, cell, parts in headline_columns(run):
            ours, theirs = (_scores(run, found_groups[name], cell, parts) for name in (title, baseline))
            if ours is None or theirs is None:
                continue
            found = stats.SeedDifference.of(theirs, ours)
            records.append(
                {"model": title, "baseline": baseline, "suite": suite, "attack": cell.attack, "budget": cell.budget,
                 "n": ours.shape[1], "difference": found.difference, "low": found.low, "high": found.high, "p_value": found.p_value}
            )  # fmt: skip
    names = ["model", "baseline", "suite", "attack", "budget", "n", "difference", "low", "high", "p_value"]
    frame = pd.DataFrame(records, columns=names)
    return frame.assign(p_holm=stats.holm(frame["p_value"].to_numpy(float)))


def headline_columns(run: Run) -> list[tuple[str, Cell, list[Cell]]]:
    """`compared_columns`, each suite of corruptions as one column."""
    corruptions = {suite.name: suite for suite in run.suites if suite.corruptions}
    columns = [column for column in compared_columns(run) if column[0] not in corruptions]
    return columns + [(name, Cell(f"{name}/{MEAN}", ""), list(suite.cells)) for name, suite in corruptions.items()]


def _scores(run: Run, labels: list[str], cell: Cell, parts: list[Cell]) -> NDArray[np.float64] | None:
    """(trainings, samples), samples in one order: right under all parts, or of a mean the share of parts; None where a part is not complete."""
    if any(run.status(label, part).text != "complete" for label in labels for part in parts):
        return None
    rows = []
    for label in labels:
        frame = pd.concat([run.cell_rows(label, part)["correct"].astype(float) for part in parts], axis=1).sort_index()
        rows.append((frame.mean(axis=1) if cell.attack.endswith(f"/{MEAN}") else frame.min(axis=1)).to_numpy(float))
    return np.stack(rows)
