"""What leaves the program, one function for each format: names of models, files and data come from outside, and must
neither break the format nor steer who reads it. Every function returns one line unless it says otherwise."""

from __future__ import annotations

import codecs
import html as _html
import re
import unicodedata

ASCII = "robustkpca_ascii"  # error handler of str.encode: what an encoding lacks gets its look in ASCII
# Controls, line ends of Unicode, marks that turn the direction of writing, and bytes that are not UTF-8 (PEP 383).
_UNSEEN = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_SHORT = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
_LOOKS = {
    "–": "-", "—": "-", "−": "-", "→": "->", "←": "<-", "↑": "^", "↓": "v", "…": "...", "×": "x", "·": ".", "±": "+-",
    "≤": "<=", "≥": ">=", "≈": "~", "“": '"', "”": '"', "‘": "'", "’": "'", "\u200b": "", "\xa0": " ", "ß": "ss",
    "µ": "u", "μ": "u", "λ": "lambda", "ε": "eps", "γ": "gamma", "σ": "sigma",
}  # fmt: skip
_LATEX = {
    "\\": r"\textbackslash{}",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    "–": "--",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "|": r"\textbar{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "[": "{[}",  # after \\ it would begin a length
    "]": "{]}",
} | {c: f"\\{c}" for c in "&%$#_{}"}


def visible(text: str, keep: str = "") -> str:
    r"""Text in which what is not seen is written out: `\n`, `\x1b`, `\u202e`, and `\xff` for a byte that is no UTF-8.

    keep: characters that stay, e.g. line ends where several lines are meant.
    """

    def written(match: re.Match[str]) -> str:
        c = match[0]
        if c in keep:
            return c
        code = ord(c) - 0xDC00 if 0xDC80 <= ord(c) <= 0xDCFF else ord(c)
        return _SHORT.get(c) or (f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}")

    return _UNSEEN.sub(written, text)


def utf8(text: str) -> str:
    """Text in which bytes that are no UTF-8 are written out: JSON, Parquet and pandas take no other."""
    return text.encode("utf-8", errors=ASCII).decode()


def terminal(text: str, encoding: str = "utf-8", keep: str = "") -> str:
    """For a console or a log of some encoding; `keep` as in `visible`."""
    return visible(text, keep).encode(encoding, errors=ASCII).decode(encoding)


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = ""
    for c in error.object[error.start : error.end]:
        plain = unicodedata.normalize("NFKD", c).encode("ascii", "ignore").decode()
        text += _LOOKS[c] if c in _LOOKS else plain or _box(c) or visible(c)
    return text.encode("ascii", "backslashreplace").decode(), error.end


def _box(c: str) -> str:
    """Lines of tables and bars of progress."""
    if not "\u2500" <= c <= "\u259f":
        return ""
    name = unicodedata.name(c)
    if " AND " in name:
        return "+"
    return "#" if "BLOCK" in name else "|" if name.endswith("VERTICAL") else "-"


codecs.register_error(ASCII, _in_ascii)


def markdown(text: str) -> str:
    """For GitHub Markdown: shown as it is, mentions nobody, and does not begin a list or a heading."""
    text = visible(" ".join(text.split()))
    for mark in "\\`*_{}<>[]|#~$&":
        text = text.replace(mark, f"\\{mark}")
    text = re.sub(r"^([-+=]+|\d+(?=[.)]))(?=[.)]?(\s|$))", _not_a_list, text)
    return re.sub(r"@(?=\w)", "@&#8203;", text)


def _not_a_list(match: re.Match[str]) -> str:
    first = match[1]
    return f"\\{first}" if not first.isdigit() else f"{first}&#8203;"


def latex(text: str) -> str:
    """For a cell or a caption of LaTeX."""
    text = "".join(_LATEX.get(c, c) for c in visible(text))
    return f"{{*}}{text[1:]}" if text.startswith("*") else text  # after \\ it would be its starred form


def latex_comment(text: str) -> str:
    """A line of LaTeX's that says nothing to it."""
    return f"% {visible(text)}"


def csv(value: object) -> object:
    """For a cell of CSV, whose quoting the writer does: spreadsheets must not read a text as a formula."""
    if not isinstance(value, str):
        return value
    text = visible(value)
    formula = text.startswith(("=", "+", "-", "@")) and not re.fullmatch(r"[+-]?[\d.][\d\s.,;%()–+*-]*", text)
    return f"'{text}" if formula else text


def html(text: str) -> str:
    """For text and attributes of HTML."""
    return _html.escape(visible(text))


def github(text: str) -> str:
    """For the message of a GitHub workflow command; line ends stay line ends of the message."""
    return visible(text, keep="\r\n").replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def github_property(text: str) -> str:
    """For a property (title, file) of a GitHub workflow command."""
    return github(text).replace(":", "%3A").replace(",", "%2C")


def xml(text: str) -> str:
    """For text and attributes of XML 1.0, whose quoting the writer does; line ends stay."""
    return re.sub("[\ufffe\uffff]", "?", visible(text, keep="\n"))


def file_name(text: str) -> str:
    """For one part of a path, on any system."""
    return re.sub(r"[^\w.+=-]+", "-", visible(text)).strip(".-") or "unnamed"
