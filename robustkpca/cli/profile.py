"""The command that measures what models cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from robustkpca.cli.options import (
    Checkpointing,
    Compile,
    Device,
    Dtype,
    ModelFlags,
    takes_models,
)
from robustkpca.cli.show import print_table, write, wrote
from robustkpca.cli.start import asked_models, load, pick_device, split_loaded
from robustkpca.errors import SpecError

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from robustkpca.models.model import Model
    from robustkpca.models.options import ModelOptions
    from robustkpca.profile import Cost


@takes_models
def profile(
    flags: ModelFlags,
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
    if out_file is not None and out_file.suffix not in (".csv", ".md"):
        raise SpecError(f"--out {out_file}: expected a name ending in .csv or .md")
    asked = asked_models(flags, dtype=dtype, compile=compiled, grad_checkpointing=checkpointed)
    where = pick_device(device)
    import torch

    from robustkpca import profile
    from robustkpca.evaluation.plan import labels_of
    from robustkpca.tasks.classification.task import CLASSIFICATION

    timed, unusable = split_loaded(load(asked, where, _weighed_or_untrained))
    if unusable:
        raise SpecError(unusable[0].reason)
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

    from robustkpca import escape
    from robustkpca.page import Heading, Paragraph, Table, to_markdown

    if suffix == ".csv":
        text: str = pd.DataFrame([vars(cost) for cost in costs]).map(escape.csv).to_csv(index=False)
        return text
    return to_markdown([Heading("Cost", 1), Table(table), *map(Paragraph, notes)], "")


def _weighed_or_untrained(options: ModelOptions, device: str | torch.device) -> Model:
    """A model with its weights where there are any, else with fresh ones; of timm's always with fresh ones.

    Raises:
        SpecError: settings that an untrained model does not have or lacks.
    """
    from robustkpca.extensions import is_import_path
    from robustkpca.models.loading import load_model
    from robustkpca.models.settings import EMBEDDED, PURSUING, RPC_TIMM, RPCSettings, split_name
    from robustkpca.profile import untrained

    name = options.model
    if name is None or options.checkpoint is not None or name in EMBEDDED or is_import_path(name):
        return load_model(options, device)
    pursues = split_name(name)[0] in PURSUING or name.startswith(RPC_TIMM + "timm:")
    lacking = options.given & {"weights", "heads", "classes", *(() if pursues else ("iterations", "lam", "layers"))}
    if lacking:
        flags = ", ".join(map(options.text_of, sorted(lacking)))
        of = f"settings of {' and '.join(PURSUING)}" if lacking & {"iterations", "lam", "layers"} else "without weights"
        raise SpecError(f"model {name}: {flags}: {of}", lacks=lacking)
    rpc = None
    if pursues:
        if not (options.iterations and options.lam):
            raise SpecError(f"model {name}: expected --iterations and --lambda")
        layers = options.layers[0] if options.layers else "first"
        settings = {"iterations": options.iterations[0], "lambda": options.lam[0], "layers": layers}
        rpc = RPCSettings.parse(settings, "RPC settings")
    return untrained(name, rpc=rpc, img_size=options.img_size or 224).to(device)
