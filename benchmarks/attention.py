"""What our attention costs beside the definition: python benchmarks/attention.py [--threads N] [--device cuda]
[--compile]

ViT-tiny at 224, batch 16, random weights, lambda 4. "plain" is plain.py: PAP and symmetric attention written from
their definitions. Times are medians interleaved in one process; every figure is a ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from plain import PlainRPC, PlainSymmetric
from timing import arguments, conditions, medians, table
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from robustkpca.models.attention import RPCAttention, SymmetricAttention

BATCH, DEPTH = 16, 12
VARIANTS = {"6iter/layer1": (6, 1), "2iter/all": (2, DEPTH), "4iter/all": (4, DEPTH)}  # iterations, layers
Row = tuple[str, float, float | None]


def network(
    symmetric: type[SymmetricAttention], rpc: type[RPCAttention], variant: str, device: str
) -> VisionTransformer:
    """A ViT-tiny with frozen parameters, the same for all; `variant` is one of VARIANTS or symvit."""
    torch.manual_seed(0)
    model = VisionTransformer(
        embed_dim=192, depth=DEPTH, num_heads=3, norm_layer=partial(nn.LayerNorm, eps=1e-6), attn_layer=symmetric
    )
    iterations, layers = VARIANTS.get(variant, (0, 0))
    for block in model.blocks[:layers]:
        block.attn = rpc.of(block.attn, iterations=iterations, lam=4.0)
    return model.eval().requires_grad_(False).to(device)


@torch.inference_mode()
def inference(model: nn.Module, images: Tensor) -> Tensor:
    return model(images)


def input_gradient(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    x = images.clone().requires_grad_()
    return torch.autograd.grad(F.cross_entropy(model(x), labels), x)[0]


def all_gradients(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    """What a pipeline does that calls backward() on a model whose parameters are not frozen."""
    model.zero_grad()
    F.cross_entropy(model(images.clone().requires_grad_()), labels).backward()


def saved(model: nn.Module, x: Tensor) -> int:
    """Bytes that a forward pass keeps for the gradient of its input: distinct storages, without those of the model."""
    owned = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(x.detach().requires_grad_())
    del out  # alive until here, so that no address was used twice
    return sum(size for place, size in kept.items() if place not in owned)


def over_symvit(seconds: dict[str, float], what: str, most: tuple[float, float, float]) -> Iterator[Row]:
    """What RPC costs over SymViT, with our attention and with the plain one."""
    for variant, limit in zip(VARIANTS, most, strict=True):
        yield f"{what}, {variant} over symvit: ours", seconds[f"ours {variant}"] / seconds["ours symvit"], limit
        yield f"{what}, {variant} over symvit: plain", seconds[f"plain {variant}"] / seconds["plain symvit"], None


def over_plain(seconds: dict[str, float], what: str, most: float, theirs: str = "plain") -> Iterator[Row]:
    """What our attention costs over `theirs`."""
    for variant in ("symvit", *VARIANTS):
        if f"{theirs} {variant}" in seconds:
            limit = most if variant in ("2iter/all", "4iter/all") else None
            yield f"{what}, {variant}", seconds[f"ours {variant}"] / seconds[f"{theirs} {variant}"], limit


def memory(ours: VisionTransformer, plain: VisionTransformer, images: Tensor) -> Iterator[Row]:
    """Activations kept for the gradient.

    With checkpointing, those of one block come back during the backward pass and count.
    """
    whole = saved(plain, images)
    yield "saved activations, ours over plain, 4iter/all", saved(ours, images) / whole, 0.80
    block = saved(ours.blocks[0], torch.zeros(BATCH, 197, 192, device=images.device))
    ours.set_grad_checkpointing(True)
    yield "the same with block checkpointing, and one block recomputed", (saved(ours, images) + block) / whole, 0.20
    ours.set_grad_checkpointing(False)


def main() -> None:
    parser = arguments("Our attention against the definition.", repeats=15)
    parser.add_argument("--compile", action="store_true", help="torch.compile too, for inference")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = options.device
    images, labels = torch.rand(BATCH, 3, 224, 224, device=device), torch.arange(BATCH, device=device)
    kinds = {"ours": (SymmetricAttention, RPCAttention), "plain": (PlainSymmetric, PlainRPC)}
    models = {f"{name} {v}": network(*kind, v, device) for v in ("symvit", *VARIANTS) for name, kind in kinds.items()}
    trained = {v: network(*kinds["plain"], v, device).requires_grad_(True) for v in ("2iter/all", "4iter/all")}

    passes: dict[str, Callable[[], object]] = {name: partial(inference, m, images) for name, m in models.items()}
    if options.compile:
        compiled = {v: torch.compile(models[f"ours {v}"]) for v in trained}
        passes |= {f"compiled {v}": partial(inference, m, images) for v, m in compiled.items()}
    fast = medians(passes, options)
    gradients: dict[str, Callable[[], object]] = {
        name: partial(input_gradient, m, images, labels) for name, m in models.items()
    }
    gradients |= {f"trained {v}": partial(all_gradients, m, images, labels) for v, m in trained.items()}
    slow = medians(gradients, options)

    rows = [
        *over_symvit(fast, "inference", (1.15, 1.30, 1.95)),
        *over_symvit(slow, "forward + input gradient", (1.18, 1.40, 2.05)),
        *over_plain(fast, "inference, ours over plain", 0.85),
        *((f"inference, ours compiled over plain, {v}", fast[f"compiled {v}"] / fast[f"plain {v}"], None)
          for v in trained if options.compile),
        *over_plain(slow, "forward + input gradient, ours over plain", 0.88),
        *over_plain(slow, "forward + input gradient, ours over plain with parameter gradients", 0.74, "trained"),
        *memory(models["ours 4iter/all"], models["plain 4iter/all"], images),
    ]  # fmt: skip
    print(table(rows))
    print(f"\n{conditions(options)}")


if __name__ == "__main__":
    main()
