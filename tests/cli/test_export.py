"""`export`: figures and attacked images of stored runs."""

import re
import shutil
import xml.etree.ElementTree as ET

import pandas as pd
import pytest

from tests.helpers.cli import BOTH, call


def test_attacked_images_by_the_runs_own_models_and_data(run, place, tmp_path):
    done = call("export", "run", "--images", tmp_path / "out", *BOTH[-2:], "--attack", "pgd", cwd=place)
    assert done.returncode == 0, done.stderr
    index = pd.read_csv(tmp_path / "out" / "index.csv", keep_default_na=False)
    assert set(index["attack"]) == {"clean", "pgd"}
    assert all((tmp_path / "out" / file).is_file() for file in index["file"])
    shown = re.findall(r"pgd 8/255 +│ +(\S+) → (\S+) +│ +(\S+) → (\S+)", done.stdout)
    part = index[(index["attack"] == "pgd") & (index["budget"] == "8/255")]
    right = [part[part["model"] == model] for model in part["model"].unique()]
    expected = [(100 * (p[c] == p["label"]).mean()) for p in right for c in ("prediction", "prediction_8bit")]
    assert [float(text) for text in shown[0]] == pytest.approx(expected, abs=0.05)


def test_models_and_data_that_lie_elsewhere_are_named(run, place, tmp_path):
    shutil.copytree(place / "run", tmp_path / "run")
    lost = call("export", "run", "--images", "out", "--attack", "fgsm", cwd=tmp_path)
    assert lost.returncode == 2
    assert len(lost.stderr.strip().splitlines()) == 1
    found = call("export", "run", "--images", "out", "--attack", "fgsm", "--budget", "8/255", "--first", "3",
                 "--checkpoint", place / "rpc.safetensors", "--data", f"folder:{place / 'pictures'}",
                 cwd=tmp_path)  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert len(list((tmp_path / "out").rglob("*.png"))) == 6
    other = call("export", "run", "--images", "no", "--model", "vit", "--data", f"folder:{place / 'pictures'}",
                 cwd=tmp_path)  # fmt: skip
    assert other.returncode == 2
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "expected --figures DIR or --images DIR"),
        (("--images", "o", "--attack", "pgdd"), "unknown suite of the run 'pgdd'. Did you mean 'pgd'?"),
        (("--images", "o", "--budget", "3/255"), "--budget: expected 2/255, 4/255, 8/255 as in the run, got 3/255"),
        (("--images", "o", "--budget", "x"), "--budget: expected a number such as 8/255"),
        (("--images", "o", "--first", "0"), "--first: "),
        (("--figures", "o", "--float"), "are of --images DIR"),
        (("run", "--images", "o"), "--images: expected one run, got 2"),
        (("--images", "."), ".: expected a new or empty folder"),
        (("--figures", "."), "expected a new or empty folder"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line(run, place, options, message):
    done = call("export", "run", *options, cwd=place)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
    assert not (place / "o").exists()


def test_figures_as_pdf_and_svg(run, place, tmp_path):
    for folder in ("one", "two"):
        done = call("export", "run", "--figures", tmp_path / folder, cwd=place)
        assert done.returncode == 0, done.stderr
    files = sorted(f for f in (tmp_path / "one").iterdir() if f.suffix)
    assert {f.name for f in files} >= {"1-pgd.pdf", "1-pgd.svg", "1-fgsm-examples.pdf", "1-fgsm-examples.svg"}
    for file in files:
        content = file.read_bytes()
        assert content == (tmp_path / "two" / file.name).read_bytes()
        if file.suffix == ".pdf":
            assert content.startswith(b"%PDF-")
            assert b"/Type3" not in content  # fonts that journals refuse
        else:
            assert ET.fromstring(content).tag.endswith("svg")
            assert b"prefers-color-scheme" not in content
    assert call("export", "run", "--figures", tmp_path / "one", cwd=place).returncode == 0
