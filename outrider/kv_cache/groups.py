"""KV cache groups: layers of a model whose keys and values have the same shape and window.

Layers get keys and values, slots and attention plan by group number and never see a page table. Only this module and
``KVCacheManager`` know the pages of a group. All groups of a model share one page table: a page holds the same number
of tokens of every layer. Where every group has a window, pages that no layer attends to any more are given back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Shape and window of the keys and values of one layer."""

    num_kv_heads: int
    head_dim: int
    window: int | None = None
    """Tokens that the layer sees, the last ones; None: all."""
    num_sinks: int = 0
    """First tokens that it sees besides the window."""

    def bytes_per_token(self, itemsize: int) -> int:
        """Bytes of one token's keys and values, with ``itemsize`` bytes per number."""
        return 2 * self.num_kv_heads * self.head_dim * itemsize


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers with one spec."""

    spec: KVCacheSpec
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AttentionReach:
    """Tokens that any layer of a model attends to: the last ``window``, and the first ``num_sinks``."""

    window: int
    num_sinks: int = 0
    num_rewind_tokens: int = 64
    """Tokens by which a sequence can be truncated below what was committed."""

    def unseen_pages(self, length: int, page_size: int) -> tuple[int, int]:
        """Index of the first page that no token attends to from position ``length - num_rewind_tokens`` on, and of the
        first page after it that one does. The two are equal where there are none.
        """
        first = -(-self.num_sinks // page_size)
        return first, max(first, (length - self.num_rewind_tokens - self.window + 1) // page_size)


@dataclass(frozen=True, slots=True)
class KVCacheLayout:
    """Groups of one model, in the order of their first layers."""

    groups: tuple[KVCacheGroup, ...]

    @classmethod
    def of(cls, specs: Sequence[KVCacheSpec]) -> KVCacheLayout:
        """Build the groups from the specs of all layers."""
        layers: dict[KVCacheSpec, list[int]] = {}
        for layer, spec in enumerate(specs):
            layers.setdefault(spec, []).append(layer)
        return cls(tuple(KVCacheGroup(spec, tuple(own)) for spec, own in layers.items()))

    @property
    def places(self) -> list[tuple[int, int]]:
        """For each layer, the number of its group and its index in the group."""
        found = {
            layer: (number, place)
            for number, group in enumerate(self.groups)
            for place, layer in enumerate(group.layers)
        }
        return [found[layer] for layer in range(len(found))]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each group."""
        return tuple(group.spec.window for group in self.groups)

    @property
    def sinks(self) -> tuple[int, ...]:
        """Tokens that each group sees besides its window."""
        return tuple(group.spec.num_sinks for group in self.groups)

    @property
    def reach(self) -> AttentionReach | None:
        """Tokens that any layer attends to; None: all, because a group has no window."""
        windows = [window for window in self.windows if window is not None]
        if len(windows) < len(self.windows) or not windows:
            return None
        return AttentionReach(max(windows), max(self.sinks))

    def bytes_per_token(self, itemsize: int) -> int:
        """Bytes of one token's keys and values in all layers."""
        return sum(len(group.layers) * group.spec.bytes_per_token(itemsize) for group in self.groups)
