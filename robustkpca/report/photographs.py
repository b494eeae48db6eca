"""Attacked images of a run, the same ones for all models, from what is kept in its folder."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from robustkpca.page import Figure, Gallery, Photograph, Tile
from robustkpca.report.marks import Style
from robustkpca.report.plots import Form, Pixels, example_sheet
from robustkpca.results.trainings import groups, has_training_runs
from robustkpca.runs.run import Examples, Run
from robustkpca.suites.cell import CLEAN, CLEAN_CELL, AttackId, Cell
from robustkpca.suites.suite import Suite

SHOWN = 4  # photographs of each suite in a report
MOST = 10  # models there
WRONG = "\N{BALLOT X}"
ROUNDED = "Images are shown with 8 bits; answers are those on the images before rounding."


class Kept:
    """What is kept of one attack, at the headline budget of its suite.

    `models` are those that images are kept of; of samples, those that count: they have a row of every one of these
    models. Answers are those in the rows, on the images before they were rounded to 8 bits.
    """

    def __init__(self, run: Run, suite: Suite, attack: AttackId, models: Sequence[str]) -> None:
        self.run, self.cell = run, Cell(attack, suite.threat.headline)
        self.where = f"{str(attack).replace('/', ', ')} at {suite.threat.budget_word} {self.cell.budget}"
        found = {model: run.examples(model, attack) for model in models if run.status(model, self.cell).complete}
        self.examples: dict[str, Examples] = {model: kept for model, kept in found.items() if kept is not None}
        self.places = {m: {str(s): i for i, s in enumerate(kept.sample)} for m, kept in self.examples.items()}
        self.rows: dict[str, pd.DataFrame] = {model: run.cell_rows(model, self.cell) for model in self.examples}
        self.clean = {model: run.cell_rows(model, CLEAN_CELL) for model in self.examples}

    @property
    def models(self) -> list[str]:
        return list(self.examples)

    @cached_property
    def samples(self) -> list[str]:
        """Samples of which an image is kept, in the order of the set."""
        known = set().union(*self.places.values())
        return [name for name in self.rows[self.models[0]].index if name in known] if self.models else []

    def broken(self, model: str) -> pd.Series:
        """Whether each sample was right without the attack and is not under it, bool."""
        return self.rows[model]["broken"].astype("boolean").fillna(False).astype(bool)

    def photograph(self, sample: str, models: Sequence[str]) -> tuple[Photograph, list[Pixels | None]]:
        """The image as the first model that has it takes it, then as it was attacked for each model; and the pixels of
        these tiles."""
        holder = next(model for model in self.models if sample in self.places[model])
        label = _class(self.run, holder, self.rows[holder].loc[sample, "label"])
        clean = _pixels(self.examples[holder].image[self.places[holder][sample]].astype(float))
        tiles = [Tile(CLEAN, _png(clean), f"true label {label}")]
        pixels: list[Pixels | None] = [clean]
        for model in models:
            row, place = self.rows[model].loc[sample], self.places[model].get(sample)
            answers = [_class(self.run, model, row[c]) for c in ("clean_prediction", "prediction")]
            text = " → ".join(answers)
            image = None if place is None else _attacked(self.examples[model], place)
            text = text if image is not None else f"{text}; no image: broken before"
            tiles.append(Tile(model, None if image is None else _png(image), text, not row["correct"]))
            pixels.append(image)
        return Photograph(f"{sample}, true label {label}", tiles), pixels


def examples(run: Run, suite: Suite, styles: Mapping[str, Style], name: str,
             form: Form = "page") -> tuple[Gallery, str] | None:  # fmt: skip
    """A few photographs under the strongest attack of a suite (of a cascade, whose later attacks see what is left, the
    first), and a sentence that says which they are. None where no images are kept. `name`: of the figure."""
    models = [labels[0] for labels in groups(run).values()] if has_training_runs(run) else run.models
    choice = [Kept(run, suite, attack, models[:MOST]) for attack in suite.attacks]
    choice = [kept for kept in choice[: 1 if suite.cascade else None] if kept.samples]
    if not choice:
        return None
    kept = min(choice, key=lambda k: np.mean([run.task.right(rows).mean() for rows in k.rows.values()]))
    everywhere = [s for s in kept.samples if all(s in places for places in kept.places.values())]
    right = [s for s in everywhere if all(clean.loc[s, "correct"] for clean in kept.clean.values())]
    chosen = (right or everywhere)[:SHOWN]
    if not chosen:
        return None
    photographs, pixels = zip(*(kept.photograph(s, kept.models) for s in chosen), strict=True)
    which = f"that {'all models get' if len(kept.models) > 1 else 'the model gets'} right without an attack"
    strongest = " (which left the fewest right of the suite's attacks)" if len(choice) > 1 else ""
    text = (
        f"Under {kept.where}{strongest}: the first {len(chosen)} images in the order of the set"
        f"{f' {which}' if right else ''}, the same for all models. Below each, the answer without the attack, then the "
        f"one under it; {WRONG}: wrong. {ROUNDED}"
    )
    sheet = Figure(
        name, example_sheet(photographs, pixels, styles, form), f"Images under {kept.where}, and the answers"
    )
    return Gallery(photographs, sheet), text


def broken(run: Run, suite: Suite, attack: AttackId) -> tuple[Gallery, list[str]] | None:
    """Every image kept that an attack broke for any model, as it was attacked for each of them, and sentences that say
    which they are. None where no images are kept."""
    kept = Kept(run, suite, attack, run.models)
    if not kept.samples:
        return None
    masks = {model: kept.broken(model) for model in kept.models}
    chosen = [s for s in kept.samples if any(masks[m].get(s, False) and s in kept.places[m] for m in kept.models)]
    gallery = Gallery([kept.photograph(s, kept.models)[0] for s in chosen])
    return gallery, [
        f"All images kept that {kept.where} broke for at least one model (right without the attack, wrong under it): "
        f"{len(chosen)}, in the order of the set. Each is shown as it was attacked for every model, also "
        "for those that it did not break.",
        *_counts(kept, masks),
        f"Below each, the answer without the attack, then the one under it; {WRONG}: wrong. {ROUNDED}",
    ]


def _counts(kept: Kept, masks: Mapping[str, pd.Series]) -> Iterator[str]:
    """How many were broken, and how many of them are not to be seen."""
    yield "Broken: " + "; ".join(f"{model} {int(masks[model].sum())} of {kept.run.n}" for model in kept.models) + "."
    unseen = {m: sum(s not in kept.places[m] for s in masks[m].index[masks[m]]) for m in kept.models}
    if any(unseen.values()):
        reason = "an attack before this one broke them, or they lie beyond the first images of the set, which are kept"
        yield "Not shown: " + "; ".join(f"{m} {n}" for m, n in unseen.items() if n) + f" ({reason})."


def _attacked(kept: Examples, place: int) -> Pixels:
    return _pixels(kept.image[place] + 255.0 * kept.step[place] * kept.added[place])


def _pixels(image: NDArray[Any]) -> Pixels:
    """(C, H, W) of 0 to 255 as (H, W) or (H, W, 3); of other channels the first is shown."""
    rounded: Pixels = np.clip(np.rint(image), 0, 255).astype(np.uint8)
    return rounded.transpose(1, 2, 0) if len(rounded) == 3 else rounded[0]


def _png(pixels: Pixels) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def _class(run: Run, model: str, number: int) -> str:
    """The name of a class as the model counts them, or its number."""
    settings = run.request.model(model).vision
    classes = settings.classes if settings else ()
    if number < 0:
        return "not a number"
    return classes[number] if not isinstance(classes, str) and number < len(classes) else f"class {number}"
