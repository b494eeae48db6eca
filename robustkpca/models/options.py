"""Which models, and how they run: the options that the command line, a models file and Python share. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from robustkpca.errors import CheckpointError, SpecError
from robustkpca.extensions import call_object, is_import_path
from robustkpca.models.model import Model, Unusable

if TYPE_CHECKING:
    import torch

    from robustkpca.models.classifier import Classifier

EMBEDDED = "embedded"  # stands for no file in a list of checkpoints


@dataclass(frozen=True)
class ModelOptions:
    """Models by name, by file, or both, and the settings that all of them get.

    names: embedded models, FAMILY[-SIZE], `timm:NAME`, `hf-hub:ID`, or an import path `package.module:object` that
        gives a Classifier. Without names, the checkpoints say what they are.
    checkpoints: a file for each name, in the same order, or none at all; EMBEDDED where a name needs no file.
    weights: which weights of a file that holds both.
    iterations: n of PAP, at least 1; every model is loaded once with each of them. Empty: as the file says.
    lam: weight of the sparse part, above 0. None: as the file says.
    layers: those with RPC-Attention, "first", "all", or numbers counted from 1. None: as the file says.
    heads: of weights whose size is none of the known ones.
    img_size: side in pixels, other than the weights'.
    classes: names of the logits, for weights without names.
    dtype, compiled, checkpointed: see `Classifier.variant`.
    """

    names: tuple[str, ...] = ()
    checkpoints: tuple[str, ...] = ()
    weights: Literal["raw", "ema"] = "raw"
    iterations: tuple[int, ...] = ()
    lam: float | None = None
    layers: Literal["first", "all"] | tuple[int, ...] | None = None
    heads: int | None = None
    img_size: int | None = None
    classes: tuple[str, ...] = ()
    dtype: Literal["float32", "bf16"] = "float32"
    compiled: bool = False
    checkpointed: bool = False

    def pairs(self) -> list[tuple[str | None, str | None]]:
        """(name, file) of each model, None for what was not given.

        Raises:
            SpecError: as many files as names were expected.
        """
        if self.names and self.checkpoints and len(self.names) != len(self.checkpoints):
            raise SpecError(
                f"--checkpoint: expected one for each --model ({len(self.names)}), got {len(self.checkpoints)}; "
                f"`{EMBEDDED}` is one"
            )
        files = [None if file == EMBEDDED else file for file in self.checkpoints]
        names = self.names or (None,) * len(files)
        return list(zip(names, files or [None] * len(names), strict=True))


def load_models(options: ModelOptions, device: str | torch.device = "cpu") -> list[Model | Unusable]:
    """A classifier for each model and number of iterations, in this order. Of several models, one whose weights do not
    load is Unusable.

    Raises:
        SpecError: a name or setting that makes no sense; an import path that gives no Classifier.
        CheckpointError: the only model, or every one of them, does not load.
    """

    pairs = options.pairs()
    loaded: list[Model | Unusable] = []
    for name, file in pairs:
        for iterations in options.iterations or (None,):
            try:
                loaded.append(load_model(name, file, options, iterations, device))
            except CheckpointError as error:
                if len(pairs) == 1:
                    raise
                loaded.append(Unusable(name or Path(file or "").stem, str(file or name), str(error)))
    failed = [model.reason for model in loaded if isinstance(model, Unusable)]
    if loaded and len(failed) == len(loaded):
        raise CheckpointError("; ".join(failed))
    return loaded


def load_model(
    name: str | None,
    file: str | None,
    options: ModelOptions,
    iterations: int | None = None,
    device: str | torch.device = "cpu",
) -> Model:
    """One model with the settings of `options`, whose names, checkpoints and iterations are not looked at.

    Raises:
        SpecError, CheckpointError: as `load_models`.
    """
    if name is not None and is_import_path(name):
        model = _imported(name, file, options, iterations, device)
        if not hasattr(model, "variant"):
            return model
        classifier: Classifier = model  # type: ignore[assignment]
    else:
        from robustkpca.models.checkpoints import load_classifier

        classifier = load_classifier(
            name,
            file,
            weights=options.weights,
            iterations=iterations,
            lam=options.lam,
            layers=options.layers,
            heads=options.heads,
            img_size=options.img_size,
            classes=options.classes,
            device=device,
        )
    if options.dtype == "float32" and not (options.compiled or options.checkpointed):
        return classifier
    from robustkpca.models.classifier import DTYPES

    return classifier.variant(dtype=DTYPES[options.dtype], compiled=options.compiled, checkpointed=options.checkpointed)


def _imported(
    path: str, file: str | None, options: ModelOptions, iterations: int | None, device: str | torch.device
) -> Model:
    """What the code of others makes. A Classifier is taken as one of our own over the same weights;
    theirs is left as it is."""
    from robustkpca.models.classifier import Classifier

    settings: dict[str, Any] = {
        "--checkpoint": file,
        "--weights": options.weights if options.weights != "raw" else None,
        "--iterations": iterations,
        "--lambda": options.lam,
        "--layers": options.layers,
        "--heads": options.heads,
        "--img-size": options.img_size,
        "--classes": options.classes or None,
    }
    if given := [flag for flag, value in settings.items() if value is not None]:
        raise SpecError(f"{', '.join(given)}: no settings of {path}, which makes its model itself")
    made: Model = call_object(path, what="model", expected=Model)
    if not isinstance(made, Classifier):
        made.source = path
        return made
    classifier = made.twin()
    classifier.source = path
    return classifier.to(device)
