"""Commands that say what exists: models, attacks, datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from robustkpca.cli.app import app, out


@app.command()
def models(
    inspect: Annotated[Path | None, typer.Option(help="Say what this weight file is, instead of listing.")] = None,
) -> None:
    """List the models, or say what a weight file is."""
    from robustkpca.models import checkpoints
    from robustkpca.models.checkpoints import EMBEDDED, embedded_path
    from robustkpca.models.settings import FAMILIES, SIZES, ModelSettings
    from robustkpca.models.weight_files import read

    if inspect is not None:
        for fact, value in checkpoints.inspect(inspect):
            out.print(f"{fact:10} {value}", markup=False, highlight=False, soft_wrap=True)
        return
    for name in EMBEDDED:
        file = read(embedded_path(name))
        settings = ModelSettings.parse(file.settings or {}, name)
        count = sum(t.numel() for t in file.state.values())
        _line(name, f"{settings.title}, {count:,} parameters, embedded, trained on {file.training['data']['name']}")
    for family, title in FAMILIES.items():
        for size, (width, depth, heads) in SIZES.items():
            _line(
                f"{family}-{size}",
                f"{title}, width {width}, depth {depth}, {heads} heads: give --checkpoint FILE, or train",
            )
    _line("timm:NAME", "any timm model, with its pretrained weights or --checkpoint FILE")


@app.command()
def attacks() -> None:
    """List the attack suites."""
    from robustkpca.suites.cell import CLEAN
    from robustkpca.suites.suite import load_suite, suite_names

    _line(CLEAN, "no attack: top-1 and top-5 on the images as they are")
    for name in suite_names():
        suite = load_suite(name)
        _line(name, f"{suite.title}: {suite.describe()}")


@app.command()
def datasets() -> None:
    """List the data sets."""
    from robustkpca.datasets.sources import DATASETS

    for name, source in DATASETS.items():
        _line(name, source.title)


@app.command()
def runs(folder: Annotated[Path, typer.Argument(help="Where to look, at any depth.")] = Path("runs")) -> None:
    """List stored runs with how far they came."""
    from robustkpca.errors import RunError
    from robustkpca.runs.run import Run

    if not folder.is_dir():
        raise RunError(f"runs {folder}: no such folder")
    for file in sorted(folder.rglob("run.json")):
        try:
            run = Run.open(file)
            done, total = run.progress
        except RunError as error:
            _line(str(file.parent), str(error))
            continue
        failed = len(run.summary.failures)
        state = "complete" if done == total else f"{failed} failed" if failed else "to be continued"
        what = ", ".join(s.name for s in run.suites) or "clean"
        _line(str(file.parent), f"{what}; {', '.join(run.models)}; n = {run.n}; {done} of {total} chunks, {state}")


def _line(name: str, text: str) -> None:
    out.print(f"{name:22} {text}", markup=False, highlight=False, soft_wrap=True)
