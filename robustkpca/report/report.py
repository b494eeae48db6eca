"""A report of stored runs: what the numbers say in words, tables, plots, findings, receipt.
The same runs give the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from robustkpca.diagnosis.findings import Finding, findings
from robustkpca.errors import OutputError, RunError, SpecError
from robustkpca.files import read_bounded, refuse_links, write_files
from robustkpca.page import MADE_BY, Block, Bullets, Figure, Heading, Paragraph, Table, to_html, to_markdown
from robustkpca.report import plots, run_tables
from robustkpca.report.provenance import receipt
from robustkpca.report.summary import summary
from robustkpca.results import trainings
from robustkpca.runs.run import Run


def write(runs: Sequence[Run], path: Path) -> list[Path]:
    """Write `path`.md with its figures beside it in `<stem>_files/`, or `path`.html, one self-contained file. Returns
    all files written."""
    if path.suffix not in (".md", ".html"):
        raise SpecError(f"--out: expected a file ending in .md or .html, got {path}")
    folder = path.with_name(f"{path.stem}_files")
    _refuse_foreign(path, folder)
    blocks: list[Block] = [Heading("Robustness report", 1)]
    for number, run in enumerate(runs, start=1):
        blocks += _section(run, number, len(runs))
    files: dict[Path, bytes] = {}
    if path.suffix == ".html":
        files[path] = to_html(blocks).encode()
    else:
        files = {folder / b.name: b.png for b in blocks if isinstance(b, Figure)}
        files[path] = to_markdown(blocks, folder.name).encode()
    write_files(files)
    return [path, *(file for file in files if file != path)]


def _refuse_foreign(path: Path, folder: Path) -> None:
    """Raises RunError where the page, or the folder of its figures, is there and was not made by us."""
    if path.suffix == ".md":
        refuse_links(folder.parent, folder)
    try:
        text = read_bounded(path, 2**30)
        # Pages of before had no mark.
        ours = MADE_BY.encode() in text or (text.startswith(b"# Robustness report\n") and b"\n## Receipt\n" in text)
    except FileNotFoundError:
        ours = path.suffix != ".md" or not folder.exists() or not any(folder.iterdir())
        path = folder
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from None
    if not ours:
        raise RunError(f"--out: {path} is there and was not made by `report`; move it, or choose another --out")


def _section(run: Run, number: int, of: int) -> list[Block]:
    results = findings(run)
    blocks: list[Block] = []
    part, level = ("", 2) if of == 1 else (f" of run {number}", 3)
    if of > 1:
        blocks.append(Heading(f"Run {number}: {run.request.data.name}, {run.n} samples", 2))
    blocks += [Heading(f"Summary{part}", level), Bullets([("", line) for line in summary(run, results)])]
    blocks.append(Heading(f"Tables{part}", level))
    for view in run_tables.views(run):
        notes = [Paragraph(note, small=True) for note in view.notes]
        blocks += [Heading(view.title, level + 1), Table(view.cells), *notes]
    if figures := _figures(run, number):
        blocks += [Heading(f"Figures{part}", level), *figures]
    blocks += [Heading(f"Findings{part}", level), *_findings(results)]
    models, settings = receipt(run)
    return [
        *blocks,
        Heading(f"Receipt{part}", level),
        Table(models if len(models) > len(models.T) else models.T),
        Table(settings),
    ]


def _figures(run: Run, number: int) -> list[Block]:
    long = trainings.shown_table(run)
    title = run.task.score.title
    blocks: list[Block] = []
    for suite in run.suites:
        averaged, word = suite.combination == "mean", suite.threat.budget_word
        images = {"": (f"{title} over {word}, {suite.name}", plots.accuracy_curves(run, long, suite))}
        if averaged:
            text = f"{title} for each corruption and severity, {suite.name}"
            images["-map"] = (text, plots.corruption_map(run, long, suite))
        else:
            text = f"Images, what {suite.name} added, and the answers"
            images["-examples"] = (text, plots.example_images(run, suite))
        for suffix, (text, png) in images.items():
            if png is not None:
                blocks.append(Figure(f"{number}-{suite.name}{suffix}.png", png, text))
    return blocks


def _findings(results: Sequence[Finding]) -> list[Block]:
    items: list[tuple[str, str]] = [
        (f.level, f"{f.rule}, {f.model}: {f.message}. {f.advice}".strip()) for f in results if f.level != "pass"
    ]
    passed = sorted({f.rule for f in results if f.level == "pass"} - {f.rule for f in results if f.level != "pass"})
    if passed:
        items.append(("pass", f"nothing was wrong, where there was enough to judge by, with: {', '.join(passed)}."))
    return [Bullets(items)] if items else [Paragraph("No rule could be applied to what was run.")]
