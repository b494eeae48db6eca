"""Budgets, threat models and suites: what is attacked, how, and how much. Plain data, no torch.

A suite is one TOML file. `attacks/` of the source tree travels in the wheel as `robustkpca/_suites`; a user's own file is
given by its path. The working directory is never searched.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, StrictBool, model_validator

from robustkpca.config import Frozen, data_folder, read_toml
from robustkpca.errors import SpecError, unknown
from robustkpca.suites.attack import AttackSpec
from robustkpca.suites.budget import HUGE, parse_eps
from robustkpca.suites.cell import CLEAN, Cell
from robustkpca.suites.threat import ThreatModel


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
