"""KV cache groups: layers of a model whose keys and values have the same shape and window.

Layers get keys and values, slots and attention plan by group number and never see a page table. Only this module and
``KVCacheManager`` know the pages of a group. All groups of a model share one page table: a page holds the same number
of tokens of every layer. Where every group has a window, pages that no layer attends to any more are given back; where
some have, their parts of pages are window pages, with a pool of their own (``WindowPages``).
Recurrent layers form a group of their own, whose states have a slot for each sequence.
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
class RecurrentSpec:
    """Shape of what a sequence leaves behind in one recurrent layer: a state, which is that after some of its tokens,
    and a log of the inputs of the tokens from there on, from which the state after each of them can be computed.
    """

    num_heads: int
    key_dim: int
    value_dim: int
    num_inputs: int
    """Numbers of one token in the log."""
    num_taps: int
    """Tokens that the convolution before the recurrence reads."""
    log_length: int = 64
    """Tokens that the log has room for, those that the convolution reads before the state among them."""

    @property
    def num_replayed(self) -> int:
        """Most tokens after the state that a sequence can hold."""
        return self.log_length - self.num_taps + 1

    def bytes_per_slot(self, itemsize: int) -> int:
        """Bytes of one sequence, with ``itemsize`` bytes per number of the log."""
        return 4 * self.num_heads * self.key_dim * self.value_dim + self.log_length * self.num_inputs * itemsize


@dataclass(frozen=True, slots=True)
class StateGroup:
    """Recurrent layers, which all have one spec."""

    spec: RecurrentSpec
    layers: tuple[int, ...]

    def bytes_per_slot(self, itemsize: int) -> int:
        """Bytes of one sequence in all of them."""
        return len(self.layers) * self.spec.bytes_per_slot(itemsize)


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
    states: StateGroup | None = None
    """Recurrent layers; its number as a group comes after those of ``groups``."""

    @classmethod
    def of(cls, specs: Sequence[KVCacheSpec | RecurrentSpec]) -> KVCacheLayout:
        """Build the groups from the specs of all layers."""
        layers: dict[KVCacheSpec, list[int]] = {}
        recurrent: dict[RecurrentSpec, list[int]] = {}
        for layer, spec in enumerate(specs):
            if isinstance(spec, RecurrentSpec):
                recurrent.setdefault(spec, []).append(layer)
            else:
                layers.setdefault(spec, []).append(layer)
        states = [StateGroup(spec, tuple(own)) for spec, own in recurrent.items()]
        if len(states) > 1:
            raise ValueError(f"recurrent layers of {len(states)} shapes in one model")
        return cls(tuple(KVCacheGroup(spec, tuple(own)) for spec, own in layers.items()), next(iter(states), None))

    @property
    def indices(self) -> list[tuple[int, int]]:
        """Group number and index in the group of each layer."""
        members = [group.layers for group in self.groups] + ([self.states.layers] if self.states else [])
        found = {layer: (number, place) for number, own in enumerate(members) for place, layer in enumerate(own)}
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

    @property
    def window_reach(self) -> AttentionReach | None:
        """Tokens that the groups with a window attend to; None unless there are such groups and others."""
        windows = [window for window in self.windows if window is not None]
        return AttentionReach(max(windows)) if windows and len(windows) < len(self.windows) else None

    def window_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of one token's keys and values in the groups with a window, where there are others too."""
        if self.window_reach is None:
            return 0
        windowed = [group for group in self.groups if group.spec.window is not None]
        return sum(len(group.layers) * group.spec.bytes_per_token(itemsize) for group in windowed)

    def bytes_per_token(self, itemsize: int) -> int:
        """Bytes of one token's keys and values in all layers."""
        return sum(len(group.layers) * group.spec.bytes_per_token(itemsize) for group in self.groups)
