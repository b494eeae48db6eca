"""The command that lists models and inspects weight files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from robustkpca.cli.show import entry, show


def models(
    inspect: Annotated[Path | None, typer.Option(help="Say what this weight file is, instead of listing.")] = None,
) -> None:
    """List the models, or say what a weight file is."""
    from robustkpca.models import checkpoints
    from robustkpca.models.checkpoints import embedded_path
    from robustkpca.models.settings import EMBEDDED, FAMILIES, SIZES, ModelSettings
    from robustkpca.models.weight_files import read

    if inspect is not None:
        for fact, value in checkpoints.inspect(inspect):
            show(f"{fact:10} {value}")
        return
    for name in EMBEDDED:
        file = read(embedded_path(name))
        settings = ModelSettings.parse(file.settings or {}, name)
        count = sum(t.numel() for t in file.state.values())
        entry(name, f"{settings.title}, {count:,} parameters, embedded, trained on {file.training['data']['name']}")
    for family, title in FAMILIES.items():
        for size, (width, depth, heads) in SIZES.items():
            entry(
                f"{family}-{size}",
                f"{title}, width {width}, depth {depth}, {heads} heads: give --checkpoint FILE, or train",
            )
    entry("timm:NAME", "any timm model, with its pretrained weights or --checkpoint FILE")
    entry("rpc-timm:NAME", "the same with RPC-Attention put in: --iterations, --lambda and --layers")
    entry("package.module:object", "a Classifier of your own, or a function that returns one")
