"""A report of stored runs: what the numbers say in words, tables, plots, findings, receipt.
The same runs give the same bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from robustkpca.diagnosis.findings import Finding, findings
from robustkpca.errors import OutputError, RunError, SpecError
from robustkpca.files import Outputs, read_bounded, refuse_links, write_files
from robustkpca.page import (
    MADE_BY,
    Block,
    Bullets,
    Figure,
    Heading,
    Lead,
    Link,
    Paragraph,
    Table,
    figures_of,
    to_html,
    to_markdown,
)
from robustkpca.report import marks, photographs, plots, run_tables
from robustkpca.report.marks import Style
from robustkpca.report.provenance import receipt
from robustkpca.report.summary import summary, verdict
from robustkpca.results import trainings
from robustkpca.runs.run import Run


def write(runs: Sequence[Run], path: Path) -> list[Path]:
    """Write `path`.md with its figures beside it in `<stem>_files/`, or `path`.html, one self-contained file, with a
    page of its own in `<stem>_images/` for the images that each attack broke. Returns all files written."""
    if path.suffix not in (".md", ".html"):
        raise SpecError(f"--out: expected a file ending in .md or .html, got {path}")
    folder = path.with_name(f"{path.stem}_{'files' if path.suffix == '.md' else 'images'}")
    _refuse_foreign(path, folder)
    styles = marks.styles(runs)
    files: dict[Path, bytes] = {}
    blocks: list[Block] = [Heading("Robustness report", 1)]
    for number, run in enumerate(runs, start=1):
        pages = dict(_pages(run, number)) if path.suffix == ".html" else {}
        files |= {folder / name: to_html(page, styles).encode() for name, (page, _) in pages.items()}
        links = [Link(text, f"{folder.name}/{name}") for name, (_, text) in pages.items()]
        blocks += _section(run, number, len(runs), styles, links)
    if path.suffix == ".html":
        files[path] = to_html(blocks, styles).encode()
    else:
        files = {folder / figure.name: figure.data for figure in figures_of(blocks)}
        files[path] = to_markdown(blocks, folder.name).encode()
    write_files(files)
    return [path, *(file for file in files if file != path)]


def _refuse_foreign(path: Path, folder: Path) -> None:
    """Raises RunError where the page, or the folder beside it, is there and was not made by us."""
    refuse_links(folder.parent, folder)
    try:
        text = read_bounded(path, 2**30)
        # Pages of before had no mark.
        ours = MADE_BY.encode() in text or (text.startswith(b"# Robustness report\n") and b"\n## Receipt\n" in text)
    except FileNotFoundError:
        ours = not folder.exists() or not any(folder.iterdir())
        path = folder
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from None
    if not ours:
        raise RunError(f"--out: {path} is there and was not made by `report`; move it, or choose another --out")


def _section(run: Run, number: int, of: int, styles: Mapping[str, Style], links: Sequence[Link]) -> list[Block]:
    results = findings(run)
    blocks: list[Block] = []
    part, level = ("", 2) if of == 1 else (f" of run {number}", 3)
    if of > 1:
        blocks.append(Heading(f"Run {number}: {run.request.data.name}, {run.n} samples", 2))
    blocks += [Lead(verdict(run, results)), Heading(f"Summary{part}", level)]
    blocks.append(Bullets([("", line) for line in summary(run, results)]))
    blocks.append(Heading(f"Tables{part}", level))
    for view in run_tables.views(run):
        notes = [Paragraph(note, small=True) for note in view.notes]
        blocks += [Heading(view.title, level + 1), Table(view.cells), *notes]
    if figures := _figures(run, number, styles):
        blocks += [Heading(f"Figures{part}", level), *figures]
    if images := _images(run, number, styles, links):
        blocks += [Heading(f"Images{part}", level), *images]
    blocks += [Heading(f"Findings{part}", level), *_findings(results)]
    models, settings = receipt(run)
    return [
        *blocks,
        Heading(f"Receipt{part}", level),
        Table(models if len(models) > len(models.T) else models.T),
        Table(settings),
    ]


def write_figures(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Write the figures of a report one by one, each as PDF and as SVG in light colours, into `folder`, see
    `Outputs`. Returns the files written."""
    outputs, styles = Outputs(folder), marks.styles(runs)
    files: dict[Path, bytes] = {}
    forms: tuple[plots.Form, ...] = ("pdf", "svg")
    for form in forms:
        for number, run in enumerate(runs, start=1):
            blocks = [*_figures(run, number, styles, form), *_images(run, number, styles, (), form)]
            files |= {folder / figure.name: figure.data for figure in figures_of(blocks)}
    if not files:
        raise RunError("--figures: there is nothing to be drawn in these runs; see the tables")
    outputs.replace(files)
    return list(files)


def _figures(run: Run, number: int, styles: Mapping[str, Style], form: plots.Form = "page") -> list[Block]:
    long, title = trainings.shown_table(run), run.task.score.title
    lines: list[Block] = []
    maps: list[Block] = []
    suffix = plots.SUFFIX[form]
    for suite in run.suites:
        name = f"{number}-{suite.name}"
        if (drawn := plots.accuracy_curves(run, long, suite, styles, form)) is not None:
            lines.append(Figure(f"{name}.{suffix}", drawn, f"{title} over {suite.threat.budget_word}, {suite.name}"))
        for k, model in enumerate(long["model"].unique() if suite.combination == "mean" else ()):
            drawn = plots.corruption_map(run, long, suite, model, styles, form)
            text = f"{title} of {model} for each corruption and severity, {suite.name}"
            maps.append(Figure(f"{name}-map-{k + 1}.{suffix}", drawn, text))
    if lines and len(long["model"].unique()) > plots.BANDS:
        text = f"Of more than {plots.BANDS} models no intervals are drawn; they are in the tables."
        lines.append(Paragraph(text, small=True))
    return lines + maps


def _images(run: Run, number: int, styles: Mapping[str, Style], links: Sequence[Link],
            form: plots.Form = "page") -> list[Block]:  # fmt: skip
    """Photographs under each suite, and the pages of all that were broken."""
    blocks: list[Block] = []
    for suite in run.suites:
        name = f"{number}-{suite.name}-examples.{plots.SUFFIX[form]}"
        shown = photographs.examples(run, suite, styles, name, form)
        if shown is not None:
            blocks += [Paragraph(shown[1]), shown[0]]
    return [*blocks, *links]


def _pages(run: Run, number: int) -> Iterator[tuple[str, tuple[list[Block], str]]]:
    """For each attack of which images are kept: the name of its page, the page, and what a link to it says."""
    for suite in run.suites:
        for attack in suite.attacks:
            if (shown := photographs.broken(run, suite, attack)) is not None:
                title = f"Images that {str(attack).replace('/', ', ')} broke"
                notes = [Paragraph(note) for note in shown[1]]
                count = len(shown[0].photographs)
                name = f"{number}-{str(attack).replace('/', '-')}.html"
                yield name, ([Heading(title, 1), *notes, shown[0]], f"{title}: {count}, on a page beside this one")


def _findings(results: Sequence[Finding]) -> list[Block]:
    items: list[tuple[str, str]] = [
        (f.level, f"{f.rule}, {f.model}: {f.message}. {f.advice}".strip()) for f in results if f.level != "pass"
    ]
    passed = sorted({f.rule for f in results if f.level == "pass"} - {f.rule for f in results if f.level != "pass"})
    if passed:
        items.append(("pass", f"nothing was wrong, where there was enough to judge by, with: {', '.join(passed)}."))
    return [Bullets(items)] if items else [Paragraph("No rule could be applied to what was run.")]
