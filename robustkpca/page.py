"""A page as a list of blocks, written as Markdown with image files or as one self-contained HTML file."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass, field

import pandas as pd


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


@dataclass(frozen=True)
class Figure:
    name: str  # file name without folder, ending in .png
    png: bytes = field(repr=False)
    text: str  # what it shows, for those who do not see it


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
    return "\n\n".join(parts) + "\n"


def markdown(cells: pd.DataFrame) -> str:
    """A GitHub Markdown table, the index as first column; cell text cannot break it."""
    rows: Sequence[Sequence[object]] = [
        [cells.index.name or "", *cells.columns],
        *cells.reset_index().to_numpy().tolist(),
    ]
    lines = ["| " + " | ".join(escape(str(value)) for value in row) + " |" for row in rows]
    lines.insert(1, "|" + " --- |" + " ---: |" * len(cells.columns))
    return "\n".join(lines)


def escape(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    for mark in "\\`*_{}<>[]|#~$":
        text = text.replace(mark, f"\\{mark}")
    return " ".join(text.split())


_STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --paper: #ffffff; --soft: #60646c; --line: #d9dce1; --card: #f6f7f9;
  --pass: #18794e; --warn: #8a5a00; --fail: #c1292e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --paper: #16181b; --soft: #a3a8b0; --line: #363a40;
  --card: #1f2226; --pass: #4cc38a; --warn: #f1a10d; --fail: #ff8589; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 68rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.7rem; } h2 { font-size: 1.35rem; margin-top: 2.2rem; } h3 { font-size: 1.1rem; margin-top: 1.8rem; }
.small { color: var(--soft); font-size: .86rem; margin: .3rem 0; }
.wide { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; font-size: .88rem; width: 100%; }
th, td { padding: .35rem .6rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }
th:first-child, td:first-child { text-align: left; } thead th { background: var(--card); }
tbody th { font-weight: 500; } tbody tr:last-child > * { border-bottom: 0; }
.settings td { text-align: left; overflow-wrap: anywhere; }
figure { margin: 1rem 0; } img { max-width: 100%; height: auto; background: #fff; border-radius: 6px; }
b.pass { color: var(--pass); } b.warn { color: var(--warn); } b.fail { color: var(--fail); }
"""


def to_html(blocks: Sequence[Block]) -> str:
    """One page without scripts or anything to fetch; all text is escaped."""
    title = next((b.text for b in blocks if isinstance(b, Heading)), "")
    parts = []
    for block in blocks:
        match block:
            case Heading():
                parts.append(f"<h{block.level}>{html.escape(block.text)}</h{block.level}>")
            case Paragraph():
                kind = ' class="small"' if block.small else ""
                parts.append(f"<p{kind}>{html.escape(block.text)}</p>")
            case Bullets():
                items = [f"<li>{_mark(word)}{html.escape(text)}</li>" for word, text in block.items]
                parts.append("<ul>\n" + "\n".join(items) + "\n</ul>")
            case Table():
                parts.append(_html_table(block.cells))
            case Figure():
                data = base64.b64encode(block.png).decode()
                text = html.escape(block.text, quote=True)
                parts.append(f'<figure><img src="data:image/png;base64,{data}" alt="{text}"></figure>')
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def _mark(word: str) -> str:
    if not word:
        return ""
    name = f' class="{word}"' if word in ("pass", "warn", "fail") else ""
    return f"<b{name}>{html.escape(word)}</b> "


def _html_table(cells: pd.DataFrame) -> str:
    head = "".join(f"<th>{html.escape(str(v))}</th>" for v in [cells.index.name or "", *cells.columns])
    rows = []
    for name, row in zip(cells.index, cells.to_numpy().tolist(), strict=True):
        tds = "".join(f"<td>{html.escape(str(v))}</td>" for v in row)
        rows.append(f"<tr><th>{html.escape(str(name))}</th>{tds}</tr>")
    kind = " settings" if list(cells.columns) == ["value"] else ""
    body = "\n".join(rows)
    return f'<div class="wide{kind}"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'
