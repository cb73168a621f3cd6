"""Token embedding, or a rank's rows of it."""

from __future__ import annotations

import torch

from outrider.kernels.embedding import look_up
from outrider.model_executor.layers.context import LayerContext
from outrider.model_executor.layers.contract import Weights, WeightTarget


class VocabRows:
    """Rows of the embedding. A token whose row another rank holds is looked up as zeros, so that ranks' rows add up."""

    def __init__(self, context: LayerContext) -> None:
        config, shard = context.config, context.communicator.shard
        own, num_rows = shard.vocab(config), shard.vocab_rows(config)
        is_whole = context.is_alone
        size = config.hidden_size
        table = torch.empty(num_rows + (not is_whole), size, dtype=context.dtype, device=context.device)
        table[len(own) :].zero_()  # the last row stands for all that others hold
        self._table = table
        self.own = table[: len(own)]
        """[own, hidden], to be filled."""
        self.rows = table[:num_rows]
        """[rows, hidden], zeros after the rank's own: a tied head's weight."""
        self._shape, self._part = (config.vocab_size, size), (slice(own.start, own.stop),)
        self._row_of = None if is_whole else _row_of(own, num_rows, config.vocab_size, context.device)

    def weights(self) -> Weights:
        """The table, or the rank's rows of it."""
        yield "embed_tokens.weight", WeightTarget(self.own, self._shape, self._part)

    def look_up(self, token_ids: torch.Tensor) -> torch.Tensor:
        """``token_ids`` [T] to [T, hidden]."""
        if self._row_of is not None:
            token_ids = self._row_of.index_select(0, token_ids)
        return look_up(token_ids, self._table)


def _row_of(own: range, last: int, vocab_size: int, device: torch.device) -> torch.Tensor:
    rows = torch.full((vocab_size,), last, dtype=torch.int32)
    rows[own.start : own.stop] = torch.arange(len(own), dtype=torch.int32)
    return rows.to(device)
