"""Attacks at their real strength: AutoAttack, PGD with restarts, and the ways around RPC-Attention."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from robustkpca.attacks import autoattack, engine, registry
from robustkpca.attacks.gradient_paths import SURROGATES, surrogate
from robustkpca.attacks.pgd import BestPGD, margin
from robustkpca.datasets.images import ArraySamples
from robustkpca.datasets.sources import load_samples
from robustkpca.errors import SpecError
from robustkpca.evaluation.loop import evaluate
from robustkpca.evaluation.plan import Plan
from robustkpca.models.attention import principal_attention
from robustkpca.models.checkpoints import load_classifier
from robustkpca.models.classifier import Classifier
from robustkpca.models.networks import build_network
from robustkpca.models.settings import RPCSettings
from robustkpca.results.accuracy import accuracy_table, breakers, worst_case
from robustkpca.results.columns import WORST
from robustkpca.runs.run import Run
from robustkpca.suites.attack import AttackSpec
from robustkpca.suites.budget import eps_budget
from robustkpca.suites.cell import CLEAN, Cell
from robustkpca.suites.suite import Suite, load_suite
from tests.attacks.test_engine import PIXEL, images_of
from tests.helpers.oracles import SIDE, classifier_of, linear_accuracy, tiny

ALL = RPCSettings(iterations=4, lam=4.0, layers="all")


def changed(name: str, eps: str, **parameters) -> Suite:
    """A packaged suite at one budget, with other parameters where its attacks have them."""
    suite = load_suite(name).with_eps([eps]).model_dump()
    for attack in suite["attack"]:
        attack["parameters"] |= {k: v for k, v in parameters.items() if k in attack["parameters"]}
    return Suite.parse(suite, "suite")


def run_attack(classifier, images, labels, eps="8/255", method="BestPGD", through="full", threat=PIXEL, **parameters):
    spec = AttackSpec(name="a", method=method, parameters=parameters, through=through)
    ids = [f"s{i}" for i in range(len(images))]
    draws = engine.Draws(0, "a", Fraction(eps), ids)
    return engine.attack(classifier, images, labels, spec=spec, threat=threat, draws=draws)


# -- AutoAttack


def flat(classes: int) -> Classifier:
    torch.manual_seed(classes)
    return classifier_of(nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, classes)), classes)


def right_samples(classifier: Classifier, n: int = 12) -> ArraySamples:
    """Random images labelled as the classifier sees them."""
    pixels = np.random.default_rng(0).integers(60, 196, (n, SIDE, SIDE), dtype=np.uint8)
    names = classifier.settings.classes
    samples = ArraySamples("own", [f"o{i}" for i in range(n)], np.zeros(n, dtype=np.int64), names, pixels)
    samples.labels = classifier(images_of(samples, classifier)).argmax(1).numpy()
    return samples


@pytest.mark.parametrize(("classes", "targets"), [(2, 1), (3, 2), (4, 3), (8, 7), (10, 9), (100, 9)])
def test_targets_and_what_is_left_out(classes, targets, tmp_path, monkeypatch):
    seen: dict[str, set[int]] = {"t": set(), "fab": set()}
    for cls, single, key in (
        (autoattack.APGDT, "attack_single_run", "t"),
        (autoattack.FABT, "attack_single_run_targeted", "fab"),
    ):
        original = getattr(cls, single)

        def spy(self, *args, original=original, key=key, **options):
            seen[key].add(self.target_class)
            return original(self, *args, **options)

        monkeypatch.setattr(cls, single, spy)
    classifier = flat(classes)
    suite = changed("autoattack", "1/2550", steps=3, n_queries=5)  # so small that everything survives
    run = evaluate([classifier], right_samples(classifier), [suite], tmp_path / "run")
    assert {s.text for s in run.statuses} == {"complete"}
    assert seen["fab"] == set(range(2, targets + 2))
    assert seen["t"] == (set(range(2, targets + 2)) if classes >= 4 else set())
    kept = run.suites[0]
    if classes >= 4:
        assert kept.name == "autoattack"
    else:
        assert kept.name == "autoattack-without-apgd-t"
        assert f"without apgd-t (4 classes are needed, oracle has {classes})" in kept.title
        assert "apgd-t" not in [a.name for a in kept.attack]


def test_a_suite_of_which_nothing_is_left_is_refused(linear, linear_samples):
    only = load_suite("autoattack").without(["apgd-ce", "fab-t", "square"], "slow")
    with pytest.raises(SpecError, match="4 classes are needed, oracle has 2"):
        Plan([linear], linear_samples, [only])


def test_a_cascade_attacks_survivors_only_and_adds_up(noise_samples, tmp_path, monkeypatch):
    classifier = tiny()
    samples = right_samples(classifier, 20)
    samples.labels[:4] = (samples.labels[:4] + 1) % 10
    suite = changed("autoattack", "5/255", steps=2, n_queries=4)
    ids = {image.numpy().tobytes(): i for i, image in zip(samples.ids, images_of(samples, classifier), strict=True)}
    given = []
    for method in {attack.method for attack in suite.attack}:

        class Spy(registry.METHODS[method].attack):
            name = method

            def forward(self, images, labels):
                given.append((self.name, tuple(ids[image.numpy().tobytes()] for image in images)))
                return super().forward(images, labels)

        monkeypatch.setitem(registry.METHODS._registered, method, replace(registry.METHODS[method], attack=Spy))
    run = evaluate([classifier], samples, [suite], tmp_path / "run")
    alive = set(samples.ids[4:])
    for label, spec in suite.attacks.items():
        asked = [attacked for method, attacked in given if method == spec.method]
        assert asked == ([tuple(i for i in samples.ids if i in alive)] if alive else [])
        rows = run.cell_rows(run.models[0], Cell(label, eps_budget("5/255")))
        assert list(rows.index) == samples.ids
        alive &= set(rows.index[rows["correct"]])
        assert alive == set(rows.index[rows["correct"]])
    assert 0 < len(alive) < 16
    assert (run.rows["flags"] == "").all()
    clean = run.cell_rows(run.models[0], Cell(label, eps_budget("5/255"))).loc[samples.ids[:4]]
    assert (clean["distance"] == 0).all()
    found = worst_case(run).set_index("sample")
    assert (found.loc[samples.ids[:4], "broken_by"] == CLEAN).all()
    by = found["broken_by"].value_counts()
    assert by["nothing"] == len(alive)
    assert breakers(run).set_index("attack")["broken"].to_dict() == {x: by.get(x, 0) for x in map(str, suite.attacks)}


def test_an_interrupted_cascade_goes_on(noise_samples, tmp_path):
    suite = changed("autoattack", "2/255", steps=2, n_queries=4)
    whole = evaluate([tiny()], noise_samples, [suite], tmp_path / "whole", batch_size=7)
    before = whole.rows
    for path in (whole.path / "rows" / "0").glob("autoattack+fab-t/*7.parquet"):
        path.unlink()
    for path in (whole.path / "rows" / "0").glob("autoattack+square/*.parquet"):
        path.unlink()
    again = evaluate([tiny()], noise_samples, [suite], tmp_path / "whole", batch_size=7)
    pd.testing.assert_frame_equal(again.rows, before)


def test_a_part_that_breaks_takes_those_after_it_along(noise_samples, tmp_path, monkeypatch):
    class Breaks(autoattack.APGDT):
        def forward(self, images, labels):
            raise RuntimeError("no kernel")

    monkeypatch.setitem(registry.METHODS._registered, "APGDT", replace(registry.METHODS["APGDT"], attack=Breaks))
    run = evaluate([tiny()], noise_samples, [changed("autoattack", "1/255", steps=2, n_queries=4)], tmp_path / "run")
    texts = {s.cell.attack.attack: s.text for s in run.statuses}
    assert texts["apgd-ce"] == "complete"
    assert texts["apgd-t"] == "failed: RuntimeError: no kernel"
    assert texts["fab-t"] == "failed: RuntimeError: autoattack/apgd-t, whose survivors it attacks, has failed"
    long = accuracy_table(run).set_index("attack")
    assert long.loc[f"autoattack/{WORST}", "status"].startswith("failed")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fab-t", "apgd-ce", "square"])
def test_parts_alone_on_the_linear_oracle(linear, linear_samples, name):
    """The closed form is met by the white-box parts; Square does not beat it."""
    images, labels = images_of(linear_samples, linear), torch.from_numpy(linear_samples.labels)
    spec = next(a for a in load_suite("autoattack").attack if a.name == name)
    found = run_attack(
        linear,
        images,
        labels,
        method=spec.method,
        **spec.parameters | ({"steps": 20} if "steps" in spec.parameters else {}),
    )
    accuracy = (linear(found).argmax(1) == labels).double().mean()
    assert (found - images).abs().max() <= 8 / 255 + 1e-6
    assert accuracy >= linear_accuracy(8)
    if name != "square":
        assert accuracy == linear_accuracy(8)


def test_l2_parts_stay_in_their_ball(noise_samples):
    classifier = tiny()
    images, labels = images_of(noise_samples, classifier)[:8], torch.from_numpy(noise_samples.labels[:8])
    threat = PIXEL.model_copy(update={"norm": "l2", "eps": ("0.5",)})
    for method in ("APGD", "APGDT", "FABT"):
        registry.check(AttackSpec(name="a", method=method), threat)
        found = run_attack(classifier, images, labels, "0.5", method, threat=threat)
        assert (engine.distance(classifier, images, found, threat) <= 0.5 + 1e-5).all(), method


@pytest.mark.slow
def test_autoattack_beats_pgd_with_ten_restarts_on_an_embedded_model(tmp_path):
    samples = load_samples("fashion-mnist", limit=6)
    pgd = changed("pgd-best", "8/255", steps=20, restarts=10, loss="ce")
    run = evaluate(
        [load_classifier("rpc-symvit")], samples, [load_suite("autoattack").with_eps(["8/255"]), pgd], tmp_path / "run"
    )
    found = accuracy_table(run).set_index("attack")["accuracy"]
    assert found[f"autoattack/{WORST}"] <= found["pgd-best"] <= found[CLEAN]
    assert found[f"autoattack/{WORST}"] == found["autoattack/square"]


def test_square_does_not_write_into_what_the_model_keeps():
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.kept = nn.Linear(784, 4), []

        def forward(self, x):
            self.kept.append(self.linear(x.flatten(1)))
            return self.kept[-1]

    classifier = classifier_of(Keeps(), 4)
    images = torch.rand(4, 1, SIDE, SIDE)
    run_attack(classifier, images, classifier(images).argmax(1), "1/255", method="Square", n_queries=5)
    assert len(classifier.network.kept) > 2
    assert all(logits.isfinite().all() for logits in classifier.network.kept)


# -- PGD with restarts and the best iterate


@pytest.mark.parametrize("loss", ["ce", "margin"])
@pytest.mark.parametrize("k", [2, 4, 8])
def test_best_pgd_on_the_linear_oracle(linear, linear_samples, loss, k):
    images, labels = images_of(linear_samples, linear), torch.from_numpy(linear_samples.labels)
    found = run_attack(linear, images, labels, f"{k}/255", steps=10, alpha="0.25 eps", restarts=2, loss=loss)
    assert (linear(found).argmax(1) == labels).double().mean() == linear_accuracy(k)
    assert (found - images).abs().max() <= k / 255 + 1e-6


@pytest.mark.parametrize("stop", [True, False])
def test_the_best_iterate_is_kept_and_restarts_only_help(noise_samples, stop):
    classifier = tiny()
    images = images_of(noise_samples, classifier)
    labels = classifier(images).argmax(1)
    scores = []
    for restarts in (1, 2, 5):
        found = run_attack(
            classifier, images, labels, "2/255", steps=5, alpha="0.5 eps", restarts=restarts, stop_when_wrong=stop
        )
        scores.append(margin(classifier(found), labels))
    wrong = [(s > 0).sum() for s in scores]
    assert wrong[0] <= wrong[1] <= wrong[2]
    if not stop:
        assert (scores[0] <= scores[1] + 1e-6).all()
        assert (scores[1] <= scores[2] + 1e-6).all()
    last = run_attack(classifier, images, labels, "2/255", method="PGD", steps=5, alpha="0.5 eps")
    assert wrong[2] >= (classifier(last).argmax(1) != labels).sum()


@pytest.mark.parametrize("loss", ["ce", "margin", "dlr"])
def test_best_pgd_does_not_depend_on_the_batch(noise_samples, loss):
    classifier = tiny()
    images, labels = images_of(noise_samples, classifier)[:9], torch.from_numpy(noise_samples.labels[:9])
    options = {"steps": 4, "restarts": 3, "alpha": "0.5 eps", "loss": loss}
    whole = run_attack(classifier, images, labels, **options)
    spec = AttackSpec(name="a", method="BestPGD", parameters=options)
    for i in range(9):
        draws = engine.Draws(0, "a", Fraction("8/255"), [f"s{i}"])
        alone = engine.attack(classifier, images[i : i + 1], labels[i : i + 1], spec=spec, threat=PIXEL, draws=draws)
        assert torch.equal(alone, whole[i : i + 1]), i


def test_losses_against_their_definitions():
    logits = torch.tensor([[3.0, 1.0, 0.5, -2.0], [0.0, 5.0, 1.0, 4.0]], dtype=torch.float64)
    labels = torch.tensor([0, 3])
    torch.testing.assert_close(margin(logits, labels), torch.tensor([-2.0, 1.0], dtype=torch.float64))
    from robustkpca.attacks.pgd import LOSSES

    torch.testing.assert_close(
        LOSSES["dlr"](logits, labels), torch.tensor([-2.0 / 2.5, 1.0 / 4.0], dtype=torch.float64)
    )
    with pytest.raises(SpecError, match="Available: ce, margin, dlr"):
        registry.check(AttackSpec(name="a", method="BestPGD", parameters={"loss": "cw"}), PIXEL)
    with pytest.raises(SpecError, match="restarts: expected a whole number"):
        Suite.parse(
            load_suite("pgd-best").model_dump()
            | {"attack": [{"name": "a", "method": "BestPGD", "parameters": {"restarts": 0}}]},
            "s",
        )
    with pytest.raises(SpecError, match="needs at least 3 classes"):
        run_attack(flat(2), torch.rand(1, 1, SIDE, SIDE), torch.tensor([0]), loss="dlr")


def test_eot_averages_what_a_model_draws():
    class Blurred(nn.Module):
        """A linear score whose sign of the gradient is right in the mean only."""

        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(784))

        def forward(self, x):
            s = (x.flatten(1) * (self.w + 4 * torch.randn(len(x), 784))).mean(1)
            return torch.stack([s, -s], 1)

    classifier = classifier_of(Blurred(), 2)
    images, labels = torch.full((8, 1, SIDE, SIDE), 0.5), torch.zeros(8, dtype=torch.int64)
    moved = {}
    for eot in (1, 30):
        found = run_attack(classifier, images, labels, steps=1, alpha="2 eps", eot=eot, stop_when_wrong=False)
        again = run_attack(classifier, images, labels, steps=1, alpha="2 eps", eot=eot, stop_when_wrong=False)
        assert torch.equal(found, again)  # what the model draws is repeatable
        attack = BestPGD(engine._Surface(engine.Coordinates.of(classifier, PIXEL, Fraction("8/255"))), eot=eot)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            gradient, _ = attack._gradient(images, labels)
        moved[eot] = (gradient < 0).double().mean()  # down is away from class 0
    assert moved[1] < 0.65
    assert moved[30] > 0.85


# -- ways around RPC-Attention


def test_surrogates_share_answers_and_change_the_gradient():
    classifier = tiny("rpc-symvit", ALL)
    x = torch.rand(3, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    logits, gradients = classifier(x), {}
    for through in ("full", *SURROGATES):
        other = surrogate(classifier, through)
        assert surrogate(classifier, through) is other  # made once
        if through == "symvit":
            assert not torch.allclose(other(x), logits, atol=1e-2)
        else:
            torch.testing.assert_close(other(x), logits, rtol=1e-5, atol=1e-5)
        y = x.clone().requires_grad_()
        other(y).square().sum().backward()
        gradients[through] = y.grad.flatten()
        assert y.grad.isfinite().all()
    names = list(gradients)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            assert not torch.allclose(gradients[a], gradients[b], rtol=1e-3), (a, b)
    assert {id(p) for p in classifier.parameters()} & {
        id(p) for p in surrogate(classifier, "symvit").parameters()
    } == set()
    pointers = {p.data_ptr() for p in classifier.parameters()}
    assert {p.data_ptr() for p in surrogate(classifier, "symvit").parameters()} == pointers  # shared memory


def test_the_symmetric_surrogate_is_the_symvit_of_the_same_weights():
    rpc = tiny("rpc-symvit", ALL)
    symvit = build_network(tiny("symvit").settings)
    symvit.load_state_dict(rpc.network.state_dict())
    x = torch.rand(2, 1, SIDE, SIDE)
    torch.testing.assert_close(surrogate(rpc, "symvit")(x), Classifier(symvit, tiny("symvit").settings)(x))


def test_models_without_rpc_attention_and_restricted_ones():
    plain = tiny("vit")
    assert surrogate(plain, "straight-through") is plain
    rpc = tiny("rpc-symvit", ALL)
    few = rpc.restricted([1, 3], ("a", "b"))
    x = torch.rand(2, 1, SIDE, SIDE)
    torch.testing.assert_close(surrogate(few, "half-iterations")(x), few(x), rtol=1e-5, atol=1e-5)
    assert surrogate(few, "half-iterations") is not few
    assert not torch.allclose(surrogate(few, "symvit")(x), few(x))


@pytest.mark.parametrize("gradient", ["constant-sparse", "straight-through"])
def test_gradient_modes_against_their_definition(gradient):
    """PAP written from the paper, with S detached, or with the threshold's derivative set to one."""
    draws = torch.Generator().manual_seed(0)
    k, v = (torch.randn(1, 2, 5, 4, dtype=torch.float64, generator=draws) for _ in range(2))
    n, lam, scale = 3, 0.5, 4**-0.5

    def reference(k, v):
        mu = (5 * 8 / (4 * k.abs().sum((-2, -1), keepdim=True))).detach()
        low, w = torch.zeros_like(k), torch.zeros_like(k)
        for _ in range(n):
            x = k - low + w
            s = x.sign() * (x.abs() - lam * mu).clamp_min(0)
            s = s.detach() if gradient == "constant-sparse" else x + (s - x).detach()
            keys = k - s - w
            low = (keys @ keys.transpose(-2, -1) * scale).softmax(-1) @ v
            w = w + k - low - s
        return low

    found = []
    for f in (reference, lambda k, v: principal_attention(k, v, iterations=n, lam=lam, gradient=gradient)):
        a, b = k.clone().requires_grad_(), v.clone().requires_grad_()
        out = f(a, b)
        out.pow(3).sum().backward()
        found.append((out.detach(), torch.zeros_like(k) if a.grad is None else a.grad, b.grad))
    full = k.clone().requires_grad_()
    principal_attention(full, v, iterations=n, lam=lam).pow(3).sum().backward()
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(found[0][1], full.grad)


@pytest.mark.parametrize(
    ("through", "iterations", "gradient_of"), [("half-iterations", 6, 3), ("double-iterations", 3, 6)]
)
def test_the_gradient_is_that_of_so_many_iterations(through, iterations, gradient_of):
    ours, theirs = (tiny("rpc-symvit", RPCSettings(iterations=n, lam=1.0)) for n in (iterations, gradient_of))
    x = torch.rand(2, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    grads = []
    for classifier in (surrogate(ours, through), theirs):
        y = x.clone().requires_grad_()
        tokens = classifier.network.patch_embed(classifier.normalize(y))
        block = classifier.network.blocks[0]
        block.attn(block.norm1(tokens)).sum().backward()
        grads.append(y.grad)
    torch.testing.assert_close(*grads)


def test_the_adaptive_suite_names_its_winner(noise_samples, tmp_path):
    suite = changed("adaptive", "2/255", steps=3, restarts=1, n_queries=20)
    models = [tiny("rpc-symvit", ALL), tiny("vit")]
    run = evaluate(models, noise_samples, [suite], tmp_path / "run")
    assert {s.text for s in run.statuses} == {"complete"}
    long = accuracy_table(run).set_index(["model", "attack"])["accuracy"]
    for model in run.models:
        each = [long[model, str(x)] for x in suite.attacks]
        assert long[model, f"adaptive/{WORST}"] <= min(each)
    found = breakers(run)
    assert set(found["attack"]) == set(map(str, suite.attacks))
    assert (found["alone"] <= found["broken"]).all()
    assert "through straight-through" in suite.describe()
    assert Run.open(run.path).suites[0].attack[2].through == "constant-sparse"


# -- the caller's model


def test_the_given_network_is_left_as_it_was(tmp_path, noise_samples):
    network = build_network(tiny().settings)
    network.train()
    network.blocks[0].eval()
    network.head.weight.requires_grad_(False)
    network.norm.weight.grad = torch.ones_like(network.norm.weight)
    modes = [m.training for m in network.modules()]
    wanted = [p.requires_grad for p in network.parameters()]
    classifier = Classifier(network, tiny().settings)
    with torch.no_grad():
        evaluate([classifier], noise_samples, [load_suite("pgd").with_eps(["8/255"])], tmp_path / "a")
    with torch.inference_mode():
        evaluate([classifier], noise_samples, [load_suite("pgd").with_eps(["8/255"])], tmp_path / "b")
    assert Run.open(tmp_path / "a").rows.equals(Run.open(tmp_path / "b").rows)
    assert [m.training for m in network.modules()] == modes
    assert [p.requires_grad for p in network.parameters()] == wanted
    assert torch.equal(network.norm.weight.grad, torch.ones_like(network.norm.weight))
    assert all(p.grad is None for p in classifier.parameters())
    assert not any(m.training for m in classifier.modules())
