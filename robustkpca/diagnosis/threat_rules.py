"""Rules about threat models: budgets, steps and labels that do not fit."""

from __future__ import annotations

from fractions import Fraction

from robustkpca.diagnosis.rules import ENOUGH, Model, Seen, gravest, rule
from robustkpca.suites.attack import AttackSpec
from robustkpca.suites.budget import Budget
from robustkpca.suites.suite import load_suite
from robustkpca.suites.threat import HUGE, Ball

TASK = "classification"


@rule("settings", TASK)
def settings(m: Model) -> Seen:
    """Pairs of numbers that people mix up: L2 budgets of the size of L-inf ones,
    steps beyond the ball or too short to cross it."""
    seen: list[Seen] = []
    for suite in m.run.suites:
        if not isinstance(suite.threat, Ball):
            continue
        for attack, spec in suite.attacks.items():
            usual = [budget for budget in suite.budgets if 0 < budget.value < HUGE]
            seen += [
                _misfit(f"{attack} at {suite.threat.budget_word} {budget}", suite.threat, spec, budget)
                for budget in usual
            ]
    return gravest(seen, "step sizes and budgets fit each other")


def _misfit(name: str, ball: Ball, spec: AttackSpec, budget: Budget) -> Seen:
    p, eps = spec.resolve(budget.value), float(budget)
    alpha, steps = p.get("alpha"), float(p.get("steps", 1))
    if ball.norm == "l2" and budget.value < Fraction(1, 20):
        return "warn", f"{name}: an L2 budget", "So short a distance hardly moves an image: was an L-inf budget meant?"
    if alpha is not None and float(alpha) > 2 * eps * (1 + 1e-9):
        text = f"{name}: a step of {float(alpha):.4g} is longer than the ball is wide"
        return "warn", text, 'Write step sizes as multiples of the budget, such as alpha = "0.25 eps".'
    if alpha is not None and float(alpha) * steps < eps * (1 - 1e-9):
        text = f"{name}: {steps:g} steps of {float(alpha):.4g} do not reach the budget's border"
        return "warn", text, 'Take more or longer steps, such as alpha = "0.25 eps".'
    return None


@rule("eps-zero", TASK)
def eps_zero(m: Model) -> Seen:
    if m.clean is None:
        return None
    before = m.clean["prediction"]
    seen: list[Seen] = []
    for a in m.attacks:
        if a.budget.value == 0 and a.ball and a.ball.norm != "none":
            other = int((a.rows["prediction"].reindex(before.index) != before).sum())
            advice = "A budget of 0 leaves one image: the model is random, or the attack does not keep its budget."
            text = f"{a.id} at eps 0 changes {other} of {len(before)} answers"
            seen.append(("fail", text, advice) if other else None)
    return gravest(seen, "eps 0 gives the clean answers")


@rule("autoattack-standard", TASK)
def standard_autoattack(m: Model) -> Seen:
    seen: list[Seen] = []
    for suite in m.run.suites:
        if not suite.name.startswith("autoattack"):
            continue
        theirs = load_suite("autoattack")
        advice = "Call it by another name, and do not compare it with leaderboards."
        same = suite.attack == theirs.attack and suite.cascade
        text = f"{suite.name} is not the standard AutoAttack: {suite.describe()}"
        seen.append(None if same else ("warn", text, advice))
    return gravest(seen, "AutoAttack has its standard parameters")


@rule("attacked-labels", TASK, fewest=ENOUGH)
def attacked_labels(m: Model) -> Seen:
    seen: list[Seen] = []
    for a in m.attacks:
        if a.budget.value == 0 or a.ball is None or a.ball.labels != "predicted" or m.clean is None:
            continue
        # Only images that are wrong when clean have another label to drive away from.
        before = m.right(m.clean).reindex(a.correct.index).astype(bool)
        helped = int((~before & a.correct).sum())
        text = (
            f"{a.text}, of which {100 * helped / len(before):.1f} points are images that were wrong when clean and are "
            "right now: the model's own answers were attacked"
        )
        advice = (
            "With true labels these images count as wrong. Say which labels were attacked, and compare with nothing "
            "else."
        )
        seen.append(("warn", text, advice) if helped > max(1, 0.02 * len(before)) else None)
    return gravest(seen, "attacking the model's own answers made hardly any wrong one right")
