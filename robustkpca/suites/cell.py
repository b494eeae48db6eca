"""Which attack at which budget: one column of results."""

from __future__ import annotations

from dataclasses import dataclass

from robustkpca.suites.budget import UNPERTURBED, Budget

CLEAN = "clean"  # how rows and tables call samples as they are


@dataclass(frozen=True)
class AttackId:
    """An attack by the suite it belongs to. `attack` is empty where the suite has a single one, and where nothing is
    attacked.

    Its text, `suite` or `suite/attack`, is what rows hold; a suite's name has no `/`.
    """

    suite: str
    attack: str = ""

    def __str__(self) -> str:
        return f"{self.suite}/{self.attack}" if self.attack else self.suite

    @classmethod
    def parse(cls, text: str) -> AttackId:
        """The other way round, for what is read from rows."""
        suite, _, attack = text.partition("/")
        return cls(suite, attack)


@dataclass(frozen=True)
class Cell:
    """One column of results: an attack at one budget (an eps, a severity)."""

    attack: AttackId
    budget: Budget = UNPERTURBED

    def __str__(self) -> str:
        return f"{self.attack} {self.budget}".strip()

    @property
    def texts(self) -> tuple[str, str]:
        """As rows hold it."""
        return str(self.attack), str(self.budget)

    @classmethod
    def parse(cls, attack: str, budget: str = "") -> Cell:
        """A cell from what rows hold."""
        return cls(AttackId.parse(attack), Budget.parse(budget))


CLEAN_CELL = Cell(AttackId(CLEAN))
# Cells of sets that come in conditions of their own and are evaluated without attacks.
RELEASED = "imagenet-c"  # released corruptions are imagenet-c/NAME, their budget is the severity
IN_DISTRIBUTION, OUT_OF_DISTRIBUTION = Cell(AttackId("imagenet-o", "in")), Cell(AttackId("imagenet-o", "out"))
