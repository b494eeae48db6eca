"""A second task in one file: signals of several values, a model that predicts each value, and the mean absolute error,
a ratio of sums over signals that come in groups. Nothing in the package knows it."""

from typing import ClassVar

import numpy as np
import pyarrow as pa
import torch

from robustkpca.datasets.sample_set import SampleSet
from robustkpca.suites.budget import Budget, exact
from robustkpca.suites.threat import THREATS, Threat
from robustkpca.tasks.base import Perturbation, Task
from robustkpca.tasks.batch import Batch
from robustkpca.tasks.ratio import RatioScore

WIDTH = 6


class Signals(SampleSet):
    """Signals (N, WIDTH), the first `lengths` values of which count; every four signals are a group."""

    task: ClassVar[str] = "tests.helpers.toy_task:TOY"
    in_memory: ClassVar[bool] = True
    hash_covers = "ids"

    def __init__(self, ids: list[str], **rest) -> None:
        super().__init__("signals", ids, **{"clusters": [f"group{int(i[1:]) // 4}" for i in ids], **rest})
        self.lengths = [1 + int(i[1:]) % WIDTH for i in ids]

    content_hash = "fixed"

    def take(self, indices):
        return Signals([self.ids[i] for i in indices], **self.taken(indices))

    def signal(self, index: int) -> torch.Tensor:
        return torch.from_numpy(np.random.default_rng(int(self.ids[index][1:])).uniform(0, 1, WIDTH)).float()


class Copier:
    """Predicts each value as itself plus `bias`."""

    long_title = property(lambda self: self.title)

    def __init__(self, title: str, bias: float) -> None:
        self.title, self.bias, self.source, self.notes, self.weights = title, bias, "toy", (), f"bias {bias}"
        self.device, self.dtype = torch.device("cpu"), torch.float32


@THREATS.register("shift")
class Shift(Threat):
    """Every value is moved by a share of the range, up or down."""

    budget_word: ClassVar[str] = "shift"
    nested: ClassVar[bool] = True
    shares: tuple[str, ...]

    @property
    def budgets(self) -> tuple[Budget, ...]:
        return tuple(Budget(exact(share), share) for share in self.shares)

    def describe(self) -> str:
        return f"values moved by {', '.join(self.shares)}"


class Move(Perturbation):
    def check(self, spec, threat) -> None:
        assert spec.method in ("up", "down"), spec.method

    def passes(self, spec, budget) -> float:
        return 1.0

    def apply(self, batch, spec, threat, budget, label):
        return batch.inputs + (1 if spec.method == "up" else -1) * float(budget)


class MeanAbsoluteError(RatioScore):
    name, title, higher_is_better, columns = "mae", "Mean absolute error", False, ("error", "values")
    numerator, denominator = "error", "values"


class SignalBatch(Batch):
    def __init__(self, chunk) -> None:
        super().__init__(chunk)
        self.truth = self.inputs.clone()
        self.lengths = torch.tensor([chunk.samples.lengths[i] for i in chunk.numbers])

    def take(self, chosen):
        part = super().take(chosen)
        part.truth, part.lengths = self.truth[chosen], self.lengths[chosen]
        return part

    def record(self, inputs):
        counted = torch.arange(WIDTH) < self.lengths[:, None]
        error = ((inputs + self.model.bias - self.truth).abs().double() * counted).sum(1)
        return {"error": error.numpy(), "values": self.lengths.numpy()}, {}

    def in_play(self, rows):
        return (rows["error"] <= 0.5 * rows["values"]).to_numpy(bool)

    def broken(self, own):
        return own["error"] > 0.5 * own["values"]


class Toy(Task):
    name, sample_word = "toy", "signal"
    columns = (("error", pa.float64()), ("values", pa.int64()))
    scores = (MeanAbsoluteError(),)
    perturbations: ClassVar[dict] = {"shift": Move()}

    def reader(self, samples, model, cache):
        return samples.signal

    def batch(self, chunk):
        return SignalBatch(chunk)


TOY = Toy()


def good() -> Copier:
    return Copier("good", 0.01)


def poor() -> Copier:
    return Copier("poor", 0.2)


def signals(split: str = "test") -> Signals:
    return Signals([f"s{i:03d}" for i in range(60)])
