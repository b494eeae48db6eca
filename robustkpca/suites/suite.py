"""Budgets, threat models and suites: what is attacked, how, and how much. Plain data, no torch.

A suite is one TOML file. `attacks/` of the source tree travels in the wheel as `robustkpca/_suites`; a user's own file
is given by its path. The working directory is never searched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SerializeAsAny, StrictBool, field_validator, model_validator

from robustkpca.config import Frozen, data_folder, read_toml
from robustkpca.errors import SpecError, unknown
from robustkpca.extensions import import_object, is_import_path
from robustkpca.suites.attack import AttackSpec
from robustkpca.suites.budget import Budget
from robustkpca.suites.cell import CLEAN, AttackId, Cell
from robustkpca.suites.threat import THREATS, Threat


class Suite(Frozen):
    """A named threat model with its attacks."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$")
    version: int = Field(ge=1)
    title: str
    protocol: Literal["standard", "paper"] | None = None  # the pair it belongs to, chosen with --protocol
    threat: SerializeAsAny[Threat]
    attack: tuple[AttackSpec, ...] = ()
    cascade: StrictBool = False  # each attack runs on the samples that are still right after those before it

    @model_validator(mode="before")
    @classmethod
    def _corruptions(cls, data: Any) -> Any:
        """`corruptions` and `severities` beside the name, as files had them before threat models had kinds."""
        if not isinstance(data, dict):
            return data
        if "kind" in data:
            raise ValueError('expected kind within the [threat] table, e.g. [threat] kind = "corruptions"')
        if not data.get("corruptions"):
            if data.get("threat") is None:
                raise ValueError("expected a [threat] table")
            return data
        if data.get("threat"):
            raise ValueError("expected either corruptions, or a [threat] table, got both")
        rest = {key: value for key, value in data.items() if key not in ("corruptions", "severities", "threat")}
        severities = {"severities": data["severities"]} if "severities" in data else {}
        return rest | {"threat": {"kind": "corruptions", "names": data["corruptions"], **severities}}

    @field_validator("threat", mode="before")
    @classmethod
    def _of_its_kind(cls, value: Any) -> Any:
        if isinstance(value, Threat) or not isinstance(value, Mapping):
            return value
        kind = str(value.get("kind", "ball"))
        try:
            threat = import_object(kind, what="threat model") if is_import_path(kind) else THREATS[kind]
        except SpecError as error:  # so that the line begins with the suite and the key
            raise ValueError(f"kind: {error}") from error
        return threat.model_validate(dict(value))

    @model_validator(mode="after")
    def _sane(self) -> Suite:
        if bool(self.attack) == bool(self.threat.attacks):
            raise ValueError("expected either [[attack]] tables, or a threat model that is made of attacks itself")
        if self.name == CLEAN:
            raise ValueError(f"{CLEAN} is the name of no attack at all; choose another")
        if self.cascade and len(self.attack) < 2:
            raise ValueError(f"a cascade has several attacks, got {len(self.attack)}")
        if self.cascade and getattr(self.threat, "labels", "true") != "true":
            raise ValueError("a cascade attacks the true labels, got predicted")
        names = [a.name for a in self.specs]
        if len(set(names)) != len(names):
            raise ValueError(f"expected different names, got {names}")
        return self

    @property
    def specs(self) -> tuple[AttackSpec, ...]:
        return self.attack or self.threat.attacks

    def attack_id(self, name: str) -> AttackId:
        """The address of one of its attacks; a single attack goes by the suite's name alone."""
        return AttackId(self.name, "" if len(self.attack) == 1 else name)

    @property
    def attacks(self) -> dict[AttackId, AttackSpec]:
        return {self.attack_id(spec.name): spec for spec in self.specs}

    @property
    def combination(self) -> Literal["single", "worst", "mean"]:
        """What stands for the suite in comparisons: its one attack, the worst case or the mean over its attacks."""
        return self.threat.combination if len(self.specs) > 1 or self.threat.attacks else "single"

    @property
    def budgets(self) -> tuple[Budget, ...]:
        return self.threat.budgets

    @property
    def cells(self) -> tuple[Cell, ...]:
        return tuple(Cell(attack, budget) for attack in self.attacks for budget in self.budgets)

    def describe(self) -> str:
        if not self.attack:
            return self.threat.describe()
        attacks = "; ".join(a.describe() for a in self.attack)
        cascade = ", each on the samples that the ones before left right" if self.cascade else ""
        return f"{attacks}{cascade}; {self.threat.describe()}"

    def with_eps(self, eps: Iterable[str]) -> Suite:
        """The same attacks at other budgets. Raises SpecError where the threat model has none that could be others."""
        return self._changed(threat=self.threat.with_budgets(list(eps)))

    @property
    def has_steps(self) -> bool:
        return any("steps" in a.parameters for a in self.attack)

    def with_steps(self, steps: int) -> Suite:
        """The same attacks with another number of steps, where they have steps."""
        if not self.has_steps:
            raise SpecError(f"--steps: suite {self.name} has no attack with steps")
        attacks = [a.model_dump() for a in self.attack]
        for a in attacks:
            if "steps" in a["parameters"]:
                a["parameters"]["steps"] = steps
        return self._changed(attack=attacks)

    def without(self, left_out: Sequence[str], why: str) -> Suite:
        """The suite less some of its attacks, under a name and title that say so."""
        remaining = [a.model_dump() for a in self.attack if a.name not in left_out]
        names = ", ".join(left_out)
        return self._changed(
            name=f"{self.name}-without-{'-'.join(left_out)}",
            title=f"{self.title}, without {names} ({why})",
            attack=remaining,
            cascade=self.cascade and len(remaining) > 1,
        )

    def _changed(self, **fields: Any) -> Suite:
        suite: Suite = Suite.parse({**self.model_dump(), "threat": self.threat, **fields}, f"suite {self.name}")
        return suite


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
    suite: Suite = Suite.parse(read_toml(path, "suite"), f"suite {path.name}")
    if suite.name != path.stem:
        raise SpecError(f"suite {path}: its name is {suite.name!r}, expected the file's, {path.stem!r}")
    return suite
