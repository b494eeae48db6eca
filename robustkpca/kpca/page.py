"""An analysis for readers: tables of text for a terminal; a Markdown page with plots, Parquet and CSV."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from robustkpca.escape import csv
from robustkpca.files import Outputs, is_part, refuse_links
from robustkpca.kpca.plots import Drawn, plot_gamma, plot_loss, plot_pursuit
from robustkpca.page import Block, Bullets, Figure, Heading, Paragraph, Table, to_markdown

PAGE = "analysis.md"
CHUNKS = "chunks"  # folder of what was worked out, from which the same command goes on
TABLES = ("heads", "gamma", "spectrum", "pursuit")
_FIGURES = "figures"
# A column of text: its title, the quantity (of the table `heads`) and the one it is to be compared with.
_HEADS = {
    "J": ("projection_loss", ""),
    "log |phi|^2": ("log_feature_norm", ""),
    "effective rank": ("effective_rank", ""),
    "spread / control": ("gamma_relative", "gamma_relative_control"),
    "cosine / control": ("cosine", "cosine_control"),
}
_MEANINGS = {
    "projection_loss": "J: projection loss, mean over tokens of |phi(q)|^2 - |h|^2; negative where |h| is larger "
    "than the features.",
    "log_feature_norm": "log |phi|^2: logarithm of the mean of |phi(q)|^2, the first part of J.",
    "effective_rank": "Effective rank: exp of the entropy of the centred Gram matrix' eigenvalues (Roy and Vetterli "
    "2007).",
    "gamma_relative": "Spread: mean |gamma_i - gamma_j| / mean |gamma|, over axes; 0 where the values hold "
    "eigenvectors, at most 2.",
    "cosine": "Cosine: between K~ a and a, over axes; 1 where the values hold eigenvectors. Control: the same with a "
    "random linear map of the layer's inputs in place of the values, as before any training.",
}
_PURSUIT = {
    "mu": "mu",
    "threshold": "threshold",
    "|S| / |K|": "sparse_share",
    "over threshold": "nonzero",
    "residual": "residual",
    "gradient": "gradient",
}
_PURSUIT_NOTE = (
    "Means over heads. |S| / |K|: in the 1-norm. Over threshold: share of entries of S that are not zero. Residual: "
    "|K - L - S| / |K|, Frobenius. Gradient: norm of the gradient of a fixed random projection of L, of norm one, by "
    "the keys; growth means that unrolling amplifies."
)


def head_cells(heads: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """The table `heads` of one model as text, a row for each layer and head, and what its columns mean."""
    places = [f"{layer}.{head}" for layer, head in zip(heads["layer"], heads["head"], strict=True)]
    columns, notes = {}, []
    for title, (quantity, control) in _HEADS.items():
        if quantity in heads:
            texts = [f"{x:.3g}" for x in heads[quantity]]
            if control:
                texts = [f"{x:.2f} / {y:.2f}" for x, y in zip(heads[quantity], heads[control], strict=True)]
            columns[title] = texts
            notes.append(_MEANINGS[quantity])
    return pd.DataFrame(columns, index=pd.Index(places, name="layer.head")), notes


def pursuit_cells(pursuit: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """The table `pursuit` of one model as text, a row for each layer and iteration, mean over heads."""
    means = pursuit.groupby(["layer", "iteration"])[list(_PURSUIT.values())].mean()
    columns = {title: [f"{x:.3g}" for x in means[quantity]] for title, quantity in _PURSUIT.items()}
    places = pd.Index([f"{layer}.{iteration}" for layer, iteration in means.index], name="layer.iter")
    return pd.DataFrame(columns, index=places), [_PURSUIT_NOTE]


def model_views(tables: Mapping[str, pd.DataFrame], model: str) -> list[tuple[str, pd.DataFrame, list[str]]]:
    """Title, cells and notes of what `tables` (with a column model) say of one model."""
    views = []
    for table, title, cells in (
        ("heads", "attention as kernel PCA", head_cells),
        ("pursuit", "principal attention pursuit", pursuit_cells),
    ):
        if table in tables and len(rows := tables[table][tables[table]["model"] == model]):
            views.append((f"{model}, {title}", *cells(rows)))
    return views


def claim(folder: Path) -> Outputs:
    """Make `folder`, which must be new, empty, or an analysis, done or begun. Raises RunError."""
    outputs = Outputs(folder)
    outputs.make(folder / CHUNKS)
    refuse_links(folder, folder / _FIGURES)
    return outputs


def remove_chunks(folder: Path) -> None:
    """Remove what was worked out, once the page is written; nothing of another name."""
    chunks = folder / CHUNKS
    with contextlib.suppress(OSError):
        for file in chunks.iterdir():
            if is_part(file.name) or re.fullmatch(r"[0-9a-f]{8}-[0-9]+-[0-9]{7,}\.safetensors", file.name):
                file.unlink()
        chunks.rmdir()


def write(
    outputs: Outputs,
    tables: Mapping[str, pd.DataFrame],
    receipt: Mapping[str, str],
    warnings: Sequence[str] = (),
    logs: Sequence[Path] = (),
) -> list[Path]:
    """Write the page, its plots (also as SVG) and each table as Parquet and CSV; returns the files, page first.

    The tables and figures of an earlier analysis in `outputs` that this one does not have are removed.

    `tables`: as `robustkpca.kpca.analysis` makes them, with a column model in front. `receipt`: setting to value.
    `logs`: CSV logs of training for the figure of the loss (see `plot_loss`).
    """
    folder = outputs.path
    models = list(dict.fromkeys(model for table in tables.values() for model in table["model"]))
    figures = _figures(tables, models, logs)
    blocks: list[Block] = [
        Heading("Attention as kernel PCA", 1),
        Paragraph(
            "Queries, keys and values of every attention layer, read as kernel principal component analysis of the "
            "keys (Teo and Nguyen, arXiv 2406.13762, section 2). Layers and heads are counted from 1. In layers with "
            "RPC-Attention the keys are those of its last iteration, K - S - Y/mu, and so are the queries where they "
            "are the keys; in Scaled Attention the values are (I - S) V. Means over images; the tables beside this "
            "page hold all quantities with standard errors (_se). In the table gamma, `eigenvalue` is the axis-th "
            "largest (of K~ / N): axes have no order of their own; `left_out` is the share of tokens whose coefficient "
            "is below 1/1000 of the axis' root mean square, for which gamma is not defined."
        ),
    ]
    if warnings:
        blocks.append(Bullets([("warn", text) for text in warnings]))
    for model in models:
        for title, cells, notes in model_views(tables, model):
            blocks += [Heading(title, 2), Table(cells), *(Paragraph(note, small=True) for note in notes)]
    if figures:
        blocks.append(Heading("Figures", 2))
        blocks += [Figure(f"{name}.png", drawn.png, text) for name, (drawn, text) in figures.items()]
    settings = pd.DataFrame({"value": list(receipt.values())}, index=pd.Index(list(receipt), name="setting"))
    blocks += [Heading("Receipt", 2), Table(settings)]
    files: dict[Path, bytes] = {folder / PAGE: to_markdown(blocks, _FIGURES).encode()}
    for name, table in tables.items():
        files[folder / f"{name}.parquet"] = table.to_parquet(index=False)
        files[folder / f"{name}.csv"] = table.map(csv).to_csv(index=False).encode()
    for name, (drawn, _) in figures.items():
        files[folder / _FIGURES / f"{name}.png"] = drawn.png
        files[folder / _FIGURES / f"{name}.svg"] = drawn.svg
    outputs.replace(files)
    return list(files)


def _figures(
    tables: Mapping[str, pd.DataFrame], models: Sequence[str], logs: Sequence[Path]
) -> dict[str, tuple[Drawn, str]]:
    """File name without ending -> the figure and what it shows."""
    figures = {}
    if logs:
        figures["loss"] = (plot_loss(logs), "Projection loss over training")
    if "gamma" in tables:
        for number, model in enumerate(models, start=1):
            rows = tables["gamma"][tables["gamma"]["model"] == model]
            text = f"{model}: spread of gamma and eigenvalues, by layer and head"
            figures[f"gamma-{number}"] = (plot_gamma(rows, text), text)
    if "pursuit" in tables:
        text = "Residual, sparsity and gradient norm over the iterations of principal attention pursuit"
        figures["pursuit"] = (plot_pursuit(tables["pursuit"]), text)
    return figures
