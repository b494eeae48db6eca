"""Everything that decided a run's numbers, as tables and as lines."""

from __future__ import annotations

import re
from typing import Any

import pandas as pd

from robustkpca.runs.request import DataRecord, ModelRecord
from robustkpca.runs.run import Run
from robustkpca.suites.threat import Ball


def receipt(run: Run) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Everything that decided a number: one table with a row for each model, one with settings and values."""
    request, environment = run.request, run.manifest.environment
    data = request.data
    models = pd.DataFrame([_model_row(run, m) for m in request.models]).set_index("model").fillna("failed")
    settings = {
        "data": f"{data.name}, n = {data.n}, ids {data.ids}, {data.content_covers} {data.content}",
        **_of_images(data),
        "ignored": ", ".join(environment.get("ignored", [])[:20]) or "none",
        **{f"suite {s.name} v{s.version}": s.describe() for s in run.suites},
        "seed": request.seed,
        "batch size": f"{request.batch_size} ({_batch(run)})",
        "dtype": request.dtype,
        "device": request.device
        + (f" ({environment['cuda']})" if request.device == "cuda" else "")
        + (", deterministic" if environment.get("deterministic") else ""),
        "software": ", ".join(
            f"{k} {v}"
            for k, v in environment.items()
            if k not in ("cuda", "platform", "threads", "ignored", "deterministic")
        ),
        "platform": f"{environment['platform']}, {environment['threads']} threads",
        "fingerprint": run.manifest.fingerprint,
    }
    frame = pd.DataFrame({"value": settings.values()}, index=pd.Index(settings.keys(), name="setting"), dtype=object)
    return models, frame


def _of_images(data: DataRecord) -> dict[str, str]:
    """What was done to images, and among which classes answers are."""
    if data.argmax is None:
        return {}
    return {
        "images": "short side resized, then cropped" if data.resized else "cropped, not resized",
        "answers": data.argmax,
    }


def receipt_lines(run: Run) -> list[str]:
    """The receipt in a few lines, for a terminal and for notes under a table."""
    request = run.request
    data, software = request.data, request.software
    answers = f", answers {data.argmax}" if data.argmax else ""
    lines = [
        f"{data.name}, n = {run.n}, ids {data.ids}, {data.content_covers} {data.content}{answers}; "
        f"seed {request.seed}, batch size {request.batch_size} ({_batch(run)}), {request.dtype}, {request.device}; "
        f"{', '.join(f'{k} {v}' for k, v in software.items())}; run {run.manifest.fingerprint}."
    ]
    for model in request.models:
        if model.usable:
            units = f"; {budgets_in_both_units(run, model)}" if budgets_in_both_units(run, model) else ""
            notes = "".join(f"; {note}" for note in model.notes)
            attention = f", attention {model.attention or 'not recorded'}" if model.vision else ""
            sparse = f"; S not zero: {density}" if (density := density_text(run, model.label)) else ""
            lines.append(f"{model.label}: weights {model.weights}{attention}{sparse}{units}{notes}.")
    return lines


def receipt_in_brief(run: Run) -> list[str]:
    """The receipt for a terminal: data, software, weights, and notes of models that have any; `receipt_lines` has the
    whole of it."""
    request = run.request
    weights = [f"{model.label} {model.weights}" for model in request.models if model.usable]
    more = f" and {len(weights) - 3} more" if len(weights) > 3 else ""
    return [
        f"{request.data.name}, n = {run.n}, seed {request.seed}, {request.dtype}, {request.device}; "
        f"run {run.manifest.fingerprint}.",
        f"{', '.join(f'{k} {v}' for k, v in request.software.items())}.",
        f"weights {', '.join(weights[:3]) or 'none'}{more}.",
        *(f"{model.label}: {text}." for model in request.models if model.usable and (text := _remarks(run, model))),
    ]


def _remarks(run: Run, model: ModelRecord) -> str:
    """What a terminal shows of a model beside its weights."""
    rpc, sparse = model.vision and model.vision.rpc, density_text(run, model.label)
    pursuit = [f"lambda {rpc.lam:g}, S not zero: {sparse}"] if rpc and sparse else []
    return "; ".join([*pursuit, *model.notes])


def density_text(run: Run, label: str) -> str:
    """The share of entries of S that are not zero, from the first to the last iteration, by layer; empty for a model
    without RPC-Attention, and for runs from before it was measured."""
    health = run.health.get(label, {})
    layers = health.get("density", {})
    texts = {name: f"{shares[0]:.2g} to {shares[-1]:.2g}" if len(shares) > 1 else f"{shares[0]:.2g}"
             for name, shares in layers.items()}  # fmt: skip
    said = ", ".join(f"{_layer(name)} {text}" for name, text in texts.items())
    return f"{said} (first {health['n']} samples)" if said else ""


def _layer(name: str) -> str:
    """`layer 1` for the attention of the first block, else its name in the network."""
    block = re.fullmatch(r"(?:.*\.)?blocks\.(\d+)\.\w+", name)
    return f"layer {int(block[1]) + 1}" if block else name


def budgets_in_both_units(run: Run, model: ModelRecord) -> str:
    """Every L-inf budget of a run in pixels and in the model's normalised units, which differ by channel where its std
    does; empty for a model that takes no images."""
    if model.vision is None:
        return ""
    std = model.vision.preprocessing.std
    texts = []
    for suite in run.suites:
        ball = suite.threat
        if not isinstance(ball, Ball) or ball.norm != "linf":
            continue
        for budget in ball.budgets:
            eps = float(budget)
            inside, outside = ("in pixels", "normalised") if ball.space == "pixel" else ("normalised", "in pixels")
            values = sorted({f"{eps / s if ball.space == 'pixel' else eps * s:.4f}" for s in std})
            spread = " to ".join(values[:: max(1, len(values) - 1)])
            texts.append(f"eps {budget} ({eps:.4f}) {inside} is {spread} {outside}")
    return "; ".join(dict.fromkeys(texts))


def _batch(run: Run) -> str:
    decided = run.request.batch_decides
    return f"it decides the figures of {', '.join(decided)}" if decided else "it decides no figure"


def _model_row(run: Run, model: ModelRecord) -> dict[str, object]:
    if not model.usable:
        return {"model": model.label, "source": model.source, "notes": "; ".join(model.notes)}
    row: dict[str, object] = {"model": model.label, "weights": model.weights, "source": model.source}
    settings = model.vision
    if settings is None:
        return row | {"notes": "; ".join(model.notes) or "none"}
    p, rpc = settings.preprocessing, settings.rpc
    return row | {
        "iterations": rpc.iterations if rpc else "none",
        "lambda": f"{rpc.lam:g}" if rpc else "none",
        "layers": rpc.label.partition("/")[2] if rpc else "none",
        "share of S that is not zero": density_text(run, model.label) or ("not measured" if rpc else "none"),
        "attention": model.attention or "not recorded",
        "input": f"{p.channels}x{p.img_size}x{p.img_size}, {p.crop_text}, {p.interpolation}",
        "notes": "; ".join(model.notes) or "none",
        "mean / std": f"{', '.join(f'{v:g}' for v in p.mean)} / {', '.join(f'{v:g}' for v in p.std)}",
        "budgets": budgets_in_both_units(run, model) or "none",
        f"cosine of {run.request.dtype} to float64 input gradients": _cosine(run.health.get(model.label, {})),
    }


def _cosine(health: dict[str, Any]) -> str:
    if health.get("cosine_worst") is None:
        return "not measured"
    return f"median {health['cosine_median']:.3f}, worst {health['cosine_worst']:.3f}"
