"""robustkpca: how robust is a vision transformer, and does attention with robust principal components make it more so?

The whole job in Python: `load_classifier`, `load_samples` and `load_suite` give the three inputs of `evaluate`, which
returns a `Run`; `accuracy_table` and `compare` turn it into pandas tables, `findings` says what not to believe.

HOMES is the public API: a name that is not in it is private. Names are imported when they are first used, so that
`import robustkpca`, `dir(robustkpca)` and a misspelt name load neither torch nor pandas.
"""

from __future__ import annotations

from robustkpca._version import __version__

TYPE_CHECKING = False  # checkers take it as true; `typing` would be most of what this import costs
if TYPE_CHECKING:  # the same as HOMES, for type checkers and editors
    from typing import Any

    from robustkpca.datasets.sources import load_samples
    from robustkpca.diagnosis.findings import findings
    from robustkpca.evaluation.loop import evaluate
    from robustkpca.gate.check import check
    from robustkpca.models.checkpoints import load_classifier
    from robustkpca.models.classifier import Classifier
    from robustkpca.models.settings import ModelSettings, Preprocessing
    from robustkpca.results.accuracy import accuracy_table, worst_case
    from robustkpca.results.comparison import compare
    from robustkpca.results.trainings import compare_seeds, over_seeds
    from robustkpca.runs.run import Run
    from robustkpca.suites.suite import load_suite

HOMES = {
    "Classifier": "robustkpca.models.classifier",
    "ModelSettings": "robustkpca.models.settings",
    "Preprocessing": "robustkpca.models.settings",
    "Run": "robustkpca.runs.run",
    "accuracy_table": "robustkpca.results.accuracy",
    "check": "robustkpca.gate.check",
    "compare": "robustkpca.results.comparison",
    "compare_seeds": "robustkpca.results.trainings",
    "evaluate": "robustkpca.evaluation.loop",
    "findings": "robustkpca.diagnosis.findings",
    "load_classifier": "robustkpca.models.checkpoints",
    "load_samples": "robustkpca.datasets.sources",
    "load_suite": "robustkpca.suites.suite",
    "over_seeds": "robustkpca.results.trainings",
    "worst_case": "robustkpca.results.accuracy",
}
__all__ = [
    "Classifier",
    "ModelSettings",
    "Preprocessing",
    "Run",
    "__version__",
    "accuracy_table",
    "check",
    "compare",
    "compare_seeds",
    "evaluate",
    "findings",
    "load_classifier",
    "load_samples",
    "load_suite",
    "over_seeds",
    "worst_case",
]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """Import a public name on its first use.

    Raises:
        AttributeError: there is no such public name. A subpackage needs its own import, `import robustkpca.models`.
    """
    if name not in HOMES:
        # Private names are asked for by tools (copy, inspect, IPython); they get the short answer.
        exists = "" if name.startswith("_") else f". Available: {', '.join(HOMES)}"
        raise AttributeError(f"module 'robustkpca' has no attribute {name!r}{exists}")
    from importlib import import_module

    value = getattr(import_module(HOMES[name]), name)
    globals()[name] = value
    return value
