"""CUDA graphs of a block drafter: forwards of few sizes that store the target's states, and that run blocks' queries.

A captured forward begins by copying its inputs from a pinned buffer. One that stores has no rows; one of blocks has a
row for each query (see ``block_runner``) and ends at what the last product reads, which follows outside for the masks
alone. Tokens that a captured size has too many go to no slot and belong to no row.

Shape letters: ``T`` tokens, ``N`` rows that get logits, ``H`` hidden size, ``F`` values that are read of a position.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from outrider.model_executor.device_inputs import BatchFrame, BatchShape, logit_indices_in, pack, unpack
from outrider.model_executor.draft_heads.dflash import DFlashHead
from outrider.model_executor.graph_capture import CaptureBound, GraphRecorder
from outrider.model_executor.graph_shapes import GraphLimits, padded_sizes
from outrider.model_executor.input_batch import ForwardBatch
from outrider.model_executor.input_buffer import PinnedInputBuffer
from outrider.model_executor.kv_cache_tensors import KVCacheTensors
from outrider.model_executor.layers.contract import DeviceBatch


@dataclass(frozen=True, slots=True)
class _Captured:
    """Forwards of one kind."""

    buffer: PinnedInputBuffer
    replays: dict[int, Callable[[], torch.Tensor]]
    """Replays by the number of tokens."""

    def size_for(self, num_tokens: int) -> int | None:
        """The smallest that holds this many; None if none does."""
        return min((size for size in self.replays if size >= num_tokens), default=None)


class BlockGraphs:
    """Captured forwards of one drafter, none until ``capture``; for one thread, on the current stream."""

    def __init__(
        self, head: DFlashHead, kv_cache: KVCacheTensors, frame: BatchFrame, *, pages_per_row: int, limits: GraphLimits
    ) -> None:
        self._head, self._kv_cache, self._frame = head, kv_cache, frame
        longest = 1 + min(limits.max_draft_length, head.config.block_size - 1)
        most = min(limits.max_tokens, limits.max_sequences * longest)
        self._sizes = padded_sizes(most)
        device, width = head.device, head.config.target_hidden_size * len(head.config.hidden_state_layers)
        self._states = torch.zeros(most, width, dtype=head.dtype, device=device)  # [T, F] of the target
        blocks, stores = most * pages_per_row + _shape_of_blocks(most).num_fixed, _shape_of_store(most).num_fixed
        self._blocks, self._stores = (_Captured(PinnedInputBuffer(size, device), {}) for size in (blocks, stores))

    @property
    def num_graphs(self) -> int:
        """Captured where nothing is left out."""
        return 2 * len(self._sizes)

    def store(self, batch: ForwardBatch, states: Sequence[torch.Tensor]) -> bool:
        """Store keys and values of the target's ``states``, [N, F] of each row; False: no captured forward is so large,
        and nothing was done.
        """
        own, count = self._stores, len(batch.token_ids)
        if (size := own.size_for(count)) is None:
            return False
        torch.cat(list(states), out=self._states[:count])
        own.buffer.put(pack(_without_rows(batch), _shape_of_store(size)))
        own.replays[size]()
        return True

    def block(self, batch: ForwardBatch) -> torch.Tensor | None:
        """Run queries, each a row of the batch: what ``DFlashHead.logits`` takes, [N, H] of the rows that get logits;
        None: no captured forward is so large.
        """
        own = self._blocks
        if (size := own.size_for(len(batch.token_ids))) is None:
            return None
        shape = _shape_of_blocks(size)
        own.buffer.put(pack(batch, shape))
        normed = own.replays[size]()
        return normed.index_select(0, logit_indices_in(own.buffer.numbers, shape, len(batch.logit_indices)))

    def capture(self, recorder: GraphRecorder, bound: CaptureBound, progress: Callable[[int], None]) -> None:
        """Capture all that fits the bound, largest first; ``progress`` counts those captured or left out."""
        self._blocks.replays.clear()
        self._stores.replays.clear()
        done = 0
        for size in reversed(self._sizes):
            for kind, launch_of in ((self._blocks, self._launch_blocks), (self._stores, self._launch_store)):
                captured = bound.capture(recorder, launch_of(size))
                if captured is not None:
                    kind.replays[size] = captured
                done += 1
                progress(done)

    def _launch_blocks(self, size: int) -> Callable[[], torch.Tensor]:
        batch = self._empty(self._blocks.buffer, _shape_of_blocks(size))
        return functools.partial(_copy_and_run_blocks, self._blocks.buffer, self._head, batch, self._kv_cache)

    def _launch_store(self, size: int) -> Callable[[], torch.Tensor]:
        batch = self._empty(self._stores.buffer, _shape_of_store(size))
        states = self._states[:size]
        return functools.partial(_copy_and_store, self._stores.buffer, self._head, batch, states, self._kv_cache)

    def _empty(self, buffer: PinnedInputBuffer, shape: BatchShape) -> DeviceBatch:
        """Views of a batch with no row, and no token with a slot."""
        buffer.numbers.zero_()
        batch = unpack(buffer.numbers, shape, self._frame, shape.num_tokens)
        batch.clear_slots()
        return batch


def _copy_and_run_blocks(
    buffer: PinnedInputBuffer, head: DFlashHead, batch: DeviceBatch, kv_cache: KVCacheTensors
) -> torch.Tensor:
    buffer.copy_inputs()
    return head.block(batch, kv_cache)


def _copy_and_store(
    buffer: PinnedInputBuffer, head: DFlashHead, batch: DeviceBatch, states: torch.Tensor, kv_cache: KVCacheTensors
) -> torch.Tensor:
    buffer.copy_inputs()
    return head(batch, head.fuse(states), kv_cache)[0]


def _without_rows(batch: ForwardBatch) -> ForwardBatch:
    """Batch of its tokens alone: a store attends to nothing."""
    return replace(batch, page_tables=[], query_starts=[0], context_lengths=[], logit_indices=[])


def _shape_of_blocks(num_tokens: int) -> BatchShape:
    return BatchShape(num_tokens, num_tokens, 1)


def _shape_of_store(num_tokens: int) -> BatchShape:
    return BatchShape(0, num_tokens, 1)
