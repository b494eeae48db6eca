"""The tables of a run as people read them, with the notes their numbers need, and the receipt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd

from robustkpca import metrics
from robustkpca.outcomes import Run
from robustkpca.settings import ModelSettings
from robustkpca.spec import BATCH_DEPENDENT, CLEAN, OUT_OF_DISTRIBUTION, Cell, Suite
from robustkpca.tables import WORST, accuracy_table, breakers, compare, compared_columns, over_seeds


@dataclass(frozen=True)
class View:
    """A table to look at: a title, text cells with models as rows, and notes that its numbers need."""

    title: str
    cells: pd.DataFrame
    notes: tuple[str, ...] = ()


def views(run: Run, *, compared: bool = True) -> list[View]:
    """The tables of a run as people read them: one for each suite, then the paired comparison."""
    if OUT_OF_DISTRIBUTION in run.conditions:
        return [_detection_view(run)]
    if Cell(CLEAN, "") not in run.conditions:
        return [_released_view(run)]
    long = accuracy_table(run)
    found: list[View | None] = []
    for suite in run.suites:
        if suite.corruptions:
            found.append(_corruption_view(long, suite))
        elif len(suite.attack) == 1:
            found.append(_attack_view(run, long, suite))
        else:
            found += [_attacks_view(run, long, suite), _breakers_view(run, suite) if compared else None]
    if not run.suites:
        found.append(_clean_view(run, long))
    if len(run.models) > 1 and compared:
        found += [_comparison_view(run), _seeds_view(run)]
    return [view for view in found if view is not None]


def share(value: float) -> str:
    """A share in [0, 1] as per cent with one decimal."""
    return f"{100 * value:.1f}"


def with_interval(row: pd.Series) -> str:
    """`87.1 (84.9–89.0)`, or the status of a cell that has no figure."""
    if row["status"] != "complete":
        return str(row["status"])
    return f"{share(row['accuracy'])} ({share(row['low'])}–{share(row['high'])})"


def _attack_view(run: Run, long: pd.DataFrame, suite: Suite) -> View:
    """Models as rows, budgets as columns."""
    part = long[(long["suite"] == suite.name) | (long["attack"] == CLEAN)]
    heads = {b: "clean" if not b else f"eps {b}" for b in part["budget"]}
    cells = pd.DataFrame(index=pd.Index(run.models, name="model"), columns=list(heads.values()), dtype=object)
    for _, row in part.iterrows():
        cells.loc[row["model"], heads[row["budget"]]] = with_interval(row)
    return View(f"{suite.title} ({suite.name})", cells, _attack_notes(run, suite))


def _attack_notes(run: Run, suite: Suite) -> tuple[str, ...]:
    notes = [f"Accuracy in % over all {run.n} samples with 95 % Wilson interval.", f"{suite.name}: {suite.describe()}."]
    if suite.cascade:
        notes.insert(1, "Each row counts what the attacks up to it left right.")
    return tuple(notes)


def _attacks_view(run: Run, long: pd.DataFrame, suite: Suite) -> View:
    """A suite of several attacks: attacks and budgets as rows, models as columns, the worst case after each budget."""
    part = long[(long["suite"] == suite.name) | (long["attack"] == CLEAN)]
    names = [(label, label.removeprefix(f"{suite.name}/")) for label in [*suite.attacks, f"{suite.name}/{WORST}"]]
    rows = {(CLEAN, ""): "clean"} | {(x, b): f"{name} eps {b}" for b in suite.budgets for x, name in names}
    cells = pd.DataFrame(index=pd.Index(rows.values(), name="attack"), columns=run.models, dtype=object)
    for _, row in part.iterrows():
        cells.loc[rows[row["attack"], row["budget"]], row["model"]] = with_interval(row)
    return View(f"{suite.title} ({suite.name})", cells, _attack_notes(run, suite))


def _breakers_view(run: Run, suite: Suite) -> View | None:
    """How many samples each attack broke, and how many only it did."""
    found = breakers(run)
    found = found[found["suite"] == suite.name]
    if found.empty:
        return None
    rows = {(x, b): f"{x.removeprefix(f'{suite.name}/')} eps {b}" for b in suite.budgets for x in suite.attacks}
    cells = pd.DataFrame(
        "not available", index=pd.Index(rows.values(), name="attack"), columns=run.models, dtype=object
    )
    for row in found.itertuples():
        alone = "" if suite.cascade else f" ({row.alone} by it alone)"
        cells.loc[rows[row.attack, row.budget], row.model] = f"{row.broken}{alone}"
    note = "that none before it had broken" if suite.cascade else "that were right when clean"
    return View(f"Which attack broke the images ({suite.name})", cells, (f"Numbers of images, of {run.n}, {note}.",))


def _seeds_view(run: Run) -> View | None:
    """Means over checkpoints of one model."""
    found = over_seeds(run)
    if found.empty:
        return None
    rows = {(r.suite, r.attack, r.budget): _cell_name(r.attack, r.budget) for r in found.itertuples()}
    heads = {r.model: f"{r.model}, {r.seeds} seeds" for r in found.itertuples()}
    cells = pd.DataFrame(
        "not available", index=pd.Index(rows.values(), name="attack"), columns=list(heads.values()), dtype=object
    )
    for r in found.itertuples():
        text = f"{share(r.mean)} ({share(r.low)} to {share(r.high)})"
        cells.loc[rows[r.suite, r.attack, r.budget], heads[r.model]] = text
    notes = (
        "Accuracy in %: mean over checkpoints of the same settings, and its 95 % Student t interval, which is about new trainings.",
    )
    return View("Over seeds", cells, notes)


def _cell_name(attack: str, budget: str) -> str:
    return f"{attack} eps {budget}" if budget else attack


def _corruption_view(long: pd.DataFrame, suite: Suite) -> View:
    """Corruptions as rows, models as columns, accuracy averaged over severities; the mean only where all are there."""
    models = list(dict.fromkeys(long["model"]))
    part = long[long["suite"] == suite.name]
    cells = pd.DataFrame(
        index=pd.Index(["clean", *suite.corruptions, "mean"], name="corruption"), columns=models, dtype=object
    )
    for model in models:
        own = part[part["model"] == model]
        clean = long[(long["model"] == model) & (long["attack"] == CLEAN)].iloc[0]
        cells.loc["clean", model] = share(clean["accuracy"]) if clean["status"] == "complete" else clean["status"]
        means = []
        for name in suite.corruptions:
            rows = own[own["attack"] == suite.label(name)]
            bad = rows.loc[rows["status"] != "complete", "status"]
            if bad.empty:
                means.append(float(rows["accuracy"].mean()))
                cells.loc[name, model] = share(means[-1])
            else:
                cells.loc[name, model] = f"{bad.iloc[0]} ({len(bad)} of {len(rows)} severities)"
        whole = len(means) == len(suite.corruptions)
        cells.loc["mean", model] = share(sum(means) / len(means)) if whole else "not available"
    n = part["n"].max()
    notes = (
        f"Accuracy in %, mean over severities {', '.join(map(str, suite.severities))}, each over "
        f"{'all samples' if pd.isna(n) else f'all {n} samples'}; the mean is over the {len(suite.corruptions)} corruptions.",
        "Generated on the fly by robustkpca, not the released ImageNet-C images: not to be compared with figures on those.",
    )
    return View(f"{suite.title} ({suite.name})", cells, notes)


def _clean_view(run: Run, long: pd.DataFrame) -> View:
    cells = pd.DataFrame(index=pd.Index(run.models, name="model"), columns=["top-1", "top-5"], dtype=object)
    for _, row in long.iterrows():
        top5 = "not available" if pd.isna(row["top5"]) else share(row["top5"])
        cells.loc[row["model"]] = [with_interval(row), top5]
    notes = (
        f"Accuracy in % over all {run.n} samples, top-1 with 95 % Wilson interval; answers "
        f"{run.request['data']['argmax']}. Top-5 needs more than 5 classes.",
    )
    return View(f"Clean accuracy on {run.request['data']['name']}", cells, notes)


def _released_view(run: Run) -> View:
    """Released ImageNet-C: mean error and CE per corruption, then mean error and mCE over the 15."""
    table = metrics.corruption_table(run)
    names = list(dict.fromkeys(table["corruption"]))
    cells = pd.DataFrame(
        index=pd.Index([*names, "mean error of the 15", "mCE"], name="corruption"), columns=run.models, dtype=object
    )
    for model in run.models:
        own = table[table["model"] == model].set_index("corruption")
        for name in names:
            row = own.loc[name]
            if row["status"] != "complete":
                cells.loc[name, model] = row["status"]
            else:
                ce = "no AlexNet error" if pd.isna(row["ce"]) else f"CE {row['ce']:.1f}"
                cells.loc[name, model] = f"{row['mean_error']:.1f} ({ce})"
        means = {name: (None if pd.isna(v) else float(v)) for name, v in own["mean_error"].items()}
        known = [means.get(name) for name in metrics.ALEXNET]
        mce = metrics.mean_corruption_error(means)
        whole = mce is not None
        cells.loc["mean error of the 15", model] = f"{sum(known) / len(known):.1f}" if whole else "not available"  # type: ignore[arg-type]
        cells.loc["mCE", model] = f"{mce:.2f}" if whole else "not available"
    notes = (
        "Top-1 error in %, mean over severities 1 to 5 of the released images (cropped, not resized), and CE: that error by AlexNet's. "
        "mCE is the mean CE over exactly the 15 corruptions of the benchmark, each normalised first.",
    )
    return View("ImageNet-C, released images", cells, notes)


def _detection_view(run: Run) -> View:
    table = metrics.detection_table(run).set_index("model")
    heads = ["AUPR", "AUROC", "FPR95", "in / out of distribution"]
    cells = pd.DataFrame(index=pd.Index(run.models, name="model"), columns=heads, dtype=object)
    for model in run.models:
        row = table.loc[model]
        if row["status"] == "complete":
            areas = [share(row[k]) for k in ("aupr", "auroc", "fpr95")]
            cells.loc[model] = [*areas, f"{row['n_in']} / {row['n_out']}"]
        else:
            cells.loc[model] = [row["status"]] * 4
    notes = (
        "In %. Out of distribution is the positive class, the score is minus the largest softmax probability, answers "
        f"{run.request['data']['argmax']}. AUPR depends on the ratio of the two counts.",
    )
    return View("ImageNet-O, out-of-distribution detection", cells, notes)


def _comparison_view(run: Run) -> View:
    """Cells as rows, models as columns; a corruption suite is one row, its mean."""
    frame = compare(run)
    rest = run.models[1:]
    rows: dict[str, list[str]] = {}
    for suite, cell, _ in compared_columns(run):
        if any(s.name == suite and s.corruptions for s in run.suites):
            continue
        here = frame[(frame["attack"] == cell.attack) & (frame["budget"] == cell.budget)].set_index("model")
        name = "clean" if cell.attack == CLEAN else f"{cell.attack} eps {cell.budget}"
        rows[name] = [_difference(here.loc[m]) if m in here.index else "not available" for m in rest]
    for suite_ in run.suites:
        if suite_.corruptions:
            parts = {m: frame[(frame["suite"] == suite_.name) & (frame["model"] == m)] for m in rest}
            rows[f"{suite_.name}, mean"] = [
                f"{100 * p['difference'].mean():+.1f}" if len(p) == len(suite_.cells) else "not available"
                for p in parts.values()
            ]
    cells = pd.DataFrame.from_dict(rows, orient="index", columns=rest, dtype=object)
    cells.index.name = f"minus {run.models[0]}"
    notes = (
        f"Difference in points to {run.models[0]} on the same {run.n} samples with its 95 % interval (Bonett and Price, paired); p: exact "
        "McNemar test, Holm-adjusted over all cells of this comparison (the intervals are not). p >= 0.05: not distinguishable.",
    )
    return View("Paired comparison", cells, notes)


def _difference(row: pd.Series) -> str:
    p = row["p_holm"]
    said = "p < 0.001" if p < 0.001 else f"p = {p:.3f}{'' if p < 0.05 else ', not distinguishable'}"
    return f"{100 * row['difference']:+.1f} ({100 * row['low']:+.1f} to {100 * row['high']:+.1f}; {said})"


def receipt(run: Run) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Everything that decided a number: one table with a row for each model, one with settings and values."""
    request, environment = run.request, run.manifest["environment"]
    data = request["data"]
    models = pd.DataFrame([_model_row(run, m) for m in request["models"]]).set_index("model").fillna("failed")
    settings = {
        "data": f"{data['name']}, n = {data['n']}, ids {data['ids']}, {data['content_covers']} {data['content']}",
        "images": "short side resized, then cropped" if data["resized"] else "cropped, not resized",
        "answers": data["argmax"],
        "ignored": ", ".join(environment.get("ignored", [])[:20]) or "none",
        **{f"suite {s.name} v{s.version}": s.describe() for s in run.suites},
        "seed": request["seed"],
        "batch size": f"{request['batch_size']} ({_batch(run)})",
        "dtype": request["dtype"],
        "device": request["device"]
        + (f" ({environment['cuda']})" if request["device"] == "cuda" else "")
        + (", deterministic" if environment.get("deterministic") else ""),
        "software": ", ".join(
            f"{k} {v}"
            for k, v in environment.items()
            if k not in ("cuda", "platform", "threads", "ignored", "deterministic")
        ),
        "platform": f"{environment['platform']}, {environment['threads']} threads",
        "fingerprint": run.manifest["fingerprint"],
    }
    frame = pd.DataFrame({"value": settings.values()}, index=pd.Index(settings.keys(), name="setting"), dtype=object)
    return models, frame


def receipt_lines(run: Run) -> list[str]:
    """The receipt in a few lines, for a terminal and for notes under a table."""
    request = run.request
    data, software = request["data"], request["software"]
    lines = [
        f"{data['name']}, n = {run.n}, ids {data['ids']}, {data['content_covers']} {data['content']}, answers {data['argmax']}; "
        f"seed {request['seed']}, batch size {request['batch_size']} ({_batch(run)}), {request['dtype']}, {request['device']}; "
        f"{', '.join(f'{k} {v}' for k, v in software.items())}; run {run.manifest['fingerprint']}."
    ]
    for m in request["models"]:
        if m["settings"] is not None:
            units = f"; {budgets_in_both_units(run, m)}" if budgets_in_both_units(run, m) else ""
            notes = "".join(f"; {note}" for note in m["notes"])
            lines.append(
                f"{m['label']}: weights {m['weights']}, attention {m.get('attention', 'not recorded')}{units}{notes}."
            )
    return lines


def budgets_in_both_units(run: Run, model: dict[str, Any]) -> str:
    """Every L-inf budget of a run in pixels and in the model's normalised units, which differ by channel where its std does."""
    std = model["settings"]["preprocessing"]["std"]
    texts = []
    for suite in run.suites:
        if suite.threat is None or suite.threat.norm != "linf":
            continue
        for text, eps in zip(suite.budgets, map(float, suite.threat.budgets), strict=True):
            if suite.threat.space == "pixel":
                values = sorted({f"{eps / s:.4f}" for s in std})
                said = (
                    f"eps {text} ({eps:.4f}) in pixels is {' to '.join(values[:: max(1, len(values) - 1)])} normalised"
                )
            else:
                values = sorted({f"{eps * s:.4f}" for s in std})
                said = (
                    f"eps {text} ({eps:.4f}) normalised is {' to '.join(values[:: max(1, len(values) - 1)])} in pixels"
                )
            texts.append(said)
    return "; ".join(dict.fromkeys(texts))


def _batch(run: Run) -> str:
    decided = sorted({a.method for s in run.suites for a in s.attack if a.method in BATCH_DEPENDENT})
    return f"it decides the figures of {', '.join(decided)}" if decided else "it decides no figure"


def _model_row(run: Run, model: dict[str, Any]) -> dict[str, object]:
    if model["settings"] is None:
        return {"model": model["label"], "source": model["source"], "notes": "; ".join(model["notes"])}
    settings = ModelSettings.parse(model["settings"], "model settings")
    p, rpc = settings.preprocessing, settings.rpc
    return {
        "model": model["label"],
        "weights": model["weights"],
        "source": model["source"],
        "iterations": rpc.iterations if rpc else "none",
        "lambda": f"{rpc.lam:g}" if rpc else "none",
        "layers": rpc.label.partition("/")[2] if rpc else "none",
        "attention": model.get("attention", "not recorded"),
        "input": f"{p.channels}x{p.img_size}x{p.img_size}, crop {p.crop_pct:g}, {p.interpolation}",
        "notes": "; ".join(model["notes"]) or "none",
        "mean / std": f"{', '.join(f'{v:g}' for v in p.mean)} / {', '.join(f'{v:g}' for v in p.std)}",
        "budgets": budgets_in_both_units(run, model) or "none",
        f"cosine of {run.request['dtype']} to float64 input gradients": _cosine(run.probes.get(model["label"], {})),
    }


def _cosine(probe: dict[str, Any]) -> str:
    if probe.get("cosine_worst") is None:
        return "not measured"
    return f"median {probe['cosine_median']:.3f}, worst {probe['cosine_worst']:.3f}"
