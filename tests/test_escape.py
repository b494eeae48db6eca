"""What leaves the program: no name breaks a format, or steers who reads it."""

import csv
import io
import random
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pandas as pd
import pytest

from robustkpca import escape, page
from robustkpca.gate import ci
from robustkpca.gate.check import COLUMNS, REGRESSED, Verdict
from robustkpca.report.formats import render

PARTS = [
    "\n", "\r\n", "::error title=x::", "\x1b[31m", "\x1b]0;title\x07", "\x00", "\x9b", "=1+1", "+x",
    "-cmd|' /C calc'!A0", "@SUM(A1)", "\u202e", "\u2066", "@mention", "\udcff\udc80", "\ud800", "|", "`",
    "<script>alert(1)</script>", "&amp;", "\"'>", "^", "[2em]", "*", "\\input{x}", "%", "$", "#", "_", "{}",
    "]]>", "-->", "\u2028", "\x85", "\ufffe", "plain name", "Größe", "漢字", ",", ";", "\t",
]  # fmt: skip


@pytest.fixture(params=range(60), scope="module")
def name(request):
    draws = random.Random(request.param)
    return "".join(draws.choice(PARTS) for _ in range(draws.randint(1, 5)))


CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe]")


def frame(columns, names):
    """Cells of text; pandas takes no text that is not UTF-8, runs keep none."""
    cells = {escape.utf8(head): [escape.utf8(text) for text in texts] for head, texts in columns.items()}
    return pd.DataFrame(cells, pd.Index([escape.utf8(name) for name in names], name="model"))


def readable(text):
    text.encode("utf-8")
    return not CONTROLS.search(text.replace("\ufffe", ""))


class Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)

    def handle_data(self, data):
        self.text += data


def test_terminal(name):
    for encoding in ("utf-8", "latin-1", "cp1252", "ascii"):
        shown = escape.terminal(name, encoding)
        assert readable(shown)
        assert "\n" not in shown
        shown.encode(encoding)


def test_markdown(name):
    shown = page.markdown(frame({"a": [name]}, [name]))
    assert readable(shown)
    assert len(shown.splitlines()) == 3
    assert len({len(re.sub(r"\\.", "", line).split("|")) for line in shown.splitlines()}) == 1
    assert not re.search(r"@\w", shown)
    assert "<script" not in shown.replace("\\<", "")


def test_latex(name):
    class Results:
        title, notes, receipt, models, scores, n = name, (name,), (), (name,), (), None

        def groups(self, cells):
            return [name] * len(cells.columns)

        def texts(self, *, bold):
            return frame({f"{name} a": [name, "1"], f"{name} b": ["2", name]}, [name, "b"])

    shown = render(Results(), "latex", caption=name)
    assert readable(shown)
    assert len(shown.splitlines()) == 17
    rows = [line for line in shown.splitlines() if not line.startswith("%")]
    assert all(
        row.count(r" & ") == (1 if "multicolumn" in row else 2) and row.endswith(r" \\")
        for row in rows[5:12]
        if not row.startswith(("\\toprule", "\\midrule", "\\cmidrule", "\\begin"))
    )
    for row in rows:
        plain = re.sub(r"\\text\w+\{\}|\\[&%$#_{}\\]", "", row.removeprefix(r" & \multicolumn{2}{c}{"))
        if row.startswith(r"\label"):
            assert re.fullmatch(r"\\label\{[A-Za-z0-9:._/-]+\}", row)
            continue
        assert not re.search(r"[%$#_^~]", plain)
        assert "{" not in re.sub(r"{[\[\]*]}", "", plain) or row.startswith("\\")
        assert not row.startswith(("[", "*"))


def test_csv(name):
    class Results:
        title, notes, receipt, models, scores, n = "", (), (), (), (), None

        def texts(self, *, bold):
            return frame({name: [name]}, [name])

    rows = list(csv.reader(io.StringIO(render(Results(), "csv"))))
    assert [len(row) for row in rows] == [2, 2]
    for cell in [*rows[0], *rows[1]]:
        assert readable(cell)
        assert not cell.startswith(("=", "@", "+x", "-c"))


@pytest.mark.parametrize("number", ["-0.9", "+3.6", "-2.2 (-3.0–1.0)", "12", "-1e-5", -0.5])
def test_numbers_stay_numbers_in_csv(number):
    assert escape.csv(number) == number or number == "-1e-5"


def test_html(name):
    class Results:
        title, notes, receipt, models, scores, n = name, (name,), (), (name,), (), None

        def texts(self, *, bold):
            return frame({name: [name]}, [name])

    known = {"table", "caption", "thead", "tbody", "tr", "th", "td", "p"}
    shown = render(Results(), "html")
    assert readable(shown)
    assert set(Tags(shown).tags) <= known
    assert escape.visible(name) in Tags(shown).text
    whole = page.to_html([page.Heading(name, 1), page.Paragraph(name), page.Bullets([(name, name)])])
    clean = page.to_html([page.Heading("a", 1), page.Paragraph("a"), page.Bullets([("a", "a")])])
    assert readable(whole)
    assert Tags(whole).tags == Tags(clean).tags


@pytest.fixture
def verdict(name):
    row = [escape.utf8(name), escape.utf8(name), "8/255", 100, 50.0, 40.0, -10.0, -15.0, -5.0, 0.001, 1.0, "regressed"]
    cells = pd.DataFrame([row], columns=COLUMNS)
    return Verdict(REGRESSED, cells, [name], [name], [name])


def test_github(verdict):
    lines = ci.github_annotations(verdict)
    assert len(lines) == len("\n".join(lines).splitlines()) == 3
    assert all(readable(line) and line.startswith(("::error title=", "::notice title=")) for line in lines)
    summary = ci.summary(verdict)
    assert readable(summary)
    assert not any(line.startswith("::") for line in summary.splitlines())
    assert not re.search(r"@\w", summary)


def test_junit(verdict):
    text = ci.junit(verdict)
    assert readable(text)
    case = ElementTree.fromstring(text)[0]
    assert case.get("classname").replace("\n", " ") == escape.xml(verdict.cells["model"][0]).replace("\n", " ")


def test_file_names(name):
    made = escape.file_name(name)
    assert made
    assert re.fullmatch(r"[\w.+=-]+", made)
    assert not made.startswith((".", "-"))


@pytest.mark.parametrize(
    ("text", "shown"),
    [("87.1 (84.9–89.0)", "87.1 (84.9-89.0)"),
     ("a → b ↑", "a -> b ^"), ("Größe", "Grosse"), ("┏━┳│└", "+-+|+"), ("漢", "\\u6f22")],
)  # fmt: skip
def test_ascii_has_a_look_of_what_it_lacks(text, shown):
    assert escape.terminal(text, "ascii") == shown


def test_what_is_no_utf8_is_shown_by_its_bytes():
    assert escape.terminal("caf\udce9.pth") == "caf\\xe9.pth"
