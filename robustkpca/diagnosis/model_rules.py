"""Rules about models: what a few passes say about logits, randomness and gradients."""

from __future__ import annotations

from typing import Any

from robustkpca.diagnosis.rules import ENOUGH, POINTS, Level, Model, Seen, rule
from robustkpca.results.accuracy import results_of
from robustkpca.results.columns import compared_columns
from robustkpca.runs.schema import flags_of, invalid_flags
from robustkpca.statistics import proportions
from robustkpca.suites.attack import ROUNDED_GRADIENTS

TASK = "classification"
# Share of the largest logit below which two passes differ by rounding.
SAME = {"float32": 1e-4, "bfloat16": 0.03}


@rule("rows")
def rows_hold(m: Model) -> Seen:
    rows, known = m.run.rows[m.run.rows["model"] == m.name], flags_of(m.run.task)
    raised = invalid_flags(rows, m.run.task)
    raised = raised[raised != ""]
    if raised.empty:
        passed = "every attacked image is within its budget and range, every logit finite"
        if m.run.task.sample_word != "image":
            passed = f"no {m.run.task.sample_word} raises a flag"
        return ("pass", passed, "") if len(rows) else None
    reasons = ", ".join(known.get(f, f) for f in sorted({f for flags in raised for f in flags.split(",")}))
    return "fail", f"{len(raised)} rows must not be believed: {reasons}", "Results on such rows are shown as invalid."


@rule("chance", TASK)
def above_chance(m: Model) -> Seen:
    """A model that guesses has nothing that an attack could take."""
    if m.clean is None or not m.settings:
        return None
    right, n, guess = int(m.right(m.clean).sum()), len(m.clean), 1 / m.settings.num_classes
    if proportions.wilson(right, n)[0] > guess:
        return "pass", "clean accuracy is above chance", ""
    return (
        "warn",
        f"{right} of {n} images are right without an attack, which cannot be told from guessing ({guess:.1%})",
        "What an attack leaves of that says nothing: look at weights, preprocessing and labels, or take more images.",
    )


@rule("logits", TASK, fewest=ENOUGH)
def softmaxed(m: Model) -> Seen:
    if not m.health:
        return None
    if m.health["softmaxed"]:
        return (
            "fail",
            "the outputs are probabilities, not logits",
            "A second softmax flattens the loss and weakens every attack on it: return the values before the softmax.",
        )
    return "pass", "outputs are not probabilities", ""


@rule("randomness", TASK, fewest=ENOUGH)
def random(m: Model) -> Seen:
    if not m.health:
        return None
    share, changed = m.health["random"], m.health["random_predictions"]
    if not m.health["finite"]:
        return None  # what is not a number equals nothing, not even itself
    if share is not None and share <= _same(m) and not changed:
        return "pass", "two passes over the same images agree", ""
    seen = (
        f"two passes over the same images differ (by {0 if share is None else share:.1%} of the largest logit, "
        f"{changed} of {m.health['n']} answers)"
    )
    specs = [a.spec for a in m.attacks]
    averaged = [s for s in specs if float(s.parameters.get("eot", s.parameters.get("eot_iter", 1))) > 1]
    if averaged:
        return "warn", seen, "The model draws random numbers; believe only the attacks that average over them (eot)."
    return (
        "fail",
        seen,
        "The model draws random numbers and no attack averages over them: use BestPGD with eot = 20 or APGD with "
        "eot_iter = 20.",
    )


@rule("gradients", TASK, fewest=ENOUGH)
def gradients(m: Model) -> Seen:
    if not m.health:
        return None
    n, zero, broken = (m.health[k] for k in ("gradients", "zero_gradients", "broken_gradients"))
    if broken:
        return (
            "fail",
            f"{broken} of {n} input gradients are not finite",
            "Such images cannot be attacked by gradients: fix the model's numerics.",
        )
    seen = f"{zero} of {n} input gradients of the cross-entropy are zero"
    if zero > 0.02 * n:
        advice = (
            "Attacks by that gradient stand still on such images, which then only look robust: use the margin loss, "
            "Square, or for attention with a threshold the suite adaptive."
        )
        return ("fail" if zero > 0.1 * n else "warn"), seen, advice
    return "pass", seen, ""


@rule("sparse-part", TASK)
def sparse_part(m: Model) -> Seen:
    """A threshold that no entry passes leaves iterated attention, whatever the settings are called."""
    layers: dict[str, list[float]] = (m.health or {}).get("density", {})
    if not layers:
        return None
    empty = [name for name, shares in layers.items() if not any(shares)]
    if not empty:
        shares = [share for layer in layers.values() for share in layer]
        return "pass", f"S has {min(shares):.2g} to {max(shares):.2g} of its entries", ""
    where = "every layer" if len(empty) == len(layers) else ", ".join(empty)
    return (
        "warn",
        f"the sparse part S is zero in {where}, in all iterations",
        "That is iterated attention without a sparse part: the threshold lambda * mu is above every entry; a smaller "
        "lambda lets some pass.",
    )


@rule("no-gradient", TASK)
def no_gradient(m: Model) -> Seen:
    """A row that no attack could be tried on is right whatever the model is worth."""
    results, steered = results_of(m.run), False
    counts: dict[str, int] = {}
    for column in compared_columns(m.run):
        suite = next((s for s in m.run.suites if s.name == column.suite), None)
        if suite is None or suite.combination == "mean" or results.incomplete(m.name, column):
            continue
        steered |= any(m.run.request.searches.get(spec.method, "blind") != "blind" for spec in suite.attack)
        attack, budget = column.texts
        counts[f"{attack} at {suite.threat.budget_word} {budget}"] = results.untried(m.name, column)
    worst = max(counts, key=lambda name: counts[name], default="")
    if not counts.get(worst):
        return ("pass", "no image was left right for want of a gradient to follow", "") if steered else None
    advice = (
        "They are right because nothing was tried on them, and may all be breakable: attack them with the margin loss, "
        "with Square, or for attention with a threshold with the suite adaptive."
    )
    level: Level = "fail" if counts[worst] > POINTS * m.run.n else "warn"
    return level, f"{counts[worst]} of {m.run.n} images had no gradient to follow under {worst} (it was zero)", advice


@rule("gradient-precision", TASK, fewest=ENOUGH)
def precision(m: Model) -> Seen:
    dtype = m.run.request.dtype
    if ROUNDED_GRADIENTS in m.record.notes:
        advice = "Results of attacks by these gradients show a robustness that is not there: attack in float32."
        return "fail", "gradients through RPC-Attention were taken in bfloat16", advice
    if not m.health:
        return None
    if "cosine_error" in m.health:
        return (
            "warn",
            f"the model cannot be run in float64 ({m.health['cosine_error']})",
            "Its gradients were not checked for rounding.",
        )
    if m.health["cosine_worst"] is None or not _repeats(m, m.health):
        return None
    worst, median = m.health["cosine_worst"], m.health["cosine_median"]
    seen = f"cosine of {dtype} to float64 input gradients: median {median:.3f}, worst {worst:.3f}"
    if worst >= 0.95:
        return "pass", seen, ""
    advice = (
        "The gradient is partly rounding: PAP is chaotic for some settings. Judge by the worst case of the suite "
        "adaptive."
    )
    return ("fail" if median < 0.8 else "warn"), seen, advice


def _same(m: Model) -> float:
    return SAME[m.run.request.dtype]


def _repeats(m: Model, probe: dict[str, Any]) -> bool:
    """Whether an image gets one answer, whenever and with whatever others it is asked for."""
    seen = [probe["random"], probe["batch"]]
    return all(v is not None and v <= _same(m) for v in seen) and not probe["random_predictions"]


@rule("batch", TASK, fewest=ENOUGH)
def batch(m: Model) -> Seen:
    if not m.health or not m.health["finite"] or m.health["random"] is None or m.health["random"] > _same(m):
        return None
    share = m.health["batch"]
    if share is not None and share <= _same(m):
        return "pass", "an image gets the same logits alone and in a batch", ""
    return (
        "fail",
        f"an image's logits change with the others in its batch (by {0 if share is None else share:.1%} of the "
        "largest logit)",
        "Results then depend on the batch size and on what else is in the batch: fix the model (statistics "
        "over the batch?).",
    )


@rule("normalisation", TASK, fewest=ENOUGH)
def normalisation(m: Model) -> Seen:
    if not m.health or not m.health["normalisations"]:
        return None
    n, correct = m.health["n"], m.health["correct"]
    for name, (gained, lost) in m.health["normalisations"].items():
        better = proportions.Paired(n, lost, gained)  # ours against that way
        if better.difference < -0.05 and better.p_worse < 0.001:
            return (
                "fail",
                f"{correct} of {n} images are right, and {correct + gained - lost} with another normalisation ({name})",
                "The images are probably normalised twice, not at all, or with other numbers than in training: give "
                "the model's own mean and std, once.",
            )
    return "pass", "no other normalisation does better than the model's", ""
