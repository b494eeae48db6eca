"""Rules about threat models: budgets, steps and labels that do not fit."""

from __future__ import annotations

from fractions import Fraction

from robustkpca.diagnosis.attack_strength import Model, Said, _worst
from robustkpca.suites.budget import HUGE
from robustkpca.suites.cell import Cell
from robustkpca.suites.suite import load_suite


def settings(m: Model) -> Said:
    """Pairs of numbers that people mix up: L2 budgets of the size of L-inf ones, steps beyond the ball or too short to cross it."""
    said: list[Said] = []
    for suite in m.run.suites:
        for spec in suite.attack if suite.threat else ():
            for text, eps in zip(suite.budgets, suite.threat.budgets, strict=True):  # type: ignore[union-attr]
                if not 0 < eps < HUGE:
                    continue
                name = f"{suite.label(spec.name)} at eps {text}"
                p = spec.resolve(eps)
                alpha, steps = p.get("alpha"), float(p.get("steps", 1))
                if suite.threat.norm == "l2" and eps < Fraction(1, 20):  # type: ignore[union-attr]
                    said.append(
                        (
                            "warn",
                            f"{name}: an L2 budget",
                            "So short a distance hardly moves an image: was an L-inf budget meant?",
                        )
                    )
                elif alpha is not None and float(alpha) > 2 * float(eps) * (1 + 1e-9):
                    seen = f"{name}: a step of {float(alpha):.4g} is longer than the ball is wide"
                    said.append(
                        ("warn", seen, 'Write step sizes as multiples of the budget, such as alpha = "0.25 eps".')
                    )
                elif alpha is not None and float(alpha) * steps < float(eps) * (1 - 1e-9):
                    seen = f"{name}: {steps:g} steps of {float(alpha):.4g} do not reach the budget's border"
                    said.append(("warn", seen, 'Take more or longer steps, such as alpha = "0.25 eps".'))
                else:
                    said.append(None)
    return _worst(said, "step sizes and budgets fit each other")


def eps_zero(m: Model) -> Said:
    if m.clean is None:
        return None
    before = m.clean["prediction"]
    said: list[Said] = []
    for a in m.attacks:
        if a.eps == 0 and a.suite.threat and a.suite.threat.norm != "none":
            now = m.run.cell_rows(m.name, Cell(a.label, "0"))["prediction"].reindex(before.index)
            other = int((now != before).sum())
            advice = "A budget of 0 leaves one image: the model is random, or the attack does not keep its budget."
            said.append(
                ("fail", f"{a.label} at eps 0 changes {other} of {len(before)} answers", advice) if other else None
            )
    return _worst(said, "eps 0 gives the clean answers")


def standard_autoattack(m: Model) -> Said:
    said: list[Said] = []
    for suite in m.run.suites:
        if not suite.name.startswith("autoattack"):
            continue
        theirs = load_suite("autoattack")
        advice = "Call it by another name, and do not compare it with leaderboards."
        same = suite.attack == theirs.attack and suite.cascade
        said.append(
            None if same else ("warn", f"{suite.name} is not the standard AutoAttack: {suite.describe()}", advice)
        )
    return _worst(said, "AutoAttack has its standard parameters")


def attacked_labels(m: Model) -> Said:
    said: list[Said] = []
    for a in m.attacks:
        if a.eps == 0 or a.threat[3] != "predicted" or m.clean is None:
            continue
        # Only images that are wrong when clean have another label to drive away from.
        before = m.clean["correct"].reindex(a.correct.index).astype(bool)
        helped = int((~before & a.correct).sum())
        seen = (
            f"{a.text}, of which {100 * helped / len(before):.1f} points are images that were wrong when clean and are right now: "
            "the model's own answers were attacked"
        )
        advice = "With true labels these images count as wrong. Say which labels were attacked, and compare with nothing else."
        said.append(("warn", seen, advice) if helped > max(1, 0.02 * len(before)) else None)
    return _worst(said, "attacking the model's own answers made hardly any wrong one right")
