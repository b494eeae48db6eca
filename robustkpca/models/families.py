"""Families of models by name. No torch here: a family's builder is imported when a network is built.

One family more is one Family: a row of `BUILT_IN`, or in other code a builder with a decorator,

    @FAMILIES.register("my-vit")
    def my_vit(settings: ModelSettings) -> nn.Module: ...

or an entry point in the group `robustkpca.models` that names such a builder or a Family. Its models are then named
`my-vit` or `my-vit-tiny`, like those of the built-in families, and can be trained, saved and loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from robustkpca.errors import SpecError
from robustkpca.extensions import Registry

Builder = Callable[[Any], Any]  # ModelSettings -> nn.Module, neither of which this module knows


@dataclass(frozen=True)
class Family:
    """A kind of model.

    title: as tables write it, "RPC-SymViT". Also what `str` of the family gives.
    build: gets the settings (`patch_size`, `width`, `depth` and `heads` are given) and returns a network with fresh
        weights, normalised images float32 (B, C, H, W) to logits (B, num_classes); or the `module:function` that does.
    pursues: whether it has RPC-Attention, and so needs RPC settings.
    parameters_of: the family whose parameter names and shapes it shares; weights alone cannot tell the two apart.
    mark: a parameter that only this family has, below a block, such as "attn.S".
    """

    title: str
    build: str | Builder
    pursues: bool = False
    parameters_of: str | None = None
    mark: str | None = None

    def __str__(self) -> str:
        return self.title

    def network(self, settings: Any) -> Any:
        """What the builder makes of these settings (ModelSettings)."""
        if not isinstance(self.build, str):
            return self.build(settings)
        module, _, name = self.build.partition(":")
        return getattr(import_module(module), name)(settings)


BUILT_IN: dict[str, Family] = {
    "vit": Family("ViT", "robustkpca.models.networks:vit"),
    "symvit": Family("SymViT", "robustkpca.models.networks:symvit"),
    "rpc-symvit": Family("RPC-SymViT", "robustkpca.models.networks:symvit", pursues=True, parameters_of="symvit"),
    "rpc-vit": Family("RPC-ViT", "robustkpca.models.networks:asymmetric_vit", pursues=True, parameters_of="vit"),
    "scaled-vit": Family("Scaled ViT", "robustkpca.models.networks:scaled_vit", mark="attn.S"),
    "scaled-vit-alpha": Family("Scaled ViT-alpha", "robustkpca.models.networks:scaled_vit_alpha", mark="attn.s"),
}


class _Families(Registry[Family]):
    def __getitem__(self, name: str) -> Family:
        """A builder is a Family titled by its attribute `title`, else by the name."""
        item: object = super().__getitem__(name)
        if isinstance(item, Family):
            return item
        if not callable(item):
            raise SpecError(
                f"model family {name}: expected a Family or a function (settings) -> network, got {item!r:.80}"
            )
        return Family(str(getattr(item, "title", name)), item)


FAMILIES = _Families("model family", "robustkpca.models")
for _name, _family in BUILT_IN.items():
    FAMILIES.register(_name)(_family)


def alike(a: str, b: str) -> bool:
    """Whether the weights of one family are those of the other, by parameter names and shapes."""
    return _parameters_of(a) == _parameters_of(b)


def _parameters_of(name: str) -> str:
    return (FAMILIES[name].parameters_of or name) if name in FAMILIES else name
