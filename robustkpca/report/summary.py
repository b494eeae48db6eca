"""A run in words, generated from its numbers: which model is better, by how much, how sure, under which attack, and what was not run."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from robustkpca.diagnosis.findings import Finding
from robustkpca.report.run_tables import points, share, with_interval
from robustkpca.results import comparison, trainings
from robustkpca.results.accuracy import WORST
from robustkpca.runs.run import Run
from robustkpca.suites.cell import CLEAN
from robustkpca.suites.suite import Suite, load_suite, suite_names


def summary(run: Run, found: Sequence[Finding]) -> list[str]:
    """One sentence or two for each thing a reader must know, the gravest last."""
    long = trainings.shown_table(run)
    lines = []
    columns = [c for c in [_column(s) for s in run.suites] if c is not None]
    if ((long["attack"] == CLEAN) & (long["budget"] == "")).any():
        columns.insert(0, ("", CLEAN, ""))
    for name, attack, budget in columns:
        lines += _cell(run, long, name, attack, budget)
    for suite in run.suites:
        if suite.corruptions:
            lines += _corruptions(run, long, suite)
    if len(run.models) > 1:
        lines += _verdicts(run)
    if any(s.attack for s in run.suites):
        lines += _strength(run)
    broken = [s for s in run.statuses if s.text != "complete"]
    if broken:
        lines.append(f"{len(broken)} of {len(run.statuses)} cells have no figure; the tables say why.")
    for level, said in (("warn", "be read with care"), ("fail", "not be believed as they stand")):
        rules = sorted({f"{f.rule} ({f.model})" for f in found if f.level == level})
        if rules:
            lines.append(f"Some figures must {said}, see the findings: {', '.join(rules)}.")
    return lines


def _column(suite: Suite) -> tuple[str, str, str] | None:
    """What stands for a suite of attacks, of several attacks the worst case."""
    if suite.corruptions:
        return None
    return suite.name, next(iter(suite.attacks)) if len(suite.attack) == 1 else f"{suite.name}/{WORST}", suite.largest


def _cell(run: Run, long: pd.DataFrame, suite: str, attack: str, budget: str) -> list[str]:
    rows = long[(long["suite"] == suite) & (long["attack"] == attack) & (long["budget"] == budget)].set_index("model")
    where = "Without an attack" if attack == CLEAN else f"Under {attack.replace('/', ', ')} at eps {budget}"
    texts = [
        f"{model} {with_interval(row)} % right" if row["status"] == "complete" else f"{model} no figure"
        for model, row in rows.iterrows()
    ]
    mean = ", mean over trainings" if "seeds" in long.columns else ""
    return [f"{where}, of {run.n} images{mean}: {', '.join(texts)}."]


def _corruptions(run: Run, long: pd.DataFrame, suite: Suite) -> list[str]:
    texts = []
    for model in long["model"].unique():
        own = long[(long["suite"] == suite.name) & (long["model"] == model)]
        whole = (own["status"] == "complete").all()
        texts.append(f"{model} {share(float(own['accuracy'].mean()))} %" if whole else f"{model} no figure")
    return [f"Mean over the {len(suite.corruptions)} corruptions of suite {suite.name}, generated: {', '.join(texts)}."]


def _verdicts(run: Run) -> list[str]:
    """Each model against the first, over all cells of the comparison."""
    frame, how, test = (
        trainings.compare_seeds(run),
        "over trainings",
        "t tests, in which trainings and images count as drawn",
    )
    if frame.empty:
        frame, how, test = comparison.compare(run), "image by image", "exact McNemar tests"
    lines: list[str] = []
    alike: dict[str, list[str]] = {}
    for model, own in frame.groupby("model", sort=False):
        clear = own[own["p_holm"] < 0.05]
        if clear.empty:
            alike.setdefault(own["baseline"].iloc[0], []).append(str(model))
            continue
        better, worse = clear[clear["difference"] > 0], clear[clear["difference"] < 0]
        row = clear.loc[clear["difference"].abs().idxmax()]
        name = f"{row['attack'].replace('/', ', ')} {row['budget']}".strip()
        lines.append(
            f"{model} against {row['baseline']}, {how}: better in {len(better)}, worse in {len(worse)}, "
            f"not distinguishable in {len(own) - len(clear)} of {len(own)} cells; the largest clear difference is {points(row['difference'])} points "
            f"({points(row['low'])} to {points(row['high'])}) under {name} ({test}, Holm-adjusted over all cells)."
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
    rpc = any((m["settings"] or {}).get("rpc") for m in run.request["models"])
    missing = [n for n in ("autoattack", "adaptive") if n not in names and (n != "adaptive" or rpc)]
    if not missing:
        return []
    return [f"Not run: {' and '.join(missing)}. Accuracy under weaker attacks is an upper bound of robustness."]
