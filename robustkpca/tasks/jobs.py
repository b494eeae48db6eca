"""The work that suites ask for: one job for each attack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from robustkpca.errors import SpecError, unknown
from robustkpca.suites.attack import AttackSpec
from robustkpca.suites.cell import AttackId
from robustkpca.suites.suite import Suite
from robustkpca.tasks.base import Perturbation, Task


@dataclass(frozen=True)
class Job:
    """One attack of a suite, over all its budgets."""

    id: AttackId
    suite: Suite
    spec: AttackSpec
    after: AttackId | None = None  # in a cascade: the attack whose survivors it attacks

    def perturbation_of(self, task: Task) -> Perturbation:
        """How a task carries it out. Raises SpecError where it has no such threat model."""
        kind = self.suite.threat.kind
        if kind not in task.perturbations:
            raise SpecError(
                f"suite {self.suite.name}: {unknown(f'threat model of {task.name}', kind, task.perturbations)}"
            )
        return task.perturbations[kind]

    def passes(self, task: Task) -> float:
        """Forward and backward passes a sample, over all budgets, the pass that predicts on the result included."""
        perturbation = self.perturbation_of(task)
        return sum(1 + perturbation.passes(self.spec, budget) for budget in self.suite.budgets)


def jobs_of(suites: Sequence[Suite], clean: AttackId) -> list[Job]:
    """Every attack of the suites, in their order; the first of a cascade runs on what is right in `clean`."""
    jobs = []
    for suite in suites:
        after = clean
        for attack_id, spec in suite.attacks.items():
            jobs.append(Job(attack_id, suite, spec, after if suite.cascade else None))
            after = attack_id
    return jobs
