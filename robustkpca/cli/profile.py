"""The command that measures what models cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from robustkpca.cli.options import (
    Checkpoint,
    Checkpointing,
    Compile,
    Device,
    Dtype,
    ImageSize,
    Iterations,
    Lambda,
    Model,
)
from robustkpca.cli.show import print_table, write, wrote
from robustkpca.cli.start import load, model_options, pick_device, split_loaded
from robustkpca.errors import SpecError

if TYPE_CHECKING:
    import pandas as pd

    from robustkpca.models import model as any_model
    from robustkpca.profile import Cost


def profile(
    model: Model = None,
    checkpoint: Checkpoint = None,
    iterations: Iterations = None,
    lam: Lambda = None,
    layers: Annotated[
        list[str] | None, typer.Option(help="RPC-Attention: first, all, or numbers such as 1,3. Repeat to compare.")
    ] = None,
    img_size: ImageSize = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images at once.")] = 16,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds, of which the median is taken.")] = 10,
    dtype: Dtype = "float32",
    compiled: Compile = False,
    checkpointed: Checkpointing = False,
    device: Device = "auto",
    out_file: Annotated[Path | None, typer.Option("--out", help="Also write the table: .csv or .md.")] = None,
) -> None:
    """Parameters, operations, time and memory of models, beside the first of them.
    Names with a size need no weights."""
    import torch

    from robustkpca import profile
    from robustkpca.evaluation.plan import labels_of
    from robustkpca.models.classifier import DTYPES
    from robustkpca.tasks.classification.task import CLASSIFICATION

    if out_file is not None and out_file.suffix not in (".csv", ".md"):
        raise SpecError(f"--out {out_file}: expected a name ending in .csv or .md")
    if not model:
        raise SpecError("--model: expected at least one, e.g. symvit-tiny; see `robustkpca models`")
    where = pick_device(device)
    if checkpoint:
        places = layers[0] if layers else None
        options = model_options(model, checkpoint, iterations=iterations, layers=places, lam=lam, img_size=img_size)
        made = load(options, "cpu")
    else:
        made = [*_untrained(model, iterations, lam, layers, img_size)]
    way: dict[str, Any] = {"dtype": DTYPES[dtype], "compiled": compiled, "checkpointed": checkpointed}
    usable, unusable = split_loaded(made)
    if unusable:
        raise SpecError(unusable[0].reason)
    timed = [m.to(torch.device(where)).variant(**way) for m in usable]
    costs = profile.profile(timed, batch_size=batch_size, repeats=repeats)
    costs = [replace(cost, title=name) for cost, name in zip(costs, labels_of(timed, CLASSIFICATION), strict=True)]
    table = costs_table(costs)
    notes = [
        f"Operations and time an image, medians of {repeats} rounds, all models in turn, batch {batch_size}; "
        "gradient: forward and backward pass to the pixels, parameters frozen. Memory of the whole batch: peak beyond "
        "the weights. Second number: ratio to the first model.",
        profile.machine(torch.device(where))
        + f"; {dtype}{', compiled' if compiled else ''}{', blocks checkpointed' if checkpointed else ''}.",
    ]
    print_table("Cost", table, notes)
    if out_file is not None:
        write(out_file, _written(costs, table, notes, out_file.suffix))
        wrote(out_file)


def costs_table(costs: list[Cost]) -> pd.DataFrame:
    """Cells of text, one row a model."""
    import pandas as pd

    first = costs[0]
    rows = {
        cost.title: {
            "parameters": f"{cost.parameters / 1e6:.2f} M",
            "GFLOP": _beside(cost.flops / 1e9, cost.flops / first.flops),
            "forward ms": _beside(cost.forward_ms, cost.forward_ms / first.forward_ms),
            "gradient ms": _beside(cost.gradient_ms, cost.gradient_ms / first.gradient_ms),
            "forward MiB": _beside(cost.forward_bytes / 2**20, cost.forward_bytes / first.forward_bytes),
            "gradient MiB": _beside(cost.gradient_bytes / 2**20, cost.gradient_bytes / first.gradient_bytes),
        }
        for cost in costs
    }
    table = pd.DataFrame.from_dict(rows, orient="index")
    table.index.name = "model"
    return table


def _beside(value: float, ratio: float) -> str:
    return f"{value:.3g} ({ratio:.2f})"


def _written(costs: list[Cost], table: pd.DataFrame, notes: list[str], suffix: str) -> str:
    import pandas as pd

    from robustkpca.page import Heading, Paragraph, Table, to_markdown

    if suffix == ".csv":
        text: str = pd.DataFrame([vars(cost) for cost in costs]).to_csv(index=False)
        return text
    return to_markdown([Heading("Cost", 1), Table(table), *map(Paragraph, notes)], "")


def _untrained(
    names: list[str], iterations: str | None, lam: float | None, layers: list[str] | None, img_size: int | None
) -> list[any_model.Model]:
    """Embedded models, and models of named sizes with fresh weights;
    RPC models in every combination of iterations and layers."""
    from robustkpca.extensions import is_import_path
    from robustkpca.models.checkpoints import EMBEDDED, load_classifier
    from robustkpca.models.options import ModelOptions, load_model
    from robustkpca.models.settings import PURSUING, RPCSettings, parse_iterations, parse_layers, split_name
    from robustkpca.profile import untrained

    counts = parse_iterations(iterations) if iterations is not None else (None,)
    places = [parse_layers(text) for text in layers] if layers else [None]
    made: list[any_model.Model] = []
    for name in names:
        if name in EMBEDDED:
            plain = load_classifier(name)
            changed = plain.settings.rpc is not None and (iterations is not None or lam is not None or layers)
            made += (
                [load_classifier(name, iterations=n, lam=lam, layers=place) for place in places for n in counts]
                if changed
                else [plain]
            )
        elif is_import_path(name):
            made.append(load_model(name, None, ModelOptions(img_size=img_size)))
        elif split_name(name)[0] not in PURSUING:
            made.append(untrained(name, img_size=img_size or 224))
        elif iterations is None or lam is None:
            raise SpecError(f"model {name}: expected --iterations and --lambda")
        else:
            for place in places:
                for n in counts:
                    settings = {"iterations": n, "lambda": lam, "layers": place or "first"}
                    rpc = RPCSettings.parse(settings, "RPC settings")
                    made.append(untrained(name, rpc=rpc, img_size=img_size or 224))
    given = [flag for flag, value in (("--iterations", iterations), ("--lambda", lam), ("--layers", layers)) if value]
    if given and not any(getattr(getattr(m, "settings", None), "rpc", None) for m in made):
        raise SpecError(f"{', '.join(given)}: settings of {' and '.join(PURSUING)}, got {', '.join(names)}")
    return made
