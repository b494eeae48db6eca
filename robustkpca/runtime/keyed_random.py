"""Random draws that depend on what is drawn for, never on what was drawn before.

Each draw is keyed by (seed, purpose, sample id), so it is the same for any batch size, order, worker or process count,
and after a resume. Draws are made on the CPU and moved, so that every device sees the same values.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from robustkpca.errors import SpecError


def key_number(seed: int, *key: object) -> int:
    """63 bits that stand for one key."""
    text = "\x1f".join([str(int(seed)), *map(str, key)])
    digest = hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(seed: int, *key: object) -> torch.Generator:
    """A CPU generator for one key, e.g. `generator(0, "pgd", "8/255", "test/00017")`."""
    return torch.Generator().manual_seed(key_number(seed, *key))


@contextlib.contextmanager
def seeded(seed: int, *key: object) -> Iterator[None]:
    """The global generators start from a key inside, and are put back after:
    what a model draws itself is then repeatable."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(key_number(seed, *key))
        yield


class KeyedDraws(TorchFunctionMode):
    """Makes an attack on a batch equal the attacks on its samples, as far as the attack lets it.

    Random numbers drawn for each sample of the batch come from one generator a sample; others from `shared(number)`, or
    are refused where there is none. A mean cross-entropy becomes a sum: an attack looks at signs or at one sample's own
    gradient, and those then do not depend, even in their last bit, on how many others there are.
    """

    active: ClassVar[KeyedDraws | None] = None
    _FILLS = (Tensor.uniform_, Tensor.normal_, Tensor.bernoulli_)
    _FACTORIES = (torch.rand, torch.randn)
    _UNKEYED = (torch.rand_like, torch.randn_like, torch.randint, torch.randperm, torch.bernoulli, Tensor.random_,
                torch.multinomial)  # fmt: skip

    def __init__(
        self, generators: Sequence[torch.Generator], shared: Callable[[int], torch.Generator] | None = None
    ) -> None:
        super().__init__()
        self.generators = list(generators)
        self._make_shared, self._number = shared, 0
        self.shared = shared(0) if shared else None
        self._outer: list[KeyedDraws | None] = []  # what was active where this was entered

    def __enter__(self) -> Any:
        self._outer.append(KeyedDraws.active)
        KeyedDraws.active = self
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        KeyedDraws.active = self._outer.pop()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    @classmethod
    @contextlib.contextmanager
    def only(cls, indices: Tensor) -> Iterator[None]:
        """Inside, the batch is those samples of it; draws that samples share start over, so that they do not depend on
        who is left."""
        self = cls.active
        if self is None:
            yield
            return
        everyone, self._number = self.generators, self._number + 1
        self.generators = [everyone[i] for i in indices.tolist()]
        self.shared = self._make_shared(self._number) if self._make_shared else None
        try:
            yield
        finally:
            self.generators = everyone

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self._FILLS:
            return self._fill(func, args[0], args[1:], kwargs)
        if func in self._FACTORIES:
            return self._make(func, torch.Size(args[0] if len(args) == 1 and not isinstance(args[0], int) else args))
        if func in self._UNKEYED:
            raise SpecError(f"this attack draws with {func.__name__}, which cannot be keyed by sample")
        if func is F.cross_entropy and kwargs.get("reduction", "mean") == "mean":
            kwargs = {**kwargs, "reduction": "sum"}
        return func(*args, **kwargs)

    def _fill(self, func: Callable[..., Any], target: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        if target.ndim and target.shape[0] == len(self.generators) and func is not Tensor.bernoulli_:
            rows = [func(torch.empty(target.shape[1:]), *args, **kwargs, generator=g) for g in self.generators]
            return target.copy_(torch.stack(rows))
        return target.copy_(func(torch.empty(target.shape), *args, **kwargs, generator=self._shared(target.shape)))

    def _make(self, func: Callable[..., Any], shape: torch.Size) -> Tensor:
        # Images have four dimensions: fewer are numbers that the batch shares, also when the first happens to be its
        # size.
        if len(shape) == 4 and shape[0] == len(self.generators):
            return torch.stack([func(shape[1:], generator=g) for g in self.generators])
        drawn: Tensor = func(shape, generator=self._shared(shape))
        return drawn

    def _shared(self, shape: torch.Size) -> torch.Generator:
        if self.shared is None:
            raise SpecError(f"this attack draws numbers of shape {tuple(shape)}, which cannot be keyed by sample")
        return self.shared
