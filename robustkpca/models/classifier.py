"""Vision transformers by name, and the Classifier: a model as evaluation sees it."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from robustkpca.errors import CheckpointError, SpecError
from robustkpca.models.attention import (
    MultiHeadAttention,
    Pursuit,
)
from robustkpca.models.origin import Origin
from robustkpca.models.settings import ModelSettings

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
_BLOCK = 4  # images; see Classifier.logits_of_normalized


def weights_hash(state: Mapping[str, Tensor]) -> str:
    """SHA-256 (first 16 hex digits) of names, dtypes, shapes and values: the same in any file format or order."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


class _Among(nn.Module):
    """Some of a network's logits."""

    chosen: Tensor

    def __init__(self, network: nn.Module, num_classes: int, indices: Sequence[int]) -> None:
        super().__init__()
        self.network, self.num_classes = network, num_classes
        self.register_buffer("chosen", torch.tensor(indices), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return logits_of(self.network(x))[0].index_select(1, self.chosen)


def logits_of(output: object) -> tuple[Tensor, str]:
    """The logits in what a network returned, and how they were found there, "" where it returned nothing else.

    They are a tensor, the attribute or entry `logits`, the mean of a pair of equal shapes (class and distillation
    heads, as DeiT does), or the first of any other tuple or list. Raises CheckpointError for anything else.
    """
    if isinstance(output, Tensor):
        return output, ""
    named = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(named, Tensor):
        return named, f"logits are the entry `logits` of the network's {type(output).__name__}"
    if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
        first, *rest = output
        if len(rest) == 1 and isinstance(rest[0], Tensor) and rest[0].shape == first.shape:
            return torch.stack((first, rest[0])).mean(0), "logits are the mean of the network's two heads"
        return first, f"logits are the first of the network's {len(output)} outputs"
    kind = type(output).__name__
    if isinstance(output, Mapping):
        kind += f" of {', '.join(map(str, list(output)[:5])) or 'nothing'}"
    elif isinstance(output, tuple | list):
        kind += f" of {', '.join(type(item).__name__ for item in output[:5]) or 'nothing'}"
    raise CheckpointError(f"expected the network to return a float tensor (B, classes) or `logits`, got {kind}")


def _own(network: nn.Module) -> nn.Module:
    """Modules of our own over the same memory: the given network keeps its modes, `requires_grad` and `.grad`."""
    shared: dict[int, Any] = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in network.parameters()}
    shared |= {id(b): b for b in network.buffers()}
    return copy.deepcopy(network, shared)


class Classifier(nn.Module):
    """A network with its own normalisation, always in eval mode, its parameters frozen.

    The weights are the given network's, not copied; its modes, `requires_grad` and `.grad` are left as they are.

    forward: float32 images (B, C, H, W) in [0, 1], C and H = W of `settings.preprocessing`, to logits (B, classes),
    which are looked for in what the network returns as `logits_of` says, everywhere alike. Logits are float32; in
    bfloat16 (see `variant`) the network's own weights and activations are rounded.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        network: nn.Module,
        settings: ModelSettings,
        *,
        title: str | None = None,
        source: str = "",
        notes: tuple[str, ...] = (),
        weights: str | None = None,
    ) -> None:
        """`weights`: what `weights_hash` gives, where it is known."""
        super().__init__()
        self.network = _own(network)
        self.settings = settings
        self.title = title or settings.title
        # Where the weights came from and what was done to them, for the receipt.
        self.source, self.notes = source, notes
        self.origin = Origin()
        # The user's name for it, and what it is averaged under with other trainings.
        self.given_name: str | None = None
        self.group: str | None = None
        self._given, self._values = weights, self._hash()
        self.compiled = False
        shape = (1, settings.preprocessing.channels, 1, 1)
        self.register_buffer("mean", torch.tensor(settings.preprocessing.mean).reshape(shape), persistent=False)
        self.register_buffer("std", torch.tensor(settings.preprocessing.std).reshape(shape), persistent=False)
        self.eval()

    @property
    def weights(self) -> str:
        """A hash of the network's parameters and buffers as they are now: that of the file they came from, until one
        was changed."""
        now = self._hash()
        return self._given if self._given is not None and now == self._values else now

    def _hash(self) -> str:
        return weights_hash(self.network.state_dict() | dict(self.network.named_buffers()))

    def train(self, mode: bool = True) -> Classifier:
        """Stays in eval mode, all sub-modules too, whatever an attack library asks for."""
        return super().train(False)

    def restricted(self, indices: Sequence[int], classes: tuple[str, ...]) -> Classifier:
        """The same model answering among some of its classes only: logits (B, len(indices)), in that order."""
        settings = self.settings.model_copy(update={"num_classes": len(indices), "classes": classes})
        return self._over(_Among(self.network, self.settings.num_classes, indices), settings)

    def twin(self) -> Classifier:
        """A classifier of its own over the same weights."""
        return self._over(self.network, self.settings)

    def variant(
        self, *, dtype: torch.dtype = torch.float32, compiled: bool = False, checkpointed: bool = False
    ) -> Classifier:
        """The same model in another precision (float32 or bfloat16), compiled by `torch.compile`, or `checkpointed`:
        with each block's activations computed again in the backward pass, which takes less memory and more time and
        changes no result. Raises SpecError where it cannot be.
        """
        if dtype not in DTYPES.values():
            raise SpecError(f"dtype: expected {' or '.join(DTYPES)}, got {dtype}")
        if compiled:
            self.note_logits()
        new = self._over(self.network, self.settings, compiled)
        new.network.to(dtype)
        new._values = new._hash()  # rounded, but of the same file
        if checkpointed:
            switch: Any = getattr(new.network, "set_grad_checkpointing", None)
            if switch is None:
                text = f"{self.title}: it has no blocks that could be checkpointed"
                raise SpecError(text, lacks={"checkpointed"})
            switch()
        return new

    def note_logits(self) -> None:
        """Say in `notes` where the logits are in what the network returns, unless that is a plain tensor.

        Raises CheckpointError where there are none.
        """
        if self.compiled or type(self.network).__module__.startswith("timm."):  # the latter return tensors
            return
        p = self.settings.preprocessing
        images = torch.zeros(_BLOCK, p.channels, p.img_size, p.img_size, device=self.device)
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []), torch.no_grad():
            try:
                output = self._output(self.normalize(images))
            except Exception:  # whatever it is, it comes again where the network is used, and is handled there
                return
        note = self._logits(output)[1]
        if note and note not in self.notes:
            self.notes = (*self.notes, note)

    def _output(self, images: Tensor) -> object:
        """What the network returns for normalised images."""
        return self.network(images.to(torch.bfloat16) if self.dtype == torch.bfloat16 else images)

    def _logits(self, output: object) -> tuple[Tensor, str]:
        try:
            logits, note = logits_of(output)
        except CheckpointError as error:
            raise CheckpointError(f"{self.title}: {error}") from None
        if not logits.is_floating_point():
            kind = str(logits.dtype).removeprefix("torch.")
            raise CheckpointError(f"{self.title}: expected logits of floats, got {kind} {tuple(logits.shape)}")
        return logits, note

    def _over(self, network: nn.Module, settings: ModelSettings, compiled: bool | None = None) -> Classifier:
        known = {"title": self.title, "source": self.source, "notes": self.notes, "weights": self.weights}
        new = Classifier(network, settings, **known).to(self.device)  # type: ignore[arg-type]
        new.origin, new.given_name, new.group = self.origin, self.given_name, self.group
        new.compiled = self.compiled if compiled is None else compiled
        if new.compiled:
            new.network.compile()
        return new

    @property
    def long_title(self) -> str:
        """The title with all that decides RPC-Attention."""
        return self.settings.long_title

    @property
    def dtype(self) -> torch.dtype:
        """Of the network's weights; float32 where it has none."""
        return next((p.dtype for p in self.network.parameters()), torch.float32)

    @property
    def pursues(self) -> bool:
        """Whether it has RPC-Attention."""
        return any(isinstance(m, Pursuit) for m in self.network.modules())

    @property
    def device(self) -> torch.device:
        return self.mean.device

    @property
    def attention_kernel(self) -> str:
        """How attention is computed, for the receipt: kernels round differently."""
        modules = list(self.network.modules())
        compiled = ", compiled" if self.compiled else ""
        if ours := [m.parts for m in modules if isinstance(m, MultiHeadAttention)]:
            symmetric = 2 in ours
            return f"fused{', gradients by hand' if symmetric and self.device.type == 'cpu' else ''}{compiled}"
        fused = {bool(m.fused_attn) for m in modules if hasattr(m, "fused_attn")}
        kernel = {(): "none", (True,): "fused", (False,): "not fused"}.get(tuple(fused), "fused in part")
        return f"{kernel}{compiled}"

    def normalize(self, images: Tensor) -> Tensor:
        """[0, 1] pixels to normalised units."""
        return (images - self.mean) / self.std

    def denormalize(self, images: Tensor) -> Tensor:
        """Normalised units to pixels."""
        return images * self.std + self.mean

    def forward(self, images: Tensor) -> Tensor:
        return self.logits_of_normalized(self.normalize(images))

    def logits_of_normalized(self, images: Tensor) -> Tensor:
        """Logits of already normalised images, (B, C, H, W) -> (B, classes)."""
        batch = images.shape[0]
        # Matrix libraries multiply few rows, and rows left over from blocks of four, with other kernels, which round
        # otherwise. On the CPU a batch is filled up to a multiple of four, so that a sample's logits and gradient are
        # the same to the bit in any batch (measured with one and two threads).
        if images.device.type == "cpu" and batch % _BLOCK:
            images = torch.cat([images, images[:1].expand(_BLOCK - batch % _BLOCK, *images.shape[1:])])
        logits = self._logits(self._output(images))[0][:batch]
        if logits.shape != (batch, self.settings.num_classes):
            raise CheckpointError(
                f"{self.title}: expected logits of shape {(batch, self.settings.num_classes)}, "
                f"got {tuple(logits.shape)}"
            )
        return logits.float() if logits.dtype == torch.bfloat16 else logits
