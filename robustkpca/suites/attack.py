"""One attack of a suite: a method, its parameters, and the way its gradient takes."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, Literal

from pydantic import Field, field_validator

from robustkpca.config import Frozen
from robustkpca.errors import SpecError
from robustkpca.suites.budget import signed

# Stands in a model's notes where it was attacked so in spite of a refusal.
ROUNDED_GRADIENTS = "attacked by force with gradients in bfloat16, which are wrong through RPC-Attention"
_COUNTS = ("steps", "restarts", "n_restarts", "n_queries", "eot", "eot_iter", "nb_iter", "nb_sample")
_LENGTHS = ("alpha", "delta", "lr", "p_init", "alpha_max", "rho")
_WORDS = ("loss",)  # parameters whose text is no multiple of eps
# How an attack's gradient goes through RPC-Attention, see `robustkpca.attacks.gradient_paths`.
Through = Literal["full", "constant-sparse", "straight-through", "half-iterations", "double-iterations", "symvit"]


class AttackSpec(Frozen):
    """One attack of a suite: a method (see `robustkpca.attacks.registry.METHODS`; of a suite of corruptions, the name
    of one), its parameters, and the way its gradient takes.

    A parameter may be a multiple of the budget, written `"0.15 eps"`.
    """

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$")
    method: str
    through: Through = "full"
    parameters: dict[str, bool | int | float | str] = Field(default_factory=dict)

    @field_validator("parameters")
    @classmethod
    def _known_form(cls, parameters: dict[str, Any]) -> dict[str, Any]:
        for key, value in parameters.items():
            if isinstance(value, str) and key not in _WORDS:
                number: float = float(multiple(key, value))
            elif isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{key}: expected a finite number, got {value}")
            else:
                number = 1.0 if isinstance(value, str) else float(value)
            if key in _LENGTHS and number <= 0:
                raise ValueError(f"{key}: expected a length above 0, got {value!r}")
            if key in _COUNTS and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{key}: expected a whole number of at least 1, got {value!r}")
        return parameters

    def describe(self) -> str:
        """The method as a call, and the surrogate that its gradient goes through."""
        call = f"{self.method}({', '.join(f'{k}={v}' for k, v in self.parameters.items())})"
        return call if self.through == "full" else f"{call} through {self.through}"

    def resolve(self, eps: Fraction) -> dict[str, bool | int | float | str]:
        """The parameters at one budget, multiples of eps worked out."""
        return {
            key: float(multiple(key, value) * eps) if isinstance(value, str) and key not in _WORDS else value
            for key, value in self.parameters.items()
        }


def multiple(key: str, text: str) -> Fraction:
    """The factor of `"<factor> eps"`."""
    factor, _, unit = text.strip().rpartition(" ")
    try:
        if unit != "eps":
            raise ValueError
        return signed(factor, key)
    except (ValueError, SpecError):
        raise ValueError(
            f'{key}: expected a number, true or false, or a multiple of the budget such as "0.15 eps", got {text!r}'
        ) from None
