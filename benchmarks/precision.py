"""How far bfloat16 and torch.compile are from float32 on the embedded models: answers, logits, input gradients.

Usage: python benchmarks/precision.py [--device cpu] [--n 200]. Prints a Markdown table.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor
from torch.nn import functional as F

from robustkpca import Classifier, load_classifier, load_samples
from robustkpca.models.settings import EMBEDDED
from robustkpca.profile import machine

BATCH = 100
WAYS = {"bf16": {"dtype": torch.bfloat16}, "compiled": {"compiled": True}}


def of(classifier: Classifier, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and input gradients of the cross-entropy."""
    logits, gradients = [], []
    for x, y in zip(images.split(BATCH), labels.split(BATCH), strict=True):
        x = x.detach().requires_grad_()
        found = classifier(x)
        gradients.append(torch.autograd.grad(F.cross_entropy(found, y, reduction="sum"), x)[0].flatten(1))
        logits.append(found.detach())
    return torch.cat(logits), torch.cat(gradients)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--n", type=int, default=200)
    options = parser.parse_args()
    samples = load_samples("fashion-mnist", limit=options.n)
    print(
        "| model | way | same answer | largest difference of a logit, of the largest | cosine of gradients: median, "
        "worst |"
    )
    print("| --- | --- | ---: | ---: | ---: |")
    for name in EMBEDDED:
        classifier = load_classifier(name, device=options.device)
        images = torch.stack([samples.image(i, classifier.settings.preprocessing) for i in range(len(samples))])
        labels = torch.from_numpy(samples.labels_for(classifier.settings)).to(options.device)
        logits, gradients = of(classifier, images.to(options.device), labels)
        for way, settings in WAYS.items():
            theirs, other = of(classifier.variant(**settings), images.to(options.device), labels)
            same = int((theirs.argmax(1) == logits.argmax(1)).sum())
            difference = ((theirs - logits).abs().max() / logits.abs().max()).item()
            cosine = F.cosine_similarity(gradients, other, dim=1)
            print(
                f"| {classifier.title} | {way} | {same} of {len(samples)} | {difference:.1e} | "
                f"{cosine.median().item():.4f}, {cosine.min().item():.4f} |",
                flush=True,
            )
    print(f"\n{machine(torch.device(options.device))}.")


if __name__ == "__main__":
    main()
