import html.parser
import json
import os
import re
import shutil
import subprocess

import numpy as np
import pytest

from robustkpca.diagnosis.findings import RULES, findings
from robustkpca.diagnosis.rules import Rule
from robustkpca.errors import RunError, SpecError
from robustkpca.evaluation.loop import evaluate
from robustkpca.models.settings import RPCSettings
from robustkpca.report import paper_tables, plots, report, run_tables
from robustkpca.report.summary import summary
from robustkpca.results import accuracy, comparison, imagenet_c
from robustkpca.runs.run import Run
from robustkpca.suites.cell import AttackId
from robustkpca.suites.suite import Suite, load_suite
from tests.helpers.oracles import tiny
from tests.helpers.runs import with_rows

DATA = {"name": "some", "version": 1, "title": "Some | <b>corruptions</b> $x$", "corruptions": ["fog", "contrast"]}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run of two models, one with a label that wants to break pages."""
    from robustkpca.datasets.images import ArraySamples

    pixels = np.random.default_rng(0).integers(0, 256, (30, 28, 28), dtype=np.uint8)
    classes = tuple(f"c{i}" for i in range(10))
    samples = ArraySamples("noise", [f"n{i:02d}" for i in range(30)], np.arange(30) % 10, classes, pixels)
    models = [tiny(), tiny("rpc-symvit", RPCSettings(iterations=2, lam=1.0))]
    models[1].title = "<script>alert(1)</script>|`*&"
    suites = [load_suite("fgsm"), Suite.parse(DATA, "suite")]
    return evaluate(models, samples, suites, tmp_path_factory.mktemp("made") / "run")


@pytest.fixture
def run(made, tmp_path):
    """A copy that a test may spoil."""
    shutil.copytree(made.path, tmp_path / "run")
    return Run.open(tmp_path / "run")


@pytest.mark.slow
def test_the_same_run_gives_the_same_bytes(run, tmp_path):
    first = report.write([run], tmp_path / "a" / "r.md")
    second = report.write([Run.open(run.path)], tmp_path / "b" / "r.md")
    assert [p.name for p in first] == ["r.md", "1-fgsm.png", "1-fgsm-examples.png", "1-some.png", "1-some-map.png"]
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]
    pages = [report.write([run], tmp_path / name / "r.html")[0].read_bytes() for name in "ab"]
    assert pages[0] == pages[1]


def test_it_says_what_decides_its_numbers(run, tmp_path):
    text = report.write([run], tmp_path / "r.md")[0].read_text()
    plain = text.replace("\\", "")
    page = html.unescape(report.write([run], tmp_path / "r.html")[0].read_text())
    for fact in (
        "L-inf", "8/255 (0.0314)", "pixel space", "clipped to [0, 1]", "true labels", "n = 30", run.request.data.ids,
        run.request.models[0].weights, run.request.models[1].weights, "float32", "torch", "McNemar", "Wilson",
        "not the released ImageNet-C", "layer1", "normalised", "Findings", "Receipt", "fingerprint", "attention",
    ):  # fmt: skip
        assert fact in plain, fact
        assert fact in page, fact


def test_every_image_exists_and_every_table_is_straight(run, tmp_path):
    path = report.write([run, run], tmp_path / "my report.md")[0]
    text = path.read_text()
    images = re.findall(r"!\[.*?\]\(<(.*?)>\)", text)
    assert len(images) == 8
    assert all((path.parent / image).is_file() for image in images)
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.M):
        assert len({line.replace("\\|", "").count("|") for line in block.splitlines()}) == 1


class Page(html.parser.HTMLParser):
    """Balanced tags, and everything the page would fetch."""

    VOID = frozenset({"meta", "img", "br", "link"})

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.sources = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href", "srcset", "data")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_html_page_is_self_contained_and_escaped(run, tmp_path):
    files = report.write([run], tmp_path / "r.html")
    assert files == [tmp_path / "r.html"]
    text = files[0].read_text()
    page = Page()
    page.feed(text)
    assert page.open == []
    assert "script" not in page.tags
    assert len(page.sources) == 4
    assert all(s.startswith("data:image/png;base64,") for s in page.sources)
    assert "url(" not in text
    assert "@import" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text


BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.skipif(BROWSER is None, reason="no chromium here")
@pytest.mark.parametrize("width", [390, 1200])
def test_a_browser_shows_the_page_without_sideways_scrolling(run, tmp_path, width):
    page = report.write([run], tmp_path / "r.html")[0]
    probe = "<script>document.title = JSON.stringify({w: document.documentElement.scrollWidth, " \
            "inner: window.innerWidth, images: [...document.images].map(i => i.naturalWidth), " \
            "ink: getComputedStyle(document.body).color, " \
            "paper: getComputedStyle(document.body).backgroundColor})</script>"  # fmt: skip
    # An old headless window is no narrower than 500 px: the page is shown in a frame of the width asked for.
    probed = page.with_name("probed.html")
    probed.write_text(page.read_text().replace("</body>", f"{probe}</body>"))
    frame = page.with_name("frame.html")
    frame.write_text(
        f'<iframe id=f src="probed.html" width={width} height=900></iframe>'
        '<script>document.getElementById("f").onload = '
        "e => document.body.append(e.target.contentDocument.title)</script>"
    )
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         "--allow-file-access-from-files", f"--user-data-dir={tmp_path / 'profile'}",
         "--virtual-time-budget=3000", "--window-size=1300,1000", "--dump-dom", f"file://{frame}"],
        capture_output=True, text=True, timeout=120, env={**os.environ, "HOME": str(tmp_path)},
    )  # fmt: skip
    found = json.loads(html.unescape(re.search(r"\{.*\}", done.stdout).group()))
    assert found["w"] <= found["inner"] <= width
    assert len(found["images"]) == 4
    assert all(w > 0 for w in found["images"])
    assert found["ink"] != found["paper"]


def test_cells_without_a_figure_are_announced(run, tmp_path):
    for path in (run.path / "rows" / "0" / "fgsm").glob("*.parquet"):
        path.unlink()
    text = report.write([Run.open(run.path)], tmp_path / "r.md")[0].read_text()
    assert "3 of 28 cells have no result" in text
    assert "not run" in text


def test_examples_are_what_was_attacked(run):
    kept = run.examples(run.models[0], AttackId("fgsm"))
    assert kept.budget == "8/255"
    assert kept.image.shape == kept.added.shape == (4, 1, 28, 28)
    rows = run.cell_rows(run.models[0], run.cells[3]).loc[kept.sample]
    assert rows["prediction"].tolist() == kept.prediction.tolist()
    assert np.abs(kept.added).max() <= 8 / 255 + 1e-4
    assert run.examples(run.models[0], AttackId("some", "fog")) is None


def test_without_examples_a_report_is_still_written(run, tmp_path):
    run.export(tmp_path / "all.parquet")
    exported = Run.open(tmp_path / "all.parquet")
    assert exported.health == run.health
    names = [p.name for p in report.write([exported], tmp_path / "r.md")]
    assert names == ["r.md", "1-fgsm.png", "1-some.png", "1-some-map.png"]
    assert plots.example_images(exported, exported.suites[0]) is None


def test_the_summary_is_computed(run):
    rows = run.rows.copy()
    second = rows["model"] == run.models[1]
    rows["correct"] = ~second  # the second model is wrong everywhere, the first right everywhere
    changed = with_rows(run, rows)
    lines = " ".join(summary(changed, findings(changed)))
    assert "worse in 14, not distinguishable in 0 of 14 cells" in lines
    assert "the largest clear difference is -100.0 points" in lines
    assert f"{run.models[0]} 100.0 (88.6–100.0) % right" in lines
    assert "Not run: autoattack and adaptive" in lines


def test_a_report_computes_once(run, tmp_path, monkeypatch):
    """Results and findings of a run are worked out once, however many parts of the report ask for them."""
    tables, judged, compared = [], [], []
    table, clean = accuracy.Results._record, RULES["rows"]
    monkeypatch.setattr(
        accuracy.Results, "_record", lambda self, m, c: tables.append((m, *c.texts)) or table(self, m, c)
    )
    counted = Rule(clean.name, lambda model: judged.append(model.name) or clean.judge(model), clean.tasks)
    monkeypatch.setitem(RULES._registered, "rows", counted)
    pairs = comparison._compare
    monkeypatch.setattr(comparison, "_compare", lambda r, b: compared.append(b) or pairs(r, b))
    fresh = Run.open(run.path)
    report.write([fresh], tmp_path / "r.md")
    assert len(tables) == len(set(tables)) == len(fresh.models) * len(fresh.cells)
    assert judged == fresh.models
    assert compared == [fresh.models[0]]
    assert accuracy.results_of(fresh) is accuracy.results_of(fresh)
    assert accuracy.results_of(fresh).table is accuracy.results_of(fresh).table


def test_means_of_corruptions_come_from_one_place(run, monkeypatch):
    """Another `generated_means` changes what tables, summary, plots and paper tables show."""
    means = imagenet_c.generated_means
    monkeypatch.setattr(imagenet_c, "generated_means", lambda *a: means(*a).assign(value=0.123))
    long, suite = accuracy.results_of(run).table, run.suites[1]
    cells = next(view for view in run_tables.views(run) if "(some)" in view.title).cells
    assert (cells.loc[["fog", "contrast", "mean"]] == "12.3").all(axis=None)
    assert f"{run.models[0]} 12.3 %" in " ".join(summary(run, findings(run)))
    values = paper_tables.corruptions([run]).values()
    assert values.to_numpy() == pytest.approx(87.7)
    assert len(suite.specs) == 2
    monkeypatch.undo()
    by_hand = long[(long["suite"] == "some") & (long["model"] == run.models[0])]["value"].mean()
    assert f"{run.models[0]} {100 * by_hand:.1f} %" in " ".join(summary(run, findings(run)))


def test_paths_that_cannot_be(run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write"):
        report.write([run], tmp_path / "file" / "r.md")
    with pytest.raises(SpecError, match=r"ending in .md or .html, got .*r.pdf"):
        report.write([run], tmp_path / "r.pdf")
