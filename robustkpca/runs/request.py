"""What a run was asked for, as typed data: everything that decides a number, and where two requests differ."""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from typing import Any

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer

from robustkpca.config import Frozen
from robustkpca.models.settings import TRAINED_AS, ModelSettings
from robustkpca.suites.cell import AttackId, Cell
from robustkpca.suites.suite import Suite
from robustkpca.tasks.registry import task_named

FORMAT = 2


class DataRecord(Frozen):
    """The samples. `conditions`: perturbation, budget and number of samples of each cell that needs no perturbing."""

    name: str
    n: int = Field(ge=1)
    ids: str
    content: str
    content_covers: str
    conditions: tuple[tuple[str, str, int], ...]
    resized: bool | None = None
    argmax: str | None = None  # of classification: among which classes predictions are made


class ModelRecord(Frozen):
    """A model. One that could not be loaded has neither weights nor settings, and its notes say why.

    label: its name in this run, see `robustkpca.runs.names`; rows go by it.
    title: what it calls itself, where neither `settings` nor `label` say so.
    given_name: what the user calls it. group: what the user averages it under with other trainings.
    weight_choice: which weights of a file that has two, None: raw.
    overrides: each setting that contradicts the file, e.g. `lambda 1 (file: 4)`.
    recipe: hash of how it was trained but for the seed, where the file says so; training_seed: that seed. They decide
        which models are averaged, and no number of one.
    dtype: of the model, where it is not the request's. code: hash of a network's code, where it is not a library's.
    """

    label: str
    source: str
    weights: str | None = None
    parameters: int | None = None
    # A ModelSettings for classification, and read back as one: a plain dict would else match better.
    settings: ModelSettings | dict[str, Any] | None = Field(default=None, union_mode="left_to_right")
    attention: str | None = None
    notes: tuple[str, ...] = ()
    title: str | None = None
    given_name: str | None = None
    group: str | None = None
    weight_choice: str | None = None
    overrides: tuple[str, ...] | None = None
    recipe: str | None = None
    training_seed: int | None = None
    dtype: str | None = None
    code: str | None = None

    @model_serializer(mode="wrap")
    def _as_before(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without what is not said of the fields that came later: fingerprints of earlier requests stay."""
        plain: dict[str, Any] = handler(self)
        return {name: value for name, value in plain.items() if name not in _LATER or value is not None}

    @property
    def vision(self) -> ModelSettings | None:
        """The settings of a classifier; None for a model that could not be loaded, or of another task."""
        return self.settings if isinstance(self.settings, ModelSettings) else None

    @property
    def usable(self) -> bool:
        return self.weights is not None

    @property
    def overridden(self) -> tuple[str, ...]:
        """What contradicts the file. Runs from before `overrides` say it in their notes."""
        return self.overrides or tuple(note for note in self.notes if note.startswith(TRAINED_AS))


_LATER = ("title", "given_name", "group", "weight_choice", "overrides", "recipe", "training_seed", "dtype", "code")


_DECIDES_NOTHING: dict[str, Any] = {"searches": True, "models": {"__all__": {"recipe", "training_seed"}}}


class Request(Frozen):
    """Everything that decides a number. The first model is the baseline of comparisons."""

    task: str = "classification"
    task_version: int = 1
    models: tuple[ModelRecord, ...] = Field(min_length=1)
    data: DataRecord
    suites: tuple[Suite, ...]
    seed: int
    batch_size: int = Field(ge=1)
    batch_decides: tuple[str, ...] = ()  # methods whose results depend on the batch size
    searches: dict[str, str] = Field(default_factory=dict)  # what findings may expect of methods; decides no number
    dtype: str
    device: str
    software: dict[str, str]

    @field_validator("task")
    @classmethod
    def _imported(cls, name: str) -> str:
        """The code of a task registers threat models of its own, which the suites below may name."""
        task_named(name)
        return name

    @property
    def plain(self) -> dict[str, Any]:
        """What decides a number, as JSON holds it."""
        return self.model_dump(mode="json", by_alias=True, exclude=_DECIDES_NOTHING)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (16 hex digits) of everything that decides a number."""
        return fingerprint(self.plain)

    @property
    def labels(self) -> list[str]:
        return [model.label for model in self.models]

    def model(self, label: str) -> ModelRecord:
        return next(model for model in self.models if model.label == label)

    @cached_property
    def conditions(self) -> dict[Cell, int]:
        """The cells that need no perturbing (clean, or the conditions of a released set),
        and how many samples each has."""
        return {Cell.parse(attack, budget): n for attack, budget, n in self.data.conditions}

    @cached_property
    def attacks(self) -> dict[AttackId, Suite]:
        """Every attack with its suite, in the order asked for."""
        return {attack: suite for suite in self.suites for attack in suite.attacks}

    @cached_property
    def cells(self) -> list[Cell]:
        """Every column asked for, unperturbed first."""
        return [*self.conditions, *(cell for suite in self.suites for cell in suite.cells)]


class Manifest(Frozen):
    """What run.json holds. `fingerprint` is the request's, as it was when the run began; `sealed`: all files of the run
    have checksums of what they say, as runs have that were begun since there are such."""

    format: int = FORMAT
    sealed: bool = False
    fingerprint: str
    request: Request
    environment: dict[str, Any]


def fingerprint(plain: dict[str, Any]) -> str:
    """SHA-256 (16 hex digits) of plain data."""
    return hashlib.sha256(json.dumps(plain, sort_keys=True, allow_nan=False).encode()).hexdigest()[:16]


def differences(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """Where two requests (plain data) differ, as `place: ours, theirs` lines."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        keys = sorted(ours.keys() | theirs.keys())
        return [
            line
            for key in keys
            for line in differences(ours.get(key), theirs.get(key), f"{path}.{key}" if path else key)
        ]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [line for i, (a, b) in pairs for line in differences(a, b, f"{path}[{i}]")]
    return [] if ours == theirs else [f"{path}: {_short(ours)} here, {_short(theirs)} there"]


def _short(value: Any) -> str:
    """A value in one line that can be read; of models their labels."""
    if isinstance(value, list) and all(isinstance(v, dict) and "label" in v for v in value):
        return ", ".join(str(v["label"]) for v in value)
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
