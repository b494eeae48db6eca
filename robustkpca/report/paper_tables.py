"""Tables with the paper's rows and columns, from one or several runs, with the paper's own figures beside the measured ones."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import resources

import numpy as np
import pandas as pd

from robustkpca.errors import SpecError
from robustkpca.report.provenance import receipt_lines
from robustkpca.results import imagenet_c, imagenet_o
from robustkpca.runs.request import differences
from robustkpca.runs.run import Run
from robustkpca.statistics import proportions
from robustkpca.suites.attack import BATCH_DEPENDENT
from robustkpca.suites.cell import CLEAN, OUT_OF_DISTRIBUTION, RELEASED, Cell
from robustkpca.suites.suite import Suite, load_suite, suite_names

# How the paper calls a data set, and how many images it has: a figure on fewer has no published counterpart.
PUBLISHED: dict[str, tuple[str, int]] = {
    "imagenet": ("imagenet-1k", 50_000),
    "imagenet-a": ("imagenet-a", 7_500),
    "imagenet-r": ("imagenet-r", 30_000),
    "imagenet-c": ("imagenet-c", 50_000 * 75),
    "imagenet-o": ("imagenet-o", 12_000),
}
Key = tuple[str, str, str]  # dataset, attack, metric, as reference/paper_tables.csv has them


@dataclass(frozen=True)
class Column:
    """One column: its head, whether higher is better, what its numbers rest on, and where the paper has it."""

    head: str
    higher: bool
    basis: str  # what decides its numbers; columns of one head and two bases are kept apart
    key: Key | None = None
    decimals: int = 2

    @property
    def title(self) -> str:
        return f"{self.head} {'↑' if self.higher else '↓'}"


@dataclass(frozen=True)
class Entry:
    """One cell: a figure, or why there is none. `correct` is per sample, for intervals and pairing."""

    value: float | None
    status: str = "complete"
    correct: pd.Series | None = None


@dataclass
class Table:
    """Models as rows in the order met, columns in the order of the layout."""

    title: str
    entries: dict[tuple[str, Column], Entry] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def models(self) -> list[str]:
        return list(dict.fromkeys(model for model, _ in self.entries))

    @property
    def columns(self) -> list[Column]:
        return list(dict.fromkeys(column for _, column in self.entries))

    @property
    def heads(self) -> dict[Column, str]:
        """Titles, told apart by a number where two columns have one head but not one basis."""
        columns = self.columns
        heads = {}
        for column in columns:
            same = [c for c in columns if c.head == column.head]
            heads[column] = column.title if len(same) == 1 else f"{column.title} [{same.index(column) + 1}]"
        return heads

    def add(self, model: str, column: Column, entry: Entry) -> None:
        if (model, column) in self.entries:
            raise SpecError(f"two runs hold {model}, {column.head}; a cell has one figure, leave one of the runs out")
        self.entries[model, column] = entry

    def values(self) -> pd.DataFrame:
        """The figures as numbers, NaN where there is none."""
        nothing = Entry(None)
        rows = [[self.entries.get((m, c), nothing).value for c in self.columns] for m in self.models]
        return pd.DataFrame(
            rows, index=pd.Index(self.models, name="model"), columns=list(self.heads.values()), dtype=float
        )

    def texts(
        self, *, intervals: bool = False, significance: bool = False, reference: bool = False, bold: str = "{}"
    ) -> pd.DataFrame:
        """The table as text: fixed decimals, the best of a column in `bold`, on request with 95 % Wilson intervals, with marks of
        significance against the first row, and with the paper's figures beside columns that have one (an empty one stays empty)."""
        marks = self.significance() if significance else {}
        published = self.published() if reference else {}
        columns: dict[str, list[str]] = {}
        for column, head in self.heads.items():
            best = self._best(column)
            own = []
            for model in self.models:
                entry = self.entries.get((model, column), Entry(None, "not run"))
                if entry.value is None:
                    own.append(entry.status)
                    continue
                text = f"{entry.value:.{column.decimals}f}"
                text = bold.format(text) if best is not None and text == best else text
                if intervals and entry.correct is not None:
                    low, high = proportions.wilson(int(entry.correct.sum()), len(entry.correct))
                    text += f" ({100 * low:.1f}–{100 * high:.1f})"
                own.append(text + marks.get((model, column), ""))
            columns[head] = own
            theirs = [published.get((model, column)) for model in self.models]
            if any(v is not None for v in theirs):
                columns[f"{head} paper"] = ["" if v is None else f"{v:.{column.decimals}f}" for v in theirs]
                measured = [self.entries.get((m, column), Entry(None)).value for m in self.models]
                columns[f"{head} difference"] = [
                    "" if a is None or b is None else f"{a - b:+.{column.decimals}f}"
                    for a, b in zip(measured, theirs, strict=True)
                ]
        return pd.DataFrame(columns, index=pd.Index(self.models, name="model"), dtype=object)

    def published(self) -> dict[tuple[str, Column], float]:
        """The paper's figures for cells of this table, where there are any."""
        figures = paper_figures()
        found = {(m, c): figures.get((c.key, paper_name(m))) for m, c in self.entries if c.key}
        return {cell: value for cell, value in found.items() if value is not None}

    def _best(self, column: Column) -> str | None:
        """The best figure as it is printed, where there are at least two to choose from."""
        figures = [e.value for (_, c), e in self.entries.items() if c == column and e.value is not None]
        if len(figures) < 2:
            return None
        return f"{(max if column.higher else min)(figures):.{column.decimals}f}"

    def significance(self) -> dict[tuple[str, Column], str]:
        """` *` where a model differs from the first row: exact McNemar test on the same samples, Holm-adjusted over the table."""
        if not self.models:
            return {}
        first, cells, p_values = self.models[0], [], []
        for (model, column), entry in self.entries.items():
            base = self.entries.get((first, column))
            if model == first or base is None or base.correct is None or entry.correct is None:
                continue
            ours = entry.correct.reindex(base.correct.index)
            if ours.isna().any():
                continue
            cells.append((model, column))
            p_values.append(proportions.Paired.of(base.correct.to_numpy(bool), ours.to_numpy(bool)).p_value)
        adjusted = proportions.holm(np.array(p_values))
        return {cell: " *" for cell, p in zip(cells, adjusted, strict=True) if p < 0.05}


def paper_name(label: str) -> str:
    """`RPC-SymViT-tiny (4iter/layer1)` as the reference file writes it."""
    return label.replace("(", "").replace(")", "")


def paper_figures() -> dict[tuple[Key, str], float]:
    """The published figures (arXiv 2406.13762), by key and model."""
    text = (resources.files("robustkpca") / "reference" / "paper_tables.csv").read_text(encoding="utf-8")
    return {
        ((row["dataset"], row["attack"], row["metric"]), row["model"]): float(row["value"])
        for row in csv.DictReader(text.splitlines())
    }


def _facts(run: Run, suite: Suite | None = None) -> dict[str, object]:
    """What decides the numbers of a column, but not the model."""
    request = run.request
    facts: dict[str, object] = {k: request[k] for k in ("seed", "dtype", "device", "software")}
    facts["data"] = {k: v for k, v in request["data"].items() if k != "conditions"}
    if suite is not None:
        facts["suite"] = suite.model_dump(mode="json")
        if any(a.method in BATCH_DEPENDENT for a in suite.attack):
            facts["batch_size"] = request["batch_size"]
    return facts


def _basis(run: Run, suite: Suite | None = None) -> str:
    """The facts of a column as text: data, argmax, seed, precision, device, versions, threat model and parameters."""
    return json.dumps(_facts(run, suite), sort_keys=True)


def _key(run: Run, attack: str, metric: str, suite: Suite | None = None) -> Key | None:
    """Where the paper has this figure; None unless protocol, data and budget are the paper's."""
    name, n = PUBLISHED.get(run.request["data"]["name"], ("", 0))
    if not name or run.n != n or (suite is not None and not _is_the_papers(suite)):
        return None
    return name, attack, metric


def _is_the_papers(suite: Suite) -> bool:
    """Whether a suite is one of the package's paper suites, with its parameters and its highest budget."""
    if suite.protocol != "paper" or suite.name not in suite_names():
        return False
    theirs = load_suite(suite.name)
    assert suite.threat and theirs.threat
    same_threat = suite.threat.model_copy(update={"eps": ()}) == theirs.threat.model_copy(update={"eps": ()})
    return same_threat and suite.attack == theirs.attack and suite.budgets[-1] == theirs.budgets[-1]


def _accuracy(run: Run, model: str, cell: Cell, column: str = "correct") -> Entry:
    status = run.status(model, cell)
    if status.text != "complete":
        return Entry(None, status.text)
    values = run.cell_rows(model, cell)[column]
    if values.isna().any():
        return Entry(None, "not available")
    values = values.astype(bool)
    return Entry(100 * float(values.mean()), correct=values)


def attacks(runs: Sequence[Run]) -> Table:
    """Top-1 and top-5 under each attack at its highest budget (the paper's table of attacked ImageNet-1K)."""
    table = Table("Accuracy under attack, highest perturbation (%)")
    for run in runs:
        for suite in run.suites:
            if suite.corruptions:
                continue
            for attack in suite.attacks:
                cell = Cell(attack, suite.budgets[-1])
                name = attack.removesuffix("-paper")
                for metric, column in (("top1", "correct"), ("top5", "correct_top5")):
                    head = f"{attack} {cell.budget} {metric.replace('top', 'top-')}"
                    where = Column(head, True, _basis(run, suite), _key(run, name, metric, suite))
                    for model in run.models:
                        table.add(model, where, _accuracy(run, model, cell, column))
    return _with_notes(table, runs)


def budgets(runs: Sequence[Run]) -> Table:
    """Top-1 at every budget of every attack, after the clean figure."""
    table = Table("Accuracy over perturbation budgets, top-1 (%)")
    for run in runs:
        clean = Column("clean", True, _basis(run))
        for model in run.models:
            if (model, clean) not in table.entries:
                table.add(model, clean, _accuracy(run, model, Cell(CLEAN, "")))
        for suite in run.suites:
            for cell in suite.cells if not suite.corruptions else ():
                where = Column(f"{cell.attack} {cell.budget}", True, _basis(run, suite))
                for model in run.models:
                    table.add(model, where, _accuracy(run, model, cell))
    return _with_notes(table, runs)


def corruptions(runs: Sequence[Run]) -> Table:
    """Error per corruption (mean over severities), their mean, and mCE. Generated corruptions have no CE: they are not the released ones."""
    table = Table("Corruption error, top-1 (%)")
    for run in runs:
        if any(cell.attack.startswith(f"{RELEASED}/") for cell in run.conditions):
            _released(table, run)
        for suite in run.suites:
            if suite.corruptions:
                _generated(table, run, suite)
    return _with_notes(table, runs)


def _released(table: Table, run: Run) -> None:
    frame = imagenet_c.corruption_table(run)
    for model in run.models:
        own = frame[frame["model"] == model].set_index("corruption")
        means = {name: None if pd.isna(v) else float(v) for name, v in own["mean_error"].items()}
        for name, mean in means.items():
            status = str(own.loc[name, "status"])
            table.add(model, Column(str(name), False, _basis(run)), Entry(mean, status))
        mce = imagenet_c.mean_corruption_error(means)
        known = [means[n] for n in imagenet_c.ALEXNET if means.get(n) is not None]
        mean = float(np.mean(known)) if mce is not None else None  # type: ignore[arg-type]
        table.add(model, Column("mean error", False, _basis(run)), Entry(mean, "not available"))
        key = _key(run, "none", "mce")
        table.add(model, Column("mCE", False, _basis(run), key), Entry(mce, "not available"))


def _generated(table: Table, run: Run, suite: Suite) -> None:
    for model in run.models:
        means: list[float | None] = []
        for name in suite.corruptions:
            entries = [_accuracy(run, model, Cell(suite.label(name), b)) for b in suite.budgets]
            bad = [e.status for e in entries if e.value is None]
            mean = None if bad else float(np.mean([100 - e.value for e in entries]))  # type: ignore[operator]
            means.append(mean)
            table.add(
                model,
                Column(f"{name} (generated)", False, _basis(run, suite)),
                Entry(mean, bad[0] if bad else "complete"),
            )
        whole = None if None in means else float(np.mean(means))  # type: ignore[arg-type]
        table.add(model, Column("mean error (generated)", False, _basis(run, suite)), Entry(whole, "not available"))


def robustness(runs: Sequence[Run]) -> Table:
    """The paper's main table: clean, ImageNet-R, -A, -C and -O, one run for each data set."""
    table = Table("Robustness (%)")
    for run in runs:
        name = run.request["data"]["name"]
        for model in run.models:
            if OUT_OF_DISTRIBUTION in run.conditions:
                row = imagenet_o.detection_table(run).set_index("model").loc[model]
                value = None if pd.isna(row["aupr"]) else 100 * float(row["aupr"])
                column = Column(f"{name} AUPR", True, _basis(run), _key(run, "none", "aupr"))
                table.add(model, column, Entry(value, str(row["status"])))
            elif any(cell.attack.startswith(f"{RELEASED}/") for cell in run.conditions):
                _robust_c(table, run, model)
            else:
                for metric, which in (("top1", "correct"), ("top5", "correct_top5")):
                    column = Column(
                        f"{name} {metric.replace('top', 'top-')}", True, _basis(run), _key(run, "none", metric)
                    )
                    table.add(model, column, _accuracy(run, model, Cell(CLEAN, ""), which))
    return _with_notes(table, runs)


def runtime(runs: Sequence[Run]) -> Table:
    """Parameters, and wall milliseconds an image and budget, clean and under each attack, on the machine and batch size of the run."""
    table = Table("Runtime")
    for run in runs:
        place = json.dumps(
            {
                "environment": run.manifest["environment"],
                "batch": run.request["batch_size"],
                "device": run.request["device"],
            },
            sort_keys=True,
        )
        for described in run.request["models"]:
            model = described["label"]
            if described.get("parameters"):
                count = Column("parameters (million)", False, "", decimals=3)
                if (model, count) not in table.entries:
                    table.add(model, count, Entry(described["parameters"] / 1e6))
            for attack in dict.fromkeys(cell.attack for cell in run.cells):
                seconds, images = run.manifest.get("times", {}).get(f"{model}\t{attack}", (0.0, 0))
                column = Column(f"{attack} ms/image", False, place)
                table.add(model, column, Entry(1000 * seconds / images if images else None, "not measured"))
        environment = run.manifest["environment"]
        cuda = environment.get("cuda") if run.request["device"] == "cuda" else None
        table.notes.append(
            f"Wall time on {cuda or environment['platform']}, {environment['threads']} threads, batch size {run.request['batch_size']}; "
            "a shared machine makes such times noisy."
        )
    return _with_notes(table, runs)


def _robust_c(table: Table, run: Run, model: str) -> None:
    own = imagenet_c.corruption_table(run)
    own = own[own["model"] == model].set_index("corruption")
    means = {name: None if pd.isna(v) else float(v) for name, v in own["mean_error"].items()}
    mce = imagenet_c.mean_corruption_error(means)
    top1 = None if mce is None else 100 - float(np.mean([means[n] for n in imagenet_c.ALEXNET]))  # type: ignore[arg-type]
    table.add(
        model, Column("imagenet-c top-1", True, _basis(run), _key(run, "none", "top1")), Entry(top1, "not available")
    )
    table.add(
        model, Column("imagenet-c mCE", False, _basis(run), _key(run, "none", "mce")), Entry(mce, "not available")
    )


def _with_notes(table: Table, runs: Sequence[Run]) -> Table:
    if not table.entries:
        raise SpecError("none of the runs has a figure for this layout")
    for run in runs:
        table.notes += receipt_lines(run)
        table.notes += [f"{suite.name}: {suite.describe()}." for suite in run.suites]
    firsts: dict[str, Column] = {}
    for column, head in table.heads.items():
        first = firsts.setdefault(column.title, column)
        if column is not first and column.basis and first.basis:
            other = differences(json.loads(column.basis), json.loads(first.basis))
            table.notes.append(f"{head} is not the column [1] of that name: {'; '.join(other[:3])}.")
    return table


LAYOUTS: dict[str, Callable[[Sequence[Run]], Table]] = {
    "robustness": robustness,
    "attacks": attacks,
    "budgets": budgets,
    "corruptions": corruptions,
    "runtime": runtime,
}
