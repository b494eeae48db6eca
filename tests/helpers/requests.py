"""Requests that nobody ran, and runs with rows made up for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from robustkpca.models.settings import ALL_CLASSES
from robustkpca.runs.records import Record
from robustkpca.runs.request import DataRecord, ModelRecord, Request
from robustkpca.runs.run import Run
from robustkpca.suites.suite import Suite

DATA = {"name": "noise", "n": 4, "ids": "i" * 16, "content": "c" * 16, "argmax": ALL_CLASSES, "resized": True}
HEALTHY = {
    **dict.fromkeys(("random", "random_predictions", "batch", "zero_gradients", "broken_gradients"), 0),
    "softmaxed": False, "finite": True, "normalisations": {}, "gradients": 4, "cosine_median": 1.0, "cosine_worst": 1.0,
}  # fmt: skip


def request_of(models: Sequence[ModelRecord], suites: Sequence[Suite] = (), **fields: Any) -> Request:
    """A request; `fields` are those of Request or of its data."""
    data = DATA | {name: fields.pop(name) for name in list(fields) if name in DATA}
    rest = {"seed": 0, "batch_size": 10, "dtype": "float32", "device": "cpu", "software": {"torch": "2"}} | fields
    record = DataRecord(content_covers="ids and pixels", conditions=(("clean", "", data["n"]),), **data)
    return Request(models=tuple(models), data=record, suites=tuple(suites), **rest)


def run_of(request: Request, seed: int = 0) -> Run:
    """A complete run with rows drawn with the seed."""
    n, draws = request.data.n, np.random.default_rng(seed)
    cells = [(model, *cell.texts) for model in request.labels for cell in request.cells]
    model, attack, budget = (np.repeat([cell[i] for cell in cells], n) for i in range(3))
    label = np.tile(np.arange(n) % 10, len(cells))
    prediction = np.where(draws.random(len(label)) < 0.6, label, (label + 1) % 10)
    rows = pd.DataFrame(
        {"model": model, "perturbation": attack, "budget": budget, "sample": [f"s{i}" for i in range(n)] * len(cells),
         "label": label, "clean_prediction": label, "prediction": prediction, "correct": prediction == label,
         "confidence": 0.5, "flags": "", "distance": 0.0}
    )  # fmt: skip
    health = HEALTHY | {"n": n, "correct": n}
    return Run.in_memory(request, rows, [Record(model=label, health=health) for label in request.labels])
