"""Everything that decided a run's numbers, as tables and as lines."""

from __future__ import annotations

from typing import Any

import pandas as pd

from robustkpca.models.settings import ModelSettings
from robustkpca.runs.run import Run
from robustkpca.suites.attack import BATCH_DEPENDENT


def receipt(run: Run) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Everything that decided a number: one table with a row for each model, one with settings and values."""
    request, environment = run.request, run.manifest["environment"]
    data = request["data"]
    models = pd.DataFrame([_model_row(run, m) for m in request["models"]]).set_index("model").fillna("failed")
    settings = {
        "data": f"{data['name']}, n = {data['n']}, ids {data['ids']}, {data['content_covers']} {data['content']}",
        "images": "short side resized, then cropped" if data["resized"] else "cropped, not resized",
        "answers": data["argmax"],
        "ignored": ", ".join(environment.get("ignored", [])[:20]) or "none",
        **{f"suite {s.name} v{s.version}": s.describe() for s in run.suites},
        "seed": request["seed"],
        "batch size": f"{request['batch_size']} ({_batch(run)})",
        "dtype": request["dtype"],
        "device": request["device"]
        + (f" ({environment['cuda']})" if request["device"] == "cuda" else "")
        + (", deterministic" if environment.get("deterministic") else ""),
        "software": ", ".join(
            f"{k} {v}"
            for k, v in environment.items()
            if k not in ("cuda", "platform", "threads", "ignored", "deterministic")
        ),
        "platform": f"{environment['platform']}, {environment['threads']} threads",
        "fingerprint": run.manifest["fingerprint"],
    }
    frame = pd.DataFrame({"value": settings.values()}, index=pd.Index(settings.keys(), name="setting"), dtype=object)
    return models, frame


def receipt_lines(run: Run) -> list[str]:
    """The receipt in a few lines, for a terminal and for notes under a table."""
    request = run.request
    data, software = request["data"], request["software"]
    lines = [
        f"{data['name']}, n = {run.n}, ids {data['ids']}, {data['content_covers']} {data['content']}, answers {data['argmax']}; "
        f"seed {request['seed']}, batch size {request['batch_size']} ({_batch(run)}), {request['dtype']}, {request['device']}; "
        f"{', '.join(f'{k} {v}' for k, v in software.items())}; run {run.manifest['fingerprint']}."
    ]
    for m in request["models"]:
        if m["settings"] is not None:
            units = f"; {budgets_in_both_units(run, m)}" if budgets_in_both_units(run, m) else ""
            notes = "".join(f"; {note}" for note in m["notes"])
            lines.append(
                f"{m['label']}: weights {m['weights']}, attention {m.get('attention', 'not recorded')}{units}{notes}."
            )
    return lines


def budgets_in_both_units(run: Run, model: dict[str, Any]) -> str:
    """Every L-inf budget of a run in pixels and in the model's normalised units, which differ by channel where its std does."""
    std = model["settings"]["preprocessing"]["std"]
    texts = []
    for suite in run.suites:
        if suite.threat is None or suite.threat.norm != "linf":
            continue
        for text, eps in zip(suite.budgets, map(float, suite.threat.budgets), strict=True):
            if suite.threat.space == "pixel":
                values = sorted({f"{eps / s:.4f}" for s in std})
                said = (
                    f"eps {text} ({eps:.4f}) in pixels is {' to '.join(values[:: max(1, len(values) - 1)])} normalised"
                )
            else:
                values = sorted({f"{eps * s:.4f}" for s in std})
                said = (
                    f"eps {text} ({eps:.4f}) normalised is {' to '.join(values[:: max(1, len(values) - 1)])} in pixels"
                )
            texts.append(said)
    return "; ".join(dict.fromkeys(texts))


def _batch(run: Run) -> str:
    decided = sorted({a.method for s in run.suites for a in s.attack if a.method in BATCH_DEPENDENT})
    return f"it decides the figures of {', '.join(decided)}" if decided else "it decides no figure"


def _model_row(run: Run, model: dict[str, Any]) -> dict[str, object]:
    if model["settings"] is None:
        return {"model": model["label"], "source": model["source"], "notes": "; ".join(model["notes"])}
    settings = ModelSettings.parse(model["settings"], "model settings")
    p, rpc = settings.preprocessing, settings.rpc
    return {
        "model": model["label"],
        "weights": model["weights"],
        "source": model["source"],
        "iterations": rpc.iterations if rpc else "none",
        "lambda": f"{rpc.lam:g}" if rpc else "none",
        "layers": rpc.label.partition("/")[2] if rpc else "none",
        "attention": model.get("attention", "not recorded"),
        "input": f"{p.channels}x{p.img_size}x{p.img_size}, crop {p.crop_pct:g}, {p.interpolation}",
        "notes": "; ".join(model["notes"]) or "none",
        "mean / std": f"{', '.join(f'{v:g}' for v in p.mean)} / {', '.join(f'{v:g}' for v in p.std)}",
        "budgets": budgets_in_both_units(run, model) or "none",
        f"cosine of {run.request['dtype']} to float64 input gradients": _cosine(run.probes.get(model["label"], {})),
    }


def _cosine(probe: dict[str, Any]) -> str:
    if probe.get("cosine_worst") is None:
        return "not measured"
    return f"median {probe['cosine_median']:.3f}, worst {probe['cosine_worst']:.3f}"
