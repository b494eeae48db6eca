"""Tables of `layouts` as Markdown, LaTeX (booktabs), HTML and CSV."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import pandas as pd

from robustkpca import escape
from robustkpca.errors import SpecError, unknown
from robustkpca.page import markdown
from robustkpca.report.paper_tables import Table

_ON, _OFF = "\ue000", "\ue001"  # stand for bold until the text around them is escaped
_BOLD: dict[str, tuple[str, str]] = {
    "markdown": ("**", "**"),
    "latex": (r"\textbf{", "}"),
    "html": ("<b>", "</b>"),
    "csv": ("", ""),
}
FORMATS = tuple(_BOLD)
_LABEL = re.compile(r"[A-Za-z0-9:._/-]+")  # a label of LaTeX


def render(table: Table, form: str, caption: str | None = None, label: str | None = None, **options: bool) -> str:
    """The table in one of FORMATS, with its title and notes; options are those of `Table.texts`.

    caption, label: of LaTeX, as plain text; by default the title, and `tab:robustkpca`. Raises SpecError for a format
    or label that there cannot be.
    """
    if form not in _BOLD:
        raise SpecError(unknown("format", form, FORMATS))
    if label is not None and not _LABEL.fullmatch(label):
        raise SpecError(f"--label: expected letters, digits and : . _ / -, got {label!r}")
    cells = table.texts(bold=f"{_ON}{{}}{_OFF}", **options)
    if form == "csv" and table.n is not None:  # it has no notes that would say so
        cells.insert(0, "n", str(table.n))
    below = [*notes(table, **options), *table.receipt]
    if form == "latex":
        text = _latex(
            table.title if caption is None else caption,
            "tab:robustkpca" if label is None else label,
            cells,
            table.groups(cells),
            below,
        )
    else:
        text = {"markdown": _markdown, "html": _html, "csv": _csv}[form](table.title, cells, below)
    on, off = _BOLD[form]
    return text.replace(_ON, on).replace(_OFF, off)


def notes(table: Table, *, intervals: bool = False, significance: bool = False, reference: bool = False) -> list[str]:
    """What has to be said under the table, but for its receipt, when it is shown with these options of
    `Table.texts`."""
    found = list(table.notes)
    if intervals:
        names = ", ".join(dict.fromkeys(score.interval_name for score in table.scores)) or "none here"
        found.insert(0, f"In parentheses: {names}.")
    if significance:
        marked = len(table.significance())
        tests = ", ".join(dict.fromkeys(score.test_name for score in table.scores)) or "no test"
        found.insert(
            0,
            f"*: differs from {table.models[0]}, {tests} on the same samples, Holm-adjusted, p < 0.05 "
            f"({marked or 'no'} figure{'' if marked == 1 else 's'}).",
        )
    if reference:
        what = "published figure (arXiv 2406.13762) for the same protocol, data and model; empty where there is none."
        found.insert(
            0,
            f"paper: {what}" if table.published() else "No result here has a published counterpart (arXiv 2406.13762).",
        )
    return found


def _markdown(title: str, cells: pd.DataFrame, below: Sequence[str]) -> str:
    lines = [
        f"### {escape.markdown(title)}",
        "",
        markdown(cells),
        "",
        *(f"{escape.markdown(note)}  " for note in below),
    ]
    return "\n".join(lines) + "\n"


def _csv(title: str, cells: pd.DataFrame, below: Sequence[str]) -> str:
    safe = cells.map(escape.csv).rename(index=escape.csv, columns=escape.csv)
    text: str = safe.to_csv(lineterminator="\n")
    return text


def _latex(caption: str, label: str, cells: pd.DataFrame, groups: Sequence[str], below: Sequence[str]) -> str:
    """A table for the package booktabs. Columns of one group stand under its name, with what is left of their heads."""

    def row(values: Sequence[object]) -> str:
        return " & ".join(escape.latex(str(value)) for value in values) + r" \\"

    heads, above = [str(head) for head in cells.columns], []
    spans = [(group, len(list(some))) for group, some in itertools.groupby(groups)]
    if any(group and width > 1 for group, width in spans):
        place, over, rules = 0, [""], []
        for group, width in spans:
            if group and width > 1:
                over.append(rf"\multicolumn{{{width}}}{{c}}{{{escape.latex(group)}}}")
                rules.append(rf"\cmidrule(lr){{{place + 2}-{place + width + 1}}}")
                for i in range(place, place + width):
                    heads[i] = heads[i].removeprefix(group).strip() or heads[i]
            else:
                over += [""] * width
            place += width
        above = [" & ".join(over) + r" \\", " ".join(rules)]
    body = [r"\toprule", *above, row([cells.index.name, *heads]), r"\midrule"]
    body += [row(values) for values in cells.reset_index().to_numpy().tolist()]
    comments = [
        escape.latex_comment(note) for note in (*below, "Bold: the best of a column, where no other shares it.")
    ]
    return "\n".join(
        [
            *comments,
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{escape.latex(caption)}}}",
            rf"\label{{{label}}}",
            rf"\begin{{tabular}}{{l{'r' * len(cells.columns)}}}",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def _html(title: str, cells: pd.DataFrame, below: Sequence[str]) -> str:
    def row(values: Sequence[object], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape.html(str(v))}</{tag}>" for v in values) + "</tr>"

    head = row([cells.index.name, *cells.columns], "th")
    body = "\n".join(row(values, "td") for values in cells.reset_index().to_numpy().tolist())
    paragraphs = "\n".join(f"<p>{escape.html(note)}</p>" for note in below)
    caption = f"<caption>{escape.html(title)}</caption>"
    return f"<table>\n{caption}\n<thead>{head}</thead>\n<tbody>\n{body}\n</tbody>\n</table>\n{paragraphs}\n"
