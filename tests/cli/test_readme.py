"""What README shows is what is printed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
_NUMBER = re.compile(r"\d+\.\d+")


def shown() -> str:
    section = README.partition("## What it prints")[2]
    return re.search(r"```text\n(.*?)\n```", section, re.DOTALL)[1]


def masked(text: str) -> list[str]:
    """Lines without figures, versions, hashes and what is measured in seconds; which model a p speaks for stays."""
    text = re.sub(r"run [0-9a-f]{16}", "run ID", text)
    text = re.sub(r"runs/pgd-[0-9a-f]{8}( +\(\d+ s\))?", "runs/pgd-ID", text)
    text = re.sub(r"(robustkpca|timm|torch|torchattacks) [\d.]+\d(\+\w+)?", r"\1 VERSION", text)
    return [_NUMBER.sub("0.0", line.rstrip()) for line in text.strip().splitlines()]


@pytest.mark.slow
def test_the_main_command_prints_what_readme_shows(tmp_path):
    command = re.search(r"<!-- main command -->\n```bash\n.*\.venv/bin/robustkpca (.*)\n```", README)[1]
    done = subprocess.run(
        [sys.executable, "-m", "robustkpca", *command.split()], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert masked(done.stdout) == masked(shown())
    tables = [text.partition("fashion-mnist, n =")[0] for text in (done.stdout, shown())]
    ours, theirs = ([float(number) for number in _NUMBER.findall(text)] for text in tables)
    # Other processors round otherwise: a few of the 1,000 images may fall to the other side.
    assert ours == pytest.approx(theirs, abs=0.5)
    weights = [re.findall(r"\b[0-9a-f]{16}\b", text.partition("weights")[2]) for text in (done.stdout, shown())]
    assert weights[0] == weights[1]
