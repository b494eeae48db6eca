"""The work that suites ask for: one job for each attack or corruption."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from robustkpca.attacks import registry
from robustkpca.suites.attack import AttackSpec
from robustkpca.suites.cell import CLEAN
from robustkpca.suites.suite import Suite


@dataclass(frozen=True)
class Job:
    """One attack or corruption on one model: the row label, its suite, and what it stands for."""

    label: str
    suite: Suite
    what: AttackSpec | str
    after: str | None = None  # in a cascade: the row label whose survivors it attacks

    @property
    def passes(self) -> float:
        """Forward and backward passes a sample, over all budgets."""
        if isinstance(self.what, str):
            return 2.0 * len(self.suite.budgets)  # making a corruption costs about a forward pass of a small model
        live = sum(eps > 0 for eps in self.suite.threat.budgets) if self.suite.threat else 0
        return len(self.suite.budgets) + registry.passes(self.what) * live


def jobs_of(suites: Sequence[Suite]) -> list[Job]:
    """Every attack and corruption of the suites, in their order."""
    jobs = []
    for suite in suites:
        after = CLEAN
        for label, what in suite.attacks.items():
            jobs.append(Job(label, suite, what, after if suite.cascade else None))
            after = label
    return jobs
