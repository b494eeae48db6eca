import json
import sys

import numpy as np
import pandas as pd
import pytest
import torch
import torchattacks
from torch import nn

from robustkpca.datasets.images import ArraySamples
from robustkpca.errors import DataError, RunError, SpecError
from robustkpca.evaluation.loop import Resources, carry_out, evaluate
from robustkpca.evaluation.plan import Plan, labels_of
from robustkpca.models.classifier import Classifier
from robustkpca.models.settings import RPCSettings
from robustkpca.results.accuracy import accuracy_table
from robustkpca.runs.run import Run
from robustkpca.suites.cell import CLEAN, CLEAN_CELL, AttackId, Cell
from robustkpca.suites.suite import Suite, load_suite
from robustkpca.tasks.classification.task import CLASSIFICATION
from tests.helpers.attacks import Shift, register, suite_of
from tests.helpers.oracles import GREY, Linear, classifier_of, linear_accuracy, tiny

PGD = load_suite("pgd").with_eps(["4/255", "8/255"]).with_steps(3)
RPC = RPCSettings(iterations=2, lam=1.0, layers="all")


def corruption_suite(*names, severities=(1, 5)):
    data = {"name": "some", "version": 1, "title": "t", "corruptions": list(names), "severities": list(severities)}
    return Suite.parse(data, "suite")


def accuracies(run):
    long = accuracy_table(run)
    return {(r.attack, r.budget): r.accuracy for r in long.itertuples()}


def test_linear_oracle_end_to_end(linear, linear_samples, tmp_path):
    suites = [load_suite(n).with_eps([f"{k}/255" for k in (0, 2, 4, 8)]) for n in ("fgsm", "pgd")]
    run = evaluate([linear], linear_samples, suites, tmp_path / "run", batch_size=5)
    found = accuracies(run)
    assert found[CLEAN, CLEAN] == linear_accuracy(0)
    for name in ("fgsm", "pgd"):
        for k in (0, 2, 4, 8):
            assert found[name, "0" if k == 0 else f"{k}/255"] == linear_accuracy(k), (name, k)
    assert (run.rows["flags"] == "").all()


def test_two_runs_with_one_seed_are_identical(noise_samples, tmp_path):
    runs = [
        evaluate([tiny("rpc-symvit", RPC)], noise_samples, [PGD, corruption_suite("gaussian_noise")], tmp_path / name)
        for name in "ab"
    ]
    pd.testing.assert_frame_equal(runs[0].rows, runs[1].rows)
    other = evaluate([tiny("rpc-symvit", RPC)], noise_samples, [PGD], tmp_path / "c", seed=1)
    assert not other.rows["distance"].equals(runs[0].rows["distance"].head(len(other.rows)))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["symvit", "rpc-symvit"])
def test_rows_do_not_depend_on_the_batch_size(noise_samples, tmp_path, family):
    classifier = tiny(family, RPC if family == "rpc-symvit" else None)
    suites = [PGD, load_suite("pgd-paper").with_eps(["6/255"]), corruption_suite("gaussian_noise", "glass_blur", "fog")]
    frames = [evaluate([classifier], noise_samples, suites, tmp_path / str(b), batch_size=b).rows for b in (1, 7, 64)]
    exact = [c for c in frames[0].columns if c not in ("confidence", "distance")]
    for frame in frames[1:]:
        pd.testing.assert_frame_equal(frame[exact], frames[0][exact])
        np.testing.assert_allclose(frame["confidence"], frames[0]["confidence"], rtol=0, atol=1e-6)
        np.testing.assert_allclose(frame["distance"], frames[0]["distance"], rtol=0, atol=1e-6)


def test_eps_zero_is_clean(noise_samples, tmp_path):
    suites = [load_suite(n).with_eps(["0"]) for n in ("pgd", "fgsm", "pgd-paper", "fgsm-paper")]
    run = evaluate([tiny("rpc-symvit", RPC)], noise_samples, suites, tmp_path / "run")
    clean = run.cell_rows(run.models[0], CLEAN_CELL)
    for suite in suites:
        rows = run.cell_rows(run.models[0], suite.cells[0])
        assert rows["prediction"].equals(clean["prediction"])
        assert rows["confidence"].equals(clean["confidence"])
        assert (rows["distance"] == 0).all()


def test_predicted_labels_are_attacked_and_true_labels_counted(noise_samples, tmp_path):
    suites = [load_suite("fgsm-paper").with_eps(["6/255"]), load_suite("fgsm").with_eps(["1/255"])]
    run = evaluate([tiny()], noise_samples, suites, tmp_path / "run")
    paper = run.rows[run.rows["perturbation"] == "fgsm-paper"]
    assert (paper["attacked_label"] == paper["clean_prediction"]).all()
    assert (paper["attacked_label"] != paper["label"]).any()
    assert (paper["correct"] == (paper["prediction"] == paper["label"])).all()
    standard = run.rows[run.rows["perturbation"] == "fgsm"]
    assert (standard["attacked_label"] == standard["label"]).all()


def test_the_partial_last_batch_counts_by_its_samples(tmp_path, linear, linear_samples):
    some = linear_samples.take(np.array([0, 1, 2, 3, 4, 5, 6, 7, 10, 11]))  # the last two are wrong
    run = evaluate([linear], some, [load_suite("fgsm").with_eps(["0"])], tmp_path / "run", batch_size=4)
    assert accuracies(run)[CLEAN, CLEAN] == 0.8
    assert sorted(run.cell_rows("oracle", CLEAN_CELL).index) == sorted(some.ids)


def test_top5_counts_five_and_needs_more_than_five_classes(noise_samples, linear, linear_samples, tmp_path):
    classifier = tiny()
    run = evaluate([classifier], noise_samples, [load_suite("fgsm").with_eps(["0"])], tmp_path / "a")
    images = torch.stack([noise_samples.image(i, classifier.settings.preprocessing) for i in range(30)])
    best = classifier(images).argsort(1, descending=True)[:, :5]
    expected = [int(label) in row for label, row in zip(noise_samples.labels, best.tolist(), strict=True)]
    assert run.cell_rows(run.models[0], CLEAN_CELL)["correct_top5"].tolist() == expected
    two = evaluate([linear], linear_samples, [load_suite("fgsm")], tmp_path / "b")
    assert two.rows["correct_top5"].isna().all()


def test_an_attack_that_cheats_is_flagged(noise_samples, tmp_path, monkeypatch):
    class Cheat(torchattacks.FGSM):
        def forward(self, images, labels):
            found = super().forward(images, labels)
            found[0] += 0.1
            return found

    register(monkeypatch, Cheat=Cheat)
    suite = suite_of([{"name": "a", "method": "Cheat"}], eps=["1/255"])
    run = evaluate([tiny()], noise_samples, [suite], tmp_path / "run", batch_size=30)
    flags = run.cell_rows(run.models[0], Cell.parse("own", "1/255"))["flags"]
    assert flags.iloc[0] == "over_budget,out_of_box"
    assert (flags.iloc[1:] == "").all()


def shifts(*by: float, **threat) -> Suite:
    """A suite whose attacks add so much to every value."""
    names = ("first", "second")
    return suite_of(
        [{"name": n, "method": "Shift", "parameters": {"by": b}} for n, b in zip(names, by, strict=True)], **threat
    )


def flags_of(network, value: int, suite: Suite, path, preprocessing=GREY) -> dict[str, str]:
    """What is raised for one image of this value in each attack."""
    samples = ArraySamples("one", ["a"], np.zeros(1, dtype=np.int64), ("0", "1"), np.full((1, 28, 28), value, np.uint8))
    run = evaluate([classifier_of(network, 2, preprocessing)], samples, [suite], path)
    return dict(run.rows[run.rows["perturbation"] != CLEAN][["perturbation", "flags"]].itertuples(index=False))


def test_half_a_millionth_over_is_rounding_and_two_are_too_much(tmp_path, monkeypatch):
    register(monkeypatch, Shift=Shift)
    flags = flags_of(Linear(), 128, shifts(8 / 255 + 0.5e-6, 8 / 255 + 2e-6), tmp_path / "budget")
    assert flags == {"own/first": "", "own/second": "over_budget"}
    flags = flags_of(Linear(), 255, shifts(0.5e-6, 2e-6), tmp_path / "above")
    assert flags == {"own/first": "", "own/second": "out_of_box"}
    flags = flags_of(Linear(), 0, shifts(-0.5e-6, -2e-6), tmp_path / "below")
    assert flags == {"own/first": "", "own/second": "out_of_box"}


def test_the_range_is_judged_in_the_threat_models_own_space(tmp_path, monkeypatch):
    """An image of 0.6. With standard deviation 0.1 and 0.6 more it is 0.66, but 1.6 in normalised units; with
    deviation 1 and 0.5 more it is 1.1, but 0.6 in normalised units."""
    register(monkeypatch, Shift=Shift)
    for std, by, space, expected in (
        (0.1, 0.6, "normalized", "out_of_box"), (0.1, 0.06, "pixel", ""),
        (1.0, 0.5, "normalized", ""), (1.0, 0.5, "pixel", "out_of_box"),
    ):  # fmt: skip
        preprocessing = GREY.model_copy(update={"mean": (0.5,), "std": (std,)})
        suite = suite_of([{"name": "a", "method": "Shift", "parameters": {"by": by}}], eps=["1"], space=space)
        flags = flags_of(Linear(), 153, suite, tmp_path / f"{std} {space}", preprocessing)
        assert flags == {"own": expected}, (std, space)


class Faint(nn.Module):
    """Logits so flat that the gradient at a pixel is about seven times the smallest number above zero."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1e-44))

    def forward(self, x):
        s = self.scale * x.flatten(1).sum(1)
        return torch.stack([s, -s], 1)


def test_a_faint_gradient_is_not_divided_among_the_batch(noise_samples, tmp_path):
    noise_samples.pixels = np.full_like(noise_samples.pixels, 128)
    noise_samples.labels, noise_samples.classes = np.zeros(30, dtype=np.int64), ("0", "1")
    fgsm = load_suite("fgsm").with_eps(["8/255"])
    run = evaluate([classifier_of(Faint(), 2)], noise_samples, [fgsm], tmp_path / "run", batch_size=30)
    rows = run.cell_rows("oracle", Cell.parse("fgsm", "8/255"))
    np.testing.assert_allclose(rows["distance"], 8 / 255, atol=1e-7)


@pytest.mark.parametrize(("size", "kept"), [(4, 5), (12, 5), (4, 12), (5, 20)])
def test_the_first_images_are_kept_whatever_the_chunks(linear, linear_samples, tmp_path, monkeypatch, size, kept):
    """With 8 bits, clean and what was added, up to so many bytes; in the order of the set, broken or not."""
    turned = linear_samples.take(np.arange(12)[::-1])
    inputs = torch.stack([turned.image(i, linear.settings.preprocessing) for i in range(12)])
    monkeypatch.setattr("robustkpca.tasks.classification.batch.KEPT_BYTES", 2 * inputs[0].numel() * kept)
    fgsm = load_suite("fgsm").with_eps(["2/255"])
    run = evaluate([linear], turned, [fgsm], tmp_path / "run", batch_size=size)
    examples = run.examples("oracle", AttackId("fgsm"))
    assert examples.sample.tolist() == turned.ids[:kept]
    np.testing.assert_array_equal(examples.image, np.rint(inputs[:kept] * 255).numpy())
    added = examples.step[:, None, None, None] * examples.added
    np.testing.assert_allclose(np.abs(added).max((1, 2, 3)), 2 / 255, rtol=1e-3)
    np.testing.assert_allclose(examples.step * 127, run.cell_rows("oracle", Cell.parse("fgsm", "2/255"))["distance"]
                               .to_numpy()[:kept], rtol=1e-5)  # fmt: skip


class Fragile(nn.Module):
    """Not a number for images whose first pixel is bright."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(784, 10)

    def forward(self, x):
        return self.linear(x.flatten(1)) + torch.where(x[:, 0, 0, :1] > 0.5, float("nan"), 0.0)


def test_logits_that_are_not_finite_are_wrong_and_flagged(noise_samples, tmp_path):
    classifier = classifier_of(Fragile(), 10)
    samples = noise_samples
    samples.classes = tuple(map(str, range(10)))
    run = evaluate([classifier], samples, [load_suite("pgd").with_eps(["0", "1/255"])], tmp_path / "run")
    clean = run.cell_rows("oracle", CLEAN_CELL)
    broken = samples.pixels[:, 0, 0] > 127
    assert 0 < broken.sum() < 30
    assert ((clean["flags"] == "non_finite").to_numpy() == broken).all()
    assert (clean["prediction"][broken] == -1).all()
    assert not clean["correct"][broken].any()
    table = accuracy_table(run)
    assert table["accuracy"].isna().all()  # a figure that rests on such rows is no figure
    assert table["status"].str.contains(f"invalid: {broken.sum()} of 30 rows: the model's logits were not finite").all()


def test_an_attack_that_breaks_is_failed_and_costs_nothing_else(noise_samples, tmp_path, monkeypatch):
    class Breaks(torchattacks.FGSM):
        def forward(self, images, labels):
            raise RuntimeError("no kernel for this\nsecond line")

    register(monkeypatch, Mine=Breaks)
    suites = [suite_of([{"name": "a", "method": "Mine"}]), load_suite("fgsm").with_eps(["1/255"])]
    run = evaluate([tiny()], noise_samples, suites, tmp_path / "run", batch_size=7)
    texts = {str(s.cell.attack): s.text for s in run.statuses}
    assert texts == {CLEAN: "complete", "own": "failed: RuntimeError: no kernel for this", "fgsm": "complete"}
    register(monkeypatch, Mine=torchattacks.FGSM)  # repaired
    again = evaluate([tiny()], noise_samples, suites, tmp_path / "run", batch_size=7)
    assert {s.text for s in again.statuses} == {"complete"}


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda images: sys.exit(0), "failed: SystemExit: 0"),
        (lambda images: 3, "failed: TypeError: Mine returned int, expected a tensor of shape (7, 1, 28, 28)"),
        (
            lambda images: images[:1],
            "failed: TypeError: Mine returned shape (1, 1, 28, 28), expected a tensor of shape (7",
        ),
    ],
)
def test_an_attack_that_returns_no_images_is_failed(noise_samples, tmp_path, monkeypatch, returned, said):
    class Returns(torchattacks.FGSM):
        def forward(self, images, labels):
            return returned(images)

    register(monkeypatch, Mine=Returns)
    run = evaluate(
        [tiny()], noise_samples, [suite_of([{"name": "a", "method": "Mine"}])], tmp_path / "run", batch_size=7
    )
    assert run.status(run.models[0], Cell.parse("own", "8/255")).text.startswith(said)


def test_an_interrupted_run_goes_on_and_equals_a_whole_one(noise_samples, tmp_path):
    suites = [PGD, corruption_suite("shot_noise")]
    whole = evaluate([tiny(), tiny("rpc-symvit", RPC)], noise_samples, suites, tmp_path / "whole", batch_size=7)
    calls = 0

    def stop(_):
        nonlocal calls
        calls += 1
        if calls == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(
            [tiny(), tiny("rpc-symvit", RPC)], noise_samples, suites, tmp_path / "cut", batch_size=7, on_progress=stop
        )
    files = {p: p.stat().st_mtime_ns for p in (tmp_path / "cut").rglob("*.parquet")}
    assert files
    partial = Run.open(tmp_path / "cut")
    assert {"incomplete 21/30", "not run"} <= {s.text for s in partial.statuses}
    done = evaluate([tiny(), tiny("rpc-symvit", RPC)], noise_samples, suites, tmp_path / "cut", batch_size=7)
    pd.testing.assert_frame_equal(done.rows, whole.rows)
    assert all(p.stat().st_mtime_ns == t for p, t in files.items())


def test_progress_ends_at_its_total(noise_samples, tmp_path):
    seen = []
    for _ in range(2):  # a fresh run, and one that finds everything done
        evaluate([tiny()], noise_samples, [PGD], tmp_path / "run", batch_size=7, on_progress=seen.append)
        assert seen[-1].done == pytest.approx(seen[-1].total)
        assert [p.done for p in seen] == sorted(p.done for p in seen)
        seen.clear()


def test_another_request_is_refused_by_the_folder(noise_samples, tmp_path):
    evaluate([tiny()], noise_samples, [PGD], tmp_path / "run")
    before = Run.open(tmp_path / "run").rows
    with pytest.raises(RunError, match="seed: 1 here, 0 there"):
        evaluate([tiny()], noise_samples, [PGD], tmp_path / "run", seed=1)
    with pytest.raises(RunError, match="weights"):
        evaluate([tiny(seed=3)], noise_samples, [PGD], tmp_path / "run")
    with pytest.raises(RunError, match="eps"):
        evaluate([tiny()], noise_samples, [PGD.with_eps(["1/255", "2/255"])], tmp_path / "run")
    with pytest.raises(RunError, match="batch_size"):
        evaluate([tiny()], noise_samples, [PGD], tmp_path / "run", batch_size=8)
    pd.testing.assert_frame_equal(Run.open(tmp_path / "run").rows, before)


def test_a_folder_with_something_else_is_left_alone(noise_samples, tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(RunError, match="something else"):
        evaluate([tiny()], noise_samples, [PGD], tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="Not a directory"):
        evaluate([tiny()], noise_samples, [PGD], tmp_path / "file" / "run")


def test_what_can_be_found_before_the_first_batch(noise_samples, tmp_path):
    with pytest.raises(SpecError, match="pgd given twice"):
        evaluate([tiny()], noise_samples, [PGD, PGD], tmp_path / "run")
    with pytest.raises(SpecError, match="Did you mean 'fog'"):
        evaluate([tiny()], noise_samples, [corruption_suite("fogg")], tmp_path / "run")
    with pytest.raises(SpecError, match="batch-size"):
        evaluate([tiny()], noise_samples, [PGD], tmp_path / "run", batch_size=0)
    with pytest.raises(SpecError, match="at least one"):
        evaluate([], noise_samples, [PGD], tmp_path / "run")
    noise_samples.classes = tuple(f"d{i}" for i in range(10))
    with pytest.raises(DataError, match="unknown"):
        evaluate([tiny()], noise_samples, [PGD], tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_models_of_one_name_are_told_apart():
    a, b = tiny(), tiny(seed=1)
    a.source, b.source = "runs/a.pth", "runs/b.pth"
    assert labels_of([a, b], CLASSIFICATION) == [f"{a.title} [a]", f"{a.title} [b]"]
    b.source = "other/a.pth"
    assert labels_of([a, b], CLASSIFICATION) == [f"{a.title} [runs/a]", f"{a.title} [other/a]"]


def test_run_json_is_strict_and_names_everything(noise_samples, tmp_path):
    run = evaluate([tiny("rpc-symvit", RPC)], noise_samples, [PGD], tmp_path / "run")

    def refuse(text):
        raise ValueError(text)

    manifest = json.loads((tmp_path / "run" / "run.json").read_text(), parse_constant=refuse)
    request = manifest["request"]
    assert request["models"][0]["settings"]["rpc"] == {"iterations": 2, "lambda": 1.0, "layers": "all"}
    assert request["models"][0]["weights"] == tiny("rpc-symvit", RPC).weights
    assert request["data"] == {
        "name": "noise", "n": 30, "ids": noise_samples.ids_hash, "content": noise_samples.content_hash,
        "content_covers": "ids and pixels", "resized": True, "conditions": [["clean", "", 30]],
        "argmax": "among all classes of the model",
    }  # fmt: skip
    assert request["suites"][0]["threat"]["eps"] == ["4/255", "8/255"]
    assert (request["seed"], request["batch_size"], request["dtype"], request["device"]) == (0, 100, "float32", "cpu")
    assert manifest["environment"]["torch"] == torch.__version__
    assert run.manifest.model_dump(mode="json", by_alias=True) | {"checksum": manifest["checksum"]} == manifest


class Hungry(nn.Module):
    """Runs out of memory above so many images at once."""

    def __init__(self, network, most):
        super().__init__()
        self.network, self.most = network, most

    def forward(self, x):
        if len(x) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return self.network(x)


def test_when_memory_ends_smaller_portions_give_the_same_rows(noise_samples, tmp_path):
    made = tiny("rpc-symvit", RPC)
    hungry = Classifier(Hungry(made.network, 8), made.settings, title=made.title)
    suites = [PGD, corruption_suite("gaussian_noise"), load_suite("noise")]
    whole = evaluate([made], noise_samples, suites, tmp_path / "whole")
    said = []
    less = carry_out(Plan([hungry], noise_samples, suites), tmp_path / "less", Resources(on_notice=said.append))
    assert [line.partition(":")[0] for line in said] == [f"out of memory with {n} samples at once" for n in (30, 15)]
    pd.testing.assert_frame_equal(less.rows, whole.rows)
    (ours,), (theirs,) = less.health.values(), whole.health.values()
    assert list(ours.pop("density").values()) == list(theirs.pop("density").values())  # of a layer with another name
    assert ours == theirs


def test_when_not_even_one_sample_fits_the_reason_is_kept(noise_samples, tmp_path):
    made = tiny()
    hungry = Classifier(Hungry(made.network, 0), made.settings, title=made.title)
    with pytest.raises(torch.OutOfMemoryError):
        carry_out(Plan([hungry], noise_samples, [PGD]), tmp_path / "run", Resources(on_notice=lambda _: None))


def test_an_attack_whose_samples_hang_together_is_not_portioned(noise_samples, tmp_path):
    made = tiny()
    hungry = Classifier(Hungry(made.network, 8), made.settings, title=made.title)
    run = carry_out(
        Plan([hungry], noise_samples, [load_suite("cw").with_steps(2)]),
        tmp_path / "run",
        Resources(on_notice=lambda _: None),
    )
    texts = {str(s.cell.attack): s.text for s in run.statuses}
    assert texts[CLEAN] == "complete"
    assert "OutOfMemoryError" in texts["cw"]


def test_gradients_through_pap_in_bfloat16_are_refused_unless_forced(noise_samples, tmp_path):
    half = tiny("rpc-symvit", RPC).variant(dtype=torch.bfloat16)
    with pytest.raises(SpecError, match=r"in bfloat16: the attack pgd follows gradients, which are wrong .* --force"):
        evaluate([half], noise_samples, [PGD], tmp_path / "run")
    forced = evaluate([half], noise_samples, [PGD], tmp_path / "forced", force=True)
    assert forced.request.dtype == "bfloat16"
    assert any("gradients in bfloat16" in note for note in forced.request.models[0].notes)
    blind = evaluate([half], noise_samples, [load_suite("noise"), corruption_suite("fog")], tmp_path / "blind")
    symmetric = evaluate([tiny().variant(dtype=torch.bfloat16)], noise_samples, [PGD], tmp_path / "symmetric")
    for run in (blind, symmetric):
        assert {s.text for s in run.statuses} == {"complete"}
        assert not any("bfloat16" in note for note in run.request.models[0].notes)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_agrees_with_the_cpu(linear, linear_samples, tmp_path):
    here = evaluate([linear], linear_samples, [load_suite("pgd")], tmp_path / "cpu")
    there = evaluate([linear.cuda()], linear_samples, [load_suite("pgd")], tmp_path / "cuda")
    assert here.rows["prediction"].equals(there.rows["prediction"])
