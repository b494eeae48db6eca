"""The command that makes files for papers and for other programs from a stored run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from robustkpca.cli.options import DATA_HELP, Device, ModelFlags, StoredRuns, takes_models
from robustkpca.cli.show import print_table, say, wrote
from robustkpca.cli.start import asked_data, asked_models, import_code, interruptible, load, pick_device, progress_bar
from robustkpca.errors import CheckpointError, SpecError, unknown
from robustkpca.files import refuse_used

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from robustkpca.evaluation.plan import Plan
    from robustkpca.models.options import ModelOptions
    from robustkpca.runs.request import ModelRecord
    from robustkpca.runs.run import Run
    from robustkpca.suites.cell import Cell

IMAGES = "Of --images"


@takes_models
def export(
    runs: StoredRuns,
    flags: ModelFlags,
    figures: Annotated[
        Path | None,
        typer.Option(help="Folder for a report's figures, as PDF and SVG; its own earlier files are replaced."),
    ] = None,
    images: Annotated[
        Path | None,
        typer.Option(help="New folder for the attacked images of one run, made again: PNG files and index.csv."),
    ] = None,
    attack: Annotated[
        list[str] | None, typer.Option(help="Suite of the run; default all. Repeatable.", rich_help_panel=IMAGES)
    ] = None,
    budget: Annotated[
        list[str] | None, typer.Option(help="eps or severity; default all. Repeatable.", rich_help_panel=IMAGES)
    ] = None,
    first: Annotated[
        int | None, typer.Option(min=1, help="Only the first N samples of the set.", rich_help_panel=IMAGES)
    ] = None,
    floats: Annotated[
        bool,
        typer.Option("--float", help="Also as they were before rounding: images.npy, float32.", rich_help_panel=IMAGES),
    ] = False,
    data: Annotated[str | None, typer.Option(help=f"{DATA_HELP} Default: the run's.", rich_help_panel=IMAGES)] = None,
    device: Device = "auto",
) -> None:
    """Write the figures of runs, or the attacked images of one, as files. A run does not keep attacked images: they are
    made again by the same models on the same data, and anything else is refused. Models and data that do not lie where
    they did are named as for `eval`. Exit code 1: an image gets another answer than in the run."""
    from robustkpca.runs.run import Run

    opened = [Run.open(path) for path in runs]
    if figures is None and images is None:
        raise SpecError("export: expected --figures DIR or --images DIR")
    if images is None and (attack or budget or first or floats or flags != ModelFlags() or data):
        raise SpecError("export: models, data, attacks and --float are of --images DIR")
    if images is not None and len(opened) > 1:
        raise SpecError(f"--images: expected one run, got {len(opened)}")
    cells: Sequence[Cell] = ()
    if images is not None:
        cells = _cells(opened[0], attack or (), budget or ())
        refuse_used(images)  # before torch is imported
    if figures is not None:
        from robustkpca.report import report

        for file in report.write_figures(opened, figures):
            wrote(file)
    if images is not None:
        plan = _plan(opened[0], flags, data, device)
        index = _written(opened[0], plan, images, cells, first, floats=floats)
        if not _show(opened[0], plan, images, index):
            raise typer.Exit(1)


def _cells(run: Run, suites: Sequence[str], budgets: Sequence[str]) -> list[Cell]:
    """Attacks and budgets of the run; of a cascade, its last attack, which has the images that those before it broke.
    Raises SpecError for what the run does not have."""
    from robustkpca.suites.budget import exact
    from robustkpca.suites.cell import Cell

    if strange := [name for name in suites if name not in [suite.name for suite in run.suites]]:
        raise SpecError(f"--attack: {unknown('suite of the run', strange[0], [suite.name for suite in run.suites])}")
    chosen = [suite for suite in run.suites if not suites or suite.name in suites]
    wanted = {exact(text, "--budget"): text for text in budgets}
    known = {budget.value: budget.text for suite in chosen for budget in suite.budgets}
    for value, text in wanted.items():
        if value not in known:
            raise SpecError(f"--budget: expected {', '.join(known.values())} as in the run, got {text}")
    cells = [
        Cell(attack, budget)
        for suite in chosen
        for attack in list(suite.attacks)[-1 if suite.cascade else 0 :]
        for budget in suite.budgets
        if not wanted or budget.value in wanted
    ]
    if not cells:
        raise SpecError(f"--images: no attacks in run {run.name}")
    return cells


def _plan(run: Run, flags: ModelFlags, data: str | None, device: str) -> Plan:
    """What the run was asked for, with the models and data that are named, else with its own."""
    request = run.request
    asked_data(data or request.data.name)
    shared = {"dtype": "bf16"} if request.dtype == "bfloat16" else {}
    if flags == ModelFlags():
        from robustkpca.models.options import ModelOptions

        asked = [_again(record) for record in request.models if record.usable], ModelOptions.of_flags(shared)
    else:
        asked = asked_models(flags, **shared)
    import_code(asked[0], data or request.data.name)
    where = pick_device(device)
    from robustkpca.datasets.sources import load_samples
    from robustkpca.evaluation.plan import Plan
    from robustkpca.models.settings import ALL_CLASSES
    from robustkpca.tasks.base import Options

    samples = load_samples(data or request.data.name, limit=run.n, seed=request.seed)
    options = Options(request.seed, request.batch_size, request.data.argmax == ALL_CLASSES, force=True)
    try:
        loaded = load(asked, where)
    except CheckpointError as error:
        raise CheckpointError(f"{error}. Models that lie elsewhere now: --model, --checkpoint") from None
    return Plan(loaded, samples, run.suites, options)


def _written(
    run: Run, plan: Plan, folder: Path, cells: Sequence[Cell], first: int | None, *, floats: bool
) -> pd.DataFrame:
    """Write attacked images; returns their index."""
    from robustkpca.evaluation.attacked_images import INDEX, export_images
    from robustkpca.evaluation.loop import Resources

    with (
        interruptible(lambda: f"{folder} is not complete and has no {INDEX}; remove it, or choose another"),
        progress_bar() as progress,
    ):
        bar = progress.add_task("images", total=None)
        resources = Resources(
            on_progress=lambda now: progress.update(bar, completed=now.done, total=now.total, description=now.model),
            on_notice=say,
        )
        return export_images(run, plan, folder, cells, first=first, floats=floats, resources=resources)


def _show(run: Run, plan: Plan, folder: Path, index: pd.DataFrame) -> bool:
    """Say what attacked images are; False where one gets another answer than in the run."""
    import pandas as pd

    from robustkpca.evaluation.attacked_images import INDEX

    images = (index["attack"] + " " + index["budget"]).str.strip().rename("image")
    parts = {model: part.groupby(images, sort=False) for model, part in index.groupby("model", sort=False)}
    n = index.groupby(["model", images]).size().iloc[0]
    over = ""
    if index["distance_8bit"].notna().any():
        count = int(index["over_budget_8bit"].sum())
        over = f" After: {count} of {len(index)} files are over their budget."
    print_table(
        f"Accuracy (%) on attacked images before → after rounding to 8 bits, n = {n}",
        pd.DataFrame({model: part.apply(_before_and_after) for model, part in parts.items()}),
        [
            f"Before: of run {run.request.fingerprint}.{over}",
            f"wrote {folder}; its {INDEX} has a line for each file, with answers and distances before and after",
        ],
    )
    if different := int((~index["as_in_run"]).sum()):
        theirs, ours = run.request, plan.request
        say(
            f"{different} of {len(index)} images get another answer than in the run ({INDEX}: as_in_run), which was "
            f"made on {theirs.device} with torch {theirs.software.get('torch')}; here: {ours.device}, torch "
            f"{ours.software['torch']}",
            style="red",
        )
    return not different


def _before_and_after(part: pd.DataFrame) -> str:
    answers = (part["prediction"], part["prediction_8bit"])
    return " → ".join(f"{100 * (answer == part['label']).mean():.1f}" for answer in answers)


def _again(record: ModelRecord) -> ModelOptions:
    """How a model is loaded that a run says this of."""
    from robustkpca.models.options import ModelOptions, is_model
    from robustkpca.models.settings import RPC_TIMM, TIMM

    settings, source = record.vision, record.source
    values: dict[str, object] = {"name": record.given_name, "group": record.group}
    values["weights"] = record.weight_choice or "raw"
    rpc = settings.rpc if settings is not None else None
    if (name := source.removeprefix("embedded:")) == source and not is_model(source):
        values["checkpoint"] = source
        name = settings.family if settings is not None else ""
    if not name.startswith("own:"):
        values["model"] = f"{RPC_TIMM}{name}" if rpc is not None and name.startswith(TIMM) else name or None
    if rpc is not None:
        values |= {"iterations": rpc.iterations, "lambda": rpc.lam, "layers": [rpc.layers]}
    return ModelOptions.read(values, f"model {record.label}")
