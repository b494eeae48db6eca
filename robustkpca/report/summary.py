"""A run in words, generated from its numbers: which model is better, by how much, how sure, under which attack, and
what was not run."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from robustkpca.diagnosis.findings import Finding
from robustkpca.report.run_tables import with_interval
from robustkpca.results import comparison, imagenet_c, trainings
from robustkpca.results.columns import MEAN, WORST, Column
from robustkpca.runs.run import Run
from robustkpca.suites.cell import CLEAN_CELL, AttackId, Cell
from robustkpca.suites.suite import Suite, load_suite, suite_names


def summary(run: Run, findings: Sequence[Finding]) -> list[str]:
    """One sentence or two for each thing a reader must know, the gravest last."""
    long = trainings.shown_table(run)
    lines = []
    columns = [headline(suite) for suite in run.suites if suite.combination != "mean"]
    if CLEAN_CELL in run.conditions:
        columns.insert(0, Column.of("", CLEAN_CELL))
    for column in columns:
        lines += _cell(run, long, column)
    for suite in run.suites:
        if suite.combination == "mean":
            lines += _mean(run, long, suite)
    if len(run.models) > 1:
        lines += _verdicts(run)
    if any(suite.attack for suite in run.suites) and run.task.name == "classification":
        lines += _strength(run)
    broken = [s for s in run.statuses if not s.complete]
    if broken:
        lines.append(f"{len(broken)} of {len(run.statuses)} cells have no result; the tables say why.")
    for level, words in (("warn", "be read with care"), ("fail", "not be believed as they stand")):
        rules = sorted({f"{f.rule} ({f.model})" for f in findings if f.level == level})
        if rules:
            lines.append(f"Some results must {words}, see the findings: {', '.join(rules)}.")
    return lines


def headline(suite: Suite) -> Column:
    """What stands for a suite of attacks, of several attacks the worst case, at its headline budget."""
    budget = suite.threat.headline
    if suite.combination == "single":
        return Column.of(suite.name, Cell(next(iter(suite.attacks)), budget))
    parts = tuple(Cell(attack, budget) for attack in suite.attacks)
    return Column(suite.name, AttackId(suite.name, WORST), budget, parts, "worst")


def _cell(run: Run, long: pd.DataFrame, column: Column) -> list[str]:
    attack, budget = column.texts
    chosen = (long["suite"] == column.suite) & (long["attack"] == attack) & (long["budget"] == budget)
    rows, score = long[chosen].set_index("model"), run.task.score
    word = next((s.threat.budget_word for s in run.suites if s.name == column.suite), "")
    where = "Without an attack" if column.clean else f"Under {attack.replace('/', ', ')} at {word} {budget}"
    suffix = " % right" if score.unit == "%" else f" {score.unit}".rstrip()
    texts = [
        f"{model} {with_interval(row, score)}{suffix}" if row["status"] == "complete" else f"{model} no result"
        for model, row in rows.iterrows()
    ]
    mean = ", mean over trainings" if "seeds" in long.columns else ""
    return [f"{where}, of {run.n} {run.task.sample_word}s{mean}: {', '.join(texts)}."]


def _mean(run: Run, long: pd.DataFrame, suite: Suite) -> list[str]:
    score, texts = run.task.score, []
    means = imagenet_c.generated_means(long, suite)
    for row in means[means["corruption"] == MEAN].itertuples():
        shown = "no result" if pd.isna(row.value) else f"{score.shown(float(str(row.value)))} {score.unit}".rstrip()
        texts.append(f"{row.model} {shown}")
    return [f"Mean over the {len(suite.specs)} corruptions of suite {suite.name}, generated: {', '.join(texts)}."]


def _verdicts(run: Run) -> list[str]:
    """Each model against the first, over all cells of the comparison."""
    score, word = run.task.score, run.task.sample_word
    frame, how = trainings.compared_training_runs(run), "over trainings"
    test = f"t tests, in which trainings and {word}s count as drawn"
    if frame.empty:
        frame, how, test = comparison.compared(run), f"{word} by {word}", f"{score.test_name}s"
    lines: list[str] = []
    alike: dict[str, list[str]] = {}
    for model, rows in frame.groupby("model", sort=False):
        clear = rows[rows["p_holm"] < 0.05]
        if clear.empty:
            alike.setdefault(rows["baseline"].iloc[0], []).append(str(model))
            continue
        worse = int(clear["difference"].map(score.worse).sum())
        row = clear.loc[clear["difference"].abs().idxmax()]
        name = f"{row['attack'].replace('/', ', ')} {row['budget']}".strip()
        low, high = score.shown_difference(row["low"]), score.shown_difference(row["high"])
        lines.append(
            f"{model} against {row['baseline']}, {how}: better in {len(clear) - worse}, worse in {worse}, not "
            f"distinguishable in {len(rows) - len(clear)} of {len(rows)} cells; the largest clear difference is "
            f"{score.shown_difference(row['difference'])} {score.difference_unit} ({low} to {high}) under {name} "
            f"({test}, Holm-adjusted over all cells)."
        )
    for baseline, models in alike.items():
        cells = frame[frame["model"].isin(models)].drop_duplicates(["attack", "budget"])
        lines.append(
            f"Not distinguishable from {baseline}, {how}, in any of {len(cells)} cells: {', '.join(models)} "
            f"({test}, Holm-adjusted over all cells)."
        )
    return lines


def _strength(run: Run) -> list[str]:
    """What stronger attacks were left out: accuracy under an attack is an upper bound of robustness."""
    # Under other parameters a suite is not what its name stands for.
    names = {s.name for s in run.suites if s.name in suite_names() and s.attack == load_suite(s.name).attack}
    rpc = any(m.vision is not None and m.vision.rpc for m in run.request.models)
    missing = [n for n in ("autoattack", "adaptive") if n not in names and (n != "adaptive" or rpc)]
    if not missing:
        return []
    return [f"Not run: {' and '.join(missing)}. Accuracy under weaker attacks is an upper bound of robustness."]
