"""robustkpca: how robust is a vision transformer, and does attention with robust principal components make it more so?

The whole job in Python: `load_classifier`, `load_samples` and `load_suite` give the three inputs of `evaluate`, which returns a
`Run`; `accuracy_table` and `compare` turn it into pandas tables, `findings` says what not to believe. Imports are lazy: `import robustkpca` does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from robustkpca.checkpoints import load_classifier
    from robustkpca.datasets import load_samples
    from robustkpca.evaluation import evaluate
    from robustkpca.models import Classifier
    from robustkpca.outcomes import Run
    from robustkpca.regression import check
    from robustkpca.rules import findings
    from robustkpca.seeds import compare_seeds, over_seeds
    from robustkpca.settings import ModelSettings, Preprocessing
    from robustkpca.spec import load_suite
    from robustkpca.tables import accuracy_table, compare, worst_case

__version__ = "0.1.0"
_HOMES = {
    "Classifier": "models",
    "ModelSettings": "settings",
    "Preprocessing": "settings",
    "Run": "outcomes",
    "accuracy_table": "tables",
    "check": "regression",
    "compare": "tables",
    "compare_seeds": "seeds",
    "evaluate": "evaluation",
    "findings": "rules",
    "load_classifier": "checkpoints",
    "load_samples": "datasets",
    "load_suite": "spec",
    "over_seeds": "seeds",
    "worst_case": "tables",
}
__all__ = [
    "Classifier",
    "ModelSettings",
    "Preprocessing",
    "Run",
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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'robustkpca' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"robustkpca.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
