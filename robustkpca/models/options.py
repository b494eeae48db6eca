"""Which models, and how they run: the options that the command line, a models file and Python share. No torch here."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field

from robustkpca.config import Frozen, composed, read_text, read_toml
from robustkpca.errors import SpecError, unknown
from robustkpca.extensions import is_import_path
from robustkpca.models.settings import EMBEDDED, RPC_TIMM, TIMM, Layers, layers_of, split_name

NO_FILE = "embedded"  # stands for no file in a list of checkpoints
_BETWEEN = re.compile(r",|(?<![eE])\+")  # several values: 1,2,4 or 1+2+4, and 1e+2 is one
_OWN = ("model", "checkpoint", "name", "group")  # what only one model can have
WAYS = ("dtype", "compiled", "checkpointed")  # what only all models can have: precision and speed are compared alike


def _numbers(kind: type[int] | type[float], expected: str) -> BeforeValidator:
    """Several numbers from text such as `1,2,4`, from one number, or from a list."""

    def parse(value: Any) -> Any:
        parts = _BETWEEN.split(value) if isinstance(value, str) else value
        parts = parts if isinstance(parts, list | tuple) else [parts]
        try:
            return tuple(dict.fromkeys(kind(part) if isinstance(part, str) else part for part in parts))
        except (TypeError, ValueError):
            raise ValueError(f"expected {expected}, or several such as 1,2,4") from None

    return BeforeValidator(parse)


def _places(value: Any) -> Any:
    """One choice of layers or several: `first`, [1, 3], or ["first", "1,3"]."""
    value = [value] if isinstance(value, int) else value
    choices = value if isinstance(value, list | tuple) and not all(isinstance(v, int) for v in value) else [value]
    return tuple(layers_of(choice) if isinstance(choice, str) else choice for choice in choices)


class ModelOptions(Frozen):
    """One model and its settings; or, without a model and file, settings for all models that have them.

    The words are those of the command line's options, of `--model NAME,key=value,...` and of a [[model]] table. A model
    with several values is loaded in every combination of them.

    model: an embedded model, FAMILY[-SIZE], `timm:NAME`, `hf-hub:ID`, or an import path `package.module:object` that
        gives a Classifier. None: the file says what it is.
    checkpoint: its file.
    name: what results call it. Without `model`, a name that is a model's is the model.
    group: models of one group are averaged.
    weights: which weights of a file that holds both.
    iterations: n of PAP, at least 1. Empty: as the file says.
    lam: weight of the sparse part, above 0. Empty: as the file says.
    layers: those with RPC-Attention. Empty: as the file says.
    heads: of weights whose size is none of the known ones.
    img_size: side in pixels, other than the weights'.
    classes: file with the names of the logits, one a line, for weights without names.
    dtype, compiled, checkpointed: see `Classifier.variant`; for all models only.
    """

    model: str | None = None
    checkpoint: str | None = None
    name: str | None = Field(default=None, min_length=1)
    group: str | None = Field(default=None, min_length=1)
    weights: Literal["raw", "ema"] = "raw"
    iterations: Annotated[tuple[Annotated[int, Field(ge=1)], ...], _numbers(int, "a whole number")] = ()
    lam: Annotated[
        tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...], _numbers(float, "a number above 0")
    ] = Field(default=(), alias="lambda")
    layers: Annotated[tuple[Layers, ...], BeforeValidator(_places)] = ()
    heads: int | None = Field(default=None, ge=1)
    img_size: int | None = Field(default=None, ge=1)
    classes: Path | None = None
    dtype: Literal["float32", "bf16"] = "float32"
    compiled: bool = Field(default=False, alias="compile")
    checkpointed: bool = Field(default=False, alias="grad_checkpointing")

    @classmethod
    def read(cls, data: Mapping[str, Any], what: str) -> Self:
        """The options of one model from the words of a table or of `--model`; `img-size` is `img_size`.

        Raises:
            SpecError: an unknown word or model, a value that makes no sense, or nothing that says which model.
        """
        values = {key.replace("-", "_"): value for key, value in data.items()}
        if strange := [key for key in values if key not in KEYS]:
            raise SpecError(f"{what}: {unknown('key', strange[0], KEYS)}")
        if values.get("checkpoint") == NO_FILE:
            del values["checkpoint"]
        if values.get("model") is None and isinstance(values.get("name"), str) and is_model(values["name"]):
            values["model"] = values.pop("name")
        options = cls.parse(values, what)
        if options.model is None and options.checkpoint is None and options.name is None:
            raise SpecError(f"{what}: expected a model or a checkpoint, got {', '.join(values) or 'nothing'}")
        if options.model is not None or options.checkpoint is None:
            try:
                _check_model(options.model or options.name or "")
            except SpecError as error:
                raise SpecError(f"{what}: {error}") from None
        return options

    @classmethod
    def of_flags(cls, flags: Mapping[str, Any]) -> Self:
        """Settings for all models from options by their words; what was not given is None, False or empty.

        Raises:
            SpecError: a value that makes no sense.
        """
        values = {word: value for word, value in flags.items() if value not in (None, False, [])}
        for word, value in values.items():
            cls.parse({word: value}, _flag(word))
        return cls.parse(values, "options")

    @classmethod
    def of_text(cls, text: str) -> Self:
        """`NAME`, or `NAME,key=value,...`; several numbers of one key stand with + between them.

        Raises:
            SpecError: as `read`.
        """
        if "," not in text and "=" not in text:
            _check_model(text)
            return cls(model=text)
        what = f"--model {text!r}"
        values: dict[str, str] = {}
        for number, part in enumerate(text.split(",")):
            key, equals, value = (word.strip() for word in part.partition("="))
            if number == 0 and not equals:
                key, value = "model", key
            elif not (key and equals and value):
                raise SpecError(
                    f"{what}: expected key=value after each comma, got {part!r}; "
                    "several numbers are 1+2+4, and a path with a comma goes into --checkpoint or a models file"
                )
            if key in values:
                raise SpecError(f"{what}: {key} is given twice")
            values[key] = value
        return cls.read(values, what)

    @property
    def title(self) -> str:
        """What messages call it before it is loaded."""
        return self.name or self.checkpoint or self.model or ""

    @property
    def given(self) -> frozenset[str]:
        """The fields of settings that differ from their defaults."""
        fields = type(self).model_fields
        return frozenset(f for f in fields if f not in _OWN and getattr(self, f) != fields[f].default)

    def with_settings(self, shared: ModelOptions, fields: Iterable[str]) -> Self:
        """The same model with these fields of `shared`."""
        return self.model_copy(update={field: getattr(shared, field) for field in fields})

    def variants(self) -> list[Self]:
        """One for each combination of iterations, lambda and layers."""
        iterations: list[tuple[int, ...]] = [(n,) for n in self.iterations] or [()]
        lambdas: list[tuple[float, ...]] = [(lam,) for lam in self.lam] or [()]
        layers: list[tuple[Layers, ...]] = [(place,) for place in self.layers] or [()]
        return [
            self.model_copy(update={"iterations": n, "lam": lam, "layers": place})
            for place, lam, n in itertools.product(layers, lambdas, iterations)
        ]

    def text_of(self, field: str) -> str:
        """A setting as the command line has it, such as `--lambda 1,4` or `--compile`."""
        flag, value = flag_of(field), getattr(self, field)
        if value is True:
            return flag
        if field == "layers":
            return " ".join(f"{flag} {v if isinstance(v, str) else ','.join(map(str, v))}" for v in value)
        numbers = value if isinstance(value, tuple) else (value,)
        return f"{flag} {','.join(f'{v:.12g}' if isinstance(v, float) else str(v) for v in numbers)}"


KEYS = tuple(field.alias or name for name, field in ModelOptions.model_fields.items() if name not in WAYS)


def flag_of(field: str) -> str:
    """A field as an option of the command line, e.g. `--grad-checkpointing`."""
    return _flag(ModelOptions.model_fields[field].alias or field)


def _flag(word: str) -> str:
    return f"--{word.replace('_', '-')}"


def _check_model(name: str) -> None:
    """Raise SpecError for what is no model's name. Whether timm has a model, and code of others, is not looked at."""
    if name not in EMBEDDED and not name.removeprefix(RPC_TIMM).startswith(TIMM) and not is_import_path(name):
        split_name(name)


def is_model(name: str) -> bool:
    """Whether this is a model's name, in its form."""
    try:
        _check_model(name)
    except SpecError:
        return False
    return True


def read_models_file(path: Path) -> list[ModelOptions]:
    """The models of a TOML file of [[model]] tables. Relative paths in it count from the working directory.

    Raises:
        SpecError: a file that cannot be read, or a table that makes no sense.
    """
    data = read_toml(path, "models")
    tables = data.get("model")
    if set(data) != {"model"} or not isinstance(tables, list) or not tables:
        raise SpecError(f"models {path}: expected [[model]] tables, got {', '.join(data) or 'nothing'}")
    for number, table in enumerate(tables, start=1):
        if not isinstance(table, dict):
            raise SpecError(f"models {path}, number {number}: expected a [[model]] table, got {table!r}")
    return [ModelOptions.read(table, f"models {path}, number {i}") for i, table in enumerate(tables, start=1)]


def with_checkpoints(models: Sequence[ModelOptions], files: Sequence[str]) -> list[ModelOptions]:
    """Models with these files, which go in order to those that have none; files alone are models that say what they
    are.

    Raises:
        SpecError: not as many files as models without one.
    """
    chosen = [None if file == NO_FILE else file for file in files]
    if not models:
        return [ModelOptions(checkpoint=file) for file in chosen if file is not None]
    open_places = [i for i, model in enumerate(models) if model.checkpoint is None]
    if files and len(files) != len(open_places):
        own = " that has none of its own" if len(open_places) < len(models) else ""
        raise SpecError(
            f"--checkpoint: expected one for each --model{own} ({len(open_places)}), got {len(files)}; "
            f"`{NO_FILE}` is one"
        )
    paired = dict(zip(open_places, chosen, strict=False))
    return [m.model_copy(update={"checkpoint": paired[i]}) if i in paired else m for i, m in enumerate(models)]


def class_names(path: Path) -> tuple[str, ...]:
    """Names of logits, one a line. Raises SpecError for a file that cannot be read."""
    try:
        return tuple(composed(line.strip()) for line in read_text(path).splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"--classes {path}: {error}") from None
