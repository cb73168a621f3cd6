"""Runner of a block drafter: beside what a head's runner does, a forward over blocks that see all of themselves."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from outrider.kv_cache import KVSequence
from outrider.model_executor.draft_heads.dflash import DFlashHead
from outrider.model_executor.draft_heads.runner import DraftHeadRunner
from outrider.model_executor.input_batch import ForwardBatch, ForwardRow, check_rows
from outrider.sampling.support import DraftingRules


class BlockRunner(DraftHeadRunner):
    """A loaded block drafter."""

    def __init__(self, head: DFlashHead, *, rules: DraftingRules, **more: Any) -> None:  # noqa: ANN401 - as of a head
        super().__init__(head, rules=replace(rules, in_loops=False), **more)
        self.block_head = head

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
                normed = head.block(self._inputs_of(_seeing_all(batch)), self.kv_cache)
                return head.logits(normed[torch.tensor(batch.logit_indices, device=self.device)])
        finally:
            for row, length in zip(rows, lengths, strict=True):
                if row.sequence.length > length:
                    self.sequences.truncate(row.sequence, length)


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
