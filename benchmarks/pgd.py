"""What PGD costs beside its forward and backward passes: python benchmarks/pgd.py [--threads N] [--device cuda]

Evaluation and libraries: SymViT-tiny at 224 with random weights, 16 JPEG pictures in one batch, 20 steps. The active
set: an embedded model on embedded photographs. Times are medians interleaved in one process; every figure is a ratio.
foolbox is in the extra `dev`.
"""

from __future__ import annotations

import shutil
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path

import foolbox
import numpy as np
import torch
import torchattacks
from PIL import Image
from timing import arguments, conditions, medians, table
from torch import Tensor
from torch.nn import functional as F

from robustkpca import Classifier, ModelSettings, Preprocessing, evaluate, load_classifier, load_samples, load_suite
from robustkpca.attacks.engine import attack
from robustkpca.attacks.pgd import BestPGD
from robustkpca.models.networks import build_network
from robustkpca.models.settings import IMAGENET_MEAN, IMAGENET_STD
from robustkpca.suites.suite import Suite

BATCH, STEPS, EPS = 16, 20, Fraction(8, 255)
CLASSES = tuple("abcdefgh")
Row = tuple[str, float, float | None]


def pictures(folder: Path) -> None:
    """BATCH JPEG pictures of 500 x 375, ImageNet's usual size, in class folders: noise at several scales, as
    photographs have.
    """
    draws = np.random.default_rng(0)
    for i in range(BATCH):
        layers = [
            draws.normal(size=(375 // side + 1, 500 // side + 1, 3)).repeat(side, 0).repeat(side, 1)
            for side in (64, 16, 4)
        ]
        pixels = 128 + 40 * sum(layer[:375, :500] for layer in layers)
        path = folder / CLASSES[i % len(CLASSES)] / f"{i}.jpg"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=90)


def symvit_tiny(device: str) -> Classifier:
    torch.manual_seed(0)
    settings = ModelSettings(
        family="symvit", patch_size=16, width=192, depth=12, heads=3, num_classes=len(CLASSES), classes=CLASSES,
        preprocessing=Preprocessing(img_size=224, mean=IMAGENET_MEAN, std=IMAGENET_STD),
    )  # fmt: skip
    return Classifier(build_network(settings), settings).to(device)


def pgd_suite() -> Suite:
    """The package's `pgd`, at one budget and with the paper's 20 steps of 0.15 eps."""
    suite = load_suite("pgd").with_eps([str(EPS)]).model_dump()
    suite["attack"][0]["parameters"] |= {"steps": STEPS, "alpha": "0.15 eps"}
    return Suite.parse(suite, "pgd")


class _Stop(Exception):
    pass


def evaluation(classifier: Classifier, pictures_at: Path, out: Path) -> Callable[[], None]:
    """A task that evaluates PGD on the pictures: plan, decoding, the clean pass, the attack, scoring, rows.

    Pictures are decoded in the same process. The probes, some passes over the first 100 samples of a model however
    many there are, are made beforehand: a run that is stopped after them keeps them.
    """

    def run(on_progress: Callable[[object], None] | None = None) -> None:
        samples = load_samples(f"folder:{pictures_at}")
        run = evaluate([classifier], samples, [pgd_suite()], out, batch_size=BATCH, workers=0, on_progress=on_progress)
        assert {status.text for status in run.statuses} == {"complete"}

    def stop(progress: object) -> None:
        raise _Stop

    def task() -> None:
        shutil.rmtree(out / "rows")
        run()

    try:
        run(stop)
    except _Stop:
        return task
    raise AssertionError("the run was not stopped")


def passes(classifier: Classifier, images: Tensor, labels: Tensor) -> None:
    """The floor of PGD: STEPS forward passes with the gradient of the input, and one forward pass."""
    for _ in range(STEPS):
        x = images.clone().requires_grad_()
        torch.autograd.grad(F.cross_entropy(classifier(x), labels), x)
    with torch.no_grad():
        classifier(images)


def libraries(options: Namespace) -> Iterator[Row]:
    """Our evaluation over its floor; our attack beside torchattacks and foolbox, on the same model and images."""
    device = options.device
    classifier, suite = symvit_tiny(device), pgd_suite()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "pictures").mkdir()
        pictures(folder / "pictures")
        samples = load_samples(f"folder:{folder / 'pictures'}")
        images = torch.stack([samples.image(i, classifier.settings.preprocessing) for i in range(BATCH)]).to(device)
        labels = torch.from_numpy(samples.labels_for(classifier.settings)).to(device)
        eps, alpha = float(EPS), 0.15 * float(EPS)
        raw = torchattacks.PGD(classifier, eps=eps, alpha=alpha, steps=STEPS, random_start=True)
        theirs = foolbox.attacks.LinfPGD(abs_stepsize=alpha, steps=STEPS, random_start=True)
        seen = foolbox.PyTorchModel(classifier, bounds=(0, 1), device=device)
        spec, threat = suite.attack[0], suite.threat
        seconds = medians(
            {
                "evaluate": evaluation(classifier, folder / "pictures", folder / "run"),
                "floor": lambda: passes(classifier, images, labels),
                "ours": lambda: attack(
                    classifier, images, labels, spec=spec, threat=threat, eps=EPS, label="pgd", ids=samples.ids, seed=0
                ),
                "torchattacks": lambda: raw(images, labels),
                "foolbox": lambda: theirs(seen, images, labels, epsilons=eps),
            },
            options,
        )
    yield (
        "evaluate with PGD-20, over 20 x forward + input gradient and 1 forward",
        seconds["evaluate"] / seconds["floor"],
        1.05,
    )
    yield "our PGD-20 over raw torchattacks", seconds["ours"] / seconds["torchattacks"], None
    yield "our PGD-20 over foolbox's LinfPGD", seconds["ours"] / seconds["foolbox"], None


def active_set(name: str, options: Namespace) -> Iterator[Row]:
    """PGD that leaves a sample alone once an iterate is misclassified, over the same PGD that does not."""
    device = options.device
    classifier = load_classifier(name).to(device)
    samples = load_samples("fashion-mnist", limit=100)
    images = torch.stack([samples.image(i, classifier.settings.preprocessing) for i in range(len(samples))]).to(device)
    labels = torch.from_numpy(samples.labels_for(classifier.settings)).to(device)

    def found(eps: float, stop: bool) -> Tensor:
        torch.manual_seed(0)
        engine = BestPGD(classifier, eps=eps, alpha=0.15 * eps, steps=STEPS, loss="ce", stop_when_wrong=stop)
        return engine(images, labels)

    def fooled(eps: float) -> float:
        return float((classifier(found(eps, True)).argmax(1) != labels).float().mean())

    low, high = 0.0, 1.0
    while high - low > 1e-3:
        eps = (low + high) / 2
        low, high = (eps, high) if fooled(eps) < 0.75 else (low, eps)
    seconds = medians({"on": lambda: found(high, True), "off": lambda: found(high, False)}, options, times=5)
    what = f"{classifier.title}, eps {high * 255:.1f}/255 fools {fooled(high):.0%}"
    yield f"PGD-20 with an active set over without: {what}", seconds["on"] / seconds["off"], 0.50


def main() -> None:
    options = arguments("PGD beside its passes and beside other libraries.", repeats=3).parse_args()
    torch.set_num_threads(options.threads)
    rows = [
        *libraries(options),
        *(row for name in ("symvit", "rpc-symvit") for row in active_set(name, options)),
    ]
    print(table(rows))
    print(f"\n{conditions(options, 'torchattacks', 'foolbox')}")


if __name__ == "__main__":
    main()
