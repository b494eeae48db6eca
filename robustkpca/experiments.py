"""Experiments: one TOML file for each table of the paper, run or resumed by one command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from robustkpca.config import Frozen, data_folder, read_toml
from robustkpca.errors import DataError, SpecError, unknown
from robustkpca.models.options import ModelOptions
from robustkpca.report import paper_tables
from robustkpca.suites.suite import load_suite

if TYPE_CHECKING:
    from robustkpca.evaluation.loop import Resources
    from robustkpca.runs.run import Run


class Part(Frozen):
    """One run of an experiment: a kind of data, and the suites it is attacked with."""

    data: str
    attacks: tuple[str, ...] = ()


class Experiment(Frozen):
    """What a table of the paper needs."""

    name: str
    title: str
    layout: str
    part: tuple[Part, ...] = Field(min_length=1)


def _folder() -> Path:
    return data_folder("_experiments", "benchmarks")


def experiment_names() -> list[str]:
    """The experiments that come with the package."""
    return sorted(path.stem for path in _folder().glob("*.toml"))


def load_experiment(name: str) -> Experiment:
    """By name, or by the path of a TOML file."""
    if not name.endswith(".toml") and name not in experiment_names():
        raise SpecError(unknown("experiment", name, experiment_names()) + ", or a path ending in .toml")
    path = Path(name) if name.endswith(".toml") else _folder() / f"{name}.toml"
    experiment: Experiment = Experiment.parse(read_toml(path, "experiment"), f"experiment {path.name}")
    if experiment.layout not in paper_tables.LAYOUTS:
        raise SpecError(f"experiment {path.name}: {unknown('layout', experiment.layout, paper_tables.LAYOUTS)}")
    return experiment


@dataclass(frozen=True)
class Setup:
    """How an experiment is run: on which samples, and where.

    in_distribution: `imagenet:DIR`, what imagenet-o is told apart from; None: the data's `imagenet`, if it is given.
    limit: use at most so many samples, drawn with the seed.
    """

    in_distribution: str | None = None
    limit: int | None = None
    seed: int = 0
    batch_size: int = 100
    device: str = "cpu"


def run(
    experiment: Experiment,
    models: Sequence[ModelOptions],
    data: Sequence[str],
    out: Path,
    setup: Setup | None = None,
    resources: Resources | None = None,
) -> list[Run]:
    """Run or resume every part of an experiment in `out`/<data>, and return the runs in the order of the parts.

    `data` gives a `NAME` or `NAME:DIR` for each kind that the experiment needs.
    """
    from robustkpca.datasets.sources import load_samples
    from robustkpca.evaluation.loop import Resources, carry_out
    from robustkpca.evaluation.plan import Plan
    from robustkpca.models.loading import load_models
    from robustkpca.tasks.base import Options

    setup, resources = setup or Setup(), resources or Resources()
    wanted = data_of(experiment, data, setup.in_distribution)
    classifiers, plans = load_models(models, device=setup.device), []
    for part, (spec, inside) in zip(experiment.part, wanted, strict=True):
        samples = load_samples(spec, limit=setup.limit, seed=setup.seed, in_distribution=inside)
        suites = [load_suite(name) for name in part.attacks]
        plan = Plan(classifiers, samples, suites, Options(setup.seed, setup.batch_size))
        plans.append((samples.name.replace(":", "-"), plan))
    return [carry_out(plan, out / name, resources) for name, plan in plans]


def data_of(
    experiment: Experiment, data: Sequence[str], in_distribution: str | None = None
) -> list[tuple[str, str | None]]:
    """The data of each part of an experiment, and the images that imagenet-o is told apart from.

    Raises:
        DataError: a kind is missing.
    """
    given = {spec.partition(":")[0]: spec for spec in data}
    # A part that names no kind of data takes any: the only one given.
    needed = [part.data for part in experiment.part]
    wanted = {kind: given.get(kind) or (data[0] if kind == "any" and len(data) == 1 else None) for kind in needed}
    if missing := [kind for kind, spec in wanted.items() if spec is None]:
        raise DataError(
            f"experiment {experiment.name}: expected --data for {', '.join(missing)}, got {', '.join(data) or 'none'}"
        )
    inside = in_distribution or given.get("imagenet")
    return [(str(wanted[kind]), inside if kind == "imagenet-o" else None) for kind in needed]
