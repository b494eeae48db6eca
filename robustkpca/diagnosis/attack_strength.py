"""What the rows of a run give away: attacks whose order of strength is known, compared on the same samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Literal

import pandas as pd

from robustkpca.runs.run import Run
from robustkpca.runs.schema import FLAGS
from robustkpca.statistics import proportions
from robustkpca.suites.attack import AttackSpec
from robustkpca.suites.budget import HUGE
from robustkpca.suites.cell import CLEAN, Cell
from robustkpca.suites.suite import Suite

Level = Literal["pass", "warn", "fail"]
LEVEL = 0.01  # of the one-sided exact McNemar tests below
FEWEST = 7  # samples that must change, all in one direction, for that test to be significant
POINTS = 0.01  # a share of the samples too small to make a finding of, whatever its p value

# What a method knows of the model; a test keeps this list and `methods.METHODS` together.
ONE_STEP = {"FGSM"}
ITERATED = {"PGD", "BestPGD", "BIM", "MIFGSM", "PGDL2", "APGD", "APGDT", "FABT", "CW", "AutoAttack", "SLD"}
BLACK_BOX = {"Square", "SPSA", "UniformNoise"}


@dataclass(frozen=True)
class Measured:
    """One attack at one budget, whole: which samples are still right, by id."""

    label: str
    suite: Suite
    spec: AttackSpec
    eps: Fraction
    correct: pd.Series
    rpc: bool  # whether the model has the attention that surrogates go around

    @property
    def threat(self) -> tuple[object, ...]:
        """What must be the same for two attacks to be compared at one eps."""
        threat = self.suite.threat
        assert threat is not None
        return threat.norm, threat.space, threat.clip, threat.labels

    @property
    def own(self) -> bool:
        """Whether it goes along the model's own gradient."""
        return self.spec.method not in BLACK_BOX and (self.spec.through == "full" or not self.rpc)

    @property
    def name(self) -> str:
        return f"{self.label} at eps {self.suite.budgets[self._place]}"

    @property
    def _place(self) -> int:
        assert self.suite.threat is not None
        return self.suite.threat.budgets.index(self.eps)

    @property
    def effort(self) -> float:
        """Gradient steps."""
        p = self.spec.parameters
        return float(p.get("steps", 1)) * float(p.get("restarts", p.get("n_restarts", 1)))

    @property
    def text(self) -> str:
        return f"{self.name} {100 * self.correct.mean():.1f} %"


class Model:
    """One model of a run, as the rules see it."""

    def __init__(self, run: Run, name: str) -> None:
        self.run, self.name = run, name
        self.probe = run.probes.get(name)
        self.described = next(d for d in run.request["models"] if d["label"] == name)
        self.clean = self._rows(Cell(CLEAN, ""))
        self.attacks = list(self._measured())

    def _rows(self, cell: Cell) -> pd.DataFrame | None:
        return self.run.cell_rows(self.name, cell) if self.run.status(self.name, cell).text == "complete" else None

    def _measured(self) -> Iterator[Measured]:
        rpc = bool((self.described["settings"] or {}).get("rpc"))
        for suite in self.run.suites:
            if suite.threat is None or suite.cascade:  # rows of a cascade add up: none is an attack's alone
                continue
            for label, spec in suite.attacks.items():
                for text, eps in zip(suite.budgets, suite.threat.budgets, strict=True):
                    rows = self._rows(Cell(label, text))
                    if rows is not None and isinstance(spec, AttackSpec):
                        yield Measured(label, suite, spec, eps, rows["correct"].astype(bool), rpc)

    @property
    def seen(self) -> str:
        """What a comparison on so many samples can show."""
        return f"nothing clear at n = {self.run.n}, where differences under {100 * FEWEST / self.run.n:.0f} points do not show"

    def groups(self) -> Iterator[list[Measured]]:
        """Attacks of one threat model at one budget above 0."""
        keys = dict.fromkeys((m.threat, m.eps) for m in self.attacks if m.eps > 0)
        for key in keys:
            yield [m for m in self.attacks if (m.threat, m.eps) == key]


Said = tuple[Level, str, str] | None  # level, what was seen, what it means and what to do


def _only(first: pd.Series, second: pd.Series) -> proportions.Paired:
    return proportions.Paired.of(first.to_numpy(bool), second.reindex(first.index).to_numpy(bool))


def _clearly(difference: proportions.Paired) -> bool:
    """Whether the second is lower beyond chance and by more than a trifle."""
    return difference.difference < -POINTS and difference.p_worse < LEVEL


def _compared(m: Model, said: list[Said], passed: str) -> Said:
    """`_worst` of comparisons: too few samples to see a difference of half of them pass nothing."""
    if m.run.n < 2 * FEWEST and all(s is None for s in said):
        return None
    return _worst(said, f"{passed} ({m.seen})")


def _worst(said: list[Said], passed: str) -> Said:
    """The gravest of what was said; `passed` where there was something to look at and nothing was wrong."""
    found = [s for s in said if s is not None]
    for level in ("fail", "warn"):
        for s in found:
            if s[0] == level:
                return s
    return ("pass", passed, "") if said else None


def rows_hold(m: Model) -> Said:
    rows = m.run.rows
    raised = rows.loc[(rows["model"] == m.name) & (rows["flags"] != ""), "flags"]
    if raised.empty:
        return (
            ("pass", "every attacked image is within its budget and range, every logit finite", "")
            if len(rows)
            else None
        )
    reasons = ", ".join(FLAGS[f] for f in sorted({f for flags in raised for f in flags.split(",")}))
    return "fail", f"{len(raised)} rows must not be believed: {reasons}", "Figures on such rows are shown as invalid."


def above_chance(m: Model) -> Said:
    """A model that guesses has nothing that an attack could take."""
    if m.clean is None or not m.described["settings"]:
        return None
    right, n, guess = int(m.clean["correct"].sum()), len(m.clean), 1 / m.described["settings"]["num_classes"]
    if proportions.wilson(right, n)[0] > guess:
        return "pass", "clean accuracy is above chance", ""
    return (
        "warn",
        f"{right} of {n} images are right without an attack, which cannot be told from guessing ({guess:.1%})",
        "What an attack leaves of that says nothing: look at weights, preprocessing and labels, or take more images.",
    )


def eps_order(m: Model) -> Said:
    said: list[Said] = []
    for label in dict.fromkeys(a.label for a in m.attacks):
        # Without a bound, eps is another parameter of the attack, such as the confidence of CW.
        own = sorted((a for a in m.attacks if a.label == label and a.threat[0] != "none"), key=lambda a: a.eps)
        if own and own[0].eps > 0 and own[0].threat[3] == "true" and m.clean is not None:
            helps = _clearly(_only(own[0].correct, m.clean["correct"].astype(bool)))
            advice = "An attack must not help: the direction or the length of its steps is wrong."
            seen = f"clean {100 * m.clean['correct'].mean():.1f} %, but {own[0].text}"
            said.append(("fail", seen, advice) if helps else None)
        for small, large in pairwise(own):
            wrong = _clearly(_only(large.correct, small.correct))
            # One long step, or none along the gradient, may well miss what a shorter one finds.
            level: Level = "fail" if small.own and small.spec.method in ITERATED else "warn"
            advice = "A larger ball holds the smaller one: the attack is too weak at the larger budget (step size, number of steps)."
            said.append((level, f"{small.text}, but {large.text}", advice) if wrong else None)
    return _compared(m, said, "accuracy does not rise with eps")


def huge_budget(m: Model) -> Said:
    said: list[Said] = []
    for group in m.groups():
        threat = group[0].suite.threat
        if threat is None or threat.norm != "linf" or threat.space != "pixel" or group[0].eps < HUGE:
            continue
        own = [a for a in group if a.own]
        if not own:
            continue
        best = min(own, key=lambda a: a.correct.mean())
        advice = "Within such a budget every image can become any other: attacks by gradients fail on this model, so smaller budgets prove nothing."
        share = best.correct.mean()
        said.append(None if share <= 0.02 else ("fail" if share > 0.1 else "warn", best.text, advice))
    return _worst(said, "a huge budget leaves at most 2 %")


def more_effort(m: Model) -> Said:
    said: list[Said] = []
    for group in m.groups():
        own = sorted((a for a in group if a.own and a.spec.method in ITERATED), key=lambda a: a.effort)
        for i, weak in enumerate(own):
            for strong in own[i + 1 :]:
                if strong.effort < 2 * weak.effort:
                    continue
                if _clearly(_only(strong.correct, weak.correct)):
                    advice = "More steps and restarts should not raise accuracy: the longer attack is badly tuned, or the gradient misleads."
                    said.append(("fail", f"{weak.text}, but with more effort {strong.text}", advice))
                elif (gap := _only(weak.correct, strong.correct)).difference < -0.03 and _clearly(gap):
                    advice = "The shorter attack has not converged: report the stronger one."
                    said.append(("warn", f"{weak.text}, with more effort {strong.text}", advice))
                else:
                    said.append(None)
    return _compared(m, said, "more steps and restarts neither raise accuracy nor lower it much")


def one_step(m: Model) -> Said:
    said: list[Said] = []
    for group in m.groups():
        ones = [a for a in group if a.spec.method in ONE_STEP]
        many = [a for a in group if a.own and a.spec.method in ITERATED]
        if ones and many:
            one, best = (min(g, key=lambda a: a.correct.mean()) for g in (ones, many))
            advice = "An iterated attack contains the single step: its step size is wrong, or the gradient is masked."
            said.append(
                ("fail", f"{one.text}, but {best.text}", advice) if _clearly(_only(best.correct, one.correct)) else None
            )
    return _compared(m, said, "one step is not stronger than iterated attacks")


def masked_gradient(m: Model) -> Said:
    """Black-box attacks, transfer and other gradients should find nothing that the model's own gradient does not."""
    said: list[Said] = []
    for group in m.groups():
        own, others = [a for a in group if a.own], [a for a in group if not a.own]
        if not own or not others:
            continue
        survivors = pd.concat([a.correct for a in own], axis=1).all(axis=1)
        left = pd.concat([a.correct.reindex(survivors.index) for a in others], axis=1).all(axis=1)
        alone = int((survivors & ~left).sum())
        best, other = (min(g, key=lambda a: a.correct.mean()) for g in (own, others))
        seen = f"{other.text}, {best.text}; {alone} images are broken, but by no attack along the model's own gradient"
        advice = "Its own gradient misses what others find: it may be masked. Count the worst case over all attacks, and try the suite adaptive."
        if _clearly(_only(best.correct, other.correct)):
            said.append(("fail", seen, advice))
        else:
            said.append(("warn", seen, advice) if alone > max(1, 0.03 * len(survivors)) else None)
    return _compared(m, said, "other attacks find no more than those along the model's own gradient")


def square_last(m: Model) -> Said:
    """The reference AutoAttack warns when Square breaks what APGD and FAB left."""
    said: list[Said] = []
    for suite in m.run.suites:
        labels = list(suite.attacks)
        if not suite.cascade or suite.attack[-1].method not in BLACK_BOX or len(labels) < 2:
            continue
        for budget in suite.budgets:
            parts = [m._rows(Cell(label, budget)) for label in labels[-2:]]
            if parts[0] is None or parts[1] is None:
                continue
            count = int(parts[0]["correct"].sum() - parts[1]["correct"].sum())
            advice = (
                "Gradients miss what a search without them finds: the gradient may be masked. Try the suite adaptive."
            )
            seen = f"{labels[-1]} at eps {budget} broke {count} images that the attacks before it left"
            said.append(("warn", seen, advice) if count > max(1, 0.01 * m.run.n) else None)
    return _worst(said, "Square adds little to the attacks before it")
