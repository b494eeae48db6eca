"""Figures: of a report as SVG in light and dark, for papers as plain SVG and PDF; the same run gives the same bytes."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

from robustkpca.escape import visible
from robustkpca.page import THEME, Photograph
from robustkpca.report.marks import Style
from robustkpca.report.summary import headline
from robustkpca.results.columns import WORST
from robustkpca.runs.run import Run
from robustkpca.suites.budget import Budget
from robustkpca.suites.cell import CLEAN
from robustkpca.suites.suite import Suite
from robustkpca.suites.threat import Ball

WIDTH = 4.3  # inches, of every figure: at 390 px its smallest text is still about 10 px high
MOST = 10  # models in a figure of lines
BANDS = 4  # models whose intervals are drawn: of more, they hide each other

Pixels = NDArray[np.uint8]
Form = Literal["page", "svg", "pdf"]  # SVG for light and dark, and plain in light colours
SUFFIX: dict[Form, str] = {"page": "svg", "svg": "svg", "pdf": "pdf"}


def accuracy_curves(run: Run, long: pd.DataFrame, suite: Suite, styles: Mapping[str, Style],
                    form: Form = "page") -> bytes | None:  # fmt: skip
    """The score over eps from the clean one at 0, or over severity, with the bands of the table's intervals where there
    are BANDS models at most; None without two points, or with more than MOST models, whose lines nobody could tell
    apart.

    `long` is a table of checkpoints or over training runs (`trainings.shown_table`), here and below. Of a suite of
    several attacks, the worst case; of corruptions, their mean, which has no band.
    """
    models, score = long["model"].unique(), run.task.score
    lines = {model: _points(long, model, suite) for model in models}
    lines = {model: points for model, points in lines.items() if len(points) > 1}
    if not lines or len(models) > MOST:
        return None
    names = {model: _text(model, 56) for model in lines}
    with _figure(WIDTH, 3.0 + 0.19 * sum(1 + name.count("\n") for name in names.values())) as figure:
        axes = figure.add_subplot()
        for model, points in lines.items():
            look, shown = styles[model], points[["value", "low", "high"]] * score.scale
            axes.plot(points["x"], shown["value"], marker=look.marker, markersize=5, color=look.light, lw=1.6,
                      ls="--" if look.dashed else "-", label=names[model])  # fmt: skip
            if points["low"].notna().all() and len(lines) <= BANDS:
                axes.fill_between(points["x"], shown["low"], shown["high"], color=look.light, alpha=0.13, lw=0)
        if np.isfinite(score.bounds).all():
            axes.set_ylim(*(score.scale * bound for bound in score.bounds))
        axes.set_ylabel(f"{score.title.lower()} ({score.unit})" if score.unit else score.title.lower())
        axes.set_xlabel(_text(_budget_axis(suite), 52))
        worst = f", {WORST}" if suite.combination == "worst" else ""
        axes.set_title(_text(f"{suite.title}{worst}", 48))
        axes.grid(color=THEME["line"][0])
        axes.set_axisbelow(True)
        figure.legend(loc="outside lower left", frameon=False)
        return _saved(figure, styles, form)


def _points(long: pd.DataFrame, model: str, suite: Suite) -> pd.DataFrame:
    results = long[(long["model"] == model) & (long["status"] == "complete")]
    return _mean_points(results, suite) if suite.combination == "mean" else _attack_points(results, suite)


def _budget_axis(suite: Suite) -> str:
    """What the horizontal axis shows."""
    if suite.combination == "mean":
        return f"{suite.threat.budget_word} (0: clean)"
    left_out = _far_out(suite)
    beyond = f"; {left_out} not drawn" if left_out else ""
    if not isinstance(suite.threat, Ball):
        return f"{suite.threat.budget_word} (0: clean{beyond})"
    unit = "normalised units" if suite.threat.space == "normalized" else "pixel units"
    return f"eps * 255 ({unit}; 0: clean{beyond})"


def _attack_points(results: pd.DataFrame, suite: Suite) -> pd.DataFrame:
    attack = str(headline(suite).attack)
    factor = 255 if isinstance(suite.threat, Ball) else 1
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


def corruption_map(run: Run, long: pd.DataFrame, suite: Suite, model: str, styles: Mapping[str, Style],
                   form: Form = "page") -> bytes:  # fmt: skip
    """The score of a model under every corruption and severity; cells without a result stay blank."""
    score, names, budgets = run.task.score, [s.name for s in suite.specs], [str(b) for b in suite.budgets]
    results = long[(long["model"] == model) & (long["suite"] == suite.name)].set_index(["attack", "budget"])
    cells = [[results.loc[(str(suite.attack_id(c)), b), "value"] for b in budgets] for c in names]
    values = pd.DataFrame(cells).astype("Float64").to_numpy(float, na_value=np.nan)
    low, high = score.bounds if np.isfinite(score.bounds).all() else (np.nanmin(values), np.nanmax(values))
    with _figure(WIDTH, 0.9 + 0.25 * len(names)) as figure:
        axes = figure.add_subplot()
        drawn = axes.pcolormesh(values, vmin=low, vmax=high, cmap="viridis", edgecolors="face", lw=0.3)
        for (i, j), value in np.ndenumerate(values):
            if np.isfinite(value):
                light = _luminance(drawn.to_rgba(value)) > 0.18  # where black is the better contrast
                axes.text(j + 0.5, i + 0.5, f"{score.scale * value:.0f}", ha="center", va="center", fontsize=9,
                          color="#000000" if light else "#fdfdfd")  # fmt: skip
        axes.invert_yaxis()
        axes.set_xticks(np.arange(len(budgets)) + 0.5, budgets)
        axes.set_yticks(np.arange(len(names)) + 0.5, names)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_xlabel(suite.threat.budget_word)
        axes.set_title(_text(model, 40))
        return _saved(figure, styles, form)


def _luminance(colour: NDArray[np.float64] | Sequence[float]) -> float:
    """Relative luminance of an sRGB colour in [0, 1], as WCAG 2 defines it."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour[:3]]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def example_sheet(photographs: Sequence[Photograph], pixels: Sequence[Sequence[Pixels | None]],
                  styles: Mapping[str, Style], form: Form = "page") -> bytes:  # fmt: skip
    """Photographs as columns and their tiles as rows, with what was answered below each.

    `pixels`: for each photograph and each of its tiles the image, uint8 (H, W) or (H, W, 3), or None.
    """
    rows = len(photographs[0].tiles)
    with _figure(WIDTH, 0.2 + 1.62 * rows) as figure:
        figure.get_layout_engine().set(h_pad=0.08)  # type: ignore[union-attr, call-arg]  # inches: below the last answers, too
        parts = figure.subfigures(rows, 1, squeeze=False)[:, 0]
        for k, part in enumerate(parts):
            name = photographs[0].tiles[k].name
            sign = f"{styles[name].sign} " if name in styles else ""
            colour = styles[name].light if sign else THEME["ink"][0]
            part.suptitle(_text(f"{sign}{name}", 56), color=colour, x=0.01, ha="left")
            for axes, photograph, images in zip(part.subplots(1, len(pixels), squeeze=False)[0], photographs, pixels,
                                                strict=True):  # fmt: skip
                tile = photograph.tiles[k]
                axes.set_axis_off()
                if (image := images[k]) is not None:
                    axes.imshow(image, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
                colour = THEME["fail" if tile.wrong else "ink"][0]
                text = f"{tile.text}\N{NO-BREAK SPACE}\N{BALLOT X}" if tile.wrong else tile.text
                axes.text(0.5, -0.05, _text(text, 13), fontsize=9, color=colour, ha="center", va="top",
                          transform=axes.transAxes)  # fmt: skip
        return _saved(figure, styles, form)


def _text(text: str, width: int) -> str:
    """In lines of `width` characters."""
    return textwrap.fill(visible(text), width)


@contextmanager
def _figure(width: float, height: float) -> Iterator[Figure]:
    ink, line = THEME["ink"][0], THEME["line"][0]
    with mpl.rc_context({
        "font.size": 9.5, "axes.titlesize": 10.5, "axes.labelsize": 9.5, "legend.fontsize": 9.5,
        "axes.spines.top": False, "axes.spines.right": False,
        "text.color": ink, "axes.labelcolor": ink, "xtick.labelcolor": ink, "ytick.labelcolor": ink,
        "axes.edgecolor": line, "xtick.color": line, "ytick.color": line,
        "figure.facecolor": THEME["paper"][0], "axes.facecolor": "none",
        "text.parse_math": False,  # no text of a label is read as mathematics
        "svg.fonttype": "none", "svg.hashsalt": "robustkpca",  # text stays text; the same ids again
        "pdf.fonttype": 42,  # TrueType: many journals take no other
    }):  # fmt: skip
        yield Figure(figsize=(width, height), layout="constrained")


def _saved(figure: Figure, styles: Mapping[str, Style], form: Form) -> bytes:
    if form == "page":
        return _for_page(figure, styles)
    buffer = io.BytesIO()
    unsaid = ("CreationDate", "Creator", "Producer") if form == "pdf" else ("Date", "Creator", "Format", "Type")
    figure.savefig(buffer, format=form, metadata=dict.fromkeys(unsaid))
    return buffer.getvalue()


def _for_page(figure: Figure, styles: Mapping[str, Style]) -> bytes:
    """SVG with the figure's light colours written in it, and a style sheet that replaces them where dark is preferred;
    a viewer that knows no style sheets shows the light one."""
    svg = _saved(figure, styles, "svg").decode()
    svg = svg[svg.index("<svg") :]
    pairs = dict([*THEME.values(), *((s.light, s.dark) for s in styles.values())])
    rules = [
        f"[style*='{name}: {light}'] {{ {name}: {dark} !important }}"
        for light, dark in sorted(pairs.items())
        if light in svg
        for name in ("fill", "stroke")
    ]
    sheet = f"<style>@media (prefers-color-scheme: dark) {{ {' '.join(rules)} }}</style>"
    head, bracket, rest = svg.partition(">")
    return f"{head}{bracket}\n {sheet}{rest}".encode()
