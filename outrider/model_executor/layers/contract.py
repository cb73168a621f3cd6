"""Layer contract: which tensors of a checkpoint fill a layer, and what it reads in a forward.

Shape letters: ``T`` tokens of a forward, ``N`` rows that get logits, ``A`` partial sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from outrider.kernels.gemv import MAX_TOKENS, NormedInput
from outrider.kernels.paged_attention import AttentionPlan, DevicePlan
from outrider.kernels.rope_and_cache import CosSin
from outrider.kv_cache import KVCacheSpec, RecurrentSpec
from outrider.model_executor.distributed.communicator import Communicator, Norm

FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
"""Types of tensors on file that are converted to the model's."""


class Preparable(Protocol):
    """A layer that is made ready to compute once all of its weights are there."""

    def prepare(self) -> object:
        """Turn the loaded weights into the form that computes fastest."""
        ...


class KVScaled(Protocol):
    """A layer's keys and values in an FP8 cache: its numbers times scales."""

    @property
    def kv_scales(self) -> tuple[float, float]:
        """Scales of keys and of values."""
        ...

    def set_kv_scales(self, key_scale: float, value_scale: float) -> None:
        """Set ``kv_scales``, before the first forward."""
        ...


@dataclass(frozen=True, slots=True)
class WeightTarget:
    """Destination of one tensor of a checkpoint."""

    destination: torch.Tensor | None
    """A view into a parameter; broadcasts from the part. None: the tensor is another rank's."""
    shape: tuple[int, ...]
    """Shape of the checkpoint's tensor."""
    part: tuple[slice, ...] | None = None
    """Part of the tensor that is copied; None: all."""
    owner: Preparable | None = None
    """The layer to prepare once all of its weights are there."""
    file_types: tuple[str, ...] = FLOAT_TYPES
    """Types that the tensor may have on file."""
    writer: Callable[[torch.Tensor], object] | None = None
    """Writes the part to its place; None: the part is copied to the destination."""

    def write(self, content: torch.Tensor) -> None:
        """Write the ``part`` of the tensor."""
        if self.destination is not None:
            (self.writer or self.destination.copy_)(content)

    @property
    def num_values(self) -> int:
        """Values that are read."""
        if self.destination is None:
            return 0
        parts = self.part or ()
        sizes = [len(range(size)[part]) for size, part in zip(self.shape, parts, strict=False)]
        return math.prod([*sizes, *self.shape[len(sizes) :]])


Weights = Iterator[tuple[str, WeightTarget]]
"""(name in the checkpoint, where it goes) of every tensor of a layer."""


def whole(parameter: torch.Tensor, shape: Sequence[int] | None = None) -> WeightTarget:
    """The target of a tensor that every rank holds whole; ``shape`` is the tensor's, where it is broadcast."""
    return WeightTarget(parameter, tuple(parameter.shape if shape is None else shape))


class ResidualNorm(Norm, Protocol):
    """The norm at the beginning of a block."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, hidden] normalised."""
        ...


@dataclass(frozen=True, slots=True)
class Residual:
    """Input of a block: the residual stream, what is still to be added to it, and the norm of the sum."""

    hidden: torch.Tensor  # [T, hidden]
    delta: torch.Tensor | None
    """[T, hidden], or partial sums [A, T, hidden] float32, of the block before; None: nothing."""
    norm: ResidualNorm | None
    """None: the block reads the sum as it is; ``delta`` is then the same on every rank."""
    communicator: Communicator

    def normed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of the stream and what was to be added, which may be ``hidden`` written over, and it normalised."""
        if self.norm is None:
            total = self.hidden if self.delta is None else self.hidden.add_(self.delta)
            return total, total
        if self.delta is None:
            return self.hidden, self.norm(self.hidden)
        return self.hidden, self.communicator.add_and_norm(self.hidden, self.delta, self.norm)

    def unnormed(self) -> NormedInput | None:
        """The same for kernels that add and normalise themselves, but no sum of ranks; None where that is needed."""
        if self.norm is None or self.communicator.shard.size > 1:
            return None
        return NormedInput(self.hidden, self.delta, self.norm.weight, self.norm.eps)

    def unnormed_few(self) -> NormedInput | None:
        """The same for kernels that take few tokens and no partial sums."""
        is_whole = self.delta is None or self.delta.dim() == self.hidden.dim()
        is_short = 0 < self.hidden.shape[0] <= MAX_TOKENS
        return self.unnormed() if is_whole and is_short else None


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Inputs of a forward for the layers of one KV cache group."""

    slots: torch.Tensor  # [T] where each token's keys and values go; -1: nowhere
    plan: AttentionPlan | DevicePlan
    window_map: torch.Tensor | None = None
    """Slots and plan are of the pages of other layers, which it maps to those of these; None: they are their own."""

    def mapped(self) -> AttentionInputs:
        """Inputs with slots and pages of their own, made on the device."""
        plan, pages_of = self.plan, self.window_map
        if pages_of is None or not isinstance(plan, DevicePlan):
            return self
        slots, size = self.slots, plan.page_size
        # Behind the last row's pages there may be numbers of any kind.
        pages = pages_of.index_select(0, plan.rows.pages.clamp(0, len(pages_of) - 1))
        page = pages_of.index_select(0, slots.clamp(min=0) // size)
        own = torch.where(slots < 0, slots, page * size + slots % size)
        torch.zeros_like(own[:1])  # an ordinary launch: kernels behind it read slots and pages before they wait
        return AttentionInputs(own, replace(plan, rows=replace(plan.rows, pages=pages)))


@dataclass(frozen=True, slots=True)
class StateInputs:
    """Inputs of a forward for recurrent layers."""

    max_queries: int
    """Most tokens of a row in this forward."""
    query_starts: torch.Tensor  # [B + 1]
    context_lengths: torch.Tensor  # [B] tokens of the sequence, those of this forward included
    token_slots: torch.Tensor  # [T] where each token's keys and values go; -1: the row has drawn all that it draws
    slots: torch.Tensor  # [B] -1: the row is none
    starts: torch.Tensor  # [B] tokens after which the slot's state is
    ends: torch.Tensor  # [B] tokens after which the forward leaves it


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """A forward's inputs on the device, prepared once for all layers."""

    token_ids: torch.Tensor  # [T] int64, or int32 as the rest on a GPU
    positions: torch.Tensor  # [T]
    groups: tuple[AttentionInputs, ...]
    """Attention inputs by the number of the KV cache group."""
    logit_indices: torch.Tensor  # [N]
    states: StateInputs | None = None
    """States of models with recurrent layers."""

    def clear_slots(self) -> None:
        """Let no token be written to the cache."""
        for group in self.groups:
            group.slots.fill_(-1)
        if self.states is not None:
            self.states.slots.fill_(-1)


class TokenMixer(Protocol):
    """The first block of a decoder layer: attention, or a recurrence."""

    @property
    def kv_cache_spec(self) -> KVCacheSpec | RecurrentSpec:
        """Cache of earlier tokens that the layer needs."""
        ...

    @property
    def weight_prefix(self) -> str:
        """Prefix of its tensors' names below the layer."""
        ...

    def __call__(
        self,
        source: Residual,
        cache: Any,  # noqa: ANN401 - as its spec has it
        cos_sin: CosSin,
        inputs: Any,  # noqa: ANN401 - AttentionInputs or StateInputs
        /,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream with what was to be added, and what this block adds to it."""
        ...

    def weights(self) -> Weights:
        """Tensors by their names below the mixer."""
        ...


class FeedForward(Protocol):
    """The second block of a decoder layer; a ``ModelFamily`` chooses it."""

    def __call__(self, source: Residual) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream with what was to be added, and what this block adds to it."""
        ...

    def weights(self) -> Weights:
        """Tensors by their names below the layer."""
        ...
