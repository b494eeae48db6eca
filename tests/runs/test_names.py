"""Names of models: unique, as short as can be, and the same in any order."""

import itertools

import pytest

from robustkpca.errors import SpecError
from robustkpca.models.settings import RPCSettings
from robustkpca.runs.names import across, labelled, names
from robustkpca.runs.request import ModelRecord
from tests.helpers.oracles import tiny_settings
from tests.helpers.requests import request_of

TITLE = "SymViT-w16d2h2"
RPC = "RPC-SymViT-w16d2h2"


def symvit(source="m.pth", weights="a1", **fields):
    return ModelRecord(label=TITLE, source=source, weights=weights, settings=tiny_settings(), **fields)


def rpc(lam=1.0, source="m.pth", weights="a1", **fields):
    settings = tiny_settings("rpc-symvit", RPCSettings(iterations=2, lam=lam))
    return ModelRecord(label=settings.title, source=source, weights=weights, settings=settings, **fields)


def other(**fields):
    """The settings of a SymViT, with these of its preprocessing."""
    settings = tiny_settings()
    return settings.model_copy(update={"preprocessing": settings.preprocessing.model_copy(update=fields)})


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        ([symvit()], [TITLE]),
        ([symvit("x/a.pth"), symvit("x/b.pth", "b1")], [f"{TITLE} [a]", f"{TITLE} [b]"]),
        ([symvit("exp1/best.pth"), symvit("exp2/best.pth", "b1")], [f"{TITLE} [exp1/best]", f"{TITLE} [exp2/best]"]),
        ([symvit("/x/y/m.pth"), symvit("m.pth", "b1")], [f"{TITLE} [y/m]", f"{TITLE} [m.pth]"]),
        ([symvit("m.pth"), symvit("m.safetensors", "b1")], [f"{TITLE} [m.pth]", f"{TITLE} [m.safetensors]"]),
        ([symvit(weights="0123456789"), symvit(weights="9876543210")],
         [f"{TITLE} [weights 01234567]", f"{TITLE} [weights 98765432]"]),
        ([symvit(), symvit()], [f"{TITLE} [#1]", f"{TITLE} [#2]"]),
        ([symvit(), symvit(weights="b1", weight_choice="ema")], [f"{TITLE} [raw]", f"{TITLE} [ema]"]),
        ([symvit(dtype="float32"), symvit(dtype="bfloat16")], [f"{TITLE} [float32]", f"{TITLE} [bf16]"]),
        ([symvit(attention="fused"), symvit(attention="fused, compiled")],
         [f"{TITLE} [attention fused]", f"{TITLE} [fused, compiled]"]),
        ([rpc(), rpc(4.0)], [f"{RPC} (2iter/layer1, lambda 1)", f"{RPC} (2iter/layer1, lambda 4)"]),
        ([rpc(), symvit()], [f"{RPC} (2iter/layer1)", TITLE]),
        ([rpc(overrides=("lambda 1 (file: 4)",))], [f"{RPC} (2iter/layer1), lambda 1 (file: 4)"]),
        ([symvit(), symvit().model_copy(update={"settings": other(img_size=56)})],
         [f"{TITLE} [28 px]", f"{TITLE} [56 px]"]),
        ([symvit(given_name="ours"), symvit(weights="b1")], ["ours", TITLE]),
        ([symvit("a.pth", given_name="ours"), symvit("b.pth", "b1", given_name="ours")], ["ours [a]", "ours [b]"]),
        ([rpc(given_name="ours"), rpc(4.0, given_name="ours")],
         ["ours [2iter/layer1, lambda 1]", "ours [2iter/layer1, lambda 4]"]),
        ([symvit(title="mine"), symvit(weights="b1", title="theirs")], ["mine", "theirs"]),
    ],
)  # fmt: skip
def test_what_tells_apart_is_added_and_nothing_else(models, expected):
    assert names(models) == expected
    assert sorted(names(models[::-1])) == sorted(expected)


def test_a_name_that_was_chosen_to_be_anothers_is_told_apart_all_the_same():
    models = [symvit("a.pth"), symvit("b.pth", "b1"), symvit("c.pth", "c1", given_name=f"{TITLE} [a]")]
    assert len(set(names(models))) == 3
    assert names(models[::-1]) == names(models)[::-1]


def test_names_do_not_depend_on_the_order():
    models = [symvit("exp1/best.pth"), symvit("exp2/best.pth", "b1"), symvit("exp2/last.pth", "c1"),
              symvit("exp1/best.pth", "d1", weight_choice="ema"), rpc(), rpc(4.0), rpc(4.0, "n.pth", "e1")]  # fmt: skip
    expected = dict(zip(map(id, models), names(models), strict=True))
    assert len(set(expected.values())) == len(models)
    for order in itertools.islice(itertools.permutations(models), 0, 5040, 97):
        assert names(order) == [expected[id(model)] for model in order]


def test_a_label_is_a_name_and_its_title_is_not_kept_twice():
    plain, mine = labelled([symvit(title=TITLE), symvit("n.pth", "b1", title="mine")])
    assert (plain.label, plain.title) == (TITLE, None)
    assert (mine.label, mine.title) == ("mine", None)
    both = labelled([symvit("x.pth", title="mine"), symvit("y.pth", "b1", title="mine")])
    assert [(m.label, m.title) for m in both] == [("mine [x]", "mine"), ("mine [y]", "mine")]
    assert names(both) == ["mine [x]", "mine [y]"]
    assert "title" not in plain.model_dump()


@pytest.mark.parametrize("name", ["NA", "null", "nan", "None", "", " "])
def test_names_that_readers_take_for_missing_are_refused(name):
    with pytest.raises(SpecError, match="missing value; give it another"):
        labelled([symvit(title=name or " ")])
    with pytest.raises(SpecError, match="missing value"):
        labelled([symvit(given_name=name or " ")])
    assert labelled([symvit(title="NAT")])[0].label == "NAT"


def test_models_of_two_runs_share_a_name_only_where_nothing_tells_them_apart():
    first, same = request_of([symvit("x/m.pth")]), request_of([symvit("y/m.pth")], seed=1)
    assert across([first, same]) == [{TITLE: TITLE}, {TITLE: TITLE}]
    for changed, expected in (
        (request_of([symvit("y/m.pth", "b1")]), f"{TITLE} [y/m]"),
        (request_of([symvit("x/m.pth", "b1")]), f"{TITLE} [weights b1]"),
        (request_of([symvit("x/m.pth")], dtype="bfloat16"), f"{TITLE} [bf16]"),
        (request_of([symvit("x/m.pth").model_copy(update={"settings": other(crop_pct=0.5)})]), "crop 0.5"),
        (request_of([symvit("x/m.pth").model_copy(update={"settings": other(mean=(0.1,))})]), "settings "),
    ):
        for requests in ([first, changed], [changed, first]):
            rows = across(requests)
            (ours,), (theirs,) = rows[requests.index(first)].values(), rows[requests.index(changed)].values()
            assert ours != theirs
            assert expected in theirs


def test_a_data_set_that_restricts_answers_is_no_other_model():
    """ImageNet-A allows 200 of a model's 1,000 classes: its result stands in the row of the others."""
    settings = tiny_settings().model_copy(update={"num_classes": 3, "classes": ("a", "b", "c")})
    few = symvit().model_copy(update={"settings": settings})
    whole, part = request_of([symvit()]), request_of([few], argmax="among 3 classes")
    assert across([whole, part]) == [{TITLE: TITLE}, {TITLE: TITLE}]
    renamed = settings.model_copy(update={"classes": ("d", "e", "f")})  # other names for the same logits
    relabelled = request_of([few.model_copy(update={"settings": renamed})])
    assert len({name for rows in across([whole, part, relabelled]) for name in rows.values()}) == 3
