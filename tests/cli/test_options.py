"""Choices and completion: the same names as where they are defined, and no torch to list them."""

import os
import subprocess
import sys
from typing import get_args

from robustkpca.cli import options
from robustkpca.datasets.registry import DATASETS
from robustkpca.experiments import experiment_names
from robustkpca.kpca.analysis import ANALYSES
from robustkpca.models.classifier import DTYPES
from robustkpca.models.settings import EMBEDDED
from robustkpca.models.weight_files import Which
from robustkpca.report.formats import FORMATS
from robustkpca.report.paper_tables import LAYOUTS
from robustkpca.suites.suite import suite_names
from robustkpca.train.recipes import RECIPES, Recipe


def test_choices_are_those_of_the_modules_that_define_them():
    assert get_args(options.DType) == tuple(DTYPES)
    assert get_args(options.WhichWeights) == get_args(Which)
    assert get_args(options.Layout) == tuple(LAYOUTS)
    assert {*get_args(options.Format)} == {"rich", *FORMATS}
    assert [*options.Analysis] == [*ANALYSES]
    fields = Recipe.model_fields
    assert get_args(options.Amp) == get_args(fields["amp"].annotation)
    assert get_args(options.Adversarial) == get_args(fields["adversarial"].annotation)
    assert options.complete_data("") == list(DATASETS)
    assert options.complete_recipes("") == list(RECIPES)
    assert {*EMBEDDED} <= {*options.complete_models("")}
    assert options.complete_experiments("") == experiment_names()
    assert options.complete_suites("") == ["clean", *suite_names()]


def completed(*words):
    """What the shell offers after these words, and whether torch was imported for it."""
    code = "import sys, atexit; atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr)); " \
           "sys.argv = ['robustkpca']; from robustkpca.cli import main; main()"  # fmt: skip
    environment = os.environ | {
        "_ROBUSTKPCA_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(("robustkpca", *words)),
        "COMP_CWORD": str(len(words)),
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    return done.stdout.split(), done.stderr.split()[-1:]


def test_the_shell_completes_names_and_choices_without_torch():
    assert completed("eval", "--attack", "pgd") == (options.complete_suites("pgd"), ["False"])
    assert completed("eval", "--dtype", "b") == (["bf16"], ["False"])
    assert completed("eval", "--data", "imagenet-") == (options.complete_data("imagenet-"), ["False"])
    assert completed("train", "--recipe", "de") == (["deit"], ["False"])
    assert completed("eval", "--model", "rpc-sym") == (options.complete_models("rpc-sym"), ["False"])
    assert len(options.complete_models("rpc-sym")) > 4
