"""Classifiers, labelled images and suites fitted to each other, and refused where they do not fit."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from robustkpca import corruptions
from robustkpca.attacks import registry
from robustkpca.datasets.samples import Samples, class_names
from robustkpca.errors import DataError, SpecError
from robustkpca.models.classifier import Classifier
from robustkpca.models.model import Unusable
from robustkpca.models.settings import ALL_CLASSES
from robustkpca.suites.attack import ROUNDED_GRADIENTS
from robustkpca.suites.suite import Suite
from robustkpca.suites.threat import Ball, Corruptions
from robustkpca.tasks.base import Adapted, Options

Models = Sequence[Classifier | Unusable]


def adapt(models: Models, samples: Samples, suites: Sequence[Suite], options: Options) -> Adapted:
    """Models that answer among the classes of the data set's protocol, suites less what a model has too few classes
    for.

    Raises DataError for classes that do not fit, SpecError for attacks that would give wrong numbers.
    """
    usable = [model for model in models if isinstance(model, Classifier)]
    for classifier in usable:
        samples.labels_for(classifier.settings)
        _refuse(classifier, suites, options)
        classifier.note_logits()
    fitted = [_narrowed(m, samples, options) if isinstance(m, Classifier) else m for m in models]
    notes = [(ROUNDED_GRADIENTS,) if isinstance(m, Classifier) and misled_attack(m, suites) else () for m in fitted]
    fewest = min((m for m in fitted if isinstance(m, Classifier)), key=lambda m: m.settings.num_classes)
    restricted = bool(samples.among) and not options.full_argmax
    argmax = f"among {len(samples.among)} classes" if restricted else ALL_CLASSES
    facts = {"resized": samples.resized, "argmax": argmax}
    return Adapted(fitted, [_possible(suite, fewest) for suite in suites], notes, facts)


def _refuse(classifier: Classifier, suites: Sequence[Suite], options: Options) -> None:
    if (name := misled_attack(classifier, suites)) and not options.force:
        raise SpecError(
            f"{classifier.title} in bfloat16: the attack {name} follows gradients, which are wrong through "
            "RPC-Attention in this precision; use float32, or --force for results that are marked"
        )
    side = classifier.settings.preprocessing.img_size
    if side < corruptions.SMALLEST and any(isinstance(suite.threat, Corruptions) for suite in suites):
        raise SpecError(
            f"corruptions need images of at least {corruptions.SMALLEST} px, {classifier.title} takes {side}"
        )


def misled_attack(classifier: Classifier, suites: Sequence[Suite]) -> str | None:
    """The first attack by gradients on a model whose gradients are wrong in its precision: such a number shows a
    robustness that is not there."""
    if not classifier.pursues or classifier.dtype != torch.bfloat16:
        return None
    attacks = [a for suite in suites if isinstance(suite.threat, Ball) for a in suite.attack]
    return next((a.name for a in attacks if not registry.METHODS[a.method].blind), None)


def _possible(suite: Suite, fewest: Classifier) -> Suite:
    """The suite less the attacks that need more classes than a model has, for all models alike."""
    if not isinstance(suite.threat, Ball):
        return suite
    classes = fewest.settings.num_classes
    needs = {a.name: registry.least_classes(a) for a in suite.attack if registry.least_classes(a) > classes}
    if not needs:
        return suite
    why = f"{max(needs.values())} classes are needed, {fewest.title} has {classes}"
    if len(needs) == len(suite.attack):
        raise SpecError(f"suite {suite.name}: {why}")
    return suite.without(list(needs), why)


def _narrowed(classifier: Classifier, samples: Samples, options: Options) -> Classifier:
    """The classifier answering among the classes that the data set's protocol allows."""
    among, names = samples.among, class_names(classifier.settings)
    if not among or options.full_argmax or set(names) == set(among):
        return classifier
    if strange := [name for name in among if name not in names]:
        raise DataError(
            f"data {samples.name}: {len(strange)} of its {len(among)} classes are unknown to {classifier.title} "
            f"({', '.join(strange[:3])})"
        )
    position = {name: i for i, name in enumerate(names)}
    return classifier.restricted([position[name] for name in among], among)
