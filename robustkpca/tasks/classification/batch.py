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
EXAMPLES = 4  # images kept of each attack


class ImageBatch(Batch):
    """Images (B, C, H, W) in [0, 1] on a Classifier, with labels as the model counts its classes."""

    model: Classifier

    def __init__(self, chunk: Chunk) -> None:
        super().__init__(chunk)
        labels = torch.from_numpy(chunk.samples.labels_for(self.model.settings))  # type: ignore[attr-defined]
        self.labels: Tensor = labels[chunk.numbers.start : chunk.numbers.stop].to(self.inputs.device)
        self.predictions: Tensor | None = None  # on the clean images, int64 (B,)

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

    def kept_examples(self, perturbed: Tensor, rows: pd.DataFrame) -> dict[str, Any]:
        """A few images to look at, those first that the attack broke; see `robustkpca.runs.run.Examples`."""
        chosen = np.argsort(~rows["broken"].to_numpy(bool), kind="stable")[:EXAMPLES]
        image, attacked = (x[torch.from_numpy(chosen).to(x.device)].cpu() for x in (self.inputs, perturbed))
        prediction, clean, label = (rows[c].to_numpy()[chosen] for c in ("prediction", "clean_prediction", "label"))
        return {
            "budget": np.array(rows["budget"].iloc[0]), "sample": np.array([self.ids[i] for i in chosen]),
            "image": image.half().numpy(), "added": (attacked - image).half().numpy(),
            "label": label, "clean_prediction": clean, "prediction": prediction,
        }  # fmt: skip


def _numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    return tensor.cpu().numpy()
