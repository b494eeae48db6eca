"""The tables of a run as people read them, with the notes their numbers need."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from robustkpca.results import imagenet_c, imagenet_o, trainings
from robustkpca.results.accuracy import WORST, accuracy_table, breakers
from robustkpca.results.comparison import compare, compared_columns
from robustkpca.runs.run import Run
from robustkpca.suites.cell import CLEAN, OUT_OF_DISTRIBUTION, Cell
from robustkpca.suites.suite import Suite


@dataclass(frozen=True)
class View:
    """A table to look at: a title, text cells with models as rows, and notes that its numbers need."""

    title: str
    cells: pd.DataFrame
    notes: tuple[str, ...] = ()


def views(run: Run, *, compared: bool = True) -> list[View]:
    """The tables of a run as people read them: one for each suite, then the paired comparison.

    Where a model has several trainings (`seeds.of_seeds`), figures are means over them, and single checkpoints follow in one table.
    """
    if OUT_OF_DISTRIBUTION in run.conditions:
        return [_detection_view(run)]
    if Cell(CLEAN, "") not in run.conditions:
        return [_released_view(run)]
    long, several = trainings.shown_table(run), trainings.of_seeds(run)
    found: list[View | None] = []
    for suite in run.suites:
        if suite.corruptions:
            found.append(_corruption_view(run, long, suite))
        elif len(suite.attack) == 1:
            found.append(_attack_view(run, long, suite))
        else:
            found += [_attacks_view(run, long, suite), _breakers_view(run, suite) if compared else None]
    if not run.suites:
        found.append(_clean_view(run, long))
    if several:
        comparison = (_seeds_comparison_view(run) or _comparison_view(run)) if compared else None
        found += [comparison, _checkpoints_view(run)]
    elif len(run.models) > 1 and compared:
        found.append(_comparison_view(run))
    return [view for view in found if view is not None]


def share(value: float) -> str:
    """A share in [0, 1] as per cent with one decimal."""
    return f"{100 * value:.1f}"


def points(difference: float) -> str:
    """A difference of shares in points, with its sign."""
    return f"{100 * difference:+.1f}".replace("-0.0", "+0.0")


def with_interval(row: pd.Series) -> str:
    """`87.1 (84.9–89.0)`, or the status of a cell that has no figure."""
    if row["status"] != "complete":
        return str(row["status"])
    return f"{share(row['accuracy'])} ({share(row['low'])}–{share(row['high'])})"


def _attack_view(run: Run, long: pd.DataFrame, suite: Suite) -> View:
    """Models as rows, budgets as columns."""
    part = long[(long["suite"] == suite.name) | (long["attack"] == CLEAN)]
    heads = {b: "clean" if not b else f"eps {b}" for b in part["budget"]}
    cells = pd.DataFrame(index=_models(long), columns=list(heads.values()), dtype=object)
    for _, row in part.iterrows():
        cells.loc[row["model"], heads[row["budget"]]] = with_interval(row)
    return View(f"{suite.title} ({suite.name})", cells, _attack_notes(run, long, suite))


def _models(long: pd.DataFrame) -> pd.Index:
    return pd.Index(long["model"].unique(), name="model")


def _meaning(run: Run, long: pd.DataFrame) -> str:
    """What the figures of a table are, and their intervals."""
    if "seeds" not in long.columns:
        return f"Accuracy in % over all {run.n} samples with 95 % Wilson interval."
    whole = long[long["status"] == "complete"]
    counts = (long if whole.empty else whole).groupby("model", sort=False)["seeds"].first()
    number = str(counts.iloc[0]) if len(set(counts)) == 1 else ", ".join(f"{name}: {n}" for name, n in counts.items())
    single = "; of one training Wilson's, which knows of samples only" if (counts == 1).any() else ""
    return (
        f"Accuracy in % over all {run.n} samples, mean over trainings ({number}), with its 95 % interval, in which trainings and samples both count "
        f"as drawn (Welch-Satterthwaite){single}."
    )


def _attack_notes(run: Run, long: pd.DataFrame, suite: Suite) -> tuple[str, ...]:
    notes = [_meaning(run, long), f"{suite.name}: {suite.describe()}."]
    if suite.cascade:
        notes.insert(1, "Each row counts what the attacks up to it left right.")
    return tuple(notes)


def _attacks_view(run: Run, long: pd.DataFrame, suite: Suite) -> View:
    """A suite of several attacks: attacks and budgets as rows, models as columns, the worst case after each budget."""
    part = long[(long["suite"] == suite.name) | (long["attack"] == CLEAN)]
    names = [(label, label.removeprefix(f"{suite.name}/")) for label in [*suite.attacks, f"{suite.name}/{WORST}"]]
    rows = {(CLEAN, ""): "clean"} | {(x, b): f"{name} eps {b}" for b in suite.budgets for x, name in names}
    cells = pd.DataFrame(index=pd.Index(rows.values(), name="attack"), columns=_models(long), dtype=object)
    for _, row in part.iterrows():
        cells.loc[rows[row["attack"], row["budget"]], row["model"]] = with_interval(row)
    return View(f"{suite.title} ({suite.name})", cells, _attack_notes(run, long, suite))


def _breakers_view(run: Run, suite: Suite) -> View | None:
    """How many samples each attack broke, and how many only it did; of several trainings, in all of them together."""
    found = breakers(run)
    found = found[found["suite"] == suite.name]
    if found.empty:
        return None
    models, of = run.models, f"{run.n}"
    if trainings.of_seeds(run):
        groups = trainings.groups(run)
        models, of = list(groups), f"{run.n} in each training, all of a model's trainings together"
        titles = {label: title for title, labels in groups.items() for label in labels}
        keys = ["model", "suite", "attack", "budget"]
        found = found.assign(model=found["model"].map(titles)).groupby(keys, sort=False).sum().reset_index()
    rows = {(x, b): f"{x.removeprefix(f'{suite.name}/')} eps {b}" for b in suite.budgets for x in suite.attacks}
    cells = pd.DataFrame("not available", index=pd.Index(rows.values(), name="attack"), columns=models, dtype=object)
    for row in found.itertuples():
        alone = "" if suite.cascade else f" ({row.alone} by it alone)"
        cells.loc[rows[row.attack, row.budget], row.model] = f"{row.broken}{alone}"
    note = "that none before it had broken" if suite.cascade else "that were right when clean"
    return View(f"Which attack broke the images ({suite.name})", cells, (f"Numbers of images, of {of}, {note}.",))


def _seeds_comparison_view(run: Run) -> View | None:
    """Models as rows, what is compared as columns."""
    frame = trainings.compare_seeds(run)
    if frame.empty:
        return None
    names = [_cell_name(cell.attack, cell.budget) for _, cell, _ in trainings.headline_columns(run)]
    baselines = list(frame["baseline"].unique())
    alone = len(baselines) == 1
    frame = frame.assign(name=frame["model"] if alone else frame["model"] + " minus " + frame["baseline"])
    models = pd.Index(frame["name"].unique(), name=f"minus {baselines[0]}" if alone else "model minus model")
    cells = pd.DataFrame("not available", index=models, columns=names, dtype=object)
    for _, row in frame.iterrows():
        cells.loc[row["name"], _cell_name(row["attack"], row["budget"])] = _difference(row)
    notes = (
        f"Difference in points, mean over trainings, on the same {run.n} samples, with its 95 % interval, in which trainings and "
        "samples both count as drawn (Welch-Satterthwaite); p: t test of the same, Holm-adjusted over all cells of this comparison (the "
        "intervals are not). p >= 0.05: not distinguishable. Models of one training are not compared here; the same trainings run in two ways are "
        "compared training by training.",
    )
    return View("Comparison over seeds", cells, notes)


def _checkpoints_view(run: Run) -> View:
    """Each checkpoint's own figures: models as rows, one column for each cell that is compared."""
    long = accuracy_table(run).set_index(["model", "attack", "budget"])
    columns = trainings.headline_columns(run)
    heads = [_cell_name(cell.attack, cell.budget) for _, cell, _ in columns]
    cells = pd.DataFrame(index=pd.Index(run.models, name="model"), columns=heads, dtype=object)
    for model in run.models:
        for head, (_, cell, parts) in zip(heads, columns, strict=True):
            keys = (
                [cell] if (model, cell.attack, cell.budget) in long.index else parts
            )  # a mean over corruptions has no row of its own
            own = [long.loc[(model, key.attack, key.budget)] for key in keys]
            bad = [str(row["status"]) for row in own if row["status"] != "complete"]
            cells.loc[model, head] = bad[0] if bad else share(sum(float(row["accuracy"]) for row in own) / len(own))
    return View("Single checkpoints", cells, (f"Accuracy in % over all {run.n} samples.",))


def _cell_name(attack: str, budget: str) -> str:
    return f"{attack} eps {budget}" if budget else attack


def _corruption_view(run: Run, long: pd.DataFrame, suite: Suite) -> View:
    """Corruptions as rows, models as columns, accuracy averaged over severities; the mean only where all are there."""
    part = long[long["suite"] == suite.name]
    cells = pd.DataFrame(
        index=pd.Index(["clean", *suite.corruptions, "mean"], name="corruption"), columns=_models(long), dtype=object
    )
    for model in cells.columns:
        own = part[part["model"] == model]
        clean = long[(long["model"] == model) & (long["attack"] == CLEAN)].iloc[0]
        cells.loc["clean", model] = share(clean["accuracy"]) if clean["status"] == "complete" else clean["status"]
        means = []
        for name in suite.corruptions:
            rows = own[own["attack"] == suite.label(name)]
            bad = rows.loc[rows["status"] != "complete", "status"]
            if bad.empty:
                means.append(float(rows["accuracy"].mean()))
                cells.loc[name, model] = share(means[-1])
            else:
                cells.loc[name, model] = f"{bad.iloc[0]} ({len(bad)} of {len(rows)} severities)"
        whole = len(means) == len(suite.corruptions)
        cells.loc["mean", model] = share(sum(means) / len(means)) if whole else "not available"
    trainings = "trainings and " if "seeds" in long.columns else ""
    notes = (
        f"Accuracy in %, mean over {trainings}severities {', '.join(map(str, suite.severities))}, each over all {run.n} samples; the mean is over the {len(suite.corruptions)} corruptions.",
        "Generated on the fly by robustkpca, not the released ImageNet-C images: not to be compared with figures on those.",
    )
    return View(f"{suite.title} ({suite.name})", cells, notes)


def _clean_view(run: Run, long: pd.DataFrame) -> View:
    cells = pd.DataFrame(index=_models(long), columns=["top-1", "top-5"], dtype=object)
    for _, row in long.iterrows():
        top5 = "not available" if pd.isna(row["top5"]) else share(row["top5"])
        cells.loc[row["model"]] = [with_interval(row), top5]
    notes = (
        f"{_meaning(run, long)} Answers {run.request['data']['argmax']}. Top-5, without an interval, needs more than 5 classes.",
    )
    return View(f"Clean accuracy on {run.request['data']['name']}", cells, notes)


def _released_view(run: Run) -> View:
    """Released ImageNet-C: mean error and CE per corruption, then mean error and mCE over the 15."""
    table = imagenet_c.corruption_table(run)
    names = list(dict.fromkeys(table["corruption"]))
    cells = pd.DataFrame(
        index=pd.Index([*names, "mean error of the 15", "mCE"], name="corruption"), columns=run.models, dtype=object
    )
    for model in run.models:
        own = table[table["model"] == model].set_index("corruption")
        for name in names:
            row = own.loc[name]
            if row["status"] != "complete":
                cells.loc[name, model] = row["status"]
            else:
                ce = "no AlexNet error" if pd.isna(row["ce"]) else f"CE {row['ce']:.1f}"
                cells.loc[name, model] = f"{row['mean_error']:.1f} ({ce})"
        means = {name: (None if pd.isna(v) else float(v)) for name, v in own["mean_error"].items()}
        known = [means.get(name) for name in imagenet_c.ALEXNET]
        mce = imagenet_c.mean_corruption_error(means)
        whole = mce is not None
        cells.loc["mean error of the 15", model] = f"{sum(known) / len(known):.1f}" if whole else "not available"  # type: ignore[arg-type]
        cells.loc["mCE", model] = f"{mce:.2f}" if whole else "not available"
    notes = (
        "Top-1 error in %, mean over severities 1 to 5 of the released images (cropped, not resized), and CE: that error by AlexNet's. "
        "mCE is the mean CE over exactly the 15 corruptions of the benchmark, each normalised first.",
    )
    return View("ImageNet-C, released images", cells, notes)


def _detection_view(run: Run) -> View:
    table = imagenet_o.detection_table(run).set_index("model")
    heads = ["AUPR", "AUROC", "FPR95", "in / out of distribution"]
    cells = pd.DataFrame(index=pd.Index(run.models, name="model"), columns=heads, dtype=object)
    for model in run.models:
        row = table.loc[model]
        if row["status"] == "complete":
            areas = [share(row[k]) for k in ("aupr", "auroc", "fpr95")]
            cells.loc[model] = [*areas, f"{row['n_in']} / {row['n_out']}"]
        else:
            cells.loc[model] = [row["status"]] * 4
    notes = (
        "In %. Out of distribution is the positive class, the score is minus the largest softmax probability, answers "
        f"{run.request['data']['argmax']}. AUPR depends on the ratio of the two counts.",
    )
    return View("ImageNet-O, out-of-distribution detection", cells, notes)


def _comparison_view(run: Run) -> View:
    """Cells as rows, models as columns; a corruption suite is one row, its mean."""
    frame = compare(run)
    rest = run.models[1:]
    rows: dict[str, list[str]] = {}
    for suite, cell, _ in compared_columns(run):
        if any(s.name == suite and s.corruptions for s in run.suites):
            continue
        here = frame[(frame["attack"] == cell.attack) & (frame["budget"] == cell.budget)].set_index("model")
        name = "clean" if cell.attack == CLEAN else f"{cell.attack} eps {cell.budget}"
        rows[name] = [_difference(here.loc[m]) if m in here.index else "not available" for m in rest]
    for suite_ in run.suites:
        if suite_.corruptions:
            parts = {m: frame[(frame["suite"] == suite_.name) & (frame["model"] == m)] for m in rest}
            rows[f"{suite_.name}, mean"] = [
                points(p["difference"].mean()) if len(p) == len(suite_.cells) else "not available"
                for p in parts.values()
            ]
    cells = pd.DataFrame.from_dict(rows, orient="index", columns=rest, dtype=object)
    cells.index.name = f"minus {run.models[0]}"
    notes = (
        f"Difference in points to {run.models[0]} on the same {run.n} samples with its 95 % interval (Bonett and Price, paired); p: exact "
        "McNemar test, Holm-adjusted over all cells of this comparison (the intervals are not). p >= 0.05: not distinguishable.",
    )
    return View("Paired comparison", cells, notes)


def _difference(row: pd.Series) -> str:
    p = row["p_holm"]
    said = "p < 0.001" if p < 0.001 else f"p = {p:.3f}{'' if p < 0.05 else ', not distinguishable'}"
    return f"{points(row['difference'])} ({points(row['low'])} to {points(row['high'])}; {said})"
