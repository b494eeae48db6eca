"""One chunk of samples on one model: attack it or corrupt it, predict afresh, and measure what was done to it."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from robustkpca import corruptions
from robustkpca.attacks import engine, registry
from robustkpca.models.classifier import Classifier
from robustkpca.runtime.keyed_random import seeded
from robustkpca.runtime.memory import Portions
from robustkpca.suites.attack import AttackSpec
from robustkpca.suites.budget import parse_eps
from robustkpca.suites.cell import CLEAN, Cell
from robustkpca.suites.threat import ThreatModel
from robustkpca.tasks.jobs import Job

TOLERANCE = 1e-6  # of budgets and of the pixel range, as float32 rounding exceeds them by some 1e-8
TOP_K = 5
EXAMPLES = 4  # images kept of each attack


class Batch:
    """One chunk on one model: images, labels, ids, and the clean predictions."""

    def __init__(
        self,
        classifier: Classifier,
        model: str,
        images: Tensor,
        labels: Tensor,
        ids: list[str],
        seed: int,
        portions: Portions,
    ) -> None:
        self.classifier, self.model, self.seed, self.portions = classifier, model, seed, portions
        self.images, self.labels, self.ids = images, labels, ids
        self.clean: Tensor = torch.empty(0)  # predictions on the clean images, int64 (B,)
        self.examples: dict[str, dict[str, Any]] = {}  # by attack, see `outcomes.Examples`

    def clean_rows(self, conditions: Sequence[Cell]) -> pd.DataFrame:
        """The rows of the images as they are; `conditions` says which cell each belongs to."""
        rows = self._score(self.images, CLEAN, "", None, None)
        rows["attack"], rows["budget"] = [c.attack for c in conditions], [c.budget for c in conditions]
        self.clean = torch.tensor(rows["prediction"].to_numpy(), dtype=torch.int64, device=self.images.device)
        return rows.assign(clean_prediction=rows["prediction"])

    def only(self, chosen: Tensor) -> Batch:
        """Some of the samples, int64 positions."""
        ids = [self.ids[i] for i in chosen.tolist()]
        part = Batch(
            self.classifier, self.model, self.images[chosen], self.labels[chosen], ids, self.seed, self.portions
        )
        part.clean = self.clean[chosen]
        return part

    def rows(self, job: Job, before: pd.DataFrame | None = None) -> pd.DataFrame:
        """The rows of one attack or corruption, over all its budgets. In a cascade, `before` holds the rows of what was run before it:
        only samples that are right there are attacked, the others keep the row that broke them."""
        if isinstance(job.what, str):
            return pd.concat([self._corrupted(job.label, job.what, s) for s in job.suite.severities], ignore_index=True)
        assert job.suite.threat is not None
        parts = []
        for text, eps in zip(job.suite.budgets, job.suite.threat.budgets, strict=True):
            keep = text == job.suite.largest
            if before is None:
                parts.append(self._attacked(job.label, job.what, job.suite.threat, text, eps, keep))
                continue
            earlier = before[before["budget"].isin([text, ""])].reset_index(drop=True)
            right = torch.from_numpy(earlier["correct"].to_numpy(bool).nonzero()[0]).to(self.images.device)
            kept = earlier.assign(attack=job.label, budget=text, attacked_label=_numpy(self.labels))
            kept["distance"] = kept["distance"].fillna(0.0)
            if len(right):
                part = self.only(right)
                new = part._attacked(job.label, job.what, job.suite.threat, text, eps, keep)
                self.examples |= part.examples
                kept = pd.concat([kept[~earlier["correct"]], new]).set_index("sample").loc[self.ids].reset_index()
            parts.append(kept)
        return pd.concat(parts, ignore_index=True)

    def _corrupted(self, label: str, name: str, severity: int) -> pd.DataFrame:
        images = corruptions.corrupt(self.images, name, severity, self.ids, seed=self.seed)
        return self._score(images, label, str(severity), None, None)

    def _attacked(
        self, label: str, spec: AttackSpec, threat: ThreatModel, budget: str, eps: Fraction, keep: bool
    ) -> pd.DataFrame:
        # A clean prediction of -1 marks logits that were not finite: there the true label stands in, and the row is flagged.
        predicted = torch.where(self.clean < 0, self.labels, self.clean)
        targets = self.labels if threat.labels == "true" else predicted

        def found_in(part: slice) -> Tensor:
            return engine.attack(
                self.classifier,
                self.images[part],
                targets[part],
                spec=spec,
                threat=threat,
                eps=eps,
                label=label,
                ids=self.ids[part],
                seed=self.seed,
            )

        whole = registry.METHODS[spec.method].draws == "batch"  # what it finds for a sample depends on the others
        found = found_in(slice(None)) if whole else self.portions(len(self.ids), found_in)
        rows = self._score(found, label, budget, targets, threat)
        if keep:
            self._keep(label, budget, found, rows)
        return rows

    def _keep(self, label: str, budget: str, found: Tensor, rows: pd.DataFrame) -> None:
        """A few images to look at, those first that the attack broke."""
        prediction, clean, truth = (rows[c].to_numpy() for c in ("prediction", "clean_prediction", "label"))
        broken = (clean == truth) & (prediction != truth)
        chosen = np.argsort(~broken, kind="stable")[:EXAMPLES]
        image, attacked = (x[torch.from_numpy(chosen).to(x.device)].cpu() for x in (self.images, found))
        self.examples[label] = {
            "budget": np.array(budget), "sample": np.array([self.ids[i] for i in chosen]),
            "image": image.half().numpy(), "added": (attacked - image).half().numpy(),
            "label": truth[chosen], "clean_prediction": clean[chosen], "prediction": prediction[chosen],
        }  # fmt: skip

    @torch.no_grad()
    def _score(
        self, images: Tensor, attack: str, budget: str, attacked_labels: Tensor | None, threat: ThreatModel | None
    ) -> pd.DataFrame:
        """Predict afresh on `images` and measure how far they were moved: an attack's own word is not asked for."""
        with seeded(self.seed, "score", attack, budget, self.ids[0]):
            logits = self.portions(len(images), lambda part: self.classifier(images[part]).float())
        finite = logits.isfinite().all(1)
        safe = torch.where(finite[:, None], logits, 0.0)
        prediction = torch.where(finite, safe.argmax(1), -1)
        flags = {"non_finite": ~finite}
        moved = None
        if threat is not None:
            moved = engine.distance(self.classifier, self.images, images, threat)
            if threat.norm != "none":
                # Float32 sums of many values round in proportion to the sum; NaN counts as over.
                slack = TOLERANCE * max(1.0, float(parse_eps(budget)))
                flags["over_budget"] = ~(moved <= float(parse_eps(budget)) + slack)
            if threat.clip and float(parse_eps(budget)) > 0:
                box = (self.classifier.normalize(images) if threat.space == "normalized" else images).flatten(1)
                flags["out_of_box"] = ~((box >= -TOLERANCE) & (box <= 1 + TOLERANCE)).all(1)
        raised = torch.stack(list(flags.values()), dim=1).tolist()
        columns: dict[str, Any] = {
            "model": self.model,
            "attack": attack,
            "budget": budget,
            "sample": self.ids,
            "label": _numpy(self.labels),
            "attacked_label": None if attacked_labels is None else _numpy(attacked_labels),
            "clean_prediction": _numpy(self.clean) if len(self.clean) else -1,
            "prediction": _numpy(prediction),
            "correct": _numpy(prediction == self.labels),
            "correct_top5": None,
            "confidence": _numpy(safe.softmax(1).amax(1).where(finite, float("nan"))),
            "distance": None if moved is None else _numpy(moved),
            "flags": [",".join(n for n, f in zip(flags, row, strict=True) if f) for row in raised],
        }
        if logits.shape[1] > TOP_K:
            best = safe.topk(TOP_K, dim=1).indices
            columns["correct_top5"] = _numpy((best == self.labels[:, None]).any(1) & finite)
        return pd.DataFrame(columns)


def _numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    return tensor.cpu().numpy()
