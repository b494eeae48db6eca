"""The command that lists data sets."""

from __future__ import annotations

from robustkpca.cli.show import entry


def datasets() -> None:
    """List the data sets."""
    from robustkpca.datasets.registry import DATASETS

    for name, source in DATASETS.items():
        entry(name, source.title)
    entry("package.module:object", "Samples of your own, or a function that returns them")
