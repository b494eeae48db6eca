"""From rows to tables: accuracies with intervals, worst cases, paired comparisons. pandas only; every figure is recomputed from rows."""

from __future__ import annotations

import pandas as pd

from robustkpca.runs.run import Run
from robustkpca.statistics import proportions
from robustkpca.suites.cell import CLEAN, IN_DISTRIBUTION, OUT_OF_DISTRIBUTION, Cell

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
        for suite, cell, parts in columns_of(run):
            statuses = [run.status(model, part) for part in parts]
            bad = [s.text for s in statuses if s.text != "complete"]
            record: dict[str, object] = {"model": model, "suite": suite, "attack": cell.attack, "budget": cell.budget}
            if bad:
                records.append({**record, "status": bad[0]})
                continue
            frames = [run.cell_rows(model, part) for part in parts]
            correct = pd.concat([f["correct"] for f in frames], axis=1).all(axis=1)
            right, n = int(correct.sum()), len(correct)
            low, high = proportions.wilson(right, n)
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


def columns_of(run: Run) -> list[tuple[str, Cell, list[Cell]]]:
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


def worst_case(run: Run) -> pd.DataFrame:
    """For suites of several attacks: whether each sample is right under all of them, and which attacks broke it.

    Columns: model, suite, budget, sample, correct, broken_by: "" when right, "clean" when wrong without an attack, else the labels of the
    attacks that broke it, joined by commas, in the suite's order (in a cascade the first alone, as the others did not see it). Only what is complete.
    """
    frames = []
    for model in run.models:
        clean = run.cell_rows(model, Cell(CLEAN, ""))["correct"]
        for suite in run.suites:
            for budget in suite.budgets if len(suite.attack) > 1 else ():
                cells = [Cell(label, budget) for label in suite.attacks]
                if any(run.status(model, cell).text != "complete" for cell in [Cell(CLEAN, ""), *cells]):
                    continue
                right = pd.concat([run.cell_rows(model, c)["correct"] for c in cells], axis=1, keys=list(suite.attacks))
                right = right.astype(bool)
                names = [[label for label, ok in row.items() if not ok] for row in right.to_dict("records")]
                found = [by[:1] if suite.cascade else by for by in names]
                by_whom = [
                    ",".join(by) if ok else CLEAN for by, ok in zip(found, clean.reindex(right.index), strict=True)
                ]
                frames.append(
                    pd.DataFrame(
                        {"model": model, "suite": suite.name, "budget": budget, "sample": right.index,
                         "correct": right.all(axis=1).to_numpy(), "broken_by": by_whom}
                    )
                )  # fmt: skip
    columns = ["model", "suite", "budget", "sample", "correct", "broken_by"]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=columns)


def breakers(run: Run) -> pd.DataFrame:
    """How many samples each attack of a suite of several broke, and how many no other did: model, suite, attack, budget, broken, alone."""
    samples = worst_case(run)
    records = []
    for (model, suite_name, budget), part in samples.groupby(["model", "suite", "budget"], sort=False):
        suite = next(s for s in run.suites if s.name == suite_name)
        by = part["broken_by"].str.split(",")
        for label in suite.attacks:
            broken = by.map(lambda names, label=label: label in names)
            records.append(
                {"model": model, "suite": suite_name, "attack": label, "budget": budget, "broken": int(broken.sum()),
                 "alone": int((broken & (by.map(len) == 1)).sum())}
            )  # fmt: skip
    return pd.DataFrame(records, columns=["model", "suite", "attack", "budget", "broken", "alone"])
