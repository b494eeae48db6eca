"""The house: folders as floors, the public names, the layout, and the wheel as a stranger installs it."""

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
# From the ground up. A folder may import from itself and from floors below it, never upward and never from a neighbour.
FLOORS = [
    {"_version"},
    {"errors", "escape"},
    {"files"},
    {"config", "extensions", "page"},
    {"statistics", "runtime"},
    {"suites"},
    {"models"},
    {"corruptions"},
    {"datasets"},
    {"attacks"},
    {"tasks"},
    {"runs"},
    {"evaluation"},
    {"kpca", "profile"},
    {"train"},
    {"results"},
    {"diagnosis"},
    {"report"},
    {"experiments", "gate"},
    {"cli"},
    {"__main__"},
]
# What reads runs, and what describes them, works without torch.
NO_TORCH = {
    "errors",
    "escape",
    "config",
    "extensions",
    "files",
    "page",
    "statistics",
    "suites",
    "runs",
    "results",
    "diagnosis",
    "report",
    "gate",
}
NO_TORCH_MODULES = {
    "datasets/registry.py",
    "kpca/page.py",
    "kpca/plots.py",
    "models/families.py",
    "models/settings.py",
    "train/recipes.py",
}
HEAVY = ("torch", "torchattacks", "timm")


def modules():
    """(file, folder or top module) for every module of the package but the list of public names."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts != ("__init__",):
            yield path, parts[0]


def imports(path, *, types=True):
    """Every name that a file imports anywhere, with its module in front.

    Without `types`, none that only type checkers see.
    """
    tree = ast.parse(path.read_text())
    for block in ast.walk(tree):
        if not types and isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test):
            block.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                pytest.fail(f"{path}: relative import")
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_imports_point_down():
    height = {name: i for i, floor in enumerate(FLOORS) for name in floor}
    seen = 0
    for path, folder in modules():
        for name in imports(path):
            parts = name.split(".")
            if parts[0] != "robustkpca" or parts[1] == folder:
                continue
            seen += 1
            assert height[parts[1]] < height[folder], f"{path.relative_to(ROOT)} imports {name}"
    assert seen > 40


def test_modules_of_a_folder_do_not_import_in_circles():
    edges = {}
    for path, _ in modules():
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        edges[name] = set(imports(path, types=False))
    # `from package import module` is an import of the module, `from module import name` one of the module too.
    edges = {
        name: {full if full in edges else full.rpartition(".")[0] for full in wanted} & edges.keys()
        for name, wanted in edges.items()
    }
    while leaves := {name for name, wanted in edges.items() if not wanted}:
        edges = {name: wanted - leaves for name, wanted in edges.items() if name not in leaves}
    assert not edges, f"circle among {sorted(edges)}"


def test_reading_and_ground_need_no_torch():
    for path, folder in modules():
        if folder in NO_TORCH or str(path.relative_to(PACKAGE)) in NO_TORCH_MODULES:
            assert not [n for n in imports(path) if n.split(".")[0] in HEAVY], path
    code = "import sys; import robustkpca.report.report, robustkpca.gate.check; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_public_names_exist_and_are_all():
    assert {*robustkpca.HOMES, "__version__"} == set(robustkpca.__all__) == set(dir(robustkpca))
    for name in robustkpca.HOMES:
        assert callable(getattr(robustkpca, name)), name
    from robustkpca.evaluation.loop import evaluate
    from robustkpca.gate.check import check

    assert robustkpca.evaluate is evaluate
    assert robustkpca.check is check
    with pytest.raises(AttributeError, match="nothing"):
        _ = robustkpca.nothing


def test_layout():
    for name in ("pyproject.toml", "robustkpca", "attacks", "benchmarks", "tests", "reports", "README.md", ".ci/run"):
        assert (ROOT / name).exists(), name
    assert not (ROOT / "attacks" / "__init__.py").exists()


# What may be longer than MOST_LINES or have more than MOST_PARAMETERS, and why.
MOST_LINES, MOST_PARAMETERS = 60, 8
EXCEPTIONS = {
    "models/attention.py:principal_attention": "arguments of torch's scaled_dot_product_attention, then the paper's",
    "models/attention.py:MultiHeadAttention.__init__": "the signature that timm gives its attention layers",
}


def functions(tree, prefix=""):
    """(name, node) of every function in a tree, those inside classes and functions too."""
    for node in ast.iter_child_nodes(tree):
        inside = prefix
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside = f"{prefix}{node.name}."
            if not isinstance(node, ast.ClassDef):
                yield prefix + node.name, node
        yield from functions(node, inside)


def measured(node, *, command=False):
    """(lines without the docstring, parameters without self and cls); of a command only the lines of its body."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    first = body[0].lineno if body else node.end_lineno + 1
    if command:
        return node.end_lineno - first + 1, 0
    arguments = node.args
    documented = node.body[0].end_lineno - node.body[0].lineno + 1 if body is not node.body else 0
    names = [a.arg for a in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]]
    parameters = [name for name in names if name not in ("self", "cls")]
    parameters += [a for a in (arguments.vararg, arguments.kwarg) if a]
    return node.end_lineno - node.lineno + 1 - documented, len(parameters)


def test_functions_are_short_and_signatures_too():
    large = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE)
        for name, node in functions(ast.parse(path.read_text())):
            # A command's parameters are its options, most of them several lines long.
            command = place.parts[0] == "cli" and not name.startswith("_") and "typer." in ast.unparse(node.args)
            lines, parameters = measured(node, command=command)
            if lines > MOST_LINES or parameters > MOST_PARAMETERS:
                large[f"{place}:{name}"] = f"{lines} lines, {parameters} parameters"
    assert large.keys() == EXCEPTIONS.keys(), large


def test_sizes_are_measured_as_they_are_meant():
    code = ["class A:", "    def f(self, a, *b, c=1, **d):", '        """Two', '        lines."""', "        return a"]
    ((name, node),) = functions(ast.parse("\n".join(code)))
    assert (name, measured(node)) == ("A.f", (2, 4))
    assert measured(node, command=True) == (1, 0)
    assert [name for name, _ in functions(ast.parse("def f():\n    if 1:\n        def g():\n            pass"))] == [
        "f",
        "f.g",
    ]


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


@pytest.mark.slow
def test_the_wheel_runs_the_main_job_beside_a_decoy(installed):
    _, site, work = installed
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    where = subprocess.run(
        [sys.executable, "-c", "import robustkpca; print(robustkpca.__file__)"], cwd=work, env=environment,
        capture_output=True, text=True
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
