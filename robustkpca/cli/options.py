"""Options that commands share, and the choices they offer: a wrong one is refused, and the shell completes them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

# Choices with the same names elsewhere; a test compares them, importing those modules would load torch or pandas.
DType = Literal["float32", "bf16"]
WhichWeights = Literal["raw", "ema"]
Protocol = Literal["standard", "paper"]
Layout = Literal["robustness", "attacks", "budgets", "corruptions", "runtime"]
Format = Literal["rich", "markdown", "latex", "csv", "html"]
Amp = Literal["none", "bf16", "fp16"]
Adversarial = Literal["none", "pgd-at", "trades"]


class Analysis(StrEnum):
    """Of `analyze --only`; typer takes no list of a Literal."""

    loss = "loss"
    gamma = "gamma"
    spectrum = "spectrum"
    pursuit = "pursuit"


def complete_models(incomplete: str) -> list[str]:
    """Embedded models, families with and without a size, and the form of timm's."""
    from robustkpca.models.settings import FAMILIES, SIZES

    embedded = [file.stem for file in (Path(__file__).parents[1] / "embedded").glob("*.safetensors")]
    sized = [f"{family}-{size}" for family in FAMILIES for size in SIZES]
    return [
        name for name in sorted({*embedded, *FAMILIES, *sized, "timm:", "rpc-timm:"}) if name.startswith(incomplete)
    ]


def complete_families(incomplete: str) -> list[str]:
    """Families with and without a size."""
    from robustkpca.models.settings import FAMILIES, SIZES

    names = [*FAMILIES, *(f"{family}-{size}" for family in FAMILIES for size in SIZES)]
    return [name for name in names if name.startswith(incomplete)]


def complete_suites(incomplete: str) -> list[str]:
    """`clean` and the suites that come with the package."""
    from robustkpca.suites.cell import CLEAN
    from robustkpca.suites.suite import suite_names

    return [name for name in (CLEAN, *suite_names()) if name.startswith(incomplete)]


def complete_data(incomplete: str) -> list[str]:
    """Names of data sets."""
    from robustkpca.datasets.registry import DATASETS

    return [name for name in DATASETS if name.startswith(incomplete)]


def complete_experiments(incomplete: str) -> list[str]:
    """Experiments that come with the package."""
    from robustkpca.config import data_folder

    names = sorted(path.stem for path in data_folder("_experiments", "benchmarks").glob("*.toml"))
    return [name for name in names if name.startswith(incomplete)]


def complete_recipes(incomplete: str) -> list[str]:
    """Recipes of training."""
    from robustkpca.train.recipes import RECIPES

    return [name for name in RECIPES if name.startswith(incomplete)]


def complete_devices(incomplete: str) -> list[str]:
    """Where work can be done."""
    return [name for name in ("auto", "cpu", "cuda") if name.startswith(incomplete)]


def complete_layers(incomplete: str) -> list[str]:
    """Words for layers."""
    return [name for name in ("first", "all") if name.startswith(incomplete)]


# Panels of --help.
MODELS, DATA, ATTACKS, WORK, OUTPUT = "Models", "Data", "Attacks", "How the work is done", "Output"

MODEL_HELP = (
    "Embedded name, FAMILY[-SIZE] (see `models`) with --checkpoint, timm:NAME, rpc-timm:NAME, or "
    "package.module:object of your own; its own settings after it: NAME,checkpoint=FILE,iterations=4."
)
MODELS_HELP = "TOML file with a table `model` for each: model, checkpoint, name, group, weights, iterations, ..."
DATA_HELP = "Data set (see `datasets`): NAME, NAME:DIR, or package.module:object of your own."

Model = Annotated[
    list[str] | None,
    typer.Option(help=f"{MODEL_HELP} Repeat to compare.", autocompletion=complete_models, rich_help_panel=MODELS),
]
ModelsFile = Annotated[
    Path | None, typer.Option("--models", help=f"{MODELS_HELP} After those of --model.", rich_help_panel=MODELS)
]
Checkpoint = Annotated[
    list[str] | None,
    typer.Option(
        help="Weights of each --model that names none, in their order; `embedded` for embedded ones.",
        rich_help_panel=MODELS,
    ),
]
Weights = Annotated[
    WhichWeights,
    typer.Option(help="What was optimised, or its average, of files that hold both.", rich_help_panel=MODELS),
]
Iterations = Annotated[
    str | None,
    typer.Option(help="RPC-Attention: iterations n of PAP; 1,2,4 runs each of them.", rich_help_panel=MODELS),
]
Lambda = Annotated[
    str | None,
    typer.Option(
        "--lambda", help="RPC-Attention: weight of the sparse part; 1,4 runs each of them.", rich_help_panel=MODELS
    ),
]
Layers = Annotated[
    list[str] | None,
    typer.Option(
        help="RPC-Attention: first, all, or numbers counted from 1, e.g. 1,3. Repeat to compare.",
        autocompletion=complete_layers,
        rich_help_panel=MODELS,
    ),
]
Heads = Annotated[
    int | None, typer.Option(min=1, help="Attention heads, for weights of no known size.", rich_help_panel=MODELS)
]
ImageSize = Annotated[
    int | None, typer.Option(min=1, help="Image side other than the weights'.", rich_help_panel=MODELS)
]
Classes = Annotated[
    Path | None,
    typer.Option(help="Names of the logits, one a line, for weights without names.", rich_help_panel=MODELS),
]
Dtype = Annotated[DType, typer.Option(help="Precision; bf16 changes results.", rich_help_panel=WORK)]
Compile = Annotated[
    bool, typer.Option("--compile", help="Through torch.compile, which may change the last bits.", rich_help_panel=WORK)
]
Checkpointing = Annotated[
    bool,
    typer.Option(
        "--grad-checkpointing",
        help="Less memory, more time: each block is computed again for its gradient.",
        rich_help_panel=WORK,
    ),
]


@dataclasses.dataclass(frozen=True)
class ModelFlags:
    """The models of a command and the settings for all of them, as options in the order of --help."""

    model: Model = None
    models_file: ModelsFile = None
    checkpoint: Checkpoint = None
    weights: Weights = "raw"
    iterations: Iterations = None
    lam: Lambda = None
    layers: Layers = None
    heads: Heads = None
    img_size: ImageSize = None
    classes: Classes = None


def takes_models(command: Callable[..., None]) -> Callable[..., None]:
    """A command with the options of ModelFlags, which it gets together as `flags`, its parameter in their place."""
    fields = inspect.signature(ModelFlags, eval_str=True).parameters
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        parameters += fields.values() if name == "flags" else [parameter]

    @functools.wraps(command)
    def taking(**values: Any) -> None:
        flags = ModelFlags(**{name: values.pop(name) for name in fields})
        command(flags=flags, **values)

    taking.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    taking.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return taking


Data = Annotated[str, typer.Option(help=DATA_HELP, autocompletion=complete_data, rich_help_panel=DATA)]
InDistribution = Annotated[
    str | None, typer.Option(help="imagenet:DIR that imagenet-o is told apart from.", rich_help_panel=DATA)
]
Limit = Annotated[
    int | None,
    typer.Option(help="Use at most N samples, spread over the classes, drawn with --seed.", rich_help_panel=DATA),
]
BatchSize = Annotated[int, typer.Option(help="Samples a batch; the unit of work that is kept.", rich_help_panel=WORK)]
Workers = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Threads that decode images ahead. Default: 0 for embedded data, 1 on the CPU, up to 8 a GPU.",
        rich_help_panel=WORK,
    ),
]
Cache = Annotated[
    Path | None,
    typer.Option(help="Folder that keeps decoded images for later models, attacks and runs.", rich_help_panel=WORK),
]
CacheLimit = Annotated[
    float,
    typer.Option(
        min=0, help="GiB that --cache may hold; what was not used for longest goes first.", rich_help_panel=WORK
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of every random draw.", rich_help_panel=WORK)]
Device = Annotated[
    str, typer.Option(help="auto, cpu, cuda or cuda:N.", autocompletion=complete_devices, rich_help_panel=WORK)
]
OutFolder = Annotated[
    Path | None,
    typer.Option(
        "--out", help="Run folder. Default: one under runs/, named after the request.", rich_help_panel=OUTPUT
    ),
]
AsJson = Annotated[
    bool,
    typer.Option("--json", help="Print the result as one JSON object, and nothing else.", rich_help_panel=OUTPUT),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print no tables and no progress.", rich_help_panel=OUTPUT)]
StoredRuns = Annotated[list[Path], typer.Argument(help="Run folders or exported .parquet files.")]
Reference = Annotated[bool, typer.Option(help="The paper's results for the same protocol, data and model.")]
