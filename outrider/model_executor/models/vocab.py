"""The embedding, or a rank's rows of it: owns the table and the looking up. Refuses to know who holds the rest."""

from __future__ import annotations

import torch

from outrider.kernels.embedding import look_up
from outrider.model_executor.distributed.sharding import Shard
from outrider.model_executor.models.config import ModelConfig


class VocabRows:
    """Rows of the embedding. A token whose row another rank holds is looked up as zeros, so that ranks' rows add up."""

    def __init__(self, config: ModelConfig, shard: Shard, dtype: torch.dtype, device: torch.device) -> None:
        own, num_rows = shard.vocab(config), shard.vocab_rows(config)
        is_whole = shard.size == 1
        table = torch.empty(num_rows + (not is_whole), config.hidden_size, dtype=dtype, device=device)
        table[len(own) :].zero_()  # the last row stands for all that others hold
        self._table = table
        self.own = table[: len(own)]
        """[own, hidden], to be filled."""
        self.rows = table[:num_rows]
        """[rows, hidden], zeros after the rank's own: a tied head's weight."""
        self._row_of = None if is_whole else _row_of(own, num_rows, config.vocab_size, device)

    def look_up(self, token_ids: torch.Tensor) -> torch.Tensor:
        """``token_ids`` [T] to [T, hidden]."""
        if self._row_of is not None:
            token_ids = self._row_of.index_select(0, token_ids)
        return look_up(token_ids, self._table)


def _row_of(own: range, last: int, vocab_size: int, device: torch.device) -> torch.Tensor:
    rows = torch.full((vocab_size,), last, dtype=torch.int32)
    rows[own.start : own.stop] = torch.arange(len(own), dtype=torch.int32)
    return rows.to(device)
