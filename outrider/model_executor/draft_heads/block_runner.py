"""Runner of a block drafter: beside what a head's runner does, a forward over blocks that see all of themselves.

On a GPU, storing the target's states and running blocks are CUDA graphs for few tokens (``block_graphs``).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from outrider.kernels.launching import has_kernels
from outrider.kernels.paged_attention import AttentionPlan
from outrider.kv_cache import KVSequence
from outrider.model_executor.cuda_graphs import CaptureProgress
from outrider.model_executor.device_inputs import inputs_on_cpu
from outrider.model_executor.draft_heads.block_graphs import BlockGraphs
from outrider.model_executor.draft_heads.dflash import DFlashHead
from outrider.model_executor.draft_heads.runner import DraftHeadRunner
from outrider.model_executor.input_batch import ForwardBatch, ForwardRow, check_rows, restoring_lengths
from outrider.model_executor.layers.contract import AttentionInputs, DeviceBatch
from outrider.sampling.support import DraftingRules


class BlockRunner(DraftHeadRunner):
    """A loaded block drafter."""

    def __init__(self, head: DFlashHead, *, rules: DraftingRules, **more: Any) -> None:  # noqa: ANN401 - as of a head
        super().__init__(head, rules=replace(rules, in_loops=False), **more)
        self.block_head = head
        self.num_replays = 0
        """Captured forwards that ran."""
        self._graphs: BlockGraphs | None = None
        if has_kernels(head.device):
            pages_per_row = -(-self.max_model_len // self.page_size)
            self._graphs = BlockGraphs(
                head, self.kv_cache, self._frame, pages_per_row=pages_per_row, limits=self._graph_limits
            )

    def capture(self, progress: CaptureProgress | None = None) -> None:
        """Capture stores and blocks of few tokens as CUDA graphs, on a GPU."""
        if self._graphs is not None:
            self._capture(self._graphs, progress)

    def feed(self, rows: Sequence[ForwardRow], states: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Append each row's tokens and store the target's ``states`` [N, F] of them. Nothing is drawn of what is
        returned.
        """
        if self._graphs is None:
            return super().feed(rows, states)
        check_rows(self.sequences, rows, self._limits)
        with restoring_lengths(self.sequences, rows), torch.inference_mode():
            batch = self._plan(rows)
            if self._graphs.store(batch, states):
                self.num_replays += 1
                return _NOTHING, _NOTHING
            return self.head(self._inputs_of(batch), self.head.fuse(torch.cat(list(states))), self.kv_cache)

    def draft_block(self, blocks: Sequence[tuple[KVSequence, int, int]]) -> torch.Tensor:
        """Logits [N, V] float32 of the drafted tokens of each block, block by block.

        A block is a sequence, its newest token, and how many tokens to draft. The sequences are as before afterwards;
        errors are those of ``forward``.
        """
        head = self.block_head
        rows = [ForwardRow(sequence, head.queries(token_id, count), count) for sequence, token_id, count in blocks]
        lengths = [row.sequence.length for row in rows]
        check_rows(self.sequences, rows, self._limits)
        try:
            batch = self._plan(rows)
            with torch.inference_mode():
                return head.logits(self._run_blocks(batch))
        finally:
            for row, length in zip(rows, lengths, strict=True):
                if row.sequence.length > length:
                    self.sequences.truncate(row.sequence, length)

    def _run_blocks(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states of the masks, [N, H], for ``DFlashHead.logits``."""
        if self._graphs is None:
            inputs = _blocks_on_cpu(batch, inputs_on_cpu(_one_query_each(batch), self._frame, self.head.dtype))
            return self.block_head.block(inputs, self.kv_cache).index_select(0, inputs.logit_indices)
        batch = _seeing_all(batch)
        if (normed := self._graphs.block(batch)) is not None:
            self.num_replays += 1
            return normed
        inputs = self._inputs_of(batch)
        return self.block_head.block(inputs, self.kv_cache).index_select(0, inputs.logit_indices)


_NOTHING = torch.empty(0)


def _one_query_each(batch: ForwardBatch) -> ForwardBatch:
    """Attention inputs as if each block were one query that sees all of the block."""
    return replace(batch, query_starts=list(range(batch.num_rows + 1)))


def _blocks_on_cpu(batch: ForwardBatch, inputs: DeviceBatch) -> DeviceBatch:
    """Inputs of ``_one_query_each`` with all queries of each block: PyTorch's attention takes them at once."""
    indices = list(itertools.pairwise(batch.query_starts))

    def whole(group: AttentionInputs) -> AttentionInputs:
        assert isinstance(group.plan, AttentionPlan)  # noqa: S101 - of a CPU
        rows = [
            replace(row, query_start=start, query_end=end)
            for row, (start, end) in zip(group.plan.rows, indices, strict=True)
        ]
        return replace(group, plan=AttentionPlan(tuple(rows)))

    return replace(inputs, groups=tuple(map(whole, inputs.groups)))


def _seeing_all(batch: ForwardBatch) -> ForwardBatch:
    """Every query a row of its own with its block's whole context: causal attention then hides nothing from it."""
    counts = [end - start for start, end in itertools.pairwise(batch.query_starts)]
    return replace(
        batch,
        query_starts=list(range(len(batch.token_ids) + 1)),
        context_lengths=[
            length for length, count in zip(batch.context_lengths, counts, strict=True) for _ in range(count)
        ],
        page_tables=[table for table, count in zip(batch.page_tables, counts, strict=True) for _ in range(count)],
    )
