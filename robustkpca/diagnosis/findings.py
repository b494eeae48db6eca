"""Reasons not to believe a number: what the rows of a run and the probes of its models give away.

Each rule looks at one model of one run and says pass, warn or fail, or nothing where the run does not hold what it needs. The rules follow
the checklists of Carlini et al., "On Evaluating Adversarial Robustness", 2019, arXiv 1902.06705, and Athalye et al. 2018, arXiv 1802.00420.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from robustkpca.diagnosis import attack_strength, threat_rules
from robustkpca.diagnosis.attack_strength import Level, Model, Said
from robustkpca.diagnosis.model_rules import _batch, _gradients, _normalisation, _precision, _random, _softmaxed
from robustkpca.runs.run import Run


@dataclass(frozen=True)
class Finding:
    """What a rule says of a model: `message` is what was seen, `advice` what it means and what to do (empty for a pass)."""

    level: Level
    rule: str
    model: str
    message: str
    advice: str = ""


RULES: dict[str, Callable[[Model], Said]] = {
    "rows": attack_strength.rows_hold,
    "chance": attack_strength.above_chance,
    "settings": threat_rules.settings,
    "logits": _softmaxed,
    "randomness": _random,
    "batch": _batch,
    "gradients": _gradients,
    "gradient-precision": _precision,
    "normalisation": _normalisation,
    "eps-zero": threat_rules.eps_zero,
    "eps-order": attack_strength.eps_order,
    "huge-budget": attack_strength.huge_budget,
    "more-effort": attack_strength.more_effort,
    "one-step": attack_strength.one_step,
    "masked-gradient": attack_strength.masked_gradient,
    "autoattack-square": attack_strength.square_last,
    "autoattack-standard": threat_rules.standard_autoattack,
    "attacked-labels": threat_rules.attacked_labels,
}


def findings(run: Run) -> list[Finding]:
    """What every rule that can be applied says of every model that was evaluated, passes included, in the order of RULES."""
    found = []
    for name in run.models:
        model = Model(run, name)
        for rule, judge in RULES.items():
            if (said := judge(model)) is not None:
                found.append(Finding(said[0], rule, name, said[1], said[2]))
    return found
