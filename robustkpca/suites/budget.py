"""Budgets: how much a perturbation may change. Exact, and written in one way."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from robustkpca.errors import SpecError

_LONGEST = 100  # characters of a number
_EXPONENT = re.compile(r"[eE][+-]?[\d_]{4,}")


@dataclass(frozen=True, order=True)
class Budget:
    """One budget: its exact value, by which budgets are ordered, and how rows and columns write it."""

    value: Fraction
    text: str

    def __str__(self) -> str:
        return self.text

    def __float__(self) -> float:
        return float(self.value)

    @classmethod
    def parse(cls, text: str) -> Budget:
        """A budget as rows hold it; `""` is that of samples as they are."""
        return cls(exact(text), text) if text else UNPERTURBED


UNPERTURBED = Budget(Fraction(0), "")


def exact(value: str | float | Fraction, what: str = "budget") -> Fraction:
    """A number as people write it (`"8/255"`, `"0.03"`, `3`), exact.
    Raises SpecError for anything else, below 0, and for what a float cannot hold."""
    number = signed(value, what)
    if number < 0:
        raise SpecError(f"{what}: expected 0 or more, got {value}")
    return number


def signed(value: str | float | Fraction, what: str) -> Fraction:
    """As `exact`, below 0 as well."""
    text = str(value).replace(" ", "")
    try:
        if len(text) > _LONGEST or _EXPONENT.search(text):  # its digits would be written out
            raise ValueError
        above, slash, below = text.partition("/")
        if "/" in below:
            raise ValueError
        number = Fraction(above) / Fraction(below) if slash else Fraction(text)
        if number and not abs(float(number)) > 0:
            raise OverflowError
    except (ValueError, ArithmeticError):
        got = repr(value) if len(text) <= _LONGEST else f"{text[:20]}... of {len(text)} characters"
        raise SpecError(f"{what}: expected a number such as 8/255 or 0.03, got {got}") from None
    return number


def parse_eps(value: str | float | Fraction) -> Fraction:
    """The radius of a ball, exact. Decimals within 1e-6 of k/255, k >= 1, are that k/255."""
    number = exact(value, "eps")
    nearest = Fraction(round(number * 255), 255)
    return nearest if nearest and abs(number - nearest) <= Fraction(1, 10**6) else number


def eps_text(eps: Fraction) -> str:
    """The one way the radius of a ball is written in rows and columns: k/255 where it is one, else a decimal."""
    if eps.denominator == 1:
        return str(eps)
    scaled = eps * 255
    return f"{scaled}/255" if scaled.denominator == 1 and eps < 1 else repr(float(eps))


def eps_budget(value: str | float | Fraction) -> Budget:
    """The budget of a ball with this radius."""
    eps = parse_eps(value)
    return Budget(eps, eps_text(eps))
