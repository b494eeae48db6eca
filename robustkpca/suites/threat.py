"""Threat models: what may be changed in a sample, and how much. One class for each kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from fractions import Fraction
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from robustkpca.config import Frozen
from robustkpca.errors import SpecError
from robustkpca.extensions import Registry
from robustkpca.suites.attack import AttackSpec
from robustkpca.suites.budget import Budget, eps_budget, eps_text, exact

HUGE = Fraction(1, 2)  # an L-inf budget in pixels within which every image can become the same grey


class Threat(Frozen, ABC):
    """What may be changed. `kind` is the word that stands in a suite's file; each kind has a class in THREATS."""

    kind: str
    budget_word: ClassVar[str] = "budget"  # what one of its budgets is called
    combination: ClassVar[Literal["worst", "mean"]] = "worst"  # what several attacks of a suite make together
    nested: ClassVar[bool] = False  # whether a larger budget allows all that a smaller one does

    @property
    @abstractmethod
    def budgets(self) -> tuple[Budget, ...]:
        """The budgets in the order asked for."""

    @abstractmethod
    def describe(self) -> str:
        """One line that says what a number under this threat model means."""

    @property
    def has_eps(self) -> bool:
        """Whether `--eps` gives it other budgets."""
        return self.budget_word == "eps"

    @property
    def family(self) -> tuple[object, ...]:
        """What must be the same for attacks to be compared at one budget."""
        return (self.kind,)

    @property
    def ordered(self) -> bool:
        """Whether results must not get better with the budget."""
        return self.nested

    @property
    def attacks(self) -> tuple[AttackSpec, ...]:
        """What it is made of where a suite names no attacks."""
        return ()

    @property
    def headline(self) -> Budget:
        """The budget that stands for the suite."""
        return max(self.budgets)

    def with_budgets(self, budgets: list[str]) -> Threat:
        """The same with other budgets. Raises SpecError where that makes no sense."""
        raise SpecError(
            f"--eps: expected a suite with eps, this one has {self.budget_word} {', '.join(map(str, self.budgets))}"
        )


THREATS: Registry[type[Threat]] = Registry("threat model", "robustkpca.threats")


@THREATS.register("ball")
class Ball(Threat):
    """An L-p ball around the image. eps is in the units of `space`.

    space: `pixel` (images in [0, 1]) or `normalized` (after mean and std). clip: whether values in the units of `space`
    must stay in [0, 1]. norm: `none` bounds nothing; eps is then a parameter of the attack, such as the confidence of
    CW. labels: what the attack drives the prediction away from, the `true` labels or the model's own clean predictions.
    """

    kind: Literal["ball"] = "ball"
    nested: ClassVar[bool] = True
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
        return tuple(dict.fromkeys(str(eps_budget(value)) for value in values))

    @model_validator(mode="after")
    def _sane(self) -> Ball:
        for budget in self.budgets:
            if self.norm == "linf" and budget.value > 1:
                text = eps_text(budget.value)
                raise SpecError(
                    f"eps {text}: L-inf budgets are shares of the range [0, 1], expected at most 1; "
                    f"did you mean {text}/255?"
                )
        return self

    @property
    def budgets(self) -> tuple[Budget, ...]:
        return tuple(map(eps_budget, self.eps))

    @property
    def budget_word(self) -> str:  # type: ignore[override]  # other kinds have one word for all
        """Without a bound the budget is the attack's confidence."""
        return "confidence" if self.norm == "none" else "eps"

    @property
    def headline(self) -> Budget:
        """The largest, but a huge one of a battery only where there is no other."""
        usual = [b for b in self.budgets if self.norm != "linf" or b.value < HUGE]
        return max(usual or self.budgets)

    @property
    def family(self) -> tuple[object, ...]:
        return self.norm, self.space, self.clip, self.labels

    @property
    def ordered(self) -> bool:
        return self.has_eps

    def with_budgets(self, budgets: list[str]) -> Ball:
        if not self.has_eps:
            super().with_budgets(budgets)
        ball: Ball = Ball.parse({**self.model_dump(), "eps": budgets}, "--eps")
        return ball

    def describe(self) -> str:
        norm = {"linf": "L-inf", "l2": "L2", "l1": "L1", "none": "no bound"}[self.norm]
        space = "pixel space" if self.space == "pixel" else "normalised space"
        unit = " in normalised units" if self.clip and self.space == "normalized" else ""
        clip = f"clipped to [0, 1]{unit}" if self.clip else "not clipped"
        labels = "true labels" if self.labels == "true" else "the model's own clean predictions as labels"
        eps = ", ".join(f"{b} ({float(b):.4f})" if self.has_eps else str(b) for b in self.budgets)
        return f"{norm}, {self.budget_word} {eps}; {space}, {clip}; {labels}"


@THREATS.register("corruptions")
class Corruptions(Threat):
    """Generated corruptions (Hendrycks and Dietterich 2019, arXiv 1903.12261), each at every severity."""

    kind: Literal["corruptions"] = "corruptions"
    budget_word: ClassVar[str] = "severity"
    combination: ClassVar[Literal["worst", "mean"]] = "mean"
    names: tuple[str, ...] = Field(min_length=1)
    severities: tuple[int, ...] = (1, 2, 3, 4, 5)

    @model_validator(mode="after")
    def _sane(self) -> Corruptions:
        if not self.severities or any(s not in range(1, 6) for s in self.severities):
            raise ValueError(f"severities: expected numbers from 1 to 5, got {list(self.severities)}")
        return self

    @property
    def attacks(self) -> tuple[AttackSpec, ...]:
        # `mypkg.looks:vignette` goes by the name of the function.
        return tuple(AttackSpec(name=name.rpartition(":")[2].lower(), method=name) for name in self.names)

    @property
    def budgets(self) -> tuple[Budget, ...]:
        return tuple(Budget(exact(s), str(s)) for s in self.severities)

    def with_budgets(self, budgets: list[str]) -> Threat:
        raise SpecError("--eps: a suite of corruptions has severities, not eps")

    def describe(self) -> str:
        return f"{len(self.names)} generated corruptions, severities {', '.join(map(str, self.severities))}"
