"""A page as a list of blocks, written as Markdown with image files or as one self-contained HTML file."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from robustkpca.escape import markdown as escape
from robustkpca.escape import visible


@dataclass(frozen=True)
class Heading:
    text: str
    level: int  # 1 is the page's title


@dataclass(frozen=True)
class Paragraph:
    text: str
    small: bool = False  # a note under a table


@dataclass(frozen=True)
class Bullets:
    items: Sequence[tuple[str, str]]  # (a word in bold or "", text)


@dataclass(frozen=True)
class Table:
    """Cells of text, the index as first column."""

    cells: pd.DataFrame

    def rows(self) -> Iterator[tuple[object, list[object]]]:
        """The name and the cells of each row."""
        return zip(self.cells.index, self.cells.to_numpy().tolist(), strict=True)


@dataclass(frozen=True)
class Figure:
    name: str  # file name without folder, ending in .png
    png: bytes = field(repr=False)
    text: str  # what it shows, for those who do not see it

    def base64(self) -> str:
        """The image as a data URL writes it."""
        return base64.b64encode(self.png).decode()


MADE_BY = "made by robustkpca"  # in each page, so that only pages of ours are replaced
Block = Heading | Paragraph | Bullets | Table | Figure


def to_markdown(blocks: Sequence[Block], folder: str) -> str:
    """GitHub Markdown; figures are looked for in `folder`, beside the page."""
    parts = []
    for block in blocks:
        match block:
            case Heading():
                parts.append(f"{'#' * block.level} {escape(block.text)}")
            case Paragraph():
                parts.append(escape(block.text))
            case Bullets():
                marks = [f"**{escape(word)}** " if word else "" for word, _ in block.items]
                parts.append("\n".join(f"- {m}{escape(text)}" for m, (_, text) in zip(marks, block.items, strict=True)))
            case Table():
                parts.append(markdown(block.cells))
            case Figure():
                parts.append(f"![{escape(block.text)}](<{folder}/{block.name}>)")
    return "\n\n".join([*parts, f"<!-- {MADE_BY} -->"]) + "\n"


def markdown(cells: pd.DataFrame) -> str:
    """A GitHub Markdown table, the index as first column; cell text cannot break it."""
    rows: Sequence[Sequence[object]] = [
        [cells.index.name or "", *cells.columns],
        *cells.reset_index().to_numpy().tolist(),
    ]
    lines = ["| " + " | ".join(escape(str(value)) for value in row) + " |" for row in rows]
    lines.insert(1, "|" + " --- |" + " ---: |" * len(cells.columns))
    return "\n".join(lines)


def to_html(blocks: Sequence[Block]) -> str:
    """One page without scripts or anything to fetch; all text is escaped."""
    template = _environment().get_template("page.html.j2")
    title = next((b.text for b in blocks if isinstance(b, Heading)), "")
    return template.render(made_by=MADE_BY, title=title, blocks=[(type(block).__name__, block) for block in blocks])


def _seen(value: object) -> object:
    """A value of the page as it is put there; the template quotes it for HTML."""
    return visible(value, keep="\n") if isinstance(value, str) and not isinstance(value, Markup) else value


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("robustkpca", ""),
        autoescape=True,
        finalize=_seen,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
