"""Images on a classifier: what is recorded of each."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from robustkpca.models.classifier import Classifier
from robustkpca.tasks.base import Chunk
from robustkpca.tasks.batch import Batch

TOP_K = 5
KEPT_BYTES = 4 << 20  # of images kept to be looked at, of each model and attack, before compression


class ImageBatch(Batch):
    """Images (B, C, H, W) in [0, 1] on a Classifier, with labels as the model counts its classes."""

    model: Classifier

    def __init__(self, chunk: Chunk) -> None:
        super().__init__(chunk)
        labels = torch.from_numpy(chunk.samples.labels_for(self.model.settings))  # type: ignore[attr-defined]
        self.labels: Tensor = labels[chunk.numbers.start : chunk.numbers.stop].to(self.inputs.device)
        self.predictions: Tensor | None = None  # on the clean images, int64 (B,)
        # The first of the set, whatever an attack does to them: so every model keeps the same ones.
        kept = KEPT_BYTES // (2 * self.inputs[0].numel())
        self.kept = {i for i, number in zip(chunk.ids, chunk.numbers, strict=True) if number < kept}

    def note_clean(self, rows: pd.DataFrame) -> None:
        super().note_clean(rows)
        self.predictions = torch.tensor(rows["prediction"].to_numpy(), dtype=torch.int64, device=self.inputs.device)

    def take(self, chosen: slice | Tensor) -> Self:
        part = super().take(chosen)
        part.labels = self.labels[chosen]
        part.predictions = None if self.predictions is None else self.predictions[chosen]
        return part

    def record(self, inputs: Tensor) -> tuple[dict[str, Any], dict[str, Tensor]]:
        logits = self.portions(len(inputs), lambda part: self.model(inputs[part]).float())
        finite = logits.isfinite().all(1)
        safe = torch.where(finite[:, None], logits, 0.0)
        prediction = torch.where(finite, safe.argmax(1), -1)
        clean = prediction if self.predictions is None else self.predictions
        columns: dict[str, Any] = {
            "label": _numpy(self.labels),
            "attacked_label": None,
            "clean_prediction": _numpy(clean),
            "prediction": _numpy(prediction),
            "correct": _numpy(prediction == self.labels),
            "correct_top5": None,
            "confidence": _numpy(safe.softmax(1).amax(1).where(finite, float("nan"))),
        }
        if logits.shape[1] > TOP_K:
            best = safe.topk(TOP_K, dim=1).indices
            columns["correct_top5"] = _numpy((best == self.labels[:, None]).any(1) & finite)
        return columns, {"non_finite": ~finite}

    def in_play(self, rows: pd.DataFrame) -> np.ndarray[Any, Any]:
        alive: np.ndarray[Any, Any] = rows["correct"].to_numpy(bool)
        return alive

    def broken(self, columns: dict[str, Any]) -> Any:
        """Right when clean and wrong now."""
        return (columns["clean_prediction"] == columns["label"]) & ~columns["correct"]

    def attacked(self, targets: Any) -> dict[str, Any]:
        return {"attacked_label": None if targets is None else _numpy(targets)}

    def kept_examples(self, perturbed: Tensor) -> dict[str, Any] | None:
        """The images among the first of the set, to be looked at; see `robustkpca.runs.run.Examples`."""
        chosen = [i for i, name in enumerate(self.ids) if name in self.kept]
        if not chosen:
            return None
        image, attacked = (x[torch.tensor(chosen, device=x.device)].float().cpu() for x in (self.inputs, perturbed))
        added = (attacked - image).nan_to_num(0.0, 0.0, 0.0)
        step = added.abs().amax((1, 2, 3)) / 127
        return {
            "sample": np.array([self.ids[i] for i in chosen]),
            "image": (image * 255).round().to(torch.uint8).numpy(),
            "added": (added / step.clamp(min=1e-12)[:, None, None, None]).round().to(torch.int8).numpy(),
            "step": step.numpy(),
        }


def _numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    return tensor.cpu().numpy()
