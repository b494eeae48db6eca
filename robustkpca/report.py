"""A Markdown report of stored runs: tables, plots, settings. The same runs give the same bytes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from robustkpca import tables
from robustkpca.errors import RunError
from robustkpca.outcomes import Run
from robustkpca.settings import ModelSettings
from robustkpca.spec import CLEAN, Suite, parse_eps


def write(runs: Sequence[Run], path: Path) -> list[Path]:
    """Write the report and, beside it in `<stem>_files/`, its plots. Returns all files written."""
    folder = path.with_name(f"{path.stem}_files")
    plots: dict[Path, bytes] = {}
    lines = ["# Robustness report", ""]
    for number, run in enumerate(runs, start=1):
        lines += _section(run, number, len(runs), folder, plots)
    written = [path, *plots]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if plots:
            folder.mkdir(exist_ok=True)
        for file, content in [*plots.items(), (path, "\n".join(lines).encode("utf-8"))]:
            part = file.with_name(file.name + ".part")
            part.write_bytes(content)
            os.replace(part, file)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from None
    return written


def _section(run: Run, number: int, of: int, folder: Path, plots: dict[Path, bytes]) -> list[str]:
    data = run.request["data"]
    lines = [f"## Run {number}: {tables.escape(data['name'])}, {run.n} samples", ""] if of > 1 else []
    broken = [s for s in run.statuses if s.text != "complete"]
    if broken:
        lines += [f"**{len(broken)} of {len(run.statuses)} cells have no figure**; they say why in the tables.", ""]
    for view in tables.views(run):
        lines += [f"### {tables.escape(view.title)}", "", tables.markdown(view.cells), ""]
        lines += [tables.escape(note) + "  " for note in view.notes] + [""]
    long = tables.accuracy_table(run)
    for suite in run.suites:
        image = _plot(run, long, suite)
        if image:
            file = folder / f"{number}-{suite.name}.png"
            plots[file] = image
            what = "severity" if suite.corruptions else "eps"
            lines += [f"![Accuracy over {what}, {suite.name}](<{folder.name}/{file.name}>)", ""]
    return [*lines, *_findings(run), *_receipt(run)]


def _findings(run: Run) -> list[str]:
    flags = tables.flagged(run)
    lines = ["### Findings", ""]
    if flags.empty:
        return [*lines, "No row left its budget or the pixel range, and every logit was finite.", ""]
    rows = [
        f"- **error** {r.rows} rows of {tables.escape(f'{r.model}, {r.attack} {r.budget}')}: {r.meaning}."
        for r in flags.itertuples()
    ]
    return [*lines, *rows, ""]


def _receipt(run: Run) -> list[str]:
    """Everything that decided a number."""
    request, environment = run.request, run.manifest["environment"]
    data = request["data"]
    models = pd.DataFrame([_model_row(m) for m in request["models"]]).set_index("model").fillna("failed")
    settings = {
        "data": f"{data['name']}, n = {data['n']}, ids {data['ids']}, {data['content_covers']} {data['content']}",
        "images": "short side resized, then cropped" if data["resized"] else "cropped, not resized",
        "answers": data["argmax"],
        "ignored": ", ".join(environment.get("ignored", [])[:20]) or "none",
        **{f"suite {s.name} v{s.version}": s.describe() for s in run.suites},
        "seed": request["seed"],
        "batch size": request["batch_size"],
        "dtype": request["dtype"],
        "device": request["device"] + (f" ({environment['cuda']})" if request["device"] == "cuda" else ""),
        "software": ", ".join(
            f"{k} {v}" for k, v in environment.items() if k not in ("cuda", "platform", "threads", "ignored")
        ),
        "platform": f"{environment['platform']}, {environment['threads']} threads",
        "fingerprint": run.manifest["fingerprint"],
    }
    frame = pd.DataFrame({"value": settings.values()}, index=pd.Index(settings.keys(), name="setting"), dtype=object)
    return ["### Receipt", "", tables.markdown(models), "", tables.markdown(frame), ""]


def _model_row(model: dict[str, object]) -> dict[str, object]:
    if model["settings"] is None:
        return {"model": model["label"], "source": model["source"], "notes": "; ".join(model["notes"])}  # type: ignore[arg-type]
    settings = ModelSettings.parse(model["settings"], "model settings")  # type: ignore[arg-type]
    p = settings.preprocessing
    rpc = settings.rpc
    return {
        "model": model["label"],
        "weights": model["weights"],
        "source": model["source"],
        "iterations": rpc.iterations if rpc else "none",
        "lambda": f"{rpc.lam:g}" if rpc else "none",
        "layers": rpc.label.partition("/")[2] if rpc else "none",
        "input": f"{p.channels}x{p.img_size}x{p.img_size}, crop {p.crop_pct:g}, {p.interpolation}",
        "notes": "; ".join(model["notes"]) or "none",  # type: ignore[arg-type]
        "mean / std": f"{', '.join(f'{v:g}' for v in p.mean)} / {', '.join(f'{v:g}' for v in p.std)}",
    }


def _plot(run: Run, long: pd.DataFrame, suite: Suite) -> bytes | None:
    """Accuracy over eps (from the clean figure at 0) or over severity, with Wilson bands; None without two points."""
    import io

    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(6.4, 4.0), dpi=120, layout="constrained")
        axes = figure.add_subplot()
        drawn = False
        for model, colour in zip(run.models, [f"C{i}" for i in range(10)] * len(run.models), strict=False):
            own = long[(long["model"] == model) & (long["status"] == "complete")]
            for attack, part in _curves(own, suite):
                points = part.astype({"accuracy": float, "low": float, "high": float}).sort_values("x")
                if len(points) < 2:
                    continue
                drawn = True
                label = model if len(suite.attacks) == 1 or suite.corruptions else f"{model}, {attack}"
                axes.plot(points["x"], 100 * points["accuracy"], marker="o", markersize=3.5, color=colour, label=label)
                if points["low"].notna().all():
                    axes.fill_between(
                        points["x"], 100 * points["low"], 100 * points["high"], color=colour, alpha=0.15, lw=0
                    )
        if not drawn:
            return None
        axes.set_ylim(0, 100)
        axes.set_ylabel("accuracy (%)")
        unit = "normalised units" if suite.threat and suite.threat.space == "normalized" else "pixel units"
        axes.set_xlabel("severity (0: clean)" if suite.corruptions else f"eps * 255 ({unit}; 0: clean)")
        axes.set_title(suite.title)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=8)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})  # no version: the same bytes again
        return buffer.getvalue()


def _curves(own: pd.DataFrame, suite: Suite) -> list[tuple[str, pd.DataFrame]]:
    """(attack, points with x, accuracy, low, high) of one model; corruptions give one curve, their mean."""
    clean = own[own["attack"] == CLEAN].assign(x=0.0)
    part = own[own["suite"] == suite.name]
    if suite.corruptions:
        rows = []
        for severity, group in part.groupby("budget"):
            if len(group) == len(suite.corruptions):
                rows.append(
                    {"x": float(severity), "accuracy": float(group["accuracy"].mean()), "low": None, "high": None}
                )
        points = pd.concat([clean.assign(low=None, high=None)[["x", "accuracy", "low", "high"]], pd.DataFrame(rows)])
        return [(suite.name, points)]
    curves = []
    for attack in suite.attacks:
        points = part[part["attack"] == attack]
        x = [255 * float(parse_eps(budget)) for budget in points["budget"]]
        curves.append((attack, pd.concat([clean, points.assign(x=x)])))
    return curves
