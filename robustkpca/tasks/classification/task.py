"""Image classification: labels, predictions, and whether they agree. No torch until something is run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import pandas as pd
import pyarrow as pa

from robustkpca.suites.suite import Suite
from robustkpca.suites.threat import Ball, Threat
from robustkpca.tasks.base import Adapted, Chunk, Options, Perturbation, Task
from robustkpca.tasks.classification.accuracy import ACCURACY
from robustkpca.tasks.score import Score

if TYPE_CHECKING:
    from torch import Tensor

    from robustkpca.datasets.cache import PixelCache
    from robustkpca.datasets.sample_set import SampleSet
    from robustkpca.tasks.batch import Batch

HEALTH_SAMPLES = 100


class Classification(Task):
    """Images with one label each, on a `Classifier`."""

    name: ClassVar[str] = "classification"
    sample_word: ClassVar[str] = "image"
    columns: ClassVar[Sequence[tuple[str, pa.DataType]]] = (
        ("label", pa.int32()),
        ("attacked_label", pa.int32()),  # what the attack drove away from; null where nothing was attacked
        ("clean_prediction", pa.int32()),
        ("prediction", pa.int32()),  # on what was perturbed, by a fresh forward pass; -1 where logits were not finite
        ("correct", pa.bool_()),
        ("correct_top5", pa.bool_()),  # null with fewer than 6 classes
        ("confidence", pa.float32()),  # softmax probability of the prediction
    )
    scores: ClassVar[Sequence[Score]] = (ACCURACY,)
    flags: ClassVar[Mapping[str, str]] = {
        "non_finite": "the model's logits were not finite",
        "gradient_not_finite": "the attack's gradient was not finite where it began",
    }
    untried: ClassVar[Mapping[str, str]] = {
        "gradient_not_finite": flags["gradient_not_finite"],
        "no_gradient": "the attack had no gradient to follow (it was zero where it began)",
    }
    ground_truth: ClassVar[Sequence[str]] = ("label",)
    health_samples: ClassVar[int] = HEALTH_SAMPLES

    @cached_property
    def perturbations(self) -> Mapping[str, Perturbation]:
        from robustkpca.tasks.classification.perturbations import PERTURBATIONS

        return PERTURBATIONS

    def adapt(self, models: Sequence[Any], samples: SampleSet, suites: Sequence[Suite], options: Options) -> Adapted:
        from robustkpca.tasks.classification.adapt import adapt

        return adapt(models, samples, suites, options)  # type: ignore[arg-type]

    def describe(self, model: Any) -> dict[str, Any]:
        from robustkpca.models.code import code_hash

        return {
            "parameters": sum(p.numel() for p in model.network.parameters()),
            "settings": model.settings,
            "attention": model.attention_kernel,
            "code": code_hash(model.network),
        }

    def reader(self, samples: SampleSet, model: Any, cache: PixelCache | None) -> Callable[[int], Tensor]:
        from functools import partial

        preprocessing = model.settings.preprocessing
        if cache is not None:
            return cache.reader(samples, preprocessing)  # type: ignore[arg-type]
        return partial(samples.image, preprocessing=preprocessing)  # type: ignore[attr-defined]

    def batch(self, chunk: Chunk) -> Batch:
        from robustkpca.tasks.classification.batch import ImageBatch

        return ImageBatch(chunk)

    def health(self, chunk: Chunk) -> dict[str, Any]:
        from robustkpca.tasks.classification.batch import ImageBatch
        from robustkpca.tasks.classification.health import health

        batch = ImageBatch(chunk)
        return chunk.portions.whole(len(batch.ids), lambda size: health(batch.model, batch.inputs, batch.labels, size))

    def right(self, rows: pd.DataFrame) -> pd.Series:
        return rows["correct"].astype(bool)

    def sound(self, rows: pd.DataFrame, models: Mapping[str, Any]) -> list[str]:
        if rows.empty:
            return []
        if rows[["correct", "label", "prediction"]].isna().any(axis=None):
            return ["rows without a value"]
        reasons = []
        if wrong := int((rows["correct"] != (rows["prediction"] == rows["label"])).sum()):
            reasons.append(f"{wrong} rows whose `correct` is not what label and prediction say")
        classes = {label: settings.num_classes if settings else 0 for label, settings in models.items()}
        beyond = (rows["prediction"] < -1) | (rows["prediction"] >= rows["model"].map(classes))
        if wrong := int(beyond.sum()):
            reasons.append(f"{wrong} rows with a prediction that is no class of the model")
        if wrong := int((rows["confidence"].isna() & (rows["prediction"] >= 0)).sum()):
            reasons.append(f"{wrong} rows without a confidence")
        return reasons

    def examples(self, batch: Batch, threat: Threat, perturbed: Tensor) -> dict[str, Any] | None:
        return batch.kept_examples(perturbed) if isinstance(threat, Ball) else None  # type: ignore[attr-defined]


CLASSIFICATION = Classification()
