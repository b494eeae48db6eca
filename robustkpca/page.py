"""A page as a list of blocks, written as Markdown with image files or as one self-contained HTML file."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import PurePosixPath
from urllib.parse import quote

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from robustkpca.escape import markdown as escape
from robustkpca.escape import visible

# Colours of a page and its figures, light and dark. Text has a contrast of at least 4.5 to 1 on paper and card.
THEME = {
    "ink": ("#1c2024", "#e6e8eb"),
    "paper": ("#ffffff", "#16181b"),
    "soft": ("#60646c", "#a3a8b0"),
    "line": ("#d9dce1", "#363a40"),
    "card": ("#f6f7f9", "#1f2226"),
    "pass": ("#18794e", "#4cc38a"),
    "warn": ("#8a5a00", "#f1a10d"),
    "fail": ("#c1292e", "#ff8589"),
}


@dataclass(frozen=True)
class Mark:
    """How a page tells a model from the others, wherever its name stands: a sign in a colour, light and dark."""

    sign: str
    light: str
    dark: str


@dataclass(frozen=True)
class Heading:
    text: str
    level: int  # 1 is the page's title


@dataclass(frozen=True)
class Paragraph:
    text: str
    small: bool = False  # a note under a table


@dataclass(frozen=True)
class Lead:
    """What must be read first, sentence by sentence."""

    sentences: Sequence[str]


@dataclass(frozen=True)
class Link:
    """A file beside the page."""

    text: str
    path: str  # relative to the page, with /

    @property
    def href(self) -> str:
        return quote(self.path)


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
    name: str  # file name without folder, ending in .png or .svg
    data: bytes = field(repr=False)
    text: str  # what it shows, for those who do not see it

    @property
    def url(self) -> str:
        """The image as a data URL."""
        kind = "svg+xml" if PurePosixPath(self.name).suffix == ".svg" else "png"
        return data_url(self.data, kind)


MADE_BY = "made by robustkpca"  # in each page, so that only pages of ours are replaced


@dataclass(frozen=True)
class Tile:
    """An image (None: there is none to show) with its name above it and what was answered below; `wrong`: not the true
    label."""

    name: str
    png: bytes | None = field(repr=False)
    text: str
    wrong: bool = False

    @property
    def url(self) -> str:
        return data_url(self.png or b"", "png")


@dataclass(frozen=True)
class Photograph:
    """One sample: what it is, and tiles of it."""

    title: str
    tiles: Sequence[Tile]


@dataclass(frozen=True)
class Gallery:
    """Photographs in HTML; in Markdown `sheet`, a figure of them, or nothing."""

    photographs: Sequence[Photograph]
    sheet: Figure | None = None


Block = Heading | Paragraph | Lead | Link | Bullets | Table | Figure | Gallery


def data_url(data: bytes, kind: str) -> str:
    """An image of this kind (`png`, `svg+xml`) as a data URL."""
    return Markup(f"data:image/{kind};base64,{base64.b64encode(data).decode()}")


def figures_of(blocks: Sequence[Block]) -> list[Figure]:
    """The figures that Markdown looks for beside the page."""
    sheets = [block.sheet if isinstance(block, Gallery) else block for block in blocks]
    return [block for block in sheets if isinstance(block, Figure)]


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
            case Lead():
                first, *others = map(escape, block.sentences)
                parts += [f"**{first}**", *others]
            case Link():
                parts.append(f"[{escape(block.text)}](<{block.path}>)")
            case Figure() | Gallery():
                parts += [f"![{escape(f.text)}](<{folder}/{f.name}>)" for f in figures_of([block])]
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


def to_html(blocks: Sequence[Block], marks: Mapping[str, Mark] | None = None) -> str:
    """One page with nothing to fetch; all text is escaped, its only script sorts tables. Figures that follow each other
    stand side by side where there is room.

    `marks`: by the name of a model, what stands before it in tables and galleries.
    """
    script = _environment().get_template("page.js").render().strip()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    named = {name: (f"m{number}", mark) for number, (name, mark) in enumerate((marks or {}).items())}
    return _environment().get_template("page.html.j2").render(
        title=next((b.text for b in blocks if isinstance(b, Heading)), ""),
        blocks=[(type(block).__name__, block) for block in blocks],
        made_by=MADE_BY, theme=THEME, marks=named, script=Markup(script),
        policy=f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
    )  # fmt: skip


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
