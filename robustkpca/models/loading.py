"""From options to models: each loaded in its variants, with the settings for all where it has them. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from robustkpca.errors import CheckpointError, RobustKPCAError, SpecError
from robustkpca.extensions import call_object, is_import_path
from robustkpca.models.model import Model, Unusable
from robustkpca.models.options import WAYS, ModelOptions, class_names, flag_of

if TYPE_CHECKING:
    import torch

    from robustkpca.models.classifier import Classifier

T = TypeVar("T")
Load = Callable[[ModelOptions, "str | torch.device"], Model]


def load_models(
    models: Sequence[ModelOptions],
    shared: ModelOptions | None = None,
    device: str | torch.device = "cpu",
    *,
    load: Load | None = None,
    on_notice: Callable[[str], None] | None = None,
) -> list[Model | Unusable]:
    """Every variant of every model, in order. Of several models, one whose weights do not load is Unusable.

    shared: settings for all models: each goes to those that have it and do not set it themselves.
    load: what loads one variant, by default its weights; it raises an error that says what a model `lacks`.
    on_notice: is told in one line what each shared setting went to, and which files it contradicts.

    Raises:
        SpecError: a setting that makes no sense or that no model has; an import path that gives no Classifier.
        CheckpointError: the only model, or every one of them, does not load.
    """
    shared = shared or ModelOptions()
    routes = [_Route(options, shared) for options in models]
    loaded = [model for route in routes for model in route.load(load or load_model, device, alone=len(models) == 1)]
    failed = [model.reason for model in loaded if isinstance(model, Unusable)]
    if loaded and len(failed) == len(loaded):
        raise CheckpointError("; ".join(dict.fromkeys(failed)))
    for field in ModelOptions.model_fields:
        if field in shared.given and (line := _routed(shared.text_of(field), field, routes)) and on_notice:
            on_notice(line)
    return loaded


class _Route:
    """Which of the shared settings one model takes."""

    def __init__(self, options: ModelOptions, shared: ModelOptions) -> None:
        self.options, self.shared = options, shared
        self.set_itself = shared.given & options.model_fields_set
        self.taken = shared.given - options.model_fields_set
        self.refused: dict[str, RobustKPCAError] = {}  # why it does not have a setting
        self.models: list[Model | Unusable] = []

    def load(self, load: Load, device: str | torch.device, *, alone: bool) -> list[Model | Unusable]:
        """Load the variants, without the shared settings that the model turns out not to have."""
        while True:
            variants = self.options.with_settings(self.shared, self.taken).variants()
            try:
                self.models = [self._one(variant, load, device, alone=alone) for variant in variants]
                return self.models
            except RobustKPCAError as error:
                lacking = error.lacks & self.taken
                if not lacking or alone:
                    raise
                self.taken -= lacking
                self.refused |= dict.fromkeys(lacking, error)

    def _one(self, variant: ModelOptions, load: Load, device: str | torch.device, *, alone: bool) -> Model | Unusable:
        try:
            return finished(load(variant, device), variant)
        except CheckpointError as error:
            if alone or error.lacks & self.taken:
                raise
            title = variant.model or Path(variant.checkpoint or "").stem
            where = variant.checkpoint or title
            return Unusable(title, where, str(error), given_name=variant.name, group=variant.group)

    def contradicted(self, field: str) -> str | None:
        """What the file says where the shared setting says something else."""
        if field not in self.taken:
            return None
        overrides = (o for model in self.models for o in getattr(getattr(model, "origin", None), "overrides", ()))
        return next((override.file_text for override in overrides if override.setting == field), None)

    @property
    def usable(self) -> bool:
        return not all(isinstance(model, Unusable) for model in self.models)


def _routed(flag: str, field: str, routes: Sequence[_Route]) -> str:
    """A line that says what a shared setting went to; empty where it is the setting of the only model, which says
    nothing else. Raises SpecError where no model has it."""
    usable = [route for route in routes if route.usable]
    takers = [route for route in usable if field in route.taken]
    lacking = [route for route in usable if field in route.refused]
    own = [route for route in usable if field in route.set_itself]
    if lacking and not takers and not own and len(usable) == len(routes):
        raise SpecError(f"{flag}: no model has it; {lacking[0].refused[field]}")
    changes = [f"{r.options.title}, which says {text}" for r in takers if (text := r.contradicted(field)) is not None]
    plain = [r.options.title for r in takers if r.contradicted(field) is None]
    parts = [f"changes {' and '.join(changes)}"] if changes else []
    if plain and len(routes) > 1:
        parts.append("for all models" if len(plain) == len(routes) else f"for {', '.join(plain)}")
    parts += [f"not for {', '.join(r.options.title for r in lacking)}"] if lacking else []
    parts += [f"{r.options.title} keeps its own" for r in own]
    return f"{flag}: {'; '.join(parts)}" if parts else ""


def load_model(options: ModelOptions, device: str | torch.device = "cpu") -> Model:
    """One model with its weights: that of the first variant, before it is `finished`.

    Raises:
        SpecError, CheckpointError: as `load_models`.
    """
    if options.model is not None and is_import_path(options.model):
        return _imported(options, device)
    from robustkpca.models.checkpoints import load_classifier

    return load_classifier(
        options.model,
        options.checkpoint,
        weights=options.weights,
        iterations=_first(options.iterations),
        lam=_first(options.lam),
        layers=_first(options.layers),
        heads=options.heads,
        img_size=options.img_size,
        classes=() if options.classes is None else class_names(options.classes),
        device=device,
    )


def _first(values: tuple[T, ...]) -> T | None:
    return values[0] if values else None


def finished(model: Model, options: ModelOptions) -> Model:
    """A loaded model in the precision and way that its options say, with the user's name and group.

    Raises:
        SpecError: a model that cannot be run so, or takes no name.
    """
    way = options.given & {*WAYS}
    if hasattr(model, "variant"):
        if way:
            from robustkpca.models.classifier import DTYPES

            classifier: Classifier = model  # type: ignore[assignment]
            how = {"compiled": options.compiled, "checkpointed": options.checkpointed}
            model = classifier.variant(dtype=DTYPES[options.dtype], **how)
    elif way:
        text = f"{', '.join(map(options.text_of, sorted(way)))}: not for {model.title}, which is no Classifier"
        raise SpecError(text, lacks=way)
    for field in ("name", "group"):
        if (value := getattr(options, field)) is not None:
            try:
                setattr(model, "given_name" if field == "name" else field, value)
            except (AttributeError, TypeError):
                raise SpecError(f"{field}={value}: {model.title} takes no attributes") from None
    return model


def _imported(options: ModelOptions, device: str | torch.device) -> Model:
    """What the code of others makes. A Classifier is taken as one of our own over the same weights;
    theirs is left as it is."""
    from robustkpca.models.classifier import Classifier

    path = options.model or ""
    given = options.given - {*WAYS}
    flags = [flag_of(field) for field in ModelOptions.model_fields if field in given]
    flags = ["--checkpoint", *flags] if options.checkpoint is not None else flags
    if flags:
        raise SpecError(f"{', '.join(flags)}: no settings of {path}, which makes its model itself", lacks=given)
    made: Model = call_object(path, what="model", expected=Model)
    if not isinstance(made, Classifier):
        made.source = path
        return made
    classifier = made.twin()
    classifier.source = path
    return classifier.to(device)
