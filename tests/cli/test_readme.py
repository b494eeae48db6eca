"""What README shows is what is printed."""

import re
from pathlib import Path

from tests.helpers.cli import call

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
_NUMBER = re.compile(r"[-+]?\d+\.\d+")


def shown() -> str:
    section = README.partition("## What it prints")[2]
    return re.search(r"```text\n(.*?)\n```", section, re.DOTALL)[1]


def masked(text: str) -> list[str]:
    """Words without figures, versions, hashes and seconds, whatever the lines they are folded into."""
    text = re.sub(r"run [0-9a-f]{16}", "run ID", text)
    text = re.sub(r"runs/pgd-[0-9a-f]{8}( +\(\d+ s\))?", "runs/pgd-ID", text)
    text = re.sub(r"(robustkpca|timm|torch|torchattacks) [\d.]+\d(\+\w+)?", r"\1 VERSION", text)
    text = re.sub(
        r"n = \d+|all \d+ samples|same \d+ samples", "n = N", " ".join(re.sub("[┃│━─┏┓┡┩└┘┳╇┴╈]", " ", text).split())
    )
    return _NUMBER.sub("0.0", text).split()


def test_the_main_command_prints_what_readme_shows(tmp_path):
    """On a tenth of the images: words and weights are README's, figures are those of fewer images."""
    command = re.search(r"<!-- main command -->\n```bash\n.*\.venv/bin/robustkpca (.*)\n```", README)[1]
    done = call(*command.split(), "--limit", "100", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert masked(done.stdout) == masked(shown())
    weights = [re.findall(r"\b[0-9a-f]{16}\b", text.partition("weights")[2]) for text in (done.stdout, shown())]
    assert weights[0] == weights[1]
