"""The house: floors, the public names, the layout, and the wheel as a stranger installs it."""

import ast
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import robustkpca

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "robustkpca"
# Which modules may import which: only those on floors below, and named neighbours.
FLOORS = [
    {"errors"},
    {"draws", "settings", "stats", "storage"},
    {"spec", "own_attacks", "autoattack"},
    {"outcomes", "attention", "corruptions"},
    {"models", "datasets", "weights", "kpca"},
    {"checkpoints", "surrogates"},
    {"methods"},
    {"scoring", "probes", "processes"},
    {"plan"},
    {"evaluation", "analysis", "profiling"},
    {"train"},
    {"metrics"},
    {"tables", "order", "document", "receipt"},
    {"seeds"},
    {"views", "rules"},
    {"layouts", "plots", "summary", "regression", "analysis_plots"},
    {"render", "experiments", "report", "ci", "analysis_page"},
    {"cli"},
    {"__main__"},
]
NO_TORCH = {
    "errors",
    "settings",
    "spec",
    "outcomes",
    "storage",
    "stats",
    "metrics",
    "tables",
    "seeds",
    "receipt",
    "views",
    "document",
    "plots",
    "analysis_plots",
    "analysis_page",
    "ci",
    "summary",
    "rules",
    "order",
    "layouts",
    "render",
    "report",
    "regression",
}


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        yield path, parts[0]


def imports(path):
    """Names imported anywhere in a file, below robustkpca as their first part."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            pytest.fail(f"{path}: relative import")
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        yield from names


def test_imports_point_down():
    height = {name: i for i, floor in enumerate(FLOORS) for name in floor}
    seen = 0
    for path, module in modules():
        if module == "__init__":
            continue
        for name in imports(path):
            parts = name.split(".")
            if parts[0] != "robustkpca" or parts[1] in ("__version__", module):
                continue
            seen += 1
            assert height[parts[1]] < height[module], f"{path.name} imports {parts[1]}"
    assert seen > 40


def test_reading_and_ground_need_no_torch():
    for path, module in modules():
        if module in NO_TORCH:
            assert not [n for n in imports(path) if n.split(".")[0] in ("torch", "torchattacks", "timm")], path
    code = "import sys; import robustkpca.report, robustkpca.regression; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_public_names_exist_and_are_all():
    for name in robustkpca.__all__:
        assert callable(getattr(robustkpca, name)), name
    from robustkpca.evaluation import evaluate
    from robustkpca.regression import check

    assert robustkpca.evaluate is evaluate
    assert robustkpca.check is check
    with pytest.raises(AttributeError, match="nothing"):
        _ = robustkpca.nothing


def test_layout():
    for name in ("pyproject.toml", "robustkpca", "attacks", "benchmarks", "tests", "reports", "README.md", ".ci/run"):
        assert (ROOT / name).exists(), name
    assert not (ROOT / "attacks" / "__init__.py").exists()


def test_files_can_be_read_in_one_sitting():
    for path, _ in modules():
        assert len(path.read_text().splitlines()) <= 400, path


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The wheel, unpacked outside the checkout, beside a decoy `attacks`; dependencies are this environment's."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], cwd=ROOT, check=True)
    (wheel,) = folder.glob("*.whl")
    site = folder / "site"
    zipfile.ZipFile(wheel).extractall(site)
    work = folder / "work"
    (work / "attacks").mkdir(parents=True)
    (work / "attacks" / "__init__.py").write_text("raise SystemExit('the decoy was imported')\n")
    (work / "attacks" / "pgd.toml").write_text("a decoy")
    return wheel, site, work


def test_the_wheel_runs_the_main_job_beside_a_decoy(installed):
    _, site, work = installed
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    where = subprocess.run(
        [sys.executable, "-c", "import robustkpca; print(robustkpca.__file__)"], cwd=work, env=environment, capture_output=True, text=True
    )  # fmt: skip
    assert where.stdout.startswith(str(site))
    done = subprocess.run(
        [sys.executable, "-m", "robustkpca", "eval", "--model", "symvit", "--model", "rpc-symvit", "--attack", "pgd",
         "--limit", "20", "--eps", "4/255"],
        cwd=work, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "RPC-SymViT-micro" in done.stdout


def test_the_wheel_holds_what_it_must_and_no_more(installed):
    wheel, _, _ = installed
    names = zipfile.ZipFile(wheel).namelist()
    data = {"robustkpca/embedded/fashion-mnist-1000.npz", "robustkpca/embedded/LICENSE-fashion-mnist.txt"}
    assert data <= set(names)
    for packed, source in (("_suites", "attacks"), ("_experiments", "benchmarks")):
        inside = {n.removeprefix(f"robustkpca/{packed}/") for n in names if n.startswith(f"robustkpca/{packed}/")}
        assert inside == {p.name for p in (ROOT / source).glob("*.toml")}
    assert all(n.startswith(("robustkpca/", "robustkpca-")) for n in names)
    info = zipfile.ZipFile(wheel).getinfo("robustkpca/embedded/fashion-mnist-1000.npz")
    assert info.file_size < 600_000
