"""What a task is: the rows it keeps, the scores made of them, the perturbations it knows, and how it adapts to models.

    samples -> Task.adapt -> Task.batch: one chunk of samples on one model -> clean rows -> each Perturbation.apply
    -> Batch.record predicts again on what came back, Perturbation.measure says how far it moved -> rows

A row keeps the sufficient statistics of one sample. Its core columns (`robustkpca.runs.schema`) are the same for every
task. Reading runs needs tasks without torch: so the modules of a task import torch only inside its methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import pandas as pd
import pyarrow as pa

from robustkpca.suites.attack import AttackSpec
from robustkpca.suites.budget import Budget
from robustkpca.suites.suite import Suite
from robustkpca.suites.threat import Threat
from robustkpca.tasks.score import Score

if TYPE_CHECKING:
    from torch import Tensor

    from robustkpca.datasets.cache import PixelCache
    from robustkpca.datasets.sample_set import SampleSet
    from robustkpca.runtime.memory import Portions
    from robustkpca.tasks.batch import Batch


@dataclass(frozen=True)
class Options:
    """What an evaluation is asked for beside models, samples and suites.

    `full_argmax`: answers among all of a model's classes, also where the data set's protocol restricts them. `force`:
    what is known to give wrong numbers is run all the same, and marked.
    """

    seed: int = 0
    batch_size: int = 100
    full_argmax: bool = False
    force: bool = False


@dataclass(frozen=True)
class Adapted:
    """Models and suites as they will be run, in the order given. `notes`: what each model's record says beside its own
    notes. `facts`: fields of the request's data that the task adds."""

    models: Sequence[Any]  # Model or Unusable
    suites: Sequence[Suite]
    notes: Sequence[tuple[str, ...]] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


class Perturbation(ABC):
    """How a kind of threat model is carried out. It returns inputs;
    whether they fool the model is for the task to say."""

    @abstractmethod
    def check(self, spec: AttackSpec, threat: Threat) -> None:
        """Raise SpecError when the method, one of its parameters, or the threat model does not exist or fit."""

    @abstractmethod
    def passes(self, spec: AttackSpec, budget: Budget) -> float:
        """Forward and backward passes a sample at one budget, for the progress bar."""

    @abstractmethod
    def apply(self, batch: Batch, spec: AttackSpec, threat: Threat, budget: Budget, label: str) -> Tensor:
        """The perturbed inputs of all samples of the batch. Draws are keyed by (seed, label, budget, sample id). For a
        sample that could not be tried it puts a flag in `batch.untried`."""

    def targets(self, batch: Batch, threat: Threat) -> Any:
        """What the perturbation drives the model away from, one for each sample; None where nothing is."""
        return None

    def measure(
        self, batch: Batch, inputs: Tensor, threat: Threat, budget: Budget
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """How far each sample was moved (None: not measured),
        and for each flag the samples that raise it, bool (B,)."""
        return None, {}

    def search(self, spec: AttackSpec) -> str | None:
        """What findings may expect of the method, see `robustkpca.attacks.registry.Method.search`; None: nothing."""
        return None

    def decided_by_batch(self, spec: AttackSpec) -> bool:
        """Whether its draws or stopping rule see the whole batch, so that the batch size decides its numbers."""
        return False


class Task(ABC):
    """One kind of prediction problem. The cost of a new one is a folder with this class and a suite."""

    name: ClassVar[str]
    version: ClassVar[int] = 1
    sample_word: ClassVar[str] = "sample"  # the word for one of them in texts
    columns: ClassVar[Sequence[tuple[str, pa.DataType]]]  # of rows, beside the core
    scores: ClassVar[Sequence[Score]]  # the first is the headline
    flags: ClassVar[Mapping[str, str]] = {}  # flags of rows beside the core's, and what they mean
    # Flags of samples that are right because a perturbation could not be tried on them, and what they mean. Those that
    # are not in `flags` leave the row as it is, to be counted apart.
    untried: ClassVar[Mapping[str, str]] = {}
    ground_truth: ClassVar[Sequence[str]] = ()  # columns that are the same in any two runs on the same samples
    health_samples: ClassVar[int] = 0  # samples that `health` looks at, the first of the set; 0: none

    @property
    def score(self) -> Score:
        """The headline."""
        return self.scores[0]

    @property
    @abstractmethod
    def perturbations(self) -> Mapping[str, Perturbation]:
        """By the kind of threat model (`robustkpca.suites.threat.THREATS`)."""

    def adapt(self, models: Sequence[Any], samples: SampleSet, suites: Sequence[Suite], options: Options) -> Adapted:
        """Models and suites fitted to the samples and to each other.
        Raises for what cannot be run, before anything runs."""
        return Adapted(models, suites)

    def describe(self, model: Any) -> dict[str, Any]:
        """Fields of the model's record (`robustkpca.runs.request.ModelRecord`) beside label,
        source, weights and notes."""
        return {}

    @abstractmethod
    def reader(self, samples: SampleSet, model: Any, cache: PixelCache | None) -> Callable[[int], Tensor]:
        """A function from the number of a sample to its input as the model takes it."""

    @abstractmethod
    def batch(self, chunk: Chunk) -> Batch:
        """One chunk of samples on one model."""

    def health(self, chunk: Chunk) -> dict[str, Any]:
        """What a few passes say about whether numbers of a model can be believed; `robustkpca.diagnosis` reads them."""
        return {}

    def right(self, rows: pd.DataFrame) -> pd.Series:
        """Whether each sample is not (yet) lost, bool; of samples as they are,
        all that a perturbation could still break."""
        return ~rows["broken"].astype("boolean").fillna(False).astype(bool)

    def sound(self, rows: pd.DataFrame, models: Mapping[str, Any]) -> list[str]:
        """Why rows must not be believed, in words; `models`: settings by label."""
        return []

    def examples(self, batch: Batch, threat: Threat, perturbed: Tensor) -> dict[str, Any] | None:
        """A few samples to look at, as arrays; None for none."""
        return None


@dataclass(frozen=True)
class Chunk:
    """Consecutive samples on one model: what a batch is made of. `inputs`: stacked, on the CPU."""

    task: Task
    model: Any
    label: str
    samples: SampleSet
    numbers: range
    inputs: Tensor
    seed: int
    portions: Portions

    @property
    def ids(self) -> list[str]:
        return [self.samples.ids[i] for i in self.numbers]
