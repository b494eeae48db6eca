"""Runs of format 1, as robustkpca wrote them before tasks: read, compared and reported as they were measured."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from robustkpca.errors import RunError
from robustkpca.runs.records import Record
from robustkpca.runs.request import Manifest, ModelRecord, Request, fingerprint
from robustkpca.suites.cell import CLEAN

BATCH_DEPENDENT = ("AutoAttack", "CW")  # methods of that time whose results depend on the batch size

SEARCHES = {  # what findings may expect of the methods of that time
    "FGSM": "one-step",
    **dict.fromkeys(("PGD", "BestPGD", "BIM", "MIFGSM", "PGDL2", "APGD", "APGDT", "FABT", "CW"), "iterated"),
    **dict.fromkeys(("AutoAttack", "SLD"), "iterated"),
    **dict.fromkeys(("Square", "SPSA", "UniformNoise"), "blind"),
}


def manifest_of(plain: dict[str, Any], where: str) -> tuple[Manifest, list[Record]]:
    """The manifest and the records of a run.json of format 1. Raises RunError where it was changed by hand."""
    request = plain["request"]
    if plain["fingerprint"] != fingerprint(request):
        raise RunError(f"{where}: run.json was changed by hand, its fingerprint does not match its request")
    models = [_model(model) for model in request["models"]]
    methods = {attack["method"] for suite in request["suites"] for attack in suite["attack"]}
    decides = sorted(methods & set(BATCH_DEPENDENT))
    searches = {method: SEARCHES[method] for method in sorted(methods & SEARCHES.keys())}
    suites = [_suite(suite) for suite in request["suites"]]
    changed = {"models": models, "suites": suites, "batch_decides": decides, "searches": searches}
    new: Request = Request.parse({**request, **changed}, where)
    records = [
        Record(model=label, times=_by_attack(plain.get("times", {}), label),
               failures=_by_attack(plain["failures"], label), health=plain.get("probes", {}).get(label))
        for label in new.labels
    ]  # fmt: skip
    manifest = Manifest(format=1, fingerprint=plain["fingerprint"], request=new, environment=plain["environment"])
    return manifest, records


def _model(plain: dict[str, Any]) -> ModelRecord:
    model: ModelRecord = ModelRecord.parse(plain, "model of a run")
    return model


def _suite(plain: dict[str, Any]) -> dict[str, Any]:
    """Threat models had no kinds, and corruptions stood beside them."""
    rest = {key: value for key, value in plain.items() if key not in ("corruptions", "severities")}
    if plain["corruptions"]:
        names, severities = plain["corruptions"], plain["severities"]
        return rest | {"threat": {"kind": "corruptions", "names": names, "severities": severities}}
    return rest


def _by_attack(values: dict[str, Any], label: str) -> dict[str, Any]:
    """What format 1 kept under "model, tab, attack"."""
    pairs = ((key.partition("\t"), value) for key, value in values.items())
    return {attack: value for (model, _, attack), value in pairs if model == label}


def rows_of(table: pa.Table) -> pa.Table:
    """Rows of format 1 in the columns of format 2."""
    table = table.rename_columns(["perturbation" if name == "attack" else name for name in table.column_names])
    n = len(table)
    clean = pc.equal(table["budget"], "")
    right = pc.equal(table["clean_prediction"], table["label"])
    broken = pc.if_else(
        pc.or_(pc.equal(table["perturbation"], CLEAN), clean),
        pa.scalar(None, pa.bool_()),
        pc.and_(right, pc.invert(table["correct"])),
    )
    return (
        table.append_column("cluster", pa.nulls(n, pa.string()))
        .append_column("queries", pa.nulls(n, pa.int64()))
        .append_column("broken", broken)
    )
