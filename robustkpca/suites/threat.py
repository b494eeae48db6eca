"""Threat models: what an attacker may do."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from robustkpca.config import Frozen
from robustkpca.errors import SpecError
from robustkpca.suites.budget import eps_text, parse_eps


class ThreatModel(Frozen):
    """What the attacker may do. eps is in the units of `space`.

    space: `pixel` (images in [0, 1]) or `normalized` (after mean and std). clip: whether values in the units of `space` must stay in [0, 1].
    norm: `none` bounds nothing; eps is then a parameter of the attack, such as the confidence of CW.
    labels: what the attack drives the prediction away from, the `true` labels or the model's own clean predictions.
    """

    norm: Literal["linf", "l2", "l1", "none"]
    eps: tuple[str, ...] = Field(min_length=1)
    space: Literal["pixel", "normalized"]
    clip: bool
    labels: Literal["true", "predicted"]
    targeted: Literal[False] = False

    @field_validator("eps", mode="before")
    @classmethod
    def _exact(cls, values: Any) -> Any:
        if not isinstance(values, list | tuple):
            raise ValueError('expected a list such as ["4/255", "8/255"]')
        return tuple(dict.fromkeys(eps_text(parse_eps(value)) for value in values))

    @model_validator(mode="after")
    def _sane(self) -> ThreatModel:
        for eps in self.budgets:
            if self.norm == "linf" and eps > 1:
                raise SpecError(
                    f"eps {eps_text(eps)}: L-inf budgets are shares of the range [0, 1], expected at most 1; "
                    f"did you mean {eps_text(eps)}/255?"
                )
        return self

    @property
    def budgets(self) -> tuple[Fraction, ...]:
        return tuple(parse_eps(text) for text in self.eps)

    def describe(self) -> str:
        """One line that says what a number under this threat model means."""
        norm = {"linf": "L-inf", "l2": "L2", "l1": "L1", "none": "no bound"}[self.norm]
        space = "pixel space" if self.space == "pixel" else "normalised space"
        unit = " in normalised units" if self.clip and self.space == "normalized" else ""
        clip = f"clipped to [0, 1]{unit}" if self.clip else "not clipped"
        labels = "true labels" if self.labels == "true" else "the model's own clean predictions as labels"
        eps = ", ".join(f"{t} ({float(b):.4f})" for t, b in zip(self.eps, self.budgets, strict=True))
        return f"{norm}, eps {eps}; {space}, {clip}; {labels}"
