"""Text files as editors on other systems write them."""

import unicodedata

import pytest

from robustkpca.config import read_toml
from robustkpca.errors import CheckpointError, SpecError
from robustkpca.models import checkpoints
from robustkpca.models.checkpoints import load_classifier
from robustkpca.models.loading import load_model
from robustkpca.models.options import class_names, read_models_file
from robustkpca.suites.suite import load_suite
from robustkpca.train.recipes import load_recipe
from tests.helpers.oracles import tiny, tiny_settings

BOM = b"\xef\xbb\xbf"
SUITE = 'name = "mine"\nversion = 1\ntitle = "Flöße"\ncorruptions = ["fog"]\nseverities = [3]\n'


def decomposed(text):
    return unicodedata.normalize("NFD", text)


@pytest.mark.parametrize("mark", [b"", BOM])
@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_toml_with_a_mark_and_in_any_form(tmp_path, mark, form):
    path = tmp_path / "mine.toml"
    path.write_bytes(mark + unicodedata.normalize(form, SUITE).encode())
    assert load_suite(str(path)).title == "Flöße"


def test_recipes_take_a_mark_and_say_what_is_no_toml(tmp_path):
    path = tmp_path / "r.toml"
    path.write_bytes(BOM + b"epochs = 3\n")
    with pytest.raises(SpecError, match="batch_size: Field required"):  # it was read
        load_recipe(str(path))
    for content in (b"epochs =", "epochs = 3".encode("utf-16"), b"\xff"):
        path.write_bytes(content)
        with pytest.raises(SpecError, match=r"recipe .*r\.toml: not TOML"):
            load_recipe(str(path))


def test_paths_in_toml_stay_as_they_are_on_the_disk(tmp_path):
    there = tmp_path / decomposed("é.pth")
    there.write_bytes(b"")
    path = tmp_path / "m.toml"
    path.write_text(f'a = "{there}"\nb = ["{tmp_path / decomposed("ö.pth")}"]\n')
    values = read_toml(path, "models")
    assert values["a"] == str(there)
    assert values["b"] == [str(tmp_path / "ö.pth")]


def test_the_home_folder_in_toml_and_in_python(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    checkpoints.save(tmp_path / "m.safetensors", tiny().network.state_dict(), tiny_settings(), {})
    (tmp_path / "models.toml").write_text('[[model]]\ncheckpoint = "~/m.safetensors"\n')
    (entry,) = read_models_file(tmp_path / "models.toml")
    assert load_model(entry).weights == load_classifier(checkpoint="~/m.safetensors").weights == tiny().weights
    with pytest.raises(CheckpointError, match=rf"checkpoint {tmp_path}/none.pth: expected a file"):
        load_classifier(checkpoint="~/none.pth")
    assert len(read_models_file("~/models.toml")) == 1


def classes_of(path, names, **options):
    path.write_bytes(BOM + decomposed("\n".join(names)).encode(**options) + b"\r\n")
    return class_names(path)


def test_class_lists_are_compared_as_they_are_read(tmp_path):
    names = ("Mantél", "Hut", *(f"c{i}" for i in range(8)))
    given = classes_of(tmp_path / "names.txt", names)
    assert given == names
    settings = tiny_settings().model_copy(update={"classes": tuple(map(decomposed, names))})
    checkpoints.save(tmp_path / "m.safetensors", tiny().network.state_dict(), settings, {})
    same = load_classifier(checkpoint=tmp_path / "m.safetensors", classes=given)
    assert same.settings == load_classifier(checkpoint=tmp_path / "m.safetensors").settings


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda names: names[::-1], "at logit 0: 'c0' in the file, 'c9' in the list; leave --classes out"),
        (lambda names: names[:9], "at logit 9: 'c9' in the file, None in the list"),
        (lambda names: (*names, "x"), "at logit 10: None in the file, 'x' in the list"),
        (lambda names: ("C0", *names[1:]), "at logit 0: 'c0' in the file, 'C0' in the list"),
    ],
)
def test_a_list_that_contradicts_the_file_is_refused(tmp_path, change, message):
    names = tuple(f"c{i}" for i in range(10))
    settings = tiny_settings().model_copy(update={"classes": names})
    checkpoints.save(tmp_path / "m.safetensors", tiny().network.state_dict(), settings, {})
    given = classes_of(tmp_path / "names.txt", change(names))
    with pytest.raises(CheckpointError, match=rf"it names its classes itself, and --classes contradicts it {message}"):
        load_classifier(checkpoint=tmp_path / "m.safetensors", classes=given)
    bare = settings.model_copy(update={"classes": ()})
    checkpoints.save(tmp_path / "m.safetensors", tiny().network.state_dict(), bare, {})
    if len(given) == 10:
        assert load_classifier(checkpoint=tmp_path / "m.safetensors", classes=given).settings.classes == given
