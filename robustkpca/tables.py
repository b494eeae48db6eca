"""From rows to tables: accuracies with intervals, worst cases, paired comparisons. pandas only; every figure is recomputed from rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from robustkpca import metrics, stats
from robustkpca.outcomes import FLAGS, Run
from robustkpca.spec import CLEAN, IN_DISTRIBUTION, OUT_OF_DISTRIBUTION, Cell, Suite

WORST = "worst case"


def accuracy_table(run: Run) -> pd.DataFrame:
    """One row per model and cell, in the order asked for; the long form of every table.

    Columns: model, suite, attack, budget, status ("complete", "not run", "incomplete k/n", "failed: ..."), n, correct, accuracy,
    low, high (95 % Wilson interval), top5, success_rate (share of the samples that were right when clean and are wrong now). Shares in
    [0, 1], empty (NA) unless the cell is complete: n then is the whole set. A suite of several attacks adds its worst case: a
    sample counts as right when it is right under every attack.
    """
    records = []
    for model in run.models:
        clean = run.cell_rows(model, Cell(CLEAN, ""))
        for suite, cell, parts in _columns(run):
            statuses = [run.status(model, part) for part in parts]
            bad = [s.text for s in statuses if s.text != "complete"]
            record: dict[str, object] = {"model": model, "suite": suite, "attack": cell.attack, "budget": cell.budget}
            if bad:
                records.append({**record, "status": bad[0]})
                continue
            frames = [run.cell_rows(model, part) for part in parts]
            correct = pd.concat([f["correct"] for f in frames], axis=1).all(axis=1)
            right, n = int(correct.sum()), len(correct)
            low, high = stats.wilson(right, n)
            before = clean["correct"].reindex(correct.index)
            whole = before.notna().all() and bool(before.any())
            record |= {"status": "complete", "n": n, "correct": right, "accuracy": right / n, "low": low, "high": high}
            top5 = frames[0]["correct_top5"]
            if len(frames) == 1 and top5.notna().all():
                record["top5"] = float(top5.astype(bool).mean())
            if whole and cell.attack != CLEAN:
                hit = before.astype(bool)
                record["success_rate"] = float((~correct[hit]).mean())
            records.append(record)
    names = [
        "model",
        "suite",
        "attack",
        "budget",
        "status",
        "n",
        "correct",
        "accuracy",
        "low",
        "high",
        "top5",
        "success_rate",
    ]
    frame = pd.DataFrame(records, columns=names)
    return frame.astype({"n": "Int64", "correct": "Int64", **dict.fromkeys(names[7:], "Float64")})


def _columns(run: Run) -> list[tuple[str, Cell, list[Cell]]]:
    """(suite name, column, the cells it rests on) for every column of a run."""
    # ImageNet-O has no accuracy: its images are of none of the classes.
    unattacked = [cell for cell in run.conditions if cell not in (IN_DISTRIBUTION, OUT_OF_DISTRIBUTION)]
    columns = [("", cell, [cell]) for cell in unattacked]
    for suite in run.suites:
        columns += [(suite.name, cell, [cell]) for cell in suite.cells]
        if len(suite.attack) > 1:
            for budget in suite.budgets:
                parts = [Cell(attack, budget) for attack in suite.attacks]
                columns.append((suite.name, Cell(f"{suite.name}/{WORST}", budget), parts))
    return columns


def compare(run: Run, baseline: str | None = None) -> pd.DataFrame:
    """Every model against the baseline row (the first unless named) on the same samples, cell by cell.

    Columns: model, baseline, suite, attack, budget, n, difference (share, model minus baseline), gained, lost, p_value (exact McNemar, two-sided),
    p_holm (Holm-adjusted over this table). Cells that are not complete for both are left out.
    """
    baseline = baseline or run.models[0]
    records = []
    for model in run.models:
        if model == baseline:
            continue
        for suite, cell, parts in _columns(run):
            if any(run.status(m, part).text != "complete" for m in (model, baseline) for part in parts):
                continue
            ours, theirs = (
                pd.concat([run.cell_rows(m, part)["correct"] for part in parts], axis=1).all(axis=1)
                for m in (model, baseline)
            )
            paired = stats.Paired.of(theirs.to_numpy(bool), ours.reindex(theirs.index).to_numpy(bool))
            records.append(
                {
                    "model": model, "baseline": baseline, "suite": suite, "attack": cell.attack, "budget": cell.budget,
                    "n": paired.n, "difference": paired.difference, "gained": paired.gained, "lost": paired.lost,
                    "p_value": paired.p_value,
                }
            )  # fmt: skip
    names = ["model", "baseline", "suite", "attack", "budget", "n", "difference", "gained", "lost", "p_value"]
    frame = pd.DataFrame(records, columns=names)
    return frame.assign(p_holm=stats.holm(frame["p_value"].to_numpy(float)))


def flagged(run: Run) -> pd.DataFrame:
    """Rows that must not be believed, counted: model, attack, budget, flag, meaning, rows."""
    rows = run.rows
    raised = rows.loc[rows["flags"] != "", ["model", "attack", "budget", "flags"]]
    raised = raised.assign(flag=raised["flags"].str.split(",")).explode("flag")
    counts = raised.groupby(["model", "attack", "budget", "flag"], sort=False).size().reset_index(name="rows")
    return counts.assign(meaning=counts["flag"].map(FLAGS))


@dataclass(frozen=True)
class View:
    """A table to look at: a title, text cells with models as rows, and notes that its numbers need."""

    title: str
    cells: pd.DataFrame
    notes: tuple[str, ...] = ()


def views(run: Run) -> list[View]:
    """The tables of a run as people read them: one for each suite, then the paired comparison."""
    if OUT_OF_DISTRIBUTION in run.conditions:
        return [_detection_view(run)]
    if Cell(CLEAN, "") not in run.conditions:
        return [_released_view(run)]
    long = accuracy_table(run)
    found = [_corruption_view(long, s) if s.corruptions else _attack_view(run, long, s) for s in run.suites]
    if not run.suites:
        found.append(_clean_view(run, long))
    if len(run.models) > 1:
        found.append(_comparison_view(run))
    return found


def share(value: float) -> str:
    """A share in [0, 1] as per cent with one decimal."""
    return f"{100 * value:.1f}"


def with_interval(row: pd.Series) -> str:
    """`87.1 (84.9–89.0)`, or the status of a cell that has no figure."""
    if row["status"] != "complete":
        return str(row["status"])
    return f"{share(row['accuracy'])} ({share(row['low'])}–{share(row['high'])})"


def _column(suite: Suite, attack: str, budget: str) -> str:
    name = attack.removeprefix(f"{suite.name}/") if len(suite.attack) > 1 else ""
    return f"{name} eps {budget}".strip()


def _attack_view(run: Run, long: pd.DataFrame, suite: Suite) -> View:
    part = long[(long["suite"] == suite.name) | (long["attack"] == CLEAN)]
    heads = {}
    for attack, budget in zip(part["attack"], part["budget"], strict=True):
        heads[attack, budget] = "clean" if attack == CLEAN else _column(suite, attack, budget)
    cells = pd.DataFrame(index=pd.Index(run.models, name="model"), columns=list(heads.values()), dtype=object)
    for _, row in part.iterrows():
        cells.loc[row["model"], heads[row["attack"], row["budget"]]] = with_interval(row)
    notes = (f"Accuracy in % over all {run.n} samples with 95 % Wilson interval.", f"{suite.name}: {suite.describe()}.")
    return View(f"{suite.title} ({suite.name})", cells, notes)


def _corruption_view(long: pd.DataFrame, suite: Suite) -> View:
    """Corruptions as rows, models as columns, accuracy averaged over severities; the mean only where all are there."""
    models = list(dict.fromkeys(long["model"]))
    part = long[long["suite"] == suite.name]
    cells = pd.DataFrame(
        index=pd.Index(["clean", *suite.corruptions, "mean"], name="corruption"), columns=models, dtype=object
    )
    for model in models:
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
    n = part["n"].max()
    notes = (
        f"Accuracy in %, mean over severities {', '.join(map(str, suite.severities))}, each over "
        f"{'all samples' if pd.isna(n) else f'all {n} samples'}; `mean` is over the {len(suite.corruptions)} corruptions.",
        "Generated on the fly by robustkpca, not the released ImageNet-C images: not to be compared with figures on those.",
    )
    return View(f"{suite.title} ({suite.name})", cells, notes)


def _clean_view(run: Run, long: pd.DataFrame) -> View:
    cells = pd.DataFrame(index=pd.Index(run.models, name="model"), columns=["top-1", "top-5"], dtype=object)
    for _, row in long.iterrows():
        top5 = "not available" if pd.isna(row["top5"]) else share(row["top5"])
        cells.loc[row["model"]] = [with_interval(row), top5]
    notes = (
        f"Accuracy in % over all {run.n} samples, top-1 with 95 % Wilson interval; answers "
        f"{run.request['data']['argmax']}. Top-5 needs more than 5 classes.",
    )
    return View(f"Clean accuracy on {run.request['data']['name']}", cells, notes)


def _released_view(run: Run) -> View:
    """Released ImageNet-C: mean error and CE per corruption, then mean error and mCE over the 15."""
    table = metrics.corruption_table(run)
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
        known = [means.get(name) for name in metrics.ALEXNET]
        mce = metrics.mean_corruption_error(means)
        whole = mce is not None
        cells.loc["mean error of the 15", model] = f"{sum(known) / len(known):.1f}" if whole else "not available"  # type: ignore[arg-type]
        cells.loc["mCE", model] = f"{mce:.2f}" if whole else "not available"
    notes = (
        "Top-1 error in %, mean over severities 1 to 5 of the released images (cropped, not resized), and CE: that error by AlexNet's. "
        "mCE is the mean CE over exactly the 15 corruptions of the benchmark, each normalised first.",
    )
    return View("ImageNet-C, released images", cells, notes)


def _detection_view(run: Run) -> View:
    table = metrics.detection_table(run).set_index("model")
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
    for suite, cell, _ in _columns(run):
        if any(s.name == suite and s.corruptions for s in run.suites):
            continue
        here = frame[(frame["attack"] == cell.attack) & (frame["budget"] == cell.budget)].set_index("model")
        name = "clean" if cell.attack == CLEAN else f"{cell.attack} eps {cell.budget}"
        rows[name] = [_difference(here.loc[m]) if m in here.index else "not available" for m in rest]
    for suite_ in run.suites:
        if suite_.corruptions:
            parts = {m: frame[(frame["suite"] == suite_.name) & (frame["model"] == m)] for m in rest}
            rows[f"{suite_.name}, mean"] = [
                f"{100 * p['difference'].mean():+.1f}" if len(p) == len(suite_.cells) else "not available"
                for p in parts.values()
            ]
    cells = pd.DataFrame.from_dict(rows, orient="index", columns=rest, dtype=object)
    cells.index.name = f"minus {run.models[0]}"
    notes = (
        f"Difference in points to {run.models[0]} on the same {run.n} samples; p: exact McNemar test, Holm-adjusted over "
        "all cells of this comparison. p >= 0.05: not distinguishable.",
    )
    return View("Paired comparison", cells, notes)


def _difference(row: pd.Series) -> str:
    p = row["p_holm"]
    return f"{100 * row['difference']:+.1f} ({'p < 0.001' if p < 0.001 else f'p = {p:.3f}'})"


def markdown(cells: pd.DataFrame) -> str:
    """A GitHub Markdown table, the index as first column; cell text cannot break it."""
    rows: Sequence[Sequence[object]] = [
        [cells.index.name or "", *cells.columns],
        *cells.reset_index().to_numpy().tolist(),
    ]
    lines = ["| " + " | ".join(escape(str(value)) for value in row) + " |" for row in rows]
    lines.insert(1, "|" + " --- |" + " ---: |" * len(cells.columns))
    return "\n".join(lines)


def escape(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    for mark in "\\`*_{}<>[]|#~$":
        text = text.replace(mark, f"\\{mark}")
    return " ".join(text.split())
