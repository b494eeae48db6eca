"""Tables with the paper's rows and columns, from one or several runs,
with the paper's own results beside the measured ones."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import numpy as np
import pandas as pd

from robustkpca.errors import SpecError
from robustkpca.report.provenance import receipt_lines
from robustkpca.report.run_tables import untried_notes
from robustkpca.results import imagenet_c, imagenet_o
from robustkpca.results.accuracy import results_of
from robustkpca.results.columns import MEAN
from robustkpca.runs.names import across
from robustkpca.runs.request import ModelRecord, differences
from robustkpca.runs.run import Run
from robustkpca.statistics.proportions import holm
from robustkpca.suites.cell import CLEAN_CELL, OUT_OF_DISTRIBUTION, RELEASED, Cell
from robustkpca.suites.suite import Suite, load_suite, suite_names
from robustkpca.tasks.score import Score

# How the paper calls a data set, and how many images it has: a result on fewer has no published counterpart.
PUBLISHED: dict[str, tuple[str, int]] = {
    "imagenet": ("imagenet-1k", 50_000),
    "imagenet-a": ("imagenet-a", 7_500),
    "imagenet-r": ("imagenet-r", 30_000),
    "imagenet-c": ("imagenet-c", 50_000 * 75),
    "imagenet-o": ("imagenet-o", 12_000),
}
PAPERS_LAMBDA = 4.0  # of all its models (arXiv 2406.13762 and its code)
Key = tuple[str, str, str]  # dataset, attack, metric, as reference/paper_tables.csv has them


@dataclass(frozen=True)
class Column:
    """One column: its head, whether higher is better, what its numbers rest on, and where the paper has it.

    group: the words at the beginning of the head that columns beside it share, such as an attack; "" for none.
    """

    head: str
    higher: bool
    basis: str  # what decides its numbers; columns of one head and two bases are kept apart
    key: Key | None = None
    decimals: int = 2
    group: str = ""

    def title(self, *differences: str) -> str:
        """The head with what tells it apart, and whether higher or lower is better."""
        return f"{', '.join([self.head, *differences])} {'↑' if self.higher else '↓'}"

    @property
    def facts(self) -> dict[str, Any]:
        """What it rests on, by its words in heads; empty where that is no data."""
        basis: dict[str, Any] = json.loads(self.basis) if self.basis.startswith("{") else {}
        data = basis.get("data")
        if data is None:
            return {}
        place = "" if self.head.startswith(data["name"]) else data["name"]
        samples = f"ids {data['ids'][:8]}, {data['content_covers']} {data['content'][:8]}"
        return {"n": data["n"], "data": place, "seed": basis["seed"], "samples": samples, "device": basis["device"]}


@dataclass(frozen=True)
class Entry:
    """One cell: a number as it is shown, or why there is none.
    `rows` of the headline score `score`, for intervals and pairing."""

    value: float | None
    status: str = "complete"
    rows: pd.DataFrame | None = None
    score: Score | None = None


@dataclass
class Table:
    """Models as rows in the order met, columns in the order of the layout."""

    title: str
    entries: dict[tuple[str, Column], Entry] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    receipt: list[str] = field(default_factory=list)  # of all runs
    paper_names: dict[str, str] = field(default_factory=dict)  # what the paper calls a row, where it has such a model
    rows: dict[Run, dict[str, str]] = field(default_factory=dict)  # for each run, by a model's label, its row

    @classmethod
    def of(cls, title: str, runs: Sequence[Run]) -> Table:
        """An empty table whose rows are the models of these runs: those of two runs share a row where nothing that
        decides their numbers tells them apart (`robustkpca.runs.names.across`)."""
        table = cls(title)
        strangers: set[str] = set()
        for run, rows in zip(runs, across([run.request for run in runs]), strict=True):
            table.rows[run] = rows
            for model in run.request.models:
                name, theirs = rows[model.label], paper_name(model)
                if theirs is None or table.paper_names.setdefault(name, theirs) != theirs:
                    strangers.add(name)
        for name in strangers:
            table.paper_names.pop(name, None)
        return table

    @property
    def models(self) -> list[str]:
        return list(dict.fromkeys(model for model, _ in self.entries))

    @property
    def columns(self) -> list[Column]:
        return list(dict.fromkeys(column for _, column in self.entries))

    @property
    def heads(self) -> dict[Column, str]:
        """Titles. Where numbers of samples, data or seeds differ within the table, every column says its own; where
        that does not tell two of one head apart, other samples, the device, and last a number, which a note explains.
        """
        columns = self.columns
        facts = {column: column.facts for column in columns}
        told: dict[Column, list[str]] = {column: [] for column in columns}

        def tell(name: str, text: str) -> None:
            if len({f[name] for f in facts.values() if f}) > 1:
                for column, f in facts.items():
                    told[column] += [text.format(f[name])] if f and f[name] != "" else []

        tell("n", "n = {}")
        tell("data", "{}")
        tell("seed", "seed {}")
        samples = {(f["n"], f["data"], f["seed"], f["samples"]) for f in facts.values() if f}
        if len({(n, data, seed) for n, data, seed, _ in samples}) < len(samples):
            tell("samples", "{}")
        if len({(c.title(*told[c])) for c in columns}) < len(columns):
            tell("device", "{}")
        titles = [column.title(*told[column]) for column in columns]
        return {
            column: title if titles.count(title) == 1 else f"{title} [{titles[:i].count(title) + 1}]"
            for i, (column, title) in enumerate(zip(columns, titles, strict=True))
        }

    def groups(self, texts: pd.DataFrame) -> list[str]:
        """For each column of `texts`, the group that its head begins with; "" for none."""
        heads = {head: column.group for column, head in self.heads.items() if column.group}
        return [
            next((g for h, g in heads.items() if text == h or text.startswith(f"{h} ")), "") for text in texts.columns
        ]

    @property
    def n(self) -> int | None:
        """The number of samples of every column; None where they differ or there are none."""
        numbers = {column.facts["n"] for column in self.columns if column.facts}
        return numbers.pop() if len(numbers) == 1 else None

    def add(self, model: str, column: Column, entry: Entry) -> None:
        if (model, column) in self.entries:
            raise SpecError(f"two runs hold {model}, {column.head}; a cell has one result, leave one of the runs out")
        self.entries[model, column] = entry

    def put(self, run: Run, label: str, column: Column, entry: Entry) -> None:
        """Add a cell of the model that a run calls `label`."""
        self.add(self.rows[run][label], column, entry)

    def values(self) -> pd.DataFrame:
        """The results as numbers, NaN where there is none."""
        nothing = Entry(None)
        rows = [[self.entries.get((m, c), nothing).value for c in self.columns] for m in self.models]
        return pd.DataFrame(
            rows, index=pd.Index(self.models, name="model"), columns=list(self.heads.values()), dtype=float
        )

    def texts(
        self, *, intervals: bool = False, significance: bool = False, reference: bool = False, bold: str = "{}"
    ) -> pd.DataFrame:
        """The table as text: fixed decimals, the best of a column in `bold` (none where two share it), on request with
        95 % Wilson intervals, with marks of significance against the first row, and with the paper's results beside
        columns that have one (an empty one stays empty)."""
        marks = self.significance() if significance else {}
        published = self.published() if reference else {}
        columns: dict[str, list[str]] = {}
        for column, head in self.heads.items():
            best = self._best(column)
            texts = []
            for model in self.models:
                entry = self.entries.get((model, column), Entry(None, "not run"))
                if entry.value is None:
                    texts.append(entry.status)
                    continue
                text = f"{entry.value:.{column.decimals}f}"
                text = bold.format(text) if best is not None and text == best else text
                if intervals and entry.rows is not None and entry.score is not None:
                    low, high = entry.score.interval(entry.rows)
                    text += f" ({entry.score.shown(low)}–{entry.score.shown(high)})"
                texts.append(text + marks.get((model, column), ""))
            columns[head] = texts
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
        """The paper's results for cells of this table, where there are any."""
        results, names = paper_figures(), self.paper_names
        values = {(m, c): results.get((c.key, names[m])) for m, c in self.entries if c.key and m in names}
        return {cell: value for cell, value in values.items() if value is not None}

    def _best(self, column: Column) -> str | None:
        """The best result as it is printed, where there are at least two to choose from and no other is printed so."""
        values = [e.value for (_, c), e in self.entries.items() if c == column and e.value is not None]
        if len(values) < 2:
            return None
        texts = [f"{value:.{column.decimals}f}" for value in values]
        best = f"{(max if column.higher else min)(values):.{column.decimals}f}"
        return best if texts.count(best) == 1 else None

    def significance(self) -> dict[tuple[str, Column], str]:
        """` *` where a model differs from the first row: the score's paired test on the same samples, Holm-adjusted
        over the table."""
        if not self.models:
            return {}
        first, cells, p_values = self.models[0], [], []
        for (model, column), entry in self.entries.items():
            base = self.entries.get((first, column))
            if model == first or base is None or base.rows is None or entry.rows is None or entry.score is None:
                continue
            if set(base.rows.index) != set(entry.rows.index):
                continue
            cells.append((model, column))
            p_values.append(entry.score.paired(base.rows, entry.rows).p_value)
        adjusted = holm(np.array(p_values))
        return {cell: " *" for cell, p in zip(cells, adjusted, strict=True) if p < 0.05}

    @property
    def scores(self) -> list[Score]:
        """The scores of its cells."""
        return list(dict.fromkeys(e.score for e in self.entries.values() if e.score is not None))


def paper_name(model: ModelRecord) -> str | None:
    """The paper's name of a model, `RPC-SymViT-tiny 4iter/layer1`, whatever its user calls it; None for one that runs
    with other settings than its file says, or with another lambda than the paper's."""
    settings = model.vision
    if settings is None or model.overridden or (settings.rpc is not None and settings.rpc.lam != PAPERS_LAMBDA):
        return None
    return settings.title.replace("(", "").replace(")", "")


def paper_figures() -> dict[tuple[Key, str], float]:
    """The published results (arXiv 2406.13762), by key and model."""
    text = (resources.files("robustkpca") / "reference" / "paper_tables.csv").read_text(encoding="utf-8")
    return {
        ((row["dataset"], row["attack"], row["metric"]), row["model"]): float(row["value"])
        for row in csv.DictReader(text.splitlines())
    }


def _facts(run: Run, suite: Suite | None = None) -> dict[str, object]:
    """What decides the numbers of a column, but not the model, whose precision is its own."""
    request = run.request
    facts: dict[str, object] = {name: getattr(request, name) for name in ("task", "task_version", "seed", "device")}
    facts["software"] = request.software
    facts["data"] = request.data.model_dump(mode="json", exclude={"conditions"})
    if suite is not None:
        facts["suite"] = suite.model_dump(mode="json")
        if any(a.method in request.batch_decides for a in suite.attack):
            facts["batch_size"] = request.batch_size
    return facts


def _basis(run: Run, suite: Suite | None = None) -> str:
    """The facts of a column as text: data, argmax, seed, device, versions, threat model and parameters."""
    return json.dumps(_facts(run, suite), sort_keys=True)


def _key(run: Run, attack: str, metric: str, suite: Suite | None = None) -> Key | None:
    """Where the paper has this number; None unless protocol, data and budget are the paper's."""
    name, n = PUBLISHED.get(run.request.data.name, ("", 0))
    if not name or run.n != n or (suite is not None and not _is_the_papers(suite)):
        return None
    return name, attack, metric


def _is_the_papers(suite: Suite) -> bool:
    """Whether a suite is one of the package's paper suites, with its parameters and its highest budget."""
    if suite.protocol != "paper" or suite.name not in suite_names():
        return False
    theirs = load_suite(suite.name)
    same_threat = suite.threat.family == theirs.threat.family
    return same_threat and suite.attack == theirs.attack and max(suite.budgets) == max(theirs.budgets)


def _entry(run: Run, model: str, cell: Cell) -> Entry:
    """The headline score of one cell."""
    status = run.status(model, cell)
    if not status.complete:
        return Entry(None, status.text)
    rows, score = run.cell_rows(model, cell), run.task.score
    return Entry(score.scale * score.value(rows), rows=rows, score=score)


def _top5(run: Run, model: str, cell: Cell) -> Entry:
    """Top-5 accuracy of one cell in %, where the rows have it."""
    status = run.status(model, cell)
    if not status.complete:
        return Entry(None, status.text)
    rows = run.cell_rows(model, cell)
    if "correct_top5" not in rows or rows["correct_top5"].isna().any():
        return Entry(None, "not available")
    score, of_five = run.task.score, rows.assign(correct=rows["correct_top5"].astype(bool))
    return Entry(score.scale * score.value(of_five), rows=of_five, score=score)


def _measures(run: Run) -> dict[str, tuple[str, Callable[[Run, str, Cell], Entry]]]:
    """What is shown of a cell: the paper's word for it, its head, and how it is worked out."""
    if run.task.name == "classification":
        return {"top1": ("top-1", _entry), "top5": ("top-5", _top5)}
    return {run.task.score.name: (run.task.score.title.lower(), _entry)}


def attacks(runs: Sequence[Run]) -> Table:
    """The score (of classification top-1 and top-5) under each attack at its highest budget,
    as the paper's table of attacked ImageNet-1K."""
    table = Table.of(f"{_title(runs)} under attack, highest perturbation{_unit(runs)}", runs)
    for run in runs:
        for suite in run.suites:
            if suite.combination == "mean":
                continue
            for attack, spec in suite.attacks.items():
                cell = Cell(attack, max(suite.budgets))
                for metric, (word, entry) in _measures(run).items():
                    key = _key(run, spec.name, metric, suite)
                    where = Column(
                        f"{cell} {word}", run.task.score.higher_is_better, _basis(run, suite), key, group=str(cell)
                    )
                    for model in run.models:
                        table.put(run, model, where, entry(run, model, cell))
    return _with_notes(table, runs)


def budgets(runs: Sequence[Run]) -> Table:
    """The score (of classification top-1) at every budget of every attack, after the clean one."""
    top1 = ", top-1" if all(run.task.name == "classification" for run in runs) else ""
    table = Table.of(f"{_title(runs)} over perturbation budgets{top1}{_unit(runs)}", runs)
    for run in runs:
        higher = run.task.score.higher_is_better
        clean = Column("clean", higher, _basis(run))
        for model in run.models:
            _add_clean(table, run, model, clean)
        for suite in run.suites:
            for cell in suite.cells if suite.combination != "mean" else ():
                where = Column(str(cell), higher, _basis(run, suite), group=str(cell.attack))
                for model in run.models:
                    table.put(run, model, where, _entry(run, model, cell))
    return _with_notes(table, runs)


def _add_clean(table: Table, run: Run, label: str, column: Column) -> None:
    """The clean result, which runs that attack one model in several ways all have. Raises SpecError where two of them
    are complete and not the same: weights and settings do not say all that decided them."""
    entry, model = _entry(run, label, CLEAN_CELL), table.rows[run][label]
    known = table.entries.setdefault((model, column), entry)
    if known.value is None:
        table.entries[model, column] = entry
    elif entry.value is not None and known.value != entry.value:
        raise SpecError(
            f"two runs with one request disagree on {model}, {column.head}: {known.value:g} and {entry.value:g}; "
            "leave one of the runs out"
        )


def _title(runs: Sequence[Run]) -> str:
    titles = {run.task.score.title for run in runs}
    return titles.pop() if len(titles) == 1 else "Scores"


def _unit(runs: Sequence[Run]) -> str:
    units = {run.task.score.unit for run in runs}
    return f" ({units.pop()})" if len(units) == 1 and units != {""} else ""


def corruptions(runs: Sequence[Run]) -> Table:
    """Error per corruption (mean over severities), their mean, and mCE. Generated corruptions have no CE: they are not
    the released ones."""
    table = Table.of("Corruption error, top-1 (%)", runs)
    for run in runs:
        if _is_released(run):
            _released(table, run)
        for suite in run.suites:
            if suite.combination == "mean" and run.task.name == "classification":
                _generated(table, run, suite)
    return _with_notes(table, runs)


def _is_released(run: Run) -> bool:
    return any(cell.attack.suite == RELEASED for cell in run.conditions)


def _number(value: Any) -> float | None:
    return None if pd.isna(value) else float(value)


def _released(table: Table, run: Run) -> None:
    for row in imagenet_c.corruption_table(run).itertuples():
        column = Column(str(row.corruption), False, _basis(run))
        table.put(run, str(row.model), column, Entry(_number(row.mean_error), str(row.status)))
    for row in imagenet_c.released_means(run).itertuples():
        model, mean, mce = str(row.Index), _number(row.mean_error), _number(row.mce)
        table.put(run, model, Column("mean error", False, _basis(run)), Entry(mean, "not available"))
        table.put(run, model, Column("mCE", False, _basis(run), _key(run, "none", "mce")), Entry(mce, "not available"))


def _generated(table: Table, run: Run, suite: Suite) -> None:
    for row in imagenet_c.generated_means(results_of(run).table, suite).itertuples():
        name = "mean error" if row.corruption == MEAN else str(row.corruption)
        column = Column(f"{name} (generated)", False, _basis(run, suite))
        accuracy = _number(row.value)
        status = str(row.status).partition(" (")[0]
        table.put(run, str(row.model), column, Entry(None if accuracy is None else 100 - 100 * accuracy, status))


def robustness(runs: Sequence[Run]) -> Table:
    """The paper's main table: clean, ImageNet-R, -A, -C and -O, one run for each data set."""
    table = Table.of("Robustness (%)", runs)
    for run in runs:
        if OUT_OF_DISTRIBUTION in run.conditions:
            _robust_o(table, run)
        elif _is_released(run):
            _robust_c(table, run)
        else:
            for metric, (word, entry) in _measures(run).items():
                key, higher = _key(run, "none", metric), run.task.score.higher_is_better
                column = Column(f"{run.request.data.name} {word}", higher, _basis(run), key)
                for model in run.models:
                    table.put(run, model, column, entry(run, model, CLEAN_CELL))
    return _with_notes(table, runs)


def _robust_o(table: Table, run: Run) -> None:
    column = Column(f"{run.request.data.name} AUPR", True, _basis(run), _key(run, "none", "aupr"))
    for row in imagenet_o.detection_table(run).itertuples():
        value = _number(row.aupr)
        table.put(run, str(row.model), column, Entry(None if value is None else 100 * value, str(row.status)))


def _robust_c(table: Table, run: Run) -> None:
    top1 = Column("imagenet-c top-1", True, _basis(run), _key(run, "none", "top1"))
    mce = Column("imagenet-c mCE", False, _basis(run), _key(run, "none", "mce"))
    for row in imagenet_c.released_means(run).itertuples():
        error = _number(row.mean_error)
        table.put(run, str(row.Index), top1, Entry(None if error is None else 100 - error, "not available"))
        table.put(run, str(row.Index), mce, Entry(_number(row.mce), "not available"))


def runtime(runs: Sequence[Run]) -> Table:
    """Parameters, and wall milliseconds a sample and budget, clean and under each attack, on the machine and batch size
    of the run."""
    table = Table.of("Runtime", runs)
    for run in runs:
        request, environment = run.request, run.manifest.environment
        facts = {"environment": environment, "batch": request.batch_size, "device": request.device}
        place = json.dumps(facts, sort_keys=True)
        for model in request.models:
            if model.parameters:
                count = Column("parameters (million)", False, "", decimals=3)
                table.entries.setdefault((table.rows[run][model.label], count), Entry(model.parameters / 1e6))
            for attack in dict.fromkeys(str(cell.attack) for cell in run.cells):
                seconds, samples = run.summary.times.get((model.label, attack), (0.0, 0))
                budgets = sum(str(cell.attack) == attack for cell in run.cells)
                several = f", mean of {budgets} budgets" if budgets > 1 else ""
                column = Column(f"{attack} ms/{run.task.sample_word}{several}", False, place)
                table.put(
                    run, model.label, column, Entry(1000 * seconds / samples if samples else None, "not measured")
                )
        cuda = environment.get("cuda") if request.device == "cuda" else None
        table.notes.append(
            f"Wall time on {cuda or environment['platform']}, {environment['threads']} threads, batch size "
            f"{request.batch_size}; a shared machine makes such times noisy."
        )
    return _with_notes(table, runs)


def _with_notes(table: Table, runs: Sequence[Run]) -> Table:
    if not table.entries:
        raise SpecError("none of the runs has a result for this layout")
    for run in runs:
        table.receipt += receipt_lines(run)
        for suite in run.suites:
            table.notes += [f"{suite.name}: {suite.describe()}.", *untried_notes(run, suite)]
    firsts: dict[str, Column] = {}
    for column, head in table.heads.items():
        title, _, number = head.rpartition(" [")
        first = firsts.setdefault(title, column) if number.rstrip("]").isdigit() else column
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
