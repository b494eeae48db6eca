"""The columns of rows, and the flags that say a row must not be believed."""

from __future__ import annotations

import pyarrow as pa

SCHEMA = pa.schema(
    [
        ("model", pa.string()),
        ("attack", pa.string()),  # "clean", or Suite.label
        ("budget", pa.string()),  # an eps as `eps_text` writes it, a severity, or "" for clean
        ("sample", pa.string()),
        ("label", pa.int32()),
        ("attacked_label", pa.int32()),  # what the attack drove away from; null where nothing was attacked
        ("clean_prediction", pa.int32()),
        ("prediction", pa.int32()),  # on the attacked images, by a fresh forward pass; -1 where logits were not finite
        ("correct", pa.bool_()),
        ("correct_top5", pa.bool_()),  # null with fewer than 6 classes
        ("confidence", pa.float32()),  # softmax probability of the prediction
        (
            "distance",
            pa.float32(),
        ),  # attacked minus clean image, in the norm and space of the threat model; null without one
        ("flags", pa.string()),  # "", or FLAGS joined by commas
    ]
)
FLAGS = {
    "over_budget": "the attack left its budget (tolerance 1e-6)",
    "out_of_box": "the attack left the range [0, 1] (tolerance 1e-6)",
    "non_finite": "the model's logits were not finite",
}
FORMAT = 1
