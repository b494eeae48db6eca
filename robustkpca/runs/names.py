"""How models are named wherever their results are shown: in one run, in a table of several, and as trainings of one.

A name is the user's own for the model, or its title, and after it every setting that contradicts the weights' file.
What tells two models of one name apart is added only where it is needed, in the order of `_FACETS`, then the part of
the files' paths that differs, then hashes. So names are unique, and the order of the models does not change them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from robustkpca.errors import SpecError
from robustkpca.models.settings import ALL_CLASSES
from robustkpca.runs.request import ModelRecord, Request

# What readers of CSV (pandas, R) take for a missing value.
MISSING = frozenset(
    ["", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A", "NA",
     "NULL", "NaN", "None", "n/a", "nan", "null"]
)  # fmt: skip


def refuse_missing(kind: str, name: str, hint: str) -> None:
    """Raises SpecError for a name that a table's readers take for a missing value; `hint`: how to choose another."""
    if name.strip() in MISSING:
        raise SpecError(f"{kind} {name!r}: readers of tables take this name for a missing value; {hint}")


def names(models: Sequence[ModelRecord]) -> list[str]:
    """A name for each model, all different. A label counts only for a model that has neither title nor settings."""
    bases = [base_name(model) for model in models]
    for same in _alike(bases):
        lambdas = {settings.rpc.lam for i in same if (settings := models[i].vision) and settings.rpc}
        for i in same if len(lambdas) > 1 else ():
            bases[i] = base_name(models[i], long=True)
    details: list[list[str]] = [[] for _ in models]

    def shown() -> list[str]:
        brackets = (f" [{', '.join(parts)}]" if parts else "" for parts in details)
        return [base + bracket for base, bracket in zip(bases, brackets, strict=True)]

    for facet in (*map(_each, _FACETS), _paths, _each(_weights), _each(_everything), _numbers):
        for same in _alike(shown()):
            texts = facet([models[i] for i in same])
            for i, text in zip(same, texts, strict=True):
                details[i] += [text] if text and len(set(texts)) > 1 else []
    return shown()


def labelled(models: Sequence[ModelRecord]) -> list[ModelRecord]:
    """Models as they are loaded, with their names as labels. Titles that labels or settings say are not kept."""
    done = []
    for model, name in zip(models, names(models), strict=True):
        refuse_missing("model", name, "give it another (name=..., or the title of a Classifier)")
        new = model.model_copy(update={"label": name})
        bare = new.model_copy(update={"title": None})
        done.append(bare if base_name(bare) == base_name(new) else new)
    return done


def across(requests: Sequence[Request]) -> list[dict[str, str]]:
    """For each request, by a model's label, its name among the models of all of them.

    Two models of two requests get one name where neither what decides their numbers nor what they are called tells them
    apart. Of a single request the names are the labels.
    """
    if len(requests) == 1:
        return [{model.label: model.label for model in requests[0].models}]
    whole = [[m.model_copy(update={"dtype": m.dtype or r.dtype}) for m in r.models] for r in requests]
    # Data sets that allow some classes only replace a model's own. Those tell apart where there are several.
    own: dict[str, set[str]] = {}
    for request, models in zip(requests, whole, strict=True):
        for model in models if request.data.argmax in (None, ALL_CLASSES) else ():
            own.setdefault(identity(model, classes=False), set()).add(identity(model))
    known: dict[tuple[str, int], ModelRecord] = {}
    places: list[dict[str, tuple[str, int]]] = []
    for models in whole:
        places.append({})
        keys: list[str] = []
        for model in sorted(models, key=ModelRecord.model_dump_json):  # the same numbers for the same models
            bare = identity(model, classes=False)
            keys.append(identity(model) if len(own.get(bare, ())) > 1 else bare)
            place = places[-1][model.label] = keys[-1], keys.count(keys[-1])
            known[place] = min(known.get(place, model), model, key=ModelRecord.model_dump_json)
    named = dict(zip(known, names(list(known.values())), strict=True))
    return [
        {model.label: named[inside[model.label]] for model in models}
        for models, inside in zip(whole, places, strict=True)
    ]


def base_name(model: ModelRecord, *, long: bool = False) -> str:
    """A model's name before anything is added to tell it apart; `long`: a title of settings with all RPC settings."""
    base, settings = model.given_name or model.title or model.label, model.vision
    if settings is not None and not model.given_name:
        titles = (settings.title, settings.long_title)
        if base in titles or (
            not model.title and base.startswith(tuple(t + c for t in titles for c in (" [", ", ", "'")))
        ):
            base = settings.long_title if long else settings.title
    return ", ".join([base, *(model.overrides or ())])


def identity(model: ModelRecord, *, classes: bool = True) -> str:
    """What decides a model's numbers, and what it is called, as text; `classes`: those it answers among included."""
    settings: Any = model.settings
    if model.vision is not None:
        left_out = None if classes else {"classes", "num_classes"}
        settings = model.vision.model_dump(mode="json", by_alias=True, exclude=left_out)
    weights = [model.weights, _choice(model)] if model.usable else [model.source, *model.notes]
    return json.dumps([base_name(model), weights, settings, model.dtype, _kernel(model)], sort_keys=True)


def _alike(shown: Sequence[str]) -> Iterator[list[int]]:
    """The places of each name that several have."""
    for name in dict.fromkeys(shown):
        if len(same := [i for i, other in enumerate(shown) if other == name]) > 1:
            yield same


Facet = Callable[[Sequence[ModelRecord]], list[str]]  # of models of one name, what may tell each apart


def _each(facet: Callable[[ModelRecord], str]) -> Facet:
    return lambda models: [facet(model) for model in models]


def _pursuit(model: ModelRecord) -> str:
    rpc = model.vision.rpc if model.vision else None
    return f"{rpc.label}, lambda {rpc.lam:g}" if rpc else ""


def _choice(model: ModelRecord) -> str:
    return model.weight_choice or ("raw" if model.usable else "")


def _precision(model: ModelRecord) -> str:
    return {"bfloat16": "bf16", None: ""}.get(model.dtype, model.dtype or "")


def _kernel(model: ModelRecord) -> str:
    """How attention is computed, as far as it rounds otherwise on one device."""
    return (model.attention or "").replace(", gradients by hand", "")


def _attention(model: ModelRecord) -> str:
    kernel = _kernel(model)
    return kernel if kernel.endswith("compiled") else f"attention {kernel}" if kernel else ""


def _image_size(model: ModelRecord) -> str:
    return f"{model.vision.preprocessing.img_size} px" if model.vision else ""


def _crop(model: ModelRecord) -> str:
    return f"{model.vision.preprocessing.crop_text}, {model.vision.preprocessing.interpolation}" if model.vision else ""


_SUFFIX = re.compile(r"(\.(pth|pt|th|ckpt|bin|tar|safetensors))+$")  # of weight files
_FACETS = (_pursuit, _choice, _precision, _attention, _image_size, _crop)


def _paths(models: Sequence[ModelRecord]) -> list[str]:
    """The shortest end of each file's path that no other has: `best`, or `exp1/best` beside `exp2/best`."""
    sources = {model.source for model in models}
    return [_end(model.source, sources - {model.source}) for model in models]


def _end(source: str, others: set[str]) -> str:
    bare = _SUFFIX.sub("", source)
    for whole in (bare, source):
        parts = whole.split("/")
        for count in range(1, len(parts) + 1):
            end = "/".join(parts[-count:])
            if end and not any(
                f"/{other}".endswith(f"/{end}") for path in others for other in (path, _SUFFIX.sub("", path))
            ):
                return end
    return source


def _weights(model: ModelRecord) -> str:
    return f"weights {model.weights[:8]}" if model.weights else ""


def _everything(model: ModelRecord) -> str:
    return f"settings {hashlib.sha256(identity(model).encode()).hexdigest()[:8]}"


def _numbers(models: Sequence[ModelRecord]) -> list[str]:
    """Numbers, in an order that is not that of the models: they are alike, or their names were chosen so."""
    order = sorted(range(len(models)), key=lambda i: identity(models[i]))
    return [f"#{order.index(i) + 1}" for i in range(len(models))]
