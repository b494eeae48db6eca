"""What models cost: parameters, operations, time and memory, forward and with the input gradient of attacks."""

from __future__ import annotations

import os
import platform
import statistics
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from robustkpca.errors import SpecError
from robustkpca.models.classifier import Classifier
from robustkpca.models.networks import build_network
from robustkpca.models.settings import (
    CLASS_LISTS,
    FAMILIES,
    IMAGENET_MEAN,
    IMAGENET_STD,
    RPC_TIMM,
    SIZES,
    ModelSettings,
    Preprocessing,
    RPCSettings,
    split_name,
)


@dataclass(frozen=True)
class Cost:
    """Of one model. Times are medians in milliseconds an image, memory is the peak in bytes above the weights at the
    whole batch, operations are floating-point additions and multiplications of matrix products and convolutions,
    forward, an image.
    """

    title: str
    parameters: int
    flops: int
    forward_ms: float
    gradient_ms: float
    forward_bytes: int
    gradient_bytes: int


def profile(classifiers: Sequence[Classifier], *, batch_size: int = 16, repeats: int = 10) -> list[Cost]:
    """Cost of each classifier on random images of its own size, on its device.

    All are timed in turn in every one of `repeats` rounds, after one round to warm up, so that what slows the machine
    for a while slows them alike. `forward` is inference; `gradient` is forward and backward pass of the cross-entropy
    to the input, parameters frozen. On CUDA times are those of events and memory is the allocator's; on the CPU
    memory is that of all tensors, without what a kernel allocates within itself.
    """
    tasks: dict[str, Callable[[], object]] = {}
    for number, classifier in enumerate(classifiers):
        p = classifier.settings.preprocessing
        draws = torch.Generator().manual_seed(0)
        shape = (batch_size, p.channels, p.img_size, p.img_size)
        images = torch.rand(shape, generator=draws).to(classifier.device)
        labels = torch.zeros(batch_size, dtype=torch.int64, device=classifier.device)
        tasks[f"forward {number}"] = _forward(classifier, images)
        tasks[f"gradient {number}"] = _gradient(classifier, images, labels)
    seconds = medians(tasks, repeats, classifiers[0].device)
    costs = []
    for number, classifier in enumerate(classifiers):
        forward, gradient = tasks[f"forward {number}"], tasks[f"gradient {number}"]
        costs.append(
            Cost(
                classifier.title,
                sum(p.numel() for p in classifier.network.parameters()),
                _flops(classifier),
                1000 * seconds[f"forward {number}"] / batch_size,
                1000 * seconds[f"gradient {number}"] / batch_size,
                peak_bytes(forward, classifier.device),
                peak_bytes(gradient, classifier.device),
            )
        )
    return costs


def untrained(name: str, *, rpc: RPCSettings | None = None, img_size: int = 224, num_classes: int = 1000) -> Classifier:
    """A model of a named size (patch 16, ImageNet's normalisation) or `timm:NAME`, with fresh weights."""
    family, size = split_name(name)
    if family.startswith(RPC_TIMM + "timm:"):
        family = family.removeprefix(RPC_TIMM)
    elif family not in FAMILIES or not FAMILIES[family].pursues:
        rpc = None
    side, mean, std = img_size, IMAGENET_MEAN, IMAGENET_STD
    if family.startswith("timm:"):
        configuration = timm.get_pretrained_cfg(family.removeprefix("timm:"))
        side = configuration.input_size[-1] if configuration else side
    elif size is None:
        raise SpecError(f"model {name}: expected a size, {', '.join(f'{name}-{s}' for s in SIZES)}, or a checkpoint")
    width, depth, heads = SIZES.get(size or "", (None, None, None))
    settings = ModelSettings.parse(
        {
            "family": family,
            "preprocessing": Preprocessing(img_size=side, mean=mean, std=std),
            "num_classes": num_classes,
            "classes": CLASS_LISTS.get(num_classes, ()),
            "patch_size": 16 if size else None,
            "width": width,
            "depth": depth,
            "heads": heads,
            "rpc": rpc,
        },
        f"model {name}",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Classifier(build_network(settings), settings, source="untrained")


def machine(device: torch.device) -> str:
    """Processor or GPU, threads and versions in one line."""
    cpu = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.machine(),
    )
    where = f"{torch.cuda.get_device_name(device)}, {cpu}" if device.type == "cuda" else cpu
    return f"{where}, {os.cpu_count()} cores, {torch.get_num_threads()} threads; torch {torch.__version__}, timm "
    f"{timm.__version__}"


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def medians(
    tasks: Mapping[str, Callable[[], object]],
    repeats: int,
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Median seconds of each task, all in turn in every round; the first round does not count.

    `clock` gives seconds; on CUDA events are used instead. torch.utils.benchmark.Timer would run a task twice before
    each measurement, three passes where one is enough, and times one task after the other, which a slow minute
    distorts.
    """
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for round_number in range(repeats + 1):
        for name, task in tasks.items():
            seconds = _seconds(task, device, clock)
            if round_number:
                times[name].append(seconds)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def peak_bytes(task: Callable[[], object], device: torch.device) -> int:
    """Most memory that a task holds at once beyond what is there before it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        task()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device)) - before
    allocations = _Allocations()
    with allocations:
        task()
    return allocations.peak


class _Allocations(TorchDispatchMode):
    """Follows the memory of all tensors that operations return."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in given and key not in self._seen:
                self._seen.add(key)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._freed, key, storage.nbytes())
        return result

    def _freed(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _forward(classifier: Classifier, images: Tensor) -> Callable[[], Tensor]:
    @torch.no_grad()
    def task() -> Tensor:
        logits: Tensor = classifier(images)
        return logits

    return task


def _gradient(classifier: Classifier, images: Tensor, labels: Tensor) -> Callable[[], Tensor]:
    def task() -> Tensor:
        x = images.detach().requires_grad_()
        return torch.autograd.grad(F.cross_entropy(classifier(x), labels, reduction="sum"), x)[0]

    return task


def _flops(classifier: Classifier) -> int:
    """Forward, an image. Counted with attention in its parts, as fused attention is not counted on every device, and
    not compiled, as what is compiled calls no operations.
    """
    p, n = classifier.settings.preprocessing, 4  # what a Classifier fills a batch up to
    images = torch.zeros(n, p.channels, p.img_size, p.img_size, device=classifier.device)
    plain = classifier.variant(dtype=classifier.dtype)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        plain(images)
    return int(counter.get_total_flops()) // n


def _seconds(task: Callable[[], object], device: torch.device, clock: Callable[[], float]) -> float:
    if device.type != "cuda":
        start = clock()
        task()
        return clock() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    task()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000
