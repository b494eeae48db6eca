"""Attacks whose order of strength is known, compared on the same samples."""

from __future__ import annotations

from itertools import pairwise

import pandas as pd

from robustkpca.diagnosis.rules import (
    ENOUGH,
    Level,
    Model,
    Seen,
    clearly_lower,
    compared,
    gravest,
    paired,
    rule,
)
from robustkpca.suites.cell import Cell
from robustkpca.suites.threat import HUGE

TASK = "classification"


@rule("eps-order")
def eps_order(m: Model) -> Seen:
    seen: list[Seen] = []
    for attack in dict.fromkeys(a.id for a in m.attacks):
        attacks = sorted((a for a in m.attacks if a.id == attack and a.threat.ordered), key=lambda a: a.budget)
        steered = bool(attacks) and getattr(attacks[0].threat, "labels", "true") == "true"
        if attacks and attacks[0].budget.value > 0 and steered and m.clean is not None:
            helps = m.clearly_worse(attacks[0].rows, m.clean)
            advice = "An attack must not help: the direction or the length of its steps is wrong."
            seen.append(("fail", f"clean {m.shown(m.clean)}, but {attacks[0].text}", advice) if helps else None)
        for small, large in pairwise(attacks):
            wrong = m.clearly_worse(large.rows, small.rows)
            # One long step, or none along the gradient, may well miss what a shorter one finds.
            level: Level = "fail" if small.own and small.search == "iterated" else "warn"
            advice = (
                "A larger ball holds the smaller one: the attack is too weak at the larger budget (step size, number "
                "of steps)."
            )
            seen.append((level, f"{small.text}, but {large.text}", advice) if wrong else None)
    return compared(m, seen, f"{m.run.task.score.title.lower()} does not get better with the budget")


@rule("huge-budget", TASK, fewest=ENOUGH)
def huge_budget(m: Model) -> Seen:
    seen: list[Seen] = []
    for group in m.groups():
        ball = group[0].ball
        if ball is None or ball.norm != "linf" or ball.space != "pixel" or group[0].budget.value < HUGE:
            continue
        direct = [a for a in group if a.own]
        if not direct:
            continue
        best = min(direct, key=lambda a: a.correct.mean())
        advice = (
            "Within such a budget every image can become any other: attacks by gradients fail on this model, so "
            "smaller budgets prove nothing."
        )
        share = best.correct.mean()
        seen.append(None if share <= 0.02 else ("fail" if share > 0.1 else "warn", best.text, advice))
    return gravest(seen, "a huge budget leaves at most 2 %")


@rule("more-effort", TASK)
def more_effort(m: Model) -> Seen:
    seen: list[Seen] = []
    for group in m.groups():
        direct = sorted((a for a in group if a.own and a.search == "iterated"), key=lambda a: a.effort)
        for i, weak in enumerate(direct):
            for strong in direct[i + 1 :]:
                if strong.effort < 2 * weak.effort:
                    continue
                if clearly_lower(paired(strong.correct, weak.correct)):
                    advice = (
                        "More steps and restarts should not raise accuracy: the longer attack is badly tuned, or the "
                        "gradient misleads."
                    )
                    seen.append(("fail", f"{weak.text}, but with more effort {strong.text}", advice))
                elif (gap := paired(weak.correct, strong.correct)).difference < -0.03 and clearly_lower(gap):
                    advice = "The shorter attack has not converged: report the stronger one."
                    seen.append(("warn", f"{weak.text}, with more effort {strong.text}", advice))
                else:
                    seen.append(None)
    return compared(m, seen, "more steps and restarts neither raise accuracy nor lower it much")


@rule("one-step", TASK)
def one_step(m: Model) -> Seen:
    seen: list[Seen] = []
    for group in m.groups():
        ones = [a for a in group if a.search == "one-step"]
        many = [a for a in group if a.own and a.search == "iterated"]
        if ones and many:
            one, best = (min(g, key=lambda a: a.correct.mean()) for g in (ones, many))
            stronger = clearly_lower(paired(best.correct, one.correct))
            advice = "An iterated attack contains the single step: its step size is wrong, or the gradient is masked."
            seen.append(("fail", f"{one.text}, but {best.text}", advice) if stronger else None)
    return compared(m, seen, "one step is not stronger than iterated attacks")


@rule("masked-gradient", TASK)
def masked_gradient(m: Model) -> Seen:
    """Black-box attacks, transfer and other gradients should find nothing that the model's own gradient does not."""
    seen: list[Seen] = []
    for group in m.groups():
        direct, others = [a for a in group if a.own], [a for a in group if not a.own]
        if not direct or not others:
            continue
        survivors = pd.concat([a.correct for a in direct], axis=1).all(axis=1)
        left = pd.concat([a.correct.reindex(survivors.index) for a in others], axis=1).all(axis=1)
        alone = int((survivors & ~left).sum())
        best, other = (min(g, key=lambda a: a.correct.mean()) for g in (direct, others))
        text = f"{other.text}, {best.text}; {alone} images are broken, but by no attack along the model's own gradient"
        advice = (
            "Its own gradient misses what others find: it may be masked. Count the worst case over all attacks, and "
            "try the suite adaptive."
        )
        if clearly_lower(paired(best.correct, other.correct)):
            seen.append(("fail", text, advice))
        else:
            seen.append(("warn", text, advice) if alone > max(1, 0.03 * len(survivors)) else None)
    return compared(m, seen, "other attacks find no more than those along the model's own gradient")


@rule("autoattack-square", TASK, fewest=ENOUGH)
def square_last(m: Model) -> Seen:
    """The reference AutoAttack warns when Square breaks what APGD and FAB left."""
    seen: list[Seen] = []
    for suite in m.run.suites:
        attacks = list(suite.attacks)
        if not suite.cascade or m.run.request.searches.get(suite.attack[-1].method) != "blind":
            continue
        for budget in suite.budgets:
            before, after = (m.rows(Cell(attack, budget)) for attack in attacks[-2:])
            if before is None or after is None:
                continue
            count = int(m.right(before).sum() - m.right(after).sum())
            advice = (
                "Gradients miss what a search without them finds: the gradient may be masked. Try the suite adaptive."
            )
            where = f"{attacks[-1]} at {suite.threat.budget_word} {budget}"
            text = f"{where} broke {count} images that the attacks before it left"
            seen.append(("warn", text, advice) if count > max(1, 0.01 * m.run.n) else None)
    return gravest(seen, "Square adds little to the attacks before it")
