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

from robustkpca.models.settings import ModelSettings
from robustkpca.results.accuracy import WORST
from robustkpca.results.trainings import groups, of_seeds
from robustkpca.runs.run import Run
from robustkpca.suites.budget import parse_eps
from robustkpca.suites.cell import CLEAN, Cell
from robustkpca.suites.suite import Suite

SHOWN = 2  # samples of each model in the figure of examples
ACROSS = 4  # panels side by side
MOST = 10  # models in a figure of lines, and in the figure of examples


def accuracy_curves(long: pd.DataFrame, suite: Suite) -> bytes | None:
    """Accuracy over eps from the clean figure at 0, or over severity, with the bands of the table's intervals; None without two points, or
    with more than MOST models, whose lines nobody could tell apart.

    `long` is an accuracy table, of checkpoints or over seeds (`seeds.shown_table`), here and below.

    Of a suite of several attacks, the worst case; of corruptions, their mean, which has no band.
    """
    models = long["model"].unique()
    if len(models) > MOST:
        return None
    with _figure(6.4, 4.0) as figure:
        axes = figure.add_subplot()
        drawn = False
        for number, model in enumerate(models):
            own = long[(long["model"] == model) & (long["status"] == "complete")]
            points = _corruption_points(own, suite) if suite.corruptions else _attack_points(own, suite)
            if len(points) < 2:
                continue
            drawn, colour = True, f"C{number}"
            axes.plot(points["x"], 100 * points["accuracy"], marker="o", markersize=3.5, color=colour, label=model)
            if points["low"].notna().all():
                axes.fill_between(
                    points["x"], 100 * points["low"], 100 * points["high"], color=colour, alpha=0.15, lw=0
                )
        if not drawn:
            return None
        axes.set_ylim(0, 100)
        axes.set_ylabel("accuracy (%)")
        unit = "normalised units" if suite.threat and suite.threat.space == "normalized" else "pixel units"
        left_out = "" if suite.corruptions else _far_out(suite)
        beyond = f"; {left_out} not drawn" if left_out else ""
        axes.set_xlabel("severity (0: clean)" if suite.corruptions else f"eps * 255 ({unit}; 0: clean{beyond})")
        worst = "" if suite.corruptions or len(suite.attack) == 1 else f", {WORST}"
        axes.set_title(f"{suite.title}{worst}", wrap=True)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=8)
        return _png(figure)


def _attack_points(own: pd.DataFrame, suite: Suite) -> pd.DataFrame:
    label = next(iter(suite.attacks)) if len(suite.attack) == 1 else f"{suite.name}/{WORST}"
    part = own[(own["attack"] == label) & (own["suite"] == suite.name)]
    clean = own[own["attack"] == CLEAN].assign(x=0.0)
    # The clean figure stands for a budget of 0, unless that was run itself.
    part = part[part["budget"] != _far_out(suite)]
    part = part.assign(x=[float(parse_eps(b) * 255) for b in part["budget"]])
    points = part if (part["x"] == 0).any() else pd.concat([clean, part])
    return points[["x", "accuracy", "low", "high"]].astype(float).sort_values("x")


def _far_out(suite: Suite) -> str:
    """A largest budget so much larger than the others that their points would fall together; else ""."""
    ordered = sorted(suite.budgets, key=parse_eps)
    return ordered[-1] if len(ordered) > 2 and parse_eps(ordered[-1]) > 8 * parse_eps(ordered[-2]) else ""


def _corruption_points(own: pd.DataFrame, suite: Suite) -> pd.DataFrame:
    clean = own[own["attack"] == CLEAN]
    rows = [{"x": 0.0, "accuracy": float(a)} for a in clean["accuracy"]]
    part = own[own["suite"] == suite.name]
    for severity, group in part.groupby("budget"):
        if len(group) == len(suite.corruptions):
            rows.append({"x": float(str(severity)), "accuracy": float(group["accuracy"].mean())})
    points = pd.DataFrame(rows, columns=["x", "accuracy"]).sort_values("x")
    return points.assign(low=np.nan, high=np.nan)


def corruption_map(long: pd.DataFrame, suite: Suite) -> bytes:
    """Accuracy of every corruption and severity, a panel for each model; cells without a figure stay blank."""
    models, names = list(long["model"].unique()), list(suite.corruptions)
    across = min(ACROSS, len(models))
    down = -(-len(models) // across)
    with _figure(1.8 + 2.4 * across, down * (0.8 + 0.27 * len(names))) as figure:
        panels = list(figure.subplots(down, across, squeeze=False, sharey=True).flat)
        for axes in panels[len(models) :]:
            axes.set_axis_off()
        for axes, model in zip(panels, models, strict=False):
            own = long[(long["model"] == model) & (long["suite"] == suite.name)].set_index(["attack", "budget"])
            shares = np.array([[own.loc[(suite.label(c), b), "accuracy"] for b in suite.budgets] for c in names])
            values = pd.DataFrame(shares).astype("Float64").to_numpy(float, na_value=np.nan)
            axes.imshow(values, vmin=0, vmax=1, cmap="viridis", aspect="auto")
            for (i, j), value in np.ndenumerate(values):
                if np.isfinite(value):
                    axes.text(j, i, f"{100 * value:.0f}", ha="center", va="center", fontsize=7,
                              color="black" if value > 0.6 else "white")  # fmt: skip
            axes.set_xticks(range(len(suite.budgets)), suite.budgets)
            axes.set_yticks(range(len(names)), names, fontsize=8)
            axes.set_xlabel("severity")
            axes.set_title(model, fontsize=8, wrap=True)
        return _png(figure)


def example_images(run: Run, suite: Suite) -> bytes | None:
    """A row for each model, of several trainings the first: clean image, what was added (grey: nothing), and the attacked image of a few samples; of MOST models at most. None where none were kept."""
    rows = []
    for model in [own[0] for own in groups(run).values()] if of_seeds(run) else run.models:
        label = _strongest(run, model, suite)
        if label is not None and (kept := run.examples(model, label)) is not None:
            rows.append((model, label, kept))
    rows = rows[:MOST]
    if not rows:
        return None
    with _figure(1.35 * 3 * SHOWN, 1.75 * len(rows)) as figure:
        for part, (model, label, kept) in zip(figure.subfigures(len(rows), 1, squeeze=False)[:, 0], rows, strict=True):
            part.suptitle(f"{model}, {label} eps {kept.budget}", fontsize=8)
            line = part.subplots(1, 3 * SHOWN)
            for axes in line:
                axes.set_axis_off()
            for k in range(min(SHOWN, len(kept.label))):
                image, added = kept.image[k].astype(float), kept.added[k].astype(float)
                top = max(float(np.abs(added).max()), 1e-9)
                titles = [
                    f"clean: {_name(run, model, kept.clean_prediction[k])}",
                    f"added x {0.5 / top:.2g}",
                    f"attacked: {_name(run, model, kept.prediction[k])}",
                ]
                shown = (image, 0.5 + 0.5 * added / top, image + added)
                for axes, x, title in zip(line[3 * k :], shown, titles, strict=False):
                    pixels = np.clip(x, 0, 1).transpose(1, 2, 0)
                    axes.imshow(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels, cmap="gray", vmin=0, vmax=1)
                    axes.set_title(title, fontsize=6, wrap=True)
        return _png(figure)


def _strongest(run: Run, model: str, suite: Suite) -> str | None:
    """The attack that left the fewest samples right at the budget whose images are kept."""
    cells = [Cell(x, suite.largest) for x in suite.attacks]
    whole = [c for c in cells if run.status(model, c).text == "complete"]
    return min(whole, key=lambda c: run.cell_rows(model, c)["correct"].mean()).attack if whole else None


def _name(run: Run, model: str, number: NDArray[Any]) -> str:
    settings = next(m["settings"] for m in run.request["models"] if m["label"] == model)
    classes = ModelSettings.parse(settings, "model settings").classes
    i = int(number)
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
