"""Rules about models: what a few passes say about logits, randomness and gradients."""

from __future__ import annotations

from typing import Any

from robustkpca.diagnosis.attack_strength import Model, Said
from robustkpca.statistics import proportions
from robustkpca.suites.attack import ROUNDED_GRADIENTS

# Share of the largest logit below which two passes differ by rounding.
SAME = {"float32": 1e-4, "bfloat16": 0.03}


def _softmaxed(m: Model) -> Said:
    if not m.probe:
        return None
    if m.probe["softmaxed"]:
        return (
            "fail",
            "the outputs are probabilities, not logits",
            "A second softmax flattens the loss and weakens every attack on it: return the values before the softmax.",
        )
    return "pass", "outputs are not probabilities", ""


def _random(m: Model) -> Said:
    if not m.probe:
        return None
    share, changed = m.probe["random"], m.probe["random_predictions"]
    if not m.probe["finite"]:
        return None  # what is not a number equals nothing, not even itself
    if share is not None and share <= _same(m) and not changed:
        return "pass", "two passes over the same images agree", ""
    seen = f"two passes over the same images differ (by {0 if share is None else share:.1%} of the largest logit, {changed} of {m.probe['n']} answers)"
    specs = [a.spec for a in m.attacks]
    averaged = [s for s in specs if float(s.parameters.get("eot", s.parameters.get("eot_iter", 1))) > 1]
    if averaged:
        return "warn", seen, "The model draws random numbers; believe only the attacks that average over them (eot)."
    return (
        "fail",
        seen,
        "The model draws random numbers and no attack averages over them: use BestPGD with eot = 20 or APGD with eot_iter = 20.",
    )


def _gradients(m: Model) -> Said:
    if not m.probe:
        return None
    n, zero, broken = (m.probe[k] for k in ("gradients", "zero_gradients", "broken_gradients"))
    if broken:
        return (
            "fail",
            f"{broken} of {n} input gradients are not finite",
            "Such images cannot be attacked by gradients: mend the model's numerics.",
        )
    seen = f"{zero} of {n} input gradients of the cross-entropy are zero"
    if zero > 0.02 * n:
        advice = (
            "Attacks by that gradient stand still on such images, which then only look robust: use the margin loss, "
            "Square, or for attention with a threshold the suite adaptive."
        )
        return ("fail" if zero > 0.1 * n else "warn"), seen, advice
    return "pass", seen, ""


def _precision(m: Model) -> Said:
    dtype = m.run.request["dtype"]
    if ROUNDED_GRADIENTS in m.described["notes"]:
        advice = "Figures of attacks by these gradients show a robustness that is not there: attack in float32."
        return "fail", "gradients through RPC-Attention were taken in bfloat16", advice
    if not m.probe:
        return None
    if "cosine_error" in m.probe:
        return (
            "warn",
            f"the model cannot be run in float64 ({m.probe['cosine_error']})",
            "Its gradients were not checked for rounding.",
        )
    if m.probe["cosine_worst"] is None or not _repeats(m, m.probe):
        return None
    worst, median = m.probe["cosine_worst"], m.probe["cosine_median"]
    seen = f"cosine of {dtype} to float64 input gradients: median {median:.3f}, worst {worst:.3f}"
    if worst >= 0.95:
        return "pass", seen, ""
    advice = "The gradient is partly rounding: PAP is chaotic for some settings. Judge by the worst case of the suite adaptive."
    return ("fail" if median < 0.8 else "warn"), seen, advice


def _same(m: Model) -> float:
    return SAME[m.run.request["dtype"]]


def _repeats(m: Model, probe: dict[str, Any]) -> bool:
    """Whether an image gets one answer, whenever and with whatever others it is asked for."""
    seen = [probe["random"], probe["batch"]]
    return all(v is not None and v <= _same(m) for v in seen) and not probe["random_predictions"]


def _batch(m: Model) -> Said:
    if not m.probe or not m.probe["finite"] or m.probe["random"] is None or m.probe["random"] > _same(m):
        return None
    share = m.probe["batch"]
    if share is not None and share <= _same(m):
        return "pass", "an image gets the same logits alone and in a batch", ""
    return (
        "fail",
        f"an image's logits change with the others in its batch (by {0 if share is None else share:.1%} of the largest logit)",
        "Figures then hang on the batch size and on who is in the batch: mend the model (statistics over the batch?).",
    )


def _normalisation(m: Model) -> Said:
    if not m.probe or not m.probe["normalisations"]:
        return None
    n, correct = m.probe["n"], m.probe["correct"]
    for name, (gained, lost) in m.probe["normalisations"].items():
        better = proportions.Paired(n, lost, gained)  # ours against that way
        if better.difference < -0.05 and better.p_worse < 0.001:
            return (
                "fail",
                f"{correct} of {n} images are right, and {correct + gained - lost} with another normalisation ({name})",
                "The images are probably normalised twice, not at all, or with other numbers than in training: give the model's own mean and std, once.",
            )
    return "pass", "no other normalisation does better than the model's", ""
