"""Tables and lines on narrow consoles, without a terminal, and in encodings that lack characters."""

import io
import os
import re
import subprocess
import sys

import pandas as pd
import pytest
from rich.console import Console

from robustkpca.cli import show


def table(columns, rows, heads="fgsm {} top-1 ↑"):
    cells = {heads.format(f"{i}/255"): [f"{i + 40}.1 ({i + 30}.0–{i + 50}.9)"] * rows for i in range(columns)}
    return pd.DataFrame(
        cells, index=pd.Index([f"RPC-SymViT-micro (6iter/layer{i})" for i in range(rows)], name="model")
    )


@pytest.fixture
def printed(monkeypatch):
    def text(width, encoding, title, cells, notes=()):
        file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        monkeypatch.setattr(show, "out", Console(emoji=False, file=file, width=width))
        show.print_table(title, cells, notes)
        file.flush()
        return file.buffer.getvalue().decode(encoding)

    return text


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1", "cp1252"])
@pytest.mark.parametrize(("columns", "rows"), [(3, 2), (15, 2), (15, 30), (2, 40)])
def test_every_figure_is_whole(printed, width, encoding, columns, rows):
    cells = table(columns, rows)
    text = printed(width, encoding, "Table – one", cells, ["a note"])
    assert max(map(len, text.splitlines())) <= width
    dash = "–" if encoding in ("utf-8", "cp1252") else "-"
    for i in range(columns):
        assert len(re.findall(rf"\b{i + 40}\.1\b", text)) == rows
        assert len(re.findall(rf"\b{i + 30}\.0{dash}{i + 50}\.9\b", text)) == rows
        assert re.search(rf"(?<!\d){i}/255\b", text)
    assert "fgsm" in text
    assert "top-1" in text


def test_what_is_bold_is_plain_where_the_encoding_has_no_marks(printed):
    cells = pd.DataFrame({"one": ["\ue00095.00\ue001 (1–2)"]}, index=pd.Index(["a"], name="model"))
    shown = printed(80, "ascii", "t", cells)
    assert "95.00" in shown
    assert "ue000" not in shown


def test_long_words_of_heads_stand_in_a_legend(printed):
    cells = table(4, 2, heads="my-own-suite-of-attacks/long-name {}")
    text = printed(80, "utf-8", "T", cells)
    for i, letter in enumerate("abcd"):
        assert f"({letter}): my-own-suite-of-attacks/long-name {i}/255" in text
        assert f"({letter}) " in text


def test_a_table_of_few_models_and_many_columns_is_turned(printed):
    text = printed(80, "utf-8", "T", table(15, 2))
    assert "of 2)" not in text
    assert text.splitlines()[0].strip() == "T"


def test_names_cannot_steer_the_terminal_or_begin_a_line(printed, capsys):
    cells = table(1, 1)
    cells.index = pd.Index(["a\n::error::b\x1b[2J\u202ec"], name="model")
    text = printed(80, "utf-8", "T\n::error::", cells, ["note\n::error::"])
    assert not any(line.startswith("::") for line in text.splitlines())
    assert "\x1b[2J" not in text
    assert "\u202e" not in text
    show.say("line\n::error::x\udcff")
    assert capsys.readouterr().err == "line\\n::error::x\\xff\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_commands_print_in_any_encoding(run, place, encoding):
    for form in ("rich", "csv", "html", "markdown", "latex"):
        if encoding != "ascii" and form != "markdown":
            continue
        command = ["table", "run", "--layout", "budgets", "--intervals", "--format", form]
        environment = {**os.environ, "PYTHONIOENCODING": encoding}
        done = subprocess.run(
            [sys.executable, "-m", "robustkpca", *command], cwd=place, env=environment, capture_output=True
        )
        assert done.returncode == 0, done.stderr
        assert "8/255" in done.stdout.decode(encoding)


def test_the_receipt_is_three_lines_and_whole_in_the_folder(run, place):
    lines = run.stdout.splitlines()
    end = next(i for i, line in enumerate(lines) if line.startswith("findings: "))
    assert sum("budget" in line or "normalised" in line for line in lines[end - 6 : end]) == 0
    whole = (place / "run" / "receipt.txt").read_text(encoding="utf-8")
    assert "normalised" in whole
    assert "attention" in whole
