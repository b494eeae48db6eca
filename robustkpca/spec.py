"""Budgets, threat models and suites: what is attacked, how, and how much. Plain data, no torch.

A suite is one TOML file. `attacks/` of the source tree travels in the wheel as `robustkpca/_suites`; a user's own file is
given by its path. The working directory is never searched.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, StrictBool, field_validator, model_validator

from robustkpca.errors import SpecError, unknown
from robustkpca.settings import Frozen

HUGE = Fraction(1, 2)  # an L-inf budget in pixels within which every image can become the same grey
CLEAN = "clean"  # the attack column of unattacked predictions


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


# Methods whose stopping rule or draws see the whole batch, so that the batch size decides their figures.
# Stands in a model's notes where it was attacked so in spite of a refusal.
ROUNDED_GRADIENTS = "attacked by force with gradients in bfloat16, which are wrong through RPC-Attention"
BATCH_DEPENDENT = ("AutoAttack", "CW")
_COUNTS = ("steps", "restarts", "n_restarts", "n_queries", "eot", "eot_iter", "nb_iter", "nb_sample")
_LENGTHS = ("alpha", "delta", "lr", "p_init", "alpha_max", "rho")
_WORDS = ("loss",)  # parameters whose text is no multiple of eps
# How an attack's gradient goes through RPC-Attention, see `robustkpca.surrogates`.
Through = Literal["full", "constant-sparse", "straight-through", "half-iterations", "double-iterations", "symvit"]


class AttackSpec(Frozen):
    """One attack of a suite: a method (see `robustkpca.methods.METHODS`), its parameters, and the way its gradient takes.

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
        return Fraction(factor)
    except (ValueError, ZeroDivisionError):
        raise ValueError(
            f'{key}: expected a number, true or false, or a multiple of the budget such as "0.15 eps", got {text!r}'
        ) from None


@dataclass(frozen=True)
class Cell:
    """One column of results: an attack at one budget (an eps or a severity)."""

    attack: str
    budget: str


# Cells of sets that come in conditions of their own and are evaluated without attacks.
RELEASED = "imagenet-c"  # the attack column of released corruptions is imagenet-c/NAME, their budget the severity
IN_DISTRIBUTION, OUT_OF_DISTRIBUTION = Cell("imagenet-o/in", ""), Cell("imagenet-o/out", "")


class Suite(Frozen):
    """A named threat model with its attacks, or a list of corruptions with severities."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$")
    version: int = Field(ge=1)
    title: str
    protocol: Literal["standard", "paper"] | None = None  # the pair it belongs to, chosen with --protocol
    threat: ThreatModel | None = None
    attack: tuple[AttackSpec, ...] = ()
    cascade: StrictBool = False  # each attack runs on the samples that are still right after those before it
    corruptions: tuple[str, ...] = ()
    severities: tuple[int, ...] = (1, 2, 3, 4, 5)

    @model_validator(mode="after")
    def _one_kind(self) -> Suite:
        if bool(self.attack) == bool(self.corruptions):
            raise ValueError("expected either [[attack]] tables or corruptions")
        if bool(self.attack) != (self.threat is not None):
            raise ValueError("expected a [threat] table with attacks, and none with corruptions")
        if self.name == CLEAN:
            raise ValueError(f"{CLEAN} is the name of no attack at all; choose another")
        if self.cascade and len(self.attack) < 2:
            raise ValueError(f"a cascade has several attacks, got {len(self.attack)}")
        if self.cascade and self.threat and self.threat.labels != "true":
            raise ValueError(f"a cascade attacks the true labels, got {self.threat.labels}")
        names = [a.name for a in self.attack] or list(self.corruptions)
        if len(set(names)) != len(names):
            raise ValueError(f"expected different names, got {names}")
        if not self.severities or any(s not in range(1, 6) for s in self.severities):
            raise ValueError(f"severities: expected numbers from 1 to 5, got {list(self.severities)}")
        return self

    def label(self, name: str) -> str:
        """The attack column of rows: the suite's name, with the attack's own where there are several."""
        return self.name if len(self.attack) == 1 else f"{self.name}/{name}"

    @property
    def attacks(self) -> dict[str, AttackSpec | str]:
        """Row labels and what they stand for: an attack, or the name of a corruption."""
        return {self.label(a.name): a for a in self.attack} or {self.label(c): c for c in self.corruptions}

    @property
    def budgets(self) -> tuple[str, ...]:
        return self.threat.eps if self.threat else tuple(map(str, self.severities))

    @property
    def largest(self) -> str:
        """The budget that stands for the suite: its largest, but a huge one of a battery only where there is no other."""
        ordered = sorted(self.budgets, key=parse_eps)
        usual = [b for b in ordered if self.threat is None or self.threat.norm != "linf" or parse_eps(b) < HUGE]
        return (usual or ordered)[-1]

    @property
    def cells(self) -> tuple[Cell, ...]:
        return tuple(Cell(attack, budget) for attack in self.attacks for budget in self.budgets)

    def describe(self) -> str:
        if self.threat is None:
            return f"{len(self.corruptions)} generated corruptions, severities {', '.join(self.budgets)}"
        attacks = "; ".join(a.describe() for a in self.attack)
        cascade = ", each on the samples that the ones before left right" if self.cascade else ""
        return f"{attacks}{cascade}; {self.threat.describe()}"

    def with_eps(self, eps: Iterable[str]) -> Suite:
        """The same attacks at other budgets."""
        if self.threat is None:
            raise SpecError(f"--eps: suite {self.name} has severities, not eps")
        return self._changed(threat={**self.threat.model_dump(), "eps": list(eps)})

    def with_steps(self, steps: int) -> Suite:
        """The same attacks with another number of steps, where they have steps."""
        if not any("steps" in a.parameters for a in self.attack):
            raise SpecError(f"--steps: suite {self.name} has no attack with steps")
        attacks = [a.model_dump() for a in self.attack]
        for a in attacks:
            if "steps" in a["parameters"]:
                a["parameters"]["steps"] = steps
        return self._changed(attack=attacks)

    def without(self, left_out: Sequence[str], why: str) -> Suite:
        """The suite less some of its attacks, under a name and title that say so."""
        kept = [a.model_dump() for a in self.attack if a.name not in left_out]
        names = ", ".join(left_out)
        return self._changed(
            name=f"{self.name}-without-{'-'.join(left_out)}",
            title=f"{self.title}, without {names} ({why})",
            attack=kept,
            cascade=self.cascade and len(kept) > 1,
        )

    def _changed(self, **fields: Any) -> Suite:
        return Suite.parse({**self.model_dump(), **fields}, f"suite {self.name}")


def data_folder(packed: str, source: str) -> Path:
    """Data files of the package: `packed` inside a wheel, `source` at the top of a checkout."""
    here = Path(__file__).resolve().parent
    return here / packed if (here / packed).is_dir() else here.parent / source


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The content of a TOML file, with one line that names it when it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{what} {path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"{what} {path}: not TOML ({error})") from None


def _suite_folder() -> Path:
    return data_folder("_suites", "attacks")


def suite_names() -> list[str]:
    """The suites that come with the package."""
    return sorted(path.stem for path in _suite_folder().glob("*.toml"))


def load_suite(name: str, protocol: Literal["standard", "paper"] | None = None) -> Suite:
    """A suite by name, or by the path of a TOML file. `protocol` chooses between `pgd` and `pgd-paper`."""
    if name.endswith(".toml"):
        return _read_suite(Path(name))
    names = suite_names()
    if protocol == "paper" and f"{name}-paper" in names:
        name = f"{name}-paper"
    if name not in names:
        raise SpecError(unknown("attack", name, names) + ", or a path ending in .toml")
    suite = _read_suite(_suite_folder() / f"{name}.toml")
    if protocol is not None and suite.protocol not in (None, protocol):
        raise SpecError(f"--protocol {protocol}: suite {name} is of the {suite.protocol} protocol")
    return suite


def _read_suite(path: Path) -> Suite:
    suite = Suite.parse(read_toml(path, "suite"), f"suite {path.name}")
    if suite.name != path.stem:
        raise SpecError(f"suite {path}: its name is {suite.name!r}, expected the file's, {path.stem!r}")
    return suite
