"""The command that lists attack suites."""

from __future__ import annotations

from robustkpca.cli.show import entry


def attacks() -> None:
    """List the attack suites."""
    from robustkpca.suites.cell import CLEAN
    from robustkpca.suites.suite import load_suite, suite_names

    entry(CLEAN, "no attack: top-1 and top-5 on the images as they are")
    for name in suite_names():
        suite = load_suite(name)
        entry(name, f"{suite.title}: {suite.describe()}")
