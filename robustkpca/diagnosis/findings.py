"""Reasons not to believe a number: what the rows of a run and the health of its models give away.

Each rule looks at one model of one run and says pass, warn or fail, or nothing where the run does not hold what it
needs. The rules follow the checklists of Carlini et al., "On Evaluating Adversarial Robustness", 2019, arXiv
1902.06705, and Athalye et al. 2018, arXiv 1802.00420.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

# Importing them registers their rules.
from robustkpca.diagnosis import attack_strength, model_rules, threat_rules
from robustkpca.diagnosis.rules import RULES, Level, Model
from robustkpca.runs.run import Run

__all__ = ["RULES", "Finding", "attack_strength", "findings", "model_rules", "rules_of", "threat_rules"]


# How findings are shown, whatever was imported first; rules of others follow.
ORDER = (
    "rows", "chance", "settings", "logits", "randomness", "batch", "gradients", "no-gradient", "gradient-precision",
    "normalisation", "eps-zero", "eps-order", "huge-budget", "more-effort", "one-step", "masked-gradient",
    "autoattack-square", "autoattack-standard", "attacked-labels",
)  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """What a rule says of a model: `message` is what was seen,
    `advice` what it means and what to do (empty for a pass)."""

    level: Level
    rule: str
    model: str
    message: str
    advice: str = ""


_made: WeakKeyDictionary[Run, list[Finding]] = WeakKeyDictionary()


def rules_of(run: Run) -> list[str]:
    """The names of the rules that apply to the run's task, in the order in which findings are shown."""
    names = [name for name, rule in RULES.items() if not rule.tasks or run.task.name in rule.tasks]
    return sorted(names, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))


def findings(run: Run) -> list[Finding]:
    """What every rule that can be applied says of every model that was evaluated, passes included where there are
    samples enough for one."""
    if run not in _made:
        results = []
        for name in run.models:
            model = Model(run, name)
            for rule in rules_of(run):
                seen = RULES[rule].judge(model)
                if seen is not None and (seen[0] != "pass" or run.n >= RULES[rule].fewest):
                    results.append(Finding(seen[0], rule, name, seen[1], seen[2]))
        _made[run] = results
    return list(_made[run])
