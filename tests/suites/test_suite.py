import re
import tomllib
from fractions import Fraction
from pathlib import Path

import pytest

from robustkpca.attacks import registry
from robustkpca.errors import SpecError
from robustkpca.gate.check import Tolerances
from robustkpca.suites.budget import Budget, eps_text, parse_eps
from robustkpca.suites.suite import Suite, load_suite, suite_names


@pytest.mark.parametrize(
    ("text", "value"),
    [("8/255", Fraction(8, 255)), ("0.0313725", Fraction(8, 255)), ("0.03137254901960784", Fraction(8, 255)),
     ("0", Fraction(0)), ("0.0314", Fraction(157, 5000)), (" 8 / 255 ", Fraction(8, 255)), ("1.0", Fraction(1)),
     ("1.5/255", Fraction(3, 510)), ("1e-9", Fraction(1, 10**9)), ("0.0039215", Fraction(1, 255))],
)  # fmt: skip
def test_eps_is_exact_and_k_255_has_one_form(text, value):
    assert parse_eps(text) == value


def test_eps_text_goes_there_and_back():
    for k in range(256):
        assert parse_eps(eps_text(Fraction(k, 255))) == Fraction(k, 255)
    assert eps_text(Fraction(8, 255)) == "8/255"
    assert eps_text(parse_eps("0.0314")) == "0.0314"


@pytest.mark.parametrize(
    ("eps", "message"),
    [("8", "did you mean 8/255"), ("-1/255", "0 or more"), ("nan", "expected a number"), ("inf", "expected a number"),
     ("8/0", "expected a number"), ("8/255/2", "expected a number"),
     ("eight", "expected a number"), ("", "expected a number")],
)  # fmt: skip
def test_budgets_that_make_no_sense(eps, message):
    with pytest.raises(SpecError, match=message):
        load_suite("pgd").with_eps([eps])


def test_two_ways_to_write_a_budget_are_one_column():
    assert load_suite("pgd").with_eps(["8/255", "0.0313725", "0.03137254901960784"]).budgets == (
        Budget(Fraction(8, 255), "8/255"),
    )


def test_every_suite_of_the_package_loads():
    assert {"pgd", "fgsm", "pgd-paper", "fgsm-paper", "corruptions"} <= set(suite_names())
    for name in suite_names():
        assert load_suite(name).cells


def test_the_paper_protocol_says_what_the_paper_did():
    suite = load_suite("pgd", "paper")
    assert suite.name == "pgd-paper"
    assert suite.threat.model_dump() == {
        "kind": "ball", "norm": "linf", "eps": tuple(f"{i}/255" for i in range(1, 7)), "space": "normalized",
        "clip": False, "labels": "predicted", "targeted": False,
    }  # fmt: skip
    assert suite.attack[0].resolve(Fraction(6, 255)) == {
        "steps": 20, "alpha": pytest.approx(0.15 * 6 / 255), "random_start": True,
    }  # fmt: skip
    with pytest.raises(SpecError, match="of the paper protocol"):
        load_suite("pgd-paper", "standard")


def test_names_get_a_suggestion():
    with pytest.raises(SpecError, match="Did you mean 'pgd'"):
        load_suite("pdg")


def base():
    return load_suite("pgd").model_dump()


@pytest.mark.parametrize(
    ("change", "message"),
    [({"thread": 1}, "thread: Extra inputs"), ({"version": 0}, "version"), ({"corruptions": ["fog"]}, "either"),
     ({"threat": None}, "expected a .threat. table"), ({"name": "A b"}, "name"),
     ({"attack": [{"name": "a", "method": "PGD", "parameters": {"alpha": "0.1 epz"}}]}, "multiple of the budget"),
     ({"attack": [{"name": "a", "method": "PGD", "parameters": {"steps": 0}}]}, "steps"),
     ({"attack": [{"name": "a", "method": "PGD", "parameters": {"steps": True}}]}, "steps"),
     ({"attack": [{"name": "a", "method": "PGD", "parameters": {"alpha": float("nan")}}]}, "finite")],
)  # fmt: skip
def test_unknown_keys_and_wrong_values_name_themselves(change, message):
    with pytest.raises(SpecError, match=message):
        Suite.parse({**base(), **change}, "suite")


def test_describe_says_in_which_units_values_are_clipped():
    data = {**base(), "threat": {**base()["threat"], "space": "normalized"}}
    assert "clipped to [0, 1] in normalised units" in Suite.parse(data, "suite").describe()
    assert "clipped to [0, 1];" in load_suite("pgd").describe()
    assert "no bound, confidence 0;" in load_suite("cw").describe()


def test_overrides_refuse_what_has_no_such_thing():
    with pytest.raises(SpecError, match="severities, not eps"):
        load_suite("corruptions").with_eps(["1/255"])
    with pytest.raises(SpecError, match="expected a suite with eps, this one has confidence 0"):
        load_suite("cw").with_eps(["1/255"])
    with pytest.raises(SpecError, match="no attack with steps"):
        load_suite("fgsm").with_steps(3)
    assert load_suite("pgd").with_steps(3).attack[0].parameters["steps"] == 3


def test_a_suite_file_of_ones_own(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\nversion = 1\ntitle = "t"\ncorruptions = ["fog"]\nseverities = [3]\n')
    assert load_suite(str(path)).budgets == (Budget(Fraction(3), "3"),)
    path.write_text('name = "mine"\nversion = 1\ntitle = "t"\ncorruptions = ["fog"]\nseverities = [0]\n')
    with pytest.raises(SpecError, match="from 1 to 5"):
        load_suite(str(path))
    path.write_text("name = ")
    with pytest.raises(SpecError, match="not TOML"):
        load_suite(str(path))
    with pytest.raises(SpecError, match="No such file"):
        load_suite(str(tmp_path / "none.toml"))


def test_the_working_directory_is_not_searched(tmp_path, monkeypatch):
    (tmp_path / "attacks").mkdir()
    (tmp_path / "attacks" / "pgd.toml").write_text("a decoy")
    monkeypatch.chdir(tmp_path)
    assert load_suite("pgd").attack[0].method == "PGD"


def test_the_readmes_suites_and_limits_are_what_it_says(tmp_path):
    """TOML blocks of the README are read by what they are for."""
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    blocks = [tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", text, re.S)]
    suites = [Suite.parse(b, "README") for b in blocks if "attack" in b]
    limits = [Tolerances.parse(b, "README") for b in blocks if "cell" in b]
    assert (len(suites), len(limits)) == (1, 1)
    for spec in suites[0].attack:
        registry.check(spec, suites[0].threat)
    assert suites[0].attack[1].through == "straight-through"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"threat": {"kind": "nonsense"}}, r"suite: threat: kind: unknown threat model 'nonsense'"),
        ({"kind": "corruptions"}, r"expected kind within the \[threat\] table"),
    ],
)
def test_kinds_of_threat_models_that_do_not_exist_or_stand_elsewhere(changes, message):
    with pytest.raises(SpecError, match=message):
        Suite.parse({"name": "s", "version": 1, "title": "s", **changes}, "suite")
