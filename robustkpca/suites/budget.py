"""Budgets: how much an attack may change, exact and written in one way."""

from __future__ import annotations

from fractions import Fraction

from robustkpca.errors import SpecError

HUGE = Fraction(1, 2)  # an L-inf budget in pixels within which every image can become the same grey


def parse_eps(value: str | float | Fraction) -> Fraction:
    """A budget as people write it (`"8/255"`, `"0.03"`), exact. Decimals within 1e-6 of k/255, k >= 1, are that k/255."""
    try:
        number = Fraction(value if isinstance(value, Fraction) else str(value).replace(" ", ""))
    except (ValueError, ZeroDivisionError):
        raise SpecError(f"eps: expected a number such as 8/255 or 0.03, got {value!r}") from None
    if number < 0:
        raise SpecError(f"eps: expected 0 or more, got {value}")
    nearest = Fraction(round(number * 255), 255)
    return nearest if nearest and abs(number - nearest) <= Fraction(1, 10**6) else number


def eps_text(eps: Fraction) -> str:
    """The one way a budget is written in rows and columns: k/255 where it is one, else a decimal."""
    if eps.denominator == 1:
        return str(eps)
    scaled = eps * 255
    return f"{scaled}/255" if scaled.denominator == 1 and eps < 1 else repr(float(eps))
