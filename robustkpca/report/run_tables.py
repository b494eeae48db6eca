"""The tables of a run as people read them: text cells, models as rows, and the notes that their numbers need."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from robustkpca.results import comparison, imagenet_c, imagenet_o, trainings
from robustkpca.results.accuracy import VALUE, breakers, results_of
from robustkpca.results.columns import MEAN, WORST, Column, columns_of, compared_columns, headline_columns
from robustkpca.runs.run import Run
from robustkpca.runs.schema import remarks_of
from robustkpca.suites.cell import CLEAN, CLEAN_CELL, OUT_OF_DISTRIBUTION, AttackId
from robustkpca.suites.suite import Suite
from robustkpca.tasks.score import Score


@dataclass(frozen=True)
class View:
    """A table to look at: a title, text cells with models as rows, and notes that its numbers need."""

    title: str
    cells: pd.DataFrame
    notes: tuple[str, ...] = ()


def views(run: Run, *, compared: bool = True) -> list[View]:
    """The tables of a run: one for each suite, then the paired comparison.

    Where a model has several training runs, results are means over them, and single checkpoints follow in one table.
    """
    if OUT_OF_DISTRIBUTION in run.conditions:
        return [_detection_view(run)]
    if CLEAN_CELL not in run.conditions:
        return [_released_view(run)]
    long, several = trainings.shown_table(run), trainings.has_training_runs(run)
    tables: list[View | None] = []
    for suite in run.suites:
        if suite.combination == "mean":
            tables.append(_mean_view(run, long, suite))
        elif suite.combination == "single":
            tables.append(_attack_view(run, long, suite))
        else:
            tables += [_attacks_view(run, long, suite), _breakers_view(run, suite) if compared else None]
    if not run.suites:
        tables.append(_clean_view(run, long))
    if several:
        between = (_training_runs_view(run) or _comparison_view(run)) if compared else None
        tables += [between, _checkpoints_view(run)]
    elif len(run.models) > 1 and compared:
        tables.append(_comparison_view(run))
    return [view for view in tables if view is not None]


def with_interval(row: pd.Series, score: Score) -> str:
    """`87.1 (84.9–89.0)`, or the status of a cell that has no result."""
    if row["status"] != "complete":
        return str(row["status"])
    return f"{score.shown(row[VALUE])} ({score.shown(row['low'])}–{score.shown(row['high'])})"


def column_name(column: Column, run: Run) -> str:
    """`clean`, `pgd eps 8/255`, `corruptions/fog severity 3`."""
    attack, budget = column.texts
    suite = next((s for s in run.suites if s.name == column.suite), None)
    return f"{attack} {suite.threat.budget_word} {budget}" if budget and suite else f"{attack} {budget}".strip()


def _attack_view(run: Run, long: pd.DataFrame, suite: Suite) -> View:
    """Models as rows, budgets as columns."""
    part = long[(long["suite"] == suite.name) | (long["attack"] == CLEAN)]
    heads = {b: "clean" if not b else f"{suite.threat.budget_word} {b}" for b in part["budget"]}
    cells = pd.DataFrame(index=_models(long), columns=list(heads.values()), dtype=object)
    for _, row in part.iterrows():
        cells.loc[row["model"], heads[row["budget"]]] = with_interval(row, run.task.score)
    return View(f"{suite.title} ({suite.name})", cells, _attack_notes(run, long, suite))


def _models(long: pd.DataFrame) -> pd.Index:
    return pd.Index(long["model"].unique(), name="model")


def _in_unit(run: Run) -> str:
    """`Accuracy in %`."""
    score = run.task.score
    return f"{score.title} in {score.unit}" if score.unit else score.title


def _meaning(run: Run, long: pd.DataFrame) -> str:
    """What the numbers of a table are, and their intervals."""
    everything = f"{_in_unit(run)} over all {run.n} samples"
    if "seeds" not in long.columns:
        return f"{everything} with {run.task.score.interval_name}."
    whole = long[long["status"] == "complete"]
    counts = (long if whole.empty else whole).groupby("model", sort=False)["seeds"].first()
    number = str(counts.iloc[0]) if len(set(counts)) == 1 else ", ".join(f"{name}: {n}" for name, n in counts.items())
    alone = run.task.score.interval_name.removeprefix("95 % ")
    single = f"; of one training the {alone}, which knows of samples only" if (counts == 1).any() else ""
    return (
        f"{everything}, mean over trainings ({number}), with its 95 % interval, in which trainings and samples both "
        f"count as drawn (Welch-Satterthwaite){single}. {_averaged(run)}"
    )


def _averaged(run: Run) -> str:
    """Which checkpoints are averaged, as a sentence; nothing where none are."""
    texts = trainings.averaged(run)
    return f"{'; '.join(texts)}." if texts else ""


def _attack_notes(run: Run, long: pd.DataFrame, suite: Suite) -> tuple[str, ...]:
    notes = [_meaning(run, long), f"{suite.name}: {suite.describe()}."]
    if suite.cascade:
        notes.insert(1, "Each row counts what the attacks up to it left right.")
    return (*notes, *untried_notes(run, suite))


def untried_notes(run: Run, suite: Suite) -> list[str]:
    """How many rows are right because the attack could not be tried, where there are any."""
    results, counts = results_of(run), dict[str, int]()
    for column in columns_of(run):
        for model in run.models if column.suite == suite.name else ():
            if not results.incomplete(model, column) and (count := results.untried(model, column)):
                counts[f"{model}, {column_name(column, run)}"] = count
    if not counts:
        return []
    largest = sorted(counts, key=lambda name: -counts[name])[:3]
    more = f" and {len(counts) - len(largest)} more cells" if len(counts) > len(largest) else ""
    rows = "; ".join(f"{counts[name]} of {run.n} rows ({name})" for name in largest)
    why = " or ".join(remarks_of(run.task).values())
    return [f"Right because {why}: {rows}{more}."]


def _attacks_view(run: Run, long: pd.DataFrame, suite: Suite) -> View:
    """A suite of several attacks: attacks and budgets as rows, models as columns, the worst case after each budget."""
    part = long[(long["suite"] == suite.name) | (long["attack"] == CLEAN)]
    ids, word = [*suite.attacks, AttackId(suite.name, WORST)], suite.threat.budget_word
    rows = {(CLEAN, ""): "clean"}
    rows |= {(str(i), str(b)): f"{i.attack} {word} {b}" for b in suite.budgets for i in ids}
    cells = pd.DataFrame(index=pd.Index(rows.values(), name="attack"), columns=_models(long), dtype=object)
    for _, row in part.iterrows():
        cells.loc[rows[row["attack"], row["budget"]], row["model"]] = with_interval(row, run.task.score)
    return View(f"{suite.title} ({suite.name})", cells, _attack_notes(run, long, suite))


def _breakers_view(run: Run, suite: Suite) -> View | None:
    """How many samples each attack broke, and how many only it did;
    of several training runs, in all of them together."""
    table = breakers(run)
    table = table[table["suite"] == suite.name]
    if table.empty:
        return None
    models, of = run.models, f"{run.n}"
    if trainings.has_training_runs(run):
        groups = trainings.groups(run)
        models, of = list(groups), f"{run.n} in each training, all of a model's trainings together"
        titles = {label: title for title, labels in groups.items() for label in labels}
        keys = ["model", "suite", "attack", "budget"]
        table = table.assign(model=table["model"].map(titles)).groupby(keys, sort=False).sum().reset_index()
    word = suite.threat.budget_word
    rows = {(str(i), str(b)): f"{i.attack} {word} {b}" for b in suite.budgets for i in suite.attacks}
    cells = pd.DataFrame("not available", index=pd.Index(rows.values(), name="attack"), columns=models, dtype=object)
    for row in table.itertuples():
        alone = "" if suite.cascade else f" ({row.alone} by it alone)"
        cells.loc[rows[str(row.attack), str(row.budget)], row.model] = f"{row.broken}{alone}"
    note = "that none before it had broken" if suite.cascade else "that were right when clean"
    plural = f"{run.task.sample_word}s"
    return View(f"Which attack broke the {plural} ({suite.name})", cells, (f"Numbers of {plural}, of {of}, {note}.",))


def _training_runs_view(run: Run) -> View | None:
    """Models as rows, what is compared as columns."""
    frame = trainings.compared_training_runs(run)
    if frame.empty:
        return None
    names = {column.texts: column_name(column, run) for column in headline_columns(run)}
    baselines = list(frame["baseline"].unique())
    alone = len(baselines) == 1
    frame = frame.assign(name=frame["model"] if alone else frame["model"] + " minus " + frame["baseline"])
    models = pd.Index(frame["name"].unique(), name=f"minus {baselines[0]}" if alone else "model minus model")
    cells = pd.DataFrame("not available", index=models, columns=list(names.values()), dtype=object)
    for _, row in frame.iterrows():
        cells.loc[row["name"], names[row["attack"], row["budget"]]] = _difference(row, run.task.score)
    notes = (
        f"Difference in {run.task.score.difference_unit}, mean over trainings, on the same {run.n} samples, with its "
        "95 % interval, in which trainings and samples both count as drawn (Welch-Satterthwaite); p: t test of the "
        "same, Holm-adjusted over all cells of this comparison (the intervals are not). p >= 0.05: not "
        "distinguishable. Models of one training are not compared here; the same trainings run in two ways are "
        "compared training by training.",
    )
    return View("Comparison over seeds", cells, notes)


def _checkpoints_view(run: Run) -> View:
    """Each checkpoint's own results: models as rows, one column for each cell that is compared."""
    results, score = results_of(run), run.task.score
    columns = headline_columns(run)
    heads = [column_name(column, run) for column in columns]
    cells = pd.DataFrame(index=pd.Index(run.models, name="model"), columns=heads, dtype=object)
    for model in run.models:
        for head, column in zip(heads, columns, strict=True):
            bad = results.incomplete(model, column)
            if bad:
                cells.loc[model, head] = bad[0].text
            elif column.how == "mean":
                cells.loc[model, head] = score.shown(score.mean(results.parts(model, column)))
            else:
                cells.loc[model, head] = score.shown(score.value(results.rows(model, column)))
    return View("Single checkpoints", cells, (f"{_in_unit(run)} over all {run.n} samples.",))


def _mean_view(run: Run, long: pd.DataFrame, suite: Suite) -> View:
    """Corruptions as rows, models as columns, the score averaged over severities; the mean only where all are there."""
    score = run.task.score
    index = pd.Index(["clean", *(spec.name for spec in suite.specs), MEAN], name="corruption")
    cells = pd.DataFrame(index=index, columns=_models(long), dtype=object)
    for model in cells.columns:
        clean = long[(long["model"] == model) & (long["attack"] == CLEAN)].iloc[0]
        cells.loc["clean", model] = score.shown(clean[VALUE]) if clean["status"] == "complete" else clean["status"]
    for row in imagenet_c.generated_means(long, suite).itertuples():
        cells.loc[row.corruption, row.model] = row.status if pd.isna(row.value) else score.shown(float(str(row.value)))
    over = "trainings and " if "seeds" in long.columns else ""
    budgets = ", ".join(map(str, suite.budgets))
    notes = (
        f"{_in_unit(run)}, mean over {over}severities {budgets}, each over all {run.n} samples; the mean is over the "
        f"{len(suite.specs)} corruptions. {_averaged(run)}".strip(),
        "Generated on the fly by robustkpca, not the released ImageNet-C images: not to be compared with figures on "
        "those.",
    )
    return View(f"{suite.title} ({suite.name})", cells, notes)


def _clean_view(run: Run, long: pd.DataFrame) -> View:
    score, of_images = run.task.score, run.task.name == "classification"
    heads = ["top-1", "top-5"] if of_images else [score.title]
    cells = pd.DataFrame(index=_models(long), columns=heads, dtype=object)
    for _, row in long.iterrows():
        values = [with_interval(row, score)]
        if of_images:
            values.append("not available" if pd.isna(row["top5"]) else score.shown(row["top5"]))
        cells.loc[row["model"]] = values
    answers = f" Answers {run.request.data.argmax}." if run.request.data.argmax else ""
    top5 = " Top-5, without an interval, needs more than 5 classes." if of_images else ""
    title = "Clean accuracy" if of_images else score.title
    return View(f"{title} on {run.request.data.name}", cells, (f"{_meaning(run, long)}{answers}{top5}",))


def _released_view(run: Run) -> View:
    """Released ImageNet-C: mean error and CE per corruption, then mean error and mCE over the 15."""
    table, means = imagenet_c.corruption_table(run), imagenet_c.released_means(run)
    names = list(dict.fromkeys(table["corruption"]))
    index = pd.Index([*names, "mean error of the 15", "mCE"], name="corruption")
    cells = pd.DataFrame(index=index, columns=run.models, dtype=object)
    for row in table.itertuples():
        ce = "no AlexNet error" if pd.isna(row.ce) else f"CE {row.ce:.1f}"
        text = row.status if row.status != "complete" else f"{row.mean_error:.1f} ({ce})"
        cells.loc[row.corruption, row.model] = text
    for row in means.itertuples():
        whole = not pd.isna(row.mce)
        cells.loc["mean error of the 15", row.Index] = f"{row.mean_error:.1f}" if whole else "not available"
        cells.loc["mCE", row.Index] = f"{row.mce:.2f}" if whole else "not available"
    notes = (
        "Top-1 error in %, mean over severities 1 to 5 of the released images (cropped, not resized), and CE: that "
        "error by AlexNet's. mCE is the mean CE over exactly the 15 corruptions of the benchmark, each normalised "
        "first.",
    )
    return View("ImageNet-C, released images", cells, notes)


def _detection_view(run: Run) -> View:
    table = imagenet_o.detection_table(run).set_index("model")
    heads = ["AUPR", "AUROC", "FPR95", "in / out of distribution"]
    cells = pd.DataFrame(index=pd.Index(run.models, name="model"), columns=heads, dtype=object)
    for model in run.models:
        row = table.loc[model]
        if row["status"] == "complete":
            areas = [f"{100 * row[k]:.1f}" for k in ("aupr", "auroc", "fpr95")]
            cells.loc[model] = [*areas, f"{row['n_in']} / {row['n_out']}"]
        else:
            cells.loc[model] = [row["status"]] * 4
    notes = (
        "In %. Out of distribution is the positive class, the score is minus the largest softmax probability, answers "
        f"{run.request.data.argmax}. AUPR depends on the ratio of the two counts.",
    )
    return View("ImageNet-O, out-of-distribution detection", cells, notes)


def _comparison_view(run: Run) -> View:
    """Cells as rows, models as columns; a corruption suite is one row, its mean."""
    frame, score, rest = comparison.compared(run), run.task.score, run.models[1:]
    averaged = {suite.name: suite for suite in run.suites if suite.combination == "mean"}
    rows: dict[str, list[str]] = {}
    for column in compared_columns(run):
        if column.suite in averaged:
            continue
        attack, budget = column.texts
        here = frame[(frame["attack"] == attack) & (frame["budget"] == budget)].set_index("model")
        rows[column_name(column, run)] = [
            _difference(here.loc[m], score) if m in here.index else "not available" for m in rest
        ]
    for suite in averaged.values():
        parts = {m: frame[(frame["suite"] == suite.name) & (frame["model"] == m)] for m in rest}
        rows[f"{suite.name}, mean"] = [
            score.shown_difference(p["difference"].mean()) if len(p) == len(suite.cells) else "not available"
            for p in parts.values()
        ]
    cells = pd.DataFrame.from_dict(rows, orient="index", columns=rest, dtype=object)
    cells.index.name = f"minus {run.models[0]}"
    notes = (
        f"Difference in {score.difference_unit} to {run.models[0]} on the same {run.n} samples with its "
        f"{score.comparison_name}, Holm-adjusted over all cells of this comparison (the intervals are not). p >= 0.05: "
        "not distinguishable.",
    )
    return View("Paired comparison", cells, notes)


def _difference(row: pd.Series, score: Score) -> str:
    p = row["p_holm"]
    verdict = "p < 0.001" if p < 0.001 else f"p = {p:.3f}{'' if p < 0.05 else ', not distinguishable'}"
    low, high = score.shown_difference(row["low"]), score.shown_difference(row["high"])
    return f"{score.shown_difference(row['difference'])} ({low} to {high}; {verdict})"
