"""KV cache groups: the layers of a model whose keys and values have the same shape and reach.

Layers ask for their keys and values, slots and attention plan by number, and never see a page table; what a group's
pages are is known here and to the ``KVCacheManager`` alone. Today all groups of a model share one page table: a page
holds so many tokens of every layer, also of layers that see only a window of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Keys and values that one layer keeps."""

    num_kv_heads: int
    head_dim: int
    window: int | None = None
    """Tokens that the layer sees, the last ones; None: all."""

    def bytes_per_token(self, itemsize: int) -> int:
        """Bytes of one token's keys and values, of numbers of ``itemsize`` bytes."""
        return 2 * self.num_kv_heads * self.head_dim * itemsize


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers with one spec."""

    spec: KVCacheSpec
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KVCacheLayout:
    """Groups of one model, in the order in which their first layers come."""

    groups: tuple[KVCacheGroup, ...]

    @classmethod
    def of(cls, specs: Sequence[KVCacheSpec]) -> KVCacheLayout:
        """The groups of layers with these specs, layer by layer."""
        layers: dict[KVCacheSpec, list[int]] = {}
        for layer, spec in enumerate(specs):
            layers.setdefault(spec, []).append(layer)
        return cls(tuple(KVCacheGroup(spec, tuple(own)) for spec, own in layers.items()))

    @property
    def places(self) -> list[tuple[int, int]]:
        """Of each layer, its group's number and its place in the group."""
        found = {
            layer: (number, place)
            for number, group in enumerate(self.groups)
            for place, layer in enumerate(group.layers)
        }
        return [found[layer] for layer in range(len(found))]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each group."""
        return tuple(group.spec.window for group in self.groups)

    def bytes_per_token(self, itemsize: int) -> int:
        """Bytes of one token's keys and values in all layers."""
        return sum(len(group.layers) * group.spec.bytes_per_token(itemsize) for group in self.groups)
