import base64
import dataclasses
import hashlib
import html.parser
import json
import os
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET

import numpy as np
import pytest
import torch

from robustkpca.diagnosis.findings import RULES, findings
from robustkpca.diagnosis.rules import Rule
from robustkpca.errors import RunError, SpecError
from robustkpca.evaluation.loop import evaluate
from robustkpca.models.settings import RPCSettings
from robustkpca.page import THEME, to_html
from robustkpca.report import marks, paper_tables, photographs, plots, report, run_tables
from robustkpca.report.summary import summary, verdict
from robustkpca.results import accuracy, comparison, imagenet_c
from robustkpca.runs.run import Run
from robustkpca.suites.cell import AttackId
from robustkpca.suites.suite import Suite, load_suite
from tests.helpers.oracles import tiny
from tests.helpers.runs import with_rows

FIGURES = ["r.md", "1-fgsm.svg", "1-some.svg", "1-some-map-1.svg", "1-some-map-2.svg", "1-fgsm-examples.svg"]
DATA = {"name": "some", "version": 1, "title": "Some | <b>corruptions</b> $x$", "corruptions": ["fog", "contrast"]}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run of two models, one with a label that wants to break pages."""
    from robustkpca.datasets.images import ArraySamples

    pixels = np.random.default_rng(0).integers(0, 256, (30, 28, 28), dtype=np.uint8)
    classes = tuple(f"c{i}" for i in range(10))
    models = [tiny(), tiny("rpc-symvit", RPCSettings(iterations=2, lam=1.0))]
    labels = models[0](torch.from_numpy(pixels)[:, None] / 255).argmax(1).numpy()
    labels[::3] = 9  # mostly wrong
    samples = ArraySamples("noise", [f"n{i:02d}" for i in range(30)], labels, classes, pixels)
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
    assert [p.name for p in first] == FIGURES
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]
    first, second = ([p.read_bytes() for p in report.write([run], tmp_path / name / "r.html")] for name in "ab")
    assert first == second
    assert len(first) == 2


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
    assert len(images) == 10
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
    files = report.write([run], tmp_path / "my r.html")
    assert files == [tmp_path / "my r.html", tmp_path / "my r_images" / "1-fgsm.html"]
    for file in files:
        text = file.read_text()
        page = Page()
        page.feed(text)
        assert page.open == []
        links = [s for s in page.sources if not s.startswith("data:image/")]
        assert links == (["my%20r_images/1-fgsm.html"] if file == files[0] else [])
        assert "url(" not in text
        assert "@import" not in text
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
        assert "prefers-color-scheme: dark" in text
        assert 'name="viewport"' in text
        # The one script is ours, and the page itself forbids all others.
        (script,) = re.findall(r"<script>(.*?)</script>", text, flags=re.S)
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy = html.unescape(re.search(r'Content-Security-Policy" content="(.*?)"', text)[1])
        assert policy == (f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'")
        assert not re.search(r"<[^>]+ (style|on\w+)=", text)


PROBE = """<script>
const table = document.querySelector("table.sortable"), [button] = table.tHead.rows[0].cells[1].children;
const column = i => [...table.tBodies[0].rows].map(row => row.cells[i].textContent);
const orders = [column(1)];
for (let i = 0; i < 3; i++) { button.click(); orders.push(column(1)); }
const first = table.tBodies[0].rows[0].cells[0], box = first.closest(".wide");
box.scrollLeft = 60;
document.title = JSON.stringify({w: document.documentElement.scrollWidth, inner: window.innerWidth, orders,
  images: [...document.images].map(i => i.naturalWidth), ink: getComputedStyle(document.body).color,
  paper: getComputedStyle(document.body).backgroundColor, scrolled: box.scrollLeft,
  held: first.getBoundingClientRect().left - box.getBoundingClientRect().left,
  smallest: Math.min(...[...document.querySelectorAll("body *")].filter(e => e.textContent.trim())
    .map(e => parseFloat(getComputedStyle(e).fontSize)))});
</script>"""


BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.skipif(BROWSER is None, reason="no chromium here")
@pytest.mark.parametrize("width", [390, 1200])
def test_a_browser_shows_the_page_without_sideways_scrolling(run, tmp_path, width):
    page = report.write([run], tmp_path / "r.html")[0]
    # An old headless window is no narrower than 500 px: the page is shown in a frame of the width asked for.
    probed = page.with_name("probed.html")
    # The page's policy forbids the probe.
    text = re.sub(r"<meta http-equiv.*?>", "", page.read_text())
    probed.write_text(text.replace("</body>", f"{PROBE}</body>").replace('loading="lazy"', ""))
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
    assert len(found["images"]) == len(FIGURES) - 2 + 4 * 3  # figures, and four photographs of three tiles
    assert all(w > 0 for w in found["images"])
    assert found["ink"] != found["paper"]
    assert found["smallest"] >= 12
    asked, down, up, again = ([float(t.split()[0]) for t in order] for order in found["orders"])
    assert (asked, down, up) == (again, sorted(asked, reverse=True), sorted(asked))
    assert (width > 390) == (found["scrolled"] == 0)  # on a phone the table scrolls, and its first column stays
    assert abs(found["held"]) <= 2


def test_cells_without_a_figure_are_announced(run, tmp_path):
    for path in (run.path / "rows" / "0" / "fgsm").glob("*.parquet"):
        path.unlink()
    text = report.write([Run.open(run.path)], tmp_path / "r.md")[0].read_text()
    assert "3 of 28 cells have no result" in text
    assert "not run" in text


def test_examples_are_what_was_attacked(run):
    kept = run.examples(run.models[0], AttackId("fgsm"))
    assert kept.image.shape == kept.added.shape == (30, 1, 28, 28)
    rows = run.cell_rows(run.models[0], run.cells[3])
    assert kept.sample.tolist() == rows.index.tolist()
    np.testing.assert_allclose(127 * kept.step, rows["distance"], rtol=1e-5)
    assert np.abs(kept.step[:, None, None, None] * kept.added).max() == pytest.approx(8 / 255, rel=1e-5)
    assert run.examples(run.models[0], AttackId("some", "fog")) is None


def test_without_examples_a_report_is_still_written(run, tmp_path):
    run.export(tmp_path / "all.parquet")
    exported = Run.open(tmp_path / "all.parquet")
    assert exported.health == run.health
    names = [p.name for p in report.write([exported], tmp_path / "r.md")]
    assert names == FIGURES[:-1]
    assert [p.name for p in report.write([exported], tmp_path / "e.html")] == ["e.html"]


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


def test_the_verdict_is_two_sentences_before_all_else(run, tmp_path):
    rows = run.rows.copy()
    first, fgsm = rows["model"] == run.models[0], rows["perturbation"] == "fgsm"
    rows["correct"] = ~(first & fgsm)  # the second model is right everywhere, the first wrong under the attack
    better = with_rows(run, rows)
    who, doubt = verdict(better, findings(better))
    assert who.startswith(f"Under fgsm at eps 8/255, {run.models[1]} is better than {run.models[0]} on 30 images, by ")
    shown = comparison.compare(better).query("attack == 'fgsm' and budget == '8/255'").iloc[0]
    low, high = (f"{100 * shown[k]:+.1f}" for k in ("low", "high"))
    assert f"by +100.0 points (95 % interval {low} to {high}; p < 0.001 after Holm's correction)" in who
    assert f"of all 14 cells compared, {run.models[1]} is better in 3 and worse in 0" in who
    assert "autoattack and adaptive were not run" in doubt
    assert "one training each" in doubt
    rows["correct"] = ~fgsm
    who, _ = verdict(with_rows(run, rows), [])
    assert f"no model is measurably better than {run.models[0]} on 30 images; the difference is" in who
    assert "cells compared" not in who
    rows["correct"] = ~(~first & fgsm)
    assert f"; {run.models[1]} is worse, by -100.0 points" in verdict(with_rows(run, rows), [])[0]
    text = report.write([run], tmp_path / "r.html")[0].read_text()
    lead, summed = text.index('<div class="lead">'), text.index("<h2>Summary")
    assert lead < summed
    assert html.unescape(text[lead:summed]).count("<p>") == 2


def test_photographs_are_the_same_for_all_models_and_all_that_were_broken(run):
    """Chosen by the rule that the report states, from the rows alone."""
    fgsm, models = run.suites[0], run.models
    clean = [run.cell_rows(m, run.cells[0]) for m in models]
    attacked = [run.cell_rows(m, run.cells[3]) for m in models]
    right = [s for s in clean[0].index if all(rows.loc[s, "correct"] for rows in clean)]
    gallery, text = photographs.examples(run, fgsm, marks.styles([run]), "x.svg")
    expected = (right or list(clean[0].index))[:4]
    assert [p.title.split(",")[0] for p in gallery.photographs] == expected
    assert ("that all models get right" in text) == bool(right)
    for photo, sample in zip(gallery.photographs, expected, strict=True):
        assert [tile.name for tile in photo.tiles] == ["clean", *models]
        assert photo.title.endswith(f"true label c{clean[0].loc[sample, 'label']}")
        for tile, rows in zip(photo.tiles[1:], attacked, strict=True):
            row = rows.loc[sample]
            assert tile.text == f"c{row['clean_prediction']} → c{row['prediction']}"
            assert tile.wrong != row["correct"]
    everything, notes = photographs.broken(run, fgsm, AttackId("fgsm"))
    broken = [s for s in clean[0].index if any(rows.loc[s, "broken"] for rows in attacked)]
    assert [p.title.split(",")[0] for p in everything.photographs] == broken
    assert f"{models[0]} {int(attacked[0]['broken'].sum())} of 30" in notes[1]
    assert 'loading="lazy"' in to_html([everything])


def test_what_is_shown_of_a_cascade_is_said(run, monkeypatch):
    """A later attack has no image of what was broken before it; nor are images kept beyond the first of the set."""
    attacked = run.examples(run.models[0], AttackId("fgsm"))
    rows = run.rows.copy()
    rows["broken"] = (rows["perturbation"] == "fgsm") & (rows["budget"] == "8/255")
    changed = with_rows(run, rows)
    few = dataclasses.replace(attacked, **{k: v[[1, 4]] for k, v in vars(attacked).items()})
    one = dataclasses.replace(attacked, **{k: v[[4, 5]] for k, v in vars(attacked).items()})
    monkeypatch.setattr(Run, "examples", lambda self, m, a: few if m == run.models[0] else one)
    gallery, notes = photographs.broken(changed, run.suites[0], AttackId("fgsm"))
    assert [p.title.split(",")[0] for p in gallery.photographs] == ["n01", "n04", "n05"]
    assert [[tile.png is None for tile in p.tiles] for p in gallery.photographs] == [
        [False, False, True], [False, False, False], [False, True, False],
    ]  # fmt: skip
    assert f"Not shown: {run.models[0]} 28; {run.models[1]} 28 (" in notes[2]


def _linear(colour):
    values = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def _contrast(one, other):
    high, low = sorted((float(_linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (one, other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


# Machado, Oliveira and Fernandes 2009, table 1, severity 1: protanopia, deuteranopia, tritanopia.
BLIND = (
    [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
)


def _lab(linear):
    """CIE L*a*b* of linear sRGB, white D65."""
    matrix = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
    x = np.clip(np.array(matrix) @ np.clip(linear, 0, 1) / [0.95047, 1, 1.08883], 0, None)
    f = np.where(x > (6 / 29) ** 3, np.cbrt(x), x / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("dark", [False, True])
def test_colours_are_told_apart(dark):
    """Text has WCAG's AA contrast, lines 3 to 1; the first four models differ for the colour-blind; all by marker."""
    theme = {name: pair[dark] for name, pair in THEME.items()}
    for name in ("ink", "soft", "pass", "warn", "fail"):
        for ground in ("paper", "card"):
            assert _contrast(theme[name], theme[ground]) >= 4.5, (name, ground)
    styles = [marks.style(i) for i in range(10)]
    colours = [(s.light, s.dark)[dark] for s in styles]
    for colour in colours:
        assert _contrast(colour, theme["paper"]) >= 3, colour
    for matrix in (np.eye(3), *BLIND):
        seen = [_lab(np.array(matrix) @ _linear(colour)) for colour in colours[:4]]
        gaps = [np.linalg.norm(a - b) for i, a in enumerate(seen) for b in seen[:i]]
        assert min(gaps) > 10, gaps
    assert len({s.marker for s in styles}) == len({s.sign for s in styles}) == 10


def test_figures_are_sound_in_light_and_dark(run, tmp_path):
    """Well-formed with any name, in both schemes, with the colour and marker that the tables show."""
    folder = report.write([run], tmp_path / "r.md")[0].with_name("r_files")
    styles = marks.styles([run])
    for file in folder.iterdir():
        text = file.read_text()
        ET.fromstring(text)
        assert "prefers-color-scheme: dark" in text
        assert f"[style*='fill: {THEME['ink'][0]}'] {{ fill: {THEME['ink'][1]} !important }}" in text
        assert "<dc:date>" not in text
        assert all(float(size) >= 9 for size in re.findall(r"font: ([\d.]+)px", text))
    lines = (folder / "1-fgsm.svg").read_text()
    page = report.write([run], tmp_path / "r.html")[0].read_text()
    for number, style in enumerate(styles.values()):
        assert f"stroke: {style.light}" in lines
        assert f"{{ stroke: {style.dark} !important }}" in lines
        assert f"--m{number}: {style.light};" in page
        assert f"--m{number}: {style.dark};" in page
        assert f'<i class="m{number}" aria-hidden="true">{style.sign}</i>' in page
    assert "fill-opacity: 0.13" in lines


def test_bands_are_four_at_most(run, monkeypatch):
    long, styles = accuracy.results_of(run).table, marks.styles([run])
    assert b"fill-opacity" in plots.accuracy_curves(run, long, run.suites[0], styles)
    monkeypatch.setattr(plots, "BANDS", 1)
    assert b"fill-opacity" not in plots.accuracy_curves(run, long, run.suites[0], styles)
    assert any("no intervals are drawn" in str(b) for b in report._figures(run, 1, styles))
    monkeypatch.undo()
    assert plots.BANDS == 4


def test_names_cannot_break_a_figure(run):
    long, styles = accuracy.results_of(run).table, marks.styles([run])
    nasty = "a\x1b[31m<b>&]]>--\u202e"
    named = long.assign(model=long["model"].astype(object).map(lambda m: nasty if m == run.models[0] else m))
    svg = plots.accuracy_curves(run, named, run.suites[0], {**styles, nasty: marks.style(0)})
    assert "\\x1b[31m<b>&]]>--\\u202e" in "".join(ET.fromstring(svg.decode()).itertext())


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
