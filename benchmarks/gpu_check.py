"""What gpu_check.sh prints: golden vectors on a device in float32 and bfloat16, and PGD-20 images per second.

Usage: python benchmarks/gpu_check.py [--device cuda] [--sizes tiny,small,base] [--batch-size 64]
"""

from __future__ import annotations

import argparse
import time
from fractions import Fraction
from pathlib import Path

import torch
from safetensors.torch import load_file

from robustkpca.attacks import engine
from robustkpca.models.attention import RPCAttention, SymmetricAttention
from robustkpca.models.settings import RPCSettings
from robustkpca.profile import machine, untrained
from robustkpca.suites.suite import load_suite

GOLDEN = Path(__file__).parents[1] / "tests" / "data" / "attention_golden.safetensors"
SETTINGS = [None, *((n, lam) for n in (1, 2, 4, 6) for lam in (4.0, 1.0, 0.1, 0.01))]


def golden(device: str, dtype: torch.dtype) -> list[tuple[str, float, float]]:
    """For each setting: largest difference of the output, as a share of its largest value, and the least cosine of
    the input gradient over images.
    """
    vectors = {name: value.to(device) for name, value in load_file(GOLDEN).items()}
    rows = []
    for rpc in SETTINGS:
        name = f"rpc.n{rpc[0]}.lambda{rpc[1]}" if rpc else "symmetric"
        module = SymmetricAttention(48, num_heads=3, qkv_bias=True, dtype=torch.float64, device=device)
        module.load_state_dict({k.removeprefix("weights."): v for k, v in vectors.items() if k.startswith("weights.")})
        if rpc:
            module = RPCAttention.of(module, iterations=rpc[0], lam=rpc[1])
        module.to(dtype)
        x = vectors["x"].to(dtype).requires_grad_()
        out = module(x)
        (gradient,) = torch.autograd.grad(out, x, vectors["grad_output"].to(dtype))
        true, true_gradient = vectors[f"{name}.output"], vectors[f"{name}.grad_input"]
        error = ((out.double() - true).abs().max() / true.abs().max()).item()
        cosine = torch.cosine_similarity(gradient.double().flatten(1), true_gradient.flatten(1), dim=1)
        rows.append((name, error, cosine.min().item()))
    return rows


def images_per_second(name: str, rpc: RPCSettings | None, device: str, batch_size: int) -> float:
    """PGD-20 of the suite pgd-paper at 1/255 through torchattacks on random images, the second of two batches."""
    classifier = untrained(name, rpc=rpc).to(torch.device(device))
    suite = load_suite("pgd-paper")
    assert suite.threat is not None
    draws = torch.Generator().manual_seed(0)
    images = torch.rand(batch_size, 3, 224, 224, generator=draws).to(device)
    labels = torch.zeros(batch_size, dtype=torch.int64, device=device)
    for _ in range(2):
        _wait(device)
        start = time.perf_counter()
        engine.attack(
            classifier, images, labels, spec=suite.attack[0], threat=suite.threat, eps=Fraction(1, 255), label="pgd",
            ids=[str(i) for i in range(batch_size)], seed=0,
        )  # fmt: skip
        _wait(device)
        seconds = time.perf_counter() - start
    return batch_size / seconds


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sizes", default="tiny,small,base")
    parser.add_argument("--batch-size", type=int, default=64)
    options = parser.parse_args()
    print(machine(torch.device(options.device)))
    print("\n| golden vectors | output float32 | gradient cosine float32 | output bf16 | gradient cosine bf16 |")
    print("| --- | ---: | ---: | ---: | ---: |")
    both = zip(golden(options.device, torch.float32), golden(options.device, torch.bfloat16), strict=True)
    for (name, error, cosine), (_, half_error, half_cosine) in both:
        print(f"| {name} | {error:.1e} | {cosine:.6f} | {half_error:.1e} | {half_cosine:.4f} |")
    print(f"\n| PGD-20, batch {options.batch_size}, 224 px, float32 | images/s |")
    print("| --- | ---: |")
    for size in options.sizes.split(","):
        for family, rpc in (
            ("symvit", None),
            ("rpc-symvit", RPCSettings(iterations=6, lam=4.0)),
            ("rpc-symvit", RPCSettings(iterations=2, lam=4.0, layers="all")),
        ):
            rate = images_per_second(f"{family}-{size}", rpc, options.device, options.batch_size)
            print(f"| {family}-{size}{f' ({rpc.label})' if rpc else ''} | {rate:.1f} |", flush=True)


if __name__ == "__main__":
    main()
