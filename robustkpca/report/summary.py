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


def verdict(run: Run, findings: Sequence[Finding]) -> tuple[str, str]:
    """Two sentences: which model is better, by how much and how sure; and what of it must be doubted."""
    return _better(run), _doubts(run, findings)


def _better(run: Run) -> str:
    """The comparison under the hardest of what was compared: the worst case of several attacks, else the attack of the
    first suite, else no attack; each at its headline budget."""
    frame, score = trainings.compared_training_runs(run), run.task.score
    frame = comparison.compared(run) if frame.empty and len(run.models) > 1 else frame
    columns = [headline(suite) for suite in run.suites if suite.combination != "mean"]
    columns.sort(key=lambda column: column.how != "worst")  # stable
    columns.append(Column.of("", CLEAN_CELL))
    for column in columns:
        rows = frame[[(a, b) == column.texts for a, b in zip(frame["attack"], frame["budget"], strict=True)]]
        if not rows.empty:
            best_first = rows.sort_values("difference", ascending=not score.higher_is_better, kind="stable")
            return _compared(run, column, best_first, frame)
    if len(run.models) > 1:
        return "No result of this run compares its models."
    long = trainings.shown_table(run) if CLEAN_CELL in run.conditions else pd.DataFrame({"status": []})
    lines = [line for column in columns[:1] if not long.empty for line in _cell(run, long, column)]
    return " ".join(lines) or "This run has one model and no result that sums it up; see the table."


def _compared(run: Run, column: Column, rows: pd.DataFrame, frame: pd.DataFrame) -> str:
    """`rows`: one for each model, the best first; `frame`: all that was compared."""
    clear = rows[rows["p_holm"] < 0.05]
    better = clear[~clear["difference"].map(run.task.score.worse)]
    worse = clear[clear["difference"].map(run.task.score.worse)]
    baseline, where = rows["baseline"].iloc[0], _where(run, column)
    parts = []
    if better.empty:
        parts.append(
            f"{where}, no model is measurably better than {baseline} on {run.n} {run.task.sample_word}s; the "
            f"{'difference' if len(rows) == 1 else 'best difference'} is {_by_how_much(run, rows.iloc[0])}"
        )
    else:
        others = f" (so are {', '.join(better['model'].iloc[1:])}, by less)" if len(better) > 1 else ""
        parts.append(
            f"{where}, {better['model'].iloc[0]} is better than {baseline} on {run.n} {run.task.sample_word}s, by "
            f"{_by_how_much(run, better.iloc[0], named=False)}{others}"
        )
    if not worse.empty:
        last = worse.iloc[-1]
        others = f" (so are {', '.join(worse['model'].iloc[:-1])}, by less)" if len(worse) > 1 else ""
        parts.append(f"{last['model']} is worse, by {_by_how_much(run, last, named=False)}{others}")
    return "; ".join([*parts, *_elsewhere(run, frame)]) + "."


def _elsewhere(run: Run, frame: pd.DataFrame) -> list[str]:
    """In how many of all cells models differ clearly from the first."""
    parts = []
    for model, rows in frame.groupby("model", sort=False):
        clear = rows[rows["p_holm"] < 0.05]
        if not clear.empty:
            worse = int(clear["difference"].map(run.task.score.worse).sum())
            parts.append(f"{model} is better in {len(clear) - worse} and worse in {worse}")
    return (
        [f"of all {len(frame.drop_duplicates(['attack', 'budget']))} cells compared, {', '.join(parts)}"]
        if parts
        else []
    )


def _by_how_much(run: Run, row: pd.Series, *, named: bool = True) -> str:
    """`+6.7 points (95 % interval -4.0 to +17.2; p = 0.21 after Holm's correction)`, with the model's name in front."""
    score, p = run.task.score, row["p_holm"]
    chance = "p < 0.001" if p < 0.001 else f"p = {p:.3f}"
    return (
        f"{row['model'] + chr(39) + 's ' if named else ''}{score.shown_difference(row['difference'])} "
        f"{score.difference_unit} (95 % interval {score.shown_difference(row['low'])} to "
        f"{score.shown_difference(row['high'])}; {chance} after Holm's correction)"
    )


def _doubts(run: Run, findings: Sequence[Finding]) -> str:
    """The gravest first."""
    doubts = []
    for level, words in (("fail", "do not believe what these findings are about"), ("warn", "read with care")):
        rules = sorted({f"{f.rule} ({f.model})" for f in findings if f.level == level})
        if rules:
            doubts.append(f"{words}: {', '.join(rules[:3])}{f' and {len(rules) - 3} more' if len(rules) > 3 else ''}")
    missing = sum(not s.complete for s in run.statuses)
    if missing:
        doubts.append(f"{missing} of {len(run.statuses)} cells have no result")
    if stronger := _not_run(run):
        doubts.append(f"{' and '.join(stronger)} {'was' if len(stronger) == 1 else 'were'} not run, and stronger "
                      "attacks can only lower these numbers")  # fmt: skip
    if len(run.models) > 1 and trainings.compared_training_runs(run).empty:
        doubts.append("models stand for one training each: what another training would give is in no interval here")
    doubts.append(f"all of it is about {run.n} {run.task.sample_word}s of {run.request.data.name}")
    return f"To be doubted: {'; '.join(doubts)}."


def _where(run: Run, column: Column) -> str:
    word = next((s.threat.budget_word for s in run.suites if s.name == column.suite), "")
    attack, budget = column.texts
    return "Without an attack" if column.clean else f"Under {attack.replace('/', ', ')} at {word} {budget}"


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
    if missing := _not_run(run):
        lines.append(
            f"Not run: {' and '.join(missing)}. Accuracy under weaker attacks is an upper bound of robustness."
        )
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
    where = _where(run, column)
    chosen = (long["suite"] == column.suite) & (long["attack"] == attack) & (long["budget"] == budget)
    rows, score = long[chosen].set_index("model"), run.task.score
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


def _not_run(run: Run) -> list[str]:
    """The stronger attacks that were left out: accuracy under an attack is an upper bound of robustness."""
    if not any(suite.attack for suite in run.suites) or run.task.name != "classification":
        return []
    # Under other parameters a suite is not what its name stands for.
    names = {s.name for s in run.suites if s.name in suite_names() and s.attack == load_suite(s.name).attack}
    rpc = any(m.vision is not None and m.vision.rpc for m in run.request.models)
    return [n for n in ("autoattack", "adaptive") if n not in names and (n != "adaptive" or rpc)]
