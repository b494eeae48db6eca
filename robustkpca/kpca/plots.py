"""Figures of an analysis as PNG and SVG bytes; the same tables give the same bytes."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, SymmetricalLogLocator

from robustkpca.errors import DataError, brief

LOG_COLUMNS = ("epoch", "model", "projection_loss")
_PURSUIT = {
    "residual": "||K - L - S|| / ||K||",
    "nonzero": "entries over the threshold (%)",
    "gradient": "gradient norm",
}
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.parse_math": False,  # no text of a label is read as mathematics
    "svg.hashsalt": "robustkpca",
    "svg.fonttype": "none",
}


class Drawn(NamedTuple):
    png: bytes
    svg: bytes


def plot_loss(logs: Sequence[Path]) -> Drawn:
    """Projection loss over training: a line for each model of CSV logs (epoch, model, projection_loss).

    Rows without a loss are skipped. Raises DataError for a file that cannot be read, lacks a column or has no loss.
    """
    with _figure(6.4, 4.0) as figure:
        axes = figure.add_subplot()
        losses: list[float] = []
        for path in logs:
            for model, rows in read_log(path).groupby("model", sort=False):
                label = str(model) if len(logs) == 1 else f"{model} ({path.stem})"
                axes.plot(rows["epoch"], rows["projection_loss"], marker="o", markersize=3, label=label)
                losses += list(rows["projection_loss"])
        middle, furthest = np.median(np.abs(losses)), np.max(np.abs(losses))
        if min(losses) > 0 and furthest > 30 * min(losses):
            _log_scale(axes, (1.0, 2.0, 5.0))
        elif (
            furthest > 30 * middle > 0
        ):  # one token can dominate J: a single epoch far out, of either sign, hides the others
            linear = 10 ** np.ceil(np.log10(middle))
            axes.set_yscale("symlog", linthresh=linear)
            axes.yaxis.set_major_locator(SymmetricalLogLocator(base=10, linthresh=linear, subs=(1.0, 3.0)))
            axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylabel("projection loss J")
        axes.set_title("Projection loss over training")
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=8)
        return _drawn(figure)


def read_log(path: Path) -> pd.DataFrame:
    """The rows of a CSV log of a training that have an epoch and a projection_loss, by epoch; see `plot_loss`."""
    try:
        rows = pd.read_csv(path)
    except (OSError, ValueError) as error:  # pandas' own errors are ValueErrors
        raise DataError(f"log {path}: {brief(error)}") from None
    if missing := [name for name in LOG_COLUMNS if name not in rows]:
        raise DataError(f"log {path}: expected columns {', '.join(LOG_COLUMNS)}, missing {', '.join(missing)}")
    for name in ("epoch", "projection_loss"):
        rows[name] = pd.to_numeric(rows[name], errors="coerce")
    rows = rows[np.isfinite(rows["epoch"]) & np.isfinite(rows["projection_loss"])]
    if rows.empty:
        raise DataError(f"log {path}: no row has an epoch and a projection_loss")
    return rows.sort_values("epoch", kind="stable")


def plot_gamma(gamma: pd.DataFrame, title: str) -> Drawn:
    """The paper's figure of check 2: mean and standard deviation of |gamma_i - gamma_j| per axis beside the
    eigenvalues, by layer and head.

    `gamma`: the table of one model. Were the values eigenvectors, both would lie far below the eigenvalues (at zero).
    """
    layers, heads = sorted(gamma["layer"].unique()), sorted(gamma["head"].unique())
    with _figure(max(1.2 + 2.5 * len(heads), 5.6), 1.3 + 1.55 * len(layers)) as figure:
        panels = figure.subplots(len(layers), len(heads), squeeze=False, sharex=True, sharey="row")
        for (i, j), axes in np.ndenumerate(panels):
            rows = gamma[(gamma["layer"] == layers[i]) & (gamma["head"] == heads[j])]
            _log_scale(axes, (1.0,))
            for name, label, style in (
                ("eigenvalue", "eigenvalues, largest first", {"color": "0.35", "lw": 1.4}),
                (
                    "gamma_difference_mean",
                    "|difference of gamma|, mean",
                    {"color": "C0", "marker": "o", "ms": 3, "ls": ""},
                ),
                ("gamma_difference_std", "its standard deviation", {"color": "C1", "marker": "_", "ms": 5, "ls": ""}),
            ):
                values = rows[name].where(rows[name] > 0)
                axes.plot(rows["axis"], values, label=label, **style)
            axes.grid(alpha=0.2)
            if i == 0:
                axes.set_title(f"head {heads[j]}", fontsize=9)
            if j == 0:
                axes.set_ylabel(f"layer {layers[i]}")
            if i == len(layers) - 1:
                axes.set_xlabel("axis")
                axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        handles, labels = panels[0, 0].get_legend_handles_labels()
        figure.suptitle(title, fontsize=10)
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
        return _drawn(figure)


def plot_pursuit(pursuit: pd.DataFrame) -> Drawn:
    """Residual, sparsity and gradient norm over the iterations of PAP, mean over heads: a row a model, a line a layer.

    `pursuit`: the table of all models, with a column model.
    """
    models = list(dict.fromkeys(pursuit["model"]))
    with _figure(9.6, 0.9 + 2.3 * len(models)) as figure:
        panels = figure.subplots(len(models), len(_PURSUIT), squeeze=False, sharey="col")
        for row, model in zip(panels, models, strict=True):
            rows = pursuit[pursuit["model"] == model]
            layers = rows["layer"].unique()
            means = rows.groupby(["layer", "iteration"])[list(_PURSUIT)].mean()
            for axes, (name, label) in zip(row, _PURSUIT.items(), strict=True):
                for number, layer in enumerate(layers):
                    values = means.loc[layer, name] * (100 if name == "nonzero" else 1)
                    colour = mpl.colormaps["viridis"](0.9 * number / max(1, len(layers) - 1))
                    axes.plot(values.index, values, marker="o", ms=3, color=colour, label=f"layer {layer}")
                axes.xaxis.set_major_locator(MaxNLocator(integer=True))
                axes.set_xlabel("iteration")
                axes.set_title(label, fontsize=9)
                axes.grid(alpha=0.25)
                if name == "gradient":
                    _log_scale(axes, (1.0, 2.0, 5.0))
                    axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
            row[0].set_ylabel(model, fontsize=8, wrap=True)
        return _drawn(figure)


def _log_scale(axes: Axes, steps: Sequence[float]) -> None:
    """A logarithmic axis, labelled at `steps` times powers of ten in plain digits, not in mathematical text."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=steps))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())


@contextmanager
def _figure(width: float, height: float) -> Iterator[Figure]:
    with mpl.rc_context(_STYLE):
        yield Figure(figsize=(width, height), dpi=120, layout="constrained")


def _drawn(figure: Figure) -> Drawn:
    kinds: dict[str, dict[str, Any]] = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}
    images = {}
    for kind, metadata in kinds.items():  # no version and no date: the same bytes again
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind, metadata=metadata)
        images[kind] = buffer.getvalue()
        figure.set_layout_engine("none")  # the layout stays as it was computed; computing it takes most of the time
    return Drawn(**images)
