"""Registries, entry points and import paths, with small packages written to a temporary folder."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from robustkpca.errors import DataError, RobustKPCAError, SpecError
from robustkpca.extensions import Registry, call_object, import_object, is_import_path

GROUP = "robustkpca.testing"


@pytest.fixture
def work(tmp_path, monkeypatch):
    """An empty working directory; what a test imports is forgotten, and sys.path must be as it was."""
    monkeypatch.chdir(tmp_path)
    before, path, modules = list(sys.path), sys.path, set(sys.modules)
    yield tmp_path
    assert sys.path is path
    for name in set(sys.modules) - modules:
        del sys.modules[name]
    assert [p for p in sys.path if not p.startswith(str(tmp_path / "site"))] == before


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def install(site: Path, name: str, entry_points: str, monkeypatch, version: str = "1.2") -> None:
    """The metadata of an installed package, in a folder on sys.path."""
    info = site / f"{name}-{version}.dist-info"
    write(info / "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    write(info / "entry_points.txt", entry_points)
    if str(site) not in sys.path:
        monkeypatch.syspath_prepend(str(site))


def message(action, error: type[Exception] = SpecError) -> str:
    with pytest.raises(error) as caught:
        action()
    text = str(caught.value)
    assert "\n" not in text
    return text


# Registries


def test_the_decorator_adds_and_returns_what_it_decorates():
    registry: Registry[object] = Registry("attack method")

    @registry.register("mine")
    class Mine:
        pass

    @registry.register("square")
    def square(x: int) -> int:
        return x * x

    assert registry["mine"] is Mine
    assert registry["square"] is square
    assert square(3) == 9
    assert list(registry) == list(registry.keys()) == ["mine", "square"]
    assert len(registry) == 2
    assert dict(registry.items()) == {"mine": Mine, "square": square}
    assert "mine" in registry
    assert "yours" not in registry
    assert registry.get("yours") is None
    assert registry.get("yours", 3) == 3
    assert registry.get("mine") is Mine


def test_a_name_given_twice_names_both():
    registry: Registry[object] = Registry("task")
    registry.register("one")(subprocess.run)
    text = message(lambda: registry.register("one")(subprocess.call))
    assert text == "task 'one': the name is given twice, by subprocess:run and by subprocess:call"
    assert registry["one"] is subprocess.run
    registry.register("one")(subprocess.run)

    lazy: Registry[object] = Registry("task", lazy={"one": "subprocess:run"})
    assert "by subprocess:run and by subprocess:call" in message(lambda: lazy.register("one")(subprocess.call))
    lazy.register("one")(subprocess.run)  # the built-in's own module may use the decorator
    assert list(lazy) == ["one"]


def test_equal_homes_are_one_definition_only_if_the_name_says_so():
    registry: Registry[object] = Registry("task")
    first, second = (lambda: 1), (lambda: 2)
    registry.register("one")(first)
    message(lambda: registry.register("one")(second))
    registry.register("two")(1)
    message(lambda: registry.register("two")(2))
    assert (registry["one"], registry["two"]) == (first, 1)


def test_a_module_that_is_executed_again_replaces_its_own_entry():
    registry: Registry[object] = Registry("task")
    source = "@registry.register('one')\ndef build(): return 1\n"
    for _ in range(2):
        space = {"registry": registry, "__name__": "notebook"}
        exec(source, space)
    assert registry["one"] is space["build"]


@pytest.mark.parametrize("name", ["", None, message])
def test_a_registration_needs_a_name(name):
    text = message(lambda: Registry("task").register(name))
    assert text.startswith('task: expected a name, as in @register("name"), got ')


def test_unknown_names():
    registry: Registry[object] = Registry("attack method", lazy={"pgd": "a.b:C", "noise": "a.b:D"})
    registry.register("square")(len)
    assert message(lambda: registry["pdg"]) == (
        "unknown attack method 'pdg'. Did you mean 'pgd'? Available: pgd, noise, square"
    )
    assert message(lambda: Registry("task")["x"]) == "unknown task 'x'. None is available"


def test_built_ins_are_imported_when_asked_for_and_once(work, monkeypatch):
    write(work / "site" / "builtin_home.py", "class A:\n    class B: pass\nclass Other: pass\n")
    monkeypatch.syspath_prepend(str(work / "site"))
    registry: Registry[object] = Registry("task", lazy={"a": "builtin_home:A", "b": "builtin_home:A.B", "c": "no:C"})
    assert list(registry) == ["a", "b", "c"]
    assert "a" in registry
    assert len(registry) == 3
    assert "builtin_home" not in sys.modules
    assert registry["b"].__qualname__ == "A.B"
    assert registry["a"] is registry["a"] is sys.modules["builtin_home"].A


def test_entry_points_come_last_and_are_imported_when_asked_for(work, monkeypatch):
    site = work / "site"
    write(site / "goodpkg" / "__init__.py")
    write(site / "goodpkg" / "attacks.py", "class Mine: pass\n")
    install(site, "goodpkg", f"[{GROUP}]\nmine = goodpkg.attacks:Mine\n[other.group]\nx = y:z\n", monkeypatch)
    registry: Registry[object] = Registry("attack", GROUP, lazy={"pgd": "a:b"})
    registry.register("square")(len)
    assert list(registry) == ["pgd", "square", "mine"]
    assert len(registry) == 3
    assert "mine" in registry
    assert "goodpkg" not in sys.modules
    assert registry["mine"].__module__ == "goodpkg.attacks"
    assert registry["mine"] is registry["mine"]
    assert "mine" not in Registry("attack")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import no_such_dependency", "ModuleNotFoundError: No module named 'no_such_dependency', at site/badpkg.py:2"),
        ("raise ValueError('two\\nlines')", "ValueError: two lines, at site/badpkg.py:2"),
        ("import sys; sys.exit(7)", "SystemExit: 7, at site/badpkg.py:2"),
        ("x = (", "SyntaxError: '(' was never closed, at site/badpkg.py:2"),
        ("x = 1", "AttributeError: module 'badpkg' has no attribute 'Bad'"),
    ],
)
def test_a_broken_entry_point_costs_nobody_else(work, monkeypatch, code, reason):
    site = work / "site"
    write(site / "badpkg.py", f"# a comment\n{code}\n")
    write(site / "goodpkg.py", "class Good: pass\n")
    install(site, "badpkg", f"[{GROUP}]\nbad = badpkg:Bad\n", monkeypatch)
    install(site, "goodpkg", f"[{GROUP}]\ngood = goodpkg:Good\n", monkeypatch)
    registry: Registry[object] = Registry("attack", GROUP)
    assert set(registry) == {"bad", "good"}
    assert registry["good"].__name__ == "Good"
    expected = f"attack 'bad': loading the entry point bad = badpkg:Bad of badpkg 1.2 raised {reason}"
    assert message(lambda: registry["bad"]) == expected
    assert message(lambda: registry["bad"]) == expected
    assert message(lambda: registry.get("bad")) == expected


def test_metadata_that_cannot_be_read_hides_no_other_package(work, monkeypatch):
    site = work / "site"
    write(site / "goodpkg.py", "class Good: pass\n")
    install(site, "tornpkg", f"[{GROUP}]\nthis line has no equals sign\n", monkeypatch)
    install(site, "goodpkg", f"[{GROUP}]\ngood = goodpkg:Good\n", monkeypatch)
    registry: Registry[object] = Registry("attack", GROUP)
    assert list(registry) == ["good"]
    assert registry["good"].__name__ == "Good"


def test_two_packages_with_the_same_name_of_an_entry_point(work, monkeypatch):
    site = work / "site"
    install(site, "first", f"[{GROUP}]\nsame = first:A\n", monkeypatch)
    install(site, "second", f"[{GROUP}]\nsame = second:B\n", monkeypatch, version="2.0")
    registry: Registry[object] = Registry("attack", GROUP)
    assert list(registry) == ["same"]
    text = message(lambda: registry["same"])
    assert "the name is given twice" in text
    assert "same = first:A of first 1.2" in text
    assert "same = second:B of second 2.0" in text


def test_an_entry_point_does_not_replace_a_built_in(work, monkeypatch):
    install(work / "site", "thief", f"[{GROUP}]\nrun = thief:run\ncall = thief:call\n", monkeypatch)
    registry: Registry[object] = Registry("attack", GROUP, lazy={"run": "subprocess:run"})
    registry.register("call")(subprocess.call)
    assert list(registry) == ["run", "call"]
    left_out = r"attack 'run' is subprocess:run; the entry point run = thief:run of thief 1.2 is left out"
    with pytest.warns(UserWarning, match=left_out):
        assert registry["run"] is subprocess.run
    with pytest.warns(UserWarning, match="call = thief:call"):
        assert registry["call"] is subprocess.call


@pytest.mark.parametrize("value", ["bothpkg.attacks:Mine", "bothpkg:Mine"])
def test_a_package_may_use_the_decorator_and_an_entry_point(work, monkeypatch, value):
    site = work / "site"
    write(site / "registries.py", f"from robustkpca.extensions import Registry\nALL = Registry('attack', {GROUP!r})\n")
    write(site / "bothpkg" / "__init__.py", "from bothpkg.attacks import Mine\n")
    write(
        site / "bothpkg" / "attacks.py",
        "from registries import ALL\n@ALL.register('mine')\nclass Mine: pass\n",
    )
    install(site, "bothpkg", f"[{GROUP}]\nmine = {value}\n", monkeypatch)
    registry = import_object("registries:ALL", what="registry")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert registry["mine"] is registry["mine"] is sys.modules["bothpkg.attacks"].Mine


def test_entry_points_are_read_again_when_sys_path_has_changed(work, monkeypatch):
    registry: Registry[object] = Registry("attack", GROUP)
    assert list(registry) == []
    write(work / "site" / "latepkg.py", "def late(): pass\n")
    install(work / "site", "latepkg", f"[{GROUP}]\nlate = latepkg:late\n", monkeypatch)
    assert list(registry) == ["late"]


# What is an import path


@pytest.mark.parametrize(
    "text",
    ["mypkg.models:build", "a.b.c:D.e", "timm.models:create_model", "single:build", "package:val", "__main__:build"],
)
def test_import_paths(work, text):
    write(work / "single.py", "raise SystemExit('only asking must not import')\n")
    write(work / "package" / "__init__.py", "raise SystemExit('only asking must not import')\n")
    assert is_import_path(text)


@pytest.mark.parametrize(
    "text",
    [
        "", ":", "symvit", "rpc-symvit-tiny", "mypkg.models", "mypkg.models:", ":build", "timm:vit_tiny",
        "timm:vit_tiny_patch16_224.augreg_in21k", "hf-hub:x/y", "hf-hub:timm/x.y", "own:x", "imagenet:/data",
        "imagenet:data", "cifar10.1:data", "folder:pictures", "C:\\x", "C:/x", "C:x", "https://host/x", "a.b:c:d",
        ".models:build", "a..b:c", "a.b:c()", "a.b:c d", "a.b:1", "a.class:b", "path/a.py:build", "pictures:val",
        "a.b:c\n",
    ],
)  # fmt: skip
def test_no_import_paths(work, text):
    (work / "pictures").mkdir()  # a folder of data is not a module
    assert not is_import_path(text)


def test_reserved_names_keep_their_meaning(work):
    for name in ("folder", "timm", "own"):
        write(work / f"{name}.py", "val = 1\n")
    assert is_import_path("folder:val")
    assert not is_import_path("folder:val", reserved=["imagenet", "folder"])
    assert is_import_path("folder.more:val", reserved=["folder"])
    assert not is_import_path("timm:val")
    assert not is_import_path("own:val")


# Importing


def test_an_object_of_the_working_directory(work):
    write(work / "mypkg" / "__init__.py")
    write(work / "mypkg" / "models.py", "import helper\nclass Net:\n    class Head: pass\n    size = helper.SIZE\n")
    write(work / "helper.py", "SIZE = 5\n")
    before = list(sys.path)
    assert import_object("mypkg.models:Net", what="model").size == 5
    assert import_object("mypkg.models:Net.Head", what="model").__qualname__ == "Net.Head"
    assert sys.path == before


def test_the_working_directory_comes_first(work, monkeypatch):
    write(work / "site" / "twice.py", "where = 'installed'\n")
    write(work / "twice.py", "where = 'here'\n")
    monkeypatch.syspath_prepend(str(work / "site"))
    assert import_object("twice:where", what="model") == "here"


def test_sys_path_is_as_before_whatever_the_module_does(work):
    write(work / "greedy.py", "import sys\nsys.path.append('somewhere')\nsys.path = ['else']\nx = 1\n")
    write(work / "fails.py", "import sys\nsys.path.clear()\nraise ValueError\n")
    before, path = list(sys.path), sys.path
    assert import_object("greedy:x", what="model") == 1
    assert message(lambda: import_object("fails:x", what="model")).endswith("raised ValueError, at fails.py:3")
    assert sys.path is path
    assert sys.path == before


@pytest.mark.parametrize("text", ["models", "models:", "a/b.py:c", "C:\\x", "a.b:c()", "a:b:c", "a:b\nc"])
def test_the_wrong_form(work, text):
    assert message(lambda: import_object(text, what="--model")) == (
        f"--model: expected package.module:object, got {text!r}"
    )


def test_a_module_that_does_not_exist(work):
    write(work / "mypkg" / "__init__.py")
    looked = f"(looked in {work}, then among the installed packages)"
    assert message(lambda: import_object("nopkg.models:build", what="model")) == (
        f"model nopkg.models:build: there is no module nopkg {looked}"
    )
    assert message(lambda: import_object("mypkg.models:build", what="model")) == (
        f"model mypkg.models:build: there is no module mypkg.models {looked}; mypkg is {work / 'mypkg' / '__init__.py'}"
    )
    write(work / "plain.py")
    assert f"no module plain.models {looked}; plain is {work / 'plain.py'}" in message(
        lambda: import_object("plain.models:build", what="model")
    )


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise ValueError('first\\n  second')", "ValueError: first second, at mypkg/models.py:2"),
        ("raise RuntimeError", "RuntimeError, at mypkg/models.py:2"),
        ("import no_such", "ModuleNotFoundError: No module named 'no_such', at mypkg/models.py:2"),
        ("import mypkg.models.deep", "ModuleNotFoundError: No module named 'mypkg.models.deep'; "
         "'mypkg.models' is not a package, at mypkg/models.py:2"),
        ("from mypkg import gone", "ImportError: cannot import name 'gone' from 'mypkg' "),
        ("import mypkg.inner", "ZeroDivisionError: division by zero, at mypkg/inner.py:3"),
        ("import json; json.loads('{')", "JSONDecodeError: Expecting property name enclosed in double quotes: "
         "line 1 column 2 (char 1), at mypkg/models.py:2"),
        ("x = = 1", "SyntaxError: invalid syntax, at mypkg/models.py:2"),
        ("import sys; sys.exit('stop')", "SystemExit: stop, at mypkg/models.py:2"),
        ("import sys; sys.exit()", "SystemExit, at mypkg/models.py:2"),
        ("class E(Exception):\n    def __str__(self): 1 / 0\nraise E", "E, at mypkg/models.py:4"),
        ("raise ValueError('x' * 5000)", f"ValueError: {'x' * 300} ..., at mypkg/models.py:2"),
    ],
)  # fmt: skip
def test_a_module_that_raises(work, code, reason):
    write(work / "mypkg" / "__init__.py")
    write(work / "mypkg" / "inner.py", "def f():\n    def g():\n        1 / 0\n    g()\nf()\n")
    write(work / "mypkg" / "models.py", f"# a comment\n{code}\n")
    text = message(lambda: import_object("mypkg.models:build", what="model"))
    assert text.startswith(f"model mypkg.models:build: importing mypkg.models raised {reason}")


def test_the_cause_is_there_for_who_wants_the_traceback(work):
    write(work / "fails.py", "1 / 0\n")
    with pytest.raises(SpecError) as caught:
        import_object("fails:x", what="model")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_interrupt_and_our_own_errors_pass(work):
    write(work / "interrupted.py", "raise KeyboardInterrupt\n")
    write(work / "nodata.py", "from robustkpca.errors import DataError\nraise DataError('no data here')\n")
    before = list(sys.path)
    with pytest.raises(KeyboardInterrupt):
        import_object("interrupted:x", what="model")
    assert message(lambda: import_object("nodata:x", what="model"), DataError) == "no data here"
    assert sys.path == before


def test_an_attribute_that_does_not_exist(work):
    file = write(
        work / "names.py", "import json\nfrom pathlib import Path\n_p = 1\ndef build(): pass\nclass Net: pass\n"
    )
    assert message(lambda: import_object("names:biuld", what="model")) == (
        f"model names:biuld: unknown name 'biuld'. Did you mean 'build'? Available: build, Net (in {file})"
    )
    assert "unknown name 'x'; nothing is defined in" in message(lambda: import_object("names:Net.x", what="model"))
    write(work / "reexports.py", "from pathlib import Path\n")
    assert "Available: Path (in" in message(lambda: import_object("reexports:x", what="model"))
    write(work / "listed.py", "__all__ = ['one']\ndef one(): pass\ndef two(): pass\n")
    assert "Available: one (in" in message(lambda: import_object("listed:x", what="model"))
    empty = write(work / "empty.py")
    assert message(lambda: import_object("empty:x", what="model")) == (
        f"model empty:x: unknown name 'x'; nothing is defined in {empty}"
    )


def test_many_names_are_cut_and_the_closest_is_among_them(work):
    write(work / "many.py", "".join(f"def name{i}(): pass\n" for i in range(30)) + "def build(): pass\n")
    text = message(lambda: import_object("many:buidl", what="model"))
    assert "Did you mean 'build'? Available: build, name0, " in text
    assert "name18 and 11 more (in" in text
    assert "name19" not in text


def test_a_lookup_that_raises(work):
    write(work / "lazy.py", "def __getattr__(name):\n    raise RuntimeError(name)\n")
    assert message(lambda: import_object("lazy:x", what="model")) == (
        "model lazy:x: looking up x raised RuntimeError: x, at lazy.py:2"
    )


# Calling


def test_what_a_call_returns(work):
    write(work / "calls.py", "def build(a, *, b=0): return a + b\nready = 5\nclass Net: pass\nnet = Net()\n")
    assert call_object("calls:build", 1, what="model", expected=int, b=2) == 3
    assert call_object("calls:ready", 1, what="model", expected=int) == 5
    net_class = import_object("calls:Net", what="model")
    assert isinstance(call_object("calls:Net", what="model", expected=(int, net_class)), net_class)
    assert call_object("calls:net", what="model", expected=net_class) is import_object("calls:net", what="model")


def test_imports_within_the_call_see_the_working_directory(work):
    write(work / "late_import.py", "def build():\n    import sibling\n    return sibling.x\n")
    write(work / "sibling.py", "x = 4\n")
    before = list(sys.path)
    assert call_object("late_import:build", what="model", expected=int) == 4
    assert sys.path == before


def test_a_call_that_raises(work):
    write(
        work / "calls.py",
        "import sys\n"
        "from robustkpca.errors import DataError\n"
        "def build(**options):\n    raise KeyError('no weights')\n"
        "def leave():\n    sys.exit(3)\n"
        "def interrupt():\n    raise KeyboardInterrupt\n"
        "def nodata():\n    raise DataError('no data here')\n"
        "class Net:\n    def __init__(self, a): pass\n"
        "def stop():\n    raise StopIteration\n",
    )
    before = list(sys.path)

    def text(name, error: type[RobustKPCAError] = SpecError, *args):
        return message(lambda: call_object(f"calls:{name}", *args, what="model", expected=int), error)

    assert text("build") == "model calls:build: the call raised KeyError: 'no weights', at calls.py:4"
    assert text("leave") == "model calls:leave: the call raised SystemExit: 3, at calls.py:6"
    assert text("stop") == "model calls:stop: the call raised StopIteration, at calls.py:14"
    assert text("leave", SpecError, 1) == (
        "model calls:leave: the call raised TypeError: leave() takes 0 positional arguments "
        "but 1 was given, at calls.py:5"
    )
    assert text("Net").endswith("missing 1 required positional argument: 'a', at calls.py:12")
    assert text("nodata", DataError) == "no data here"
    with pytest.raises(KeyboardInterrupt):
        call_object("calls:interrupt", what="model", expected=int)
    assert sys.path == before


def test_something_else_comes_out(work):
    write(work / "wrong.py", "def build(): return 3\ndef nothing(): pass\ndef kind(): return dict\nx = 3\n")

    def text(name, *expected):
        return message(lambda: call_object(f"wrong:{name}", what="model", expected=expected))

    assert text("build", str, Registry) == "model: expected a str or a Registry, got int from wrong:build"
    assert text("nothing", Path) == "model: expected a pathlib.Path, got None from wrong:nothing"
    assert text("kind", subprocess.Popen) == (
        "model: expected a subprocess.Popen, got the class dict from wrong:kind"
    )  # fmt: skip
    assert text("x", OSError) == "model wrong:x: expected an OSError, or a function that returns one, got int"


def test_types_are_named_as_users_import_them(work):
    torch = pytest.importorskip("torch")
    write(work / "nets.py", "def build(): return 3\n")
    text = message(lambda: call_object("nets:build", what="model", expected=torch.nn.Module))
    assert text == "model: expected a torch.nn.Module, got int from nets:build"


def test_importing_the_module_imports_nothing_heavy():
    code = "import sys, robustkpca.extensions; sys.exit(bool({'torch', 'pydantic', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
