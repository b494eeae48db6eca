"""Figures of a report as PNG bytes; the same run gives the same bytes."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

from robustkpca.report.summary import headline
from robustkpca.results.columns import WORST
from robustkpca.results.trainings import groups, has_training_runs
from robustkpca.runs.run import Run
from robustkpca.suites.budget import Budget
from robustkpca.suites.cell import CLEAN, AttackId, Cell
from robustkpca.suites.suite import Suite
from robustkpca.suites.threat import Ball

SHOWN = 2  # samples of each model in the figure of examples
ACROSS = 4  # panels side by side
MOST = 10  # models in a figure of lines, and in the figure of examples


def accuracy_curves(run: Run, long: pd.DataFrame, suite: Suite) -> bytes | None:
    """The score over eps from the clean one at 0, or over severity, with the bands of the table's intervals; None
    without two points, or with more than MOST models, whose lines nobody could tell apart.

    `long` is a table of checkpoints or over training runs (`trainings.shown_table`), here and below. Of a suite of
    several attacks, the worst case; of corruptions, their mean, which has no band.
    """
    models, score = long["model"].unique(), run.task.score
    if len(models) > MOST:
        return None
    with _figure(6.4, 4.0) as figure:
        axes = figure.add_subplot()
        drawn = False
        for number, model in enumerate(models):
            results = long[(long["model"] == model) & (long["status"] == "complete")]
            points = _mean_points(results, suite) if suite.combination == "mean" else _attack_points(results, suite)
            if len(points) < 2:
                continue
            drawn, colour = True, f"C{number}"
            shown = points[["value", "low", "high"]] * score.scale
            axes.plot(points["x"], shown["value"], marker="o", markersize=3.5, color=colour, label=model)
            if points["low"].notna().all():
                axes.fill_between(points["x"], shown["low"], shown["high"], color=colour, alpha=0.15, lw=0)
        if not drawn:
            return None
        if np.isfinite(score.bounds).all():
            axes.set_ylim(*(score.scale * bound for bound in score.bounds))
        axes.set_ylabel(f"{score.title.lower()} ({score.unit})" if score.unit else score.title.lower())
        axes.set_xlabel(_budget_axis(suite))
        worst = f", {WORST}" if suite.combination == "worst" else ""
        axes.set_title(f"{suite.title}{worst}", wrap=True)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=8)
        return _png(figure)


def _budget_axis(suite: Suite) -> str:
    """What the horizontal axis shows."""
    if suite.combination == "mean":
        return f"{suite.threat.budget_word} (0: clean)"
    left_out = _far_out(suite)
    beyond = f"; {left_out} not drawn" if left_out else ""
    if not isinstance(suite.threat, Ball) or not suite.threat.has_eps:
        return f"{suite.threat.budget_word} (0: clean{beyond})"
    unit = "normalised units" if suite.threat.space == "normalized" else "pixel units"
    return f"eps * 255 ({unit}; 0: clean{beyond})"


def _attack_points(results: pd.DataFrame, suite: Suite) -> pd.DataFrame:
    attack = str(headline(suite).attack)
    factor = 255 if isinstance(suite.threat, Ball) and suite.threat.has_eps else 1
    place = {str(b): float(b.value * factor) for b in suite.budgets}
    part, clean = results[results["attack"] == attack], results[results["attack"] == CLEAN].assign(x=0.0)
    # The clean result stands for a budget of 0, unless that was run itself.
    part = part[part["budget"] != str(_far_out(suite) or "")]
    part = part.assign(x=[place[b] for b in part["budget"]])
    points = part if (part["x"] == 0).any() else pd.concat([clean, part])
    return points[["x", "value", "low", "high"]].astype(float).sort_values("x")


def _far_out(suite: Suite) -> Budget | None:
    """A largest budget so much larger than the others that their points would fall together; else None."""
    ordered = sorted(suite.budgets)
    return ordered[-1] if len(ordered) > 2 and ordered[-1].value > 8 * ordered[-2].value else None


def _mean_points(results: pd.DataFrame, suite: Suite) -> pd.DataFrame:
    clean = results[results["attack"] == CLEAN]
    rows = [{"x": 0.0, "value": float(a)} for a in clean["value"]]
    part = results[results["suite"] == suite.name]
    for severity, group in part.groupby("budget"):
        if len(group) == len(suite.specs):
            rows.append({"x": float(str(severity)), "value": float(group["value"].mean())})
    points = pd.DataFrame(rows, columns=["x", "value"]).sort_values("x")
    return points.assign(low=np.nan, high=np.nan)


def corruption_map(run: Run, long: pd.DataFrame, suite: Suite) -> bytes:
    """The score of every corruption and severity, a panel for each model; cells without a result stay blank."""
    models, score = list(long["model"].unique()), run.task.score
    names = [spec.name for spec in suite.specs]
    across = min(ACROSS, len(models))
    down = -(-len(models) // across)
    budgets = [str(budget) for budget in suite.budgets]
    with _figure(1.8 + 2.4 * across, down * (0.8 + 0.27 * len(names))) as figure:
        panels = list(figure.subplots(down, across, squeeze=False, sharey=True).flat)
        for axes in panels[len(models) :]:
            axes.set_axis_off()
        for axes, model in zip(panels, models, strict=False):
            results = long[(long["model"] == model) & (long["suite"] == suite.name)].set_index(["attack", "budget"])
            values = np.array([[results.loc[(str(suite.attack_id(c)), b), "value"] for b in budgets] for c in names])
            values = pd.DataFrame(values).astype("Float64").to_numpy(float, na_value=np.nan)
            low, high = score.bounds if np.isfinite(score.bounds).all() else (np.nanmin(values), np.nanmax(values))
            axes.imshow(values, vmin=low, vmax=high, cmap="viridis", aspect="auto")
            for (i, j), value in np.ndenumerate(values):
                if np.isfinite(value):
                    light = value > low + 0.6 * (high - low)
                    axes.text(j, i, f"{score.scale * value:.0f}", ha="center", va="center", fontsize=7,
                              color="black" if light else "white")  # fmt: skip
            axes.set_xticks(range(len(budgets)), budgets)
            axes.set_yticks(range(len(names)), names, fontsize=8)
            axes.set_xlabel(suite.threat.budget_word)
            axes.set_title(model, fontsize=8, wrap=True)
        return _png(figure)


def example_images(run: Run, suite: Suite) -> bytes | None:
    """A row for each model, of several training runs the first: clean image, what was added (grey: nothing), and the
    attacked image of a few samples; of MOST models at most. None where none were examples."""
    rows = []
    for model in [labels[0] for labels in groups(run).values()] if has_training_runs(run) else run.models:
        attack = _strongest(run, model, suite)
        if attack is not None and (examples := run.examples(model, attack)) is not None:
            rows.append((model, str(attack), examples))
    rows = rows[:MOST]
    if not rows:
        return None
    with _figure(1.35 * 3 * SHOWN, 1.75 * len(rows)) as figure:
        parts = figure.subfigures(len(rows), 1, squeeze=False)[:, 0]
        for part, (model, label, examples) in zip(parts, rows, strict=True):
            part.suptitle(f"{model}, {label} {suite.threat.budget_word} {examples.budget}", fontsize=8)
            line = part.subplots(1, 3 * SHOWN)
            for axes in line:
                axes.set_axis_off()
            for k in range(min(SHOWN, len(examples.label))):
                image, added = examples.image[k].astype(float), examples.added[k].astype(float)
                top = max(float(np.abs(added).max()), 1e-9)
                titles = [
                    f"clean: {_name(run, model, examples.clean_prediction[k])}",
                    f"added x {0.5 / top:.2g}",
                    f"attacked: {_name(run, model, examples.prediction[k])}",
                ]
                shown = (image, 0.5 + 0.5 * added / top, image + added)
                for axes, x, title in zip(line[3 * k :], shown, titles, strict=False):
                    pixels = np.clip(x, 0, 1).transpose(1, 2, 0)
                    axes.imshow(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels, cmap="gray", vmin=0, vmax=1)
                    axes.set_title(title, fontsize=6, wrap=True)
        return _png(figure)


def _strongest(run: Run, model: str, suite: Suite) -> AttackId | None:
    """The attack that left the fewest samples right at the budget whose images are kept."""
    cells = [Cell(attack, suite.threat.headline) for attack in suite.attacks]
    whole = [cell for cell in cells if run.status(model, cell).complete]
    if not whole:
        return None
    return min(whole, key=lambda cell: run.task.right(run.cell_rows(model, cell)).mean()).attack


def _name(run: Run, model: str, number: NDArray[Any]) -> str:
    settings, i = run.request.model(model).vision, int(number)
    classes = settings.classes if settings else ()
    return classes[i] if not isinstance(classes, str) and 0 <= i < len(classes) else str(i)


@contextmanager
def _figure(width: float, height: float) -> Iterator[Figure]:
    # No text of a label is read as mathematics.
    with mpl.rc_context(
        {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "text.parse_math": False}
    ):
        yield Figure(figsize=(width, height), dpi=120, layout="constrained")


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})  # no version: the same bytes again
    return buffer.getvalue()
