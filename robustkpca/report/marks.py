"""How models are told apart in a report: a colour and a marker each, the same wherever the model is shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from robustkpca.page import Mark
from robustkpca.results import trainings
from robustkpca.runs.run import Run

# On white and on the dark page's ground, each with a contrast of at least 3 to 1. After Okabe and Ito, "Color Universal
# Design", 2008; their orange and sky blue are darkened on white, and there is no yellow.
COLOURS = (
    ("#0072b2", "#3d9fd9"),  # blue
    ("#d55e00", "#f0803c"),  # vermillion
    ("#00865f", "#2bbd94"),  # bluish green
    ("#b8578d", "#de9cc3"),  # reddish purple
    ("#9a6a00", "#e6b13f"),  # orange
    ("#5b6472", "#b9c0ca"),  # grey
)
# matplotlib's markers, and signs of fonts that look alike.
MARKERS = (
    ("o", "●"), ("s", "■"), ("^", "▲"), ("D", "◆"), ("v", "▼"), ("P", "✚"), ("X", "✖"), ("<", "◀"), (">", "▶"),
    ("*", "★"),
)  # fmt: skip


@dataclass(frozen=True)
class Style(Mark):
    """A mark with what matplotlib needs to draw it; the colour is `light`."""

    marker: str
    dashed: bool  # where colours come round again


def style(number: int) -> Style:
    """Of the model that is the `number`-th of a report."""
    light, dark = COLOURS[number % len(COLOURS)]
    marker, sign = MARKERS[number % len(MARKERS)]
    return Style(sign, light, dark, marker, number % (2 * len(COLOURS)) >= len(COLOURS))


def styles(runs: Sequence[Run]) -> Mapping[str, Style]:
    """By the names under which models of these runs are shown, in the order asked for. A model of several training runs
    and each of these have one style."""
    numbers: dict[str, int] = {}
    for run in runs:
        several = trainings.has_training_runs(run)
        groups = trainings.groups(run) if several else {label: [label] for label in run.models}
        for title, labels in groups.items():
            number = numbers.get(title, len(set(numbers.values())))
            numbers |= {name: number for name in (title, *labels) if name not in numbers}
    return {name: style(number) for name, number in numbers.items()}
