"""A draft head as a draft loop runs it: which states each step pairs its tokens with.

The first step reads the target's states, of the pairs that a row lacks; every other step reads the head's own of the
step before, which stay on the device.

Shape letters: ``R`` rows, ``T`` tokens, ``H`` hidden size, ``F`` values of a position's states, ``V`` vocabulary.
"""

from __future__ import annotations

import torch

from outrider.model_executor.draft_heads.contract import DraftHead
from outrider.model_executor.kv_cache_tensors import KVCacheTensors
from outrider.model_executor.layers.contract import DeviceBatch


class HeadLoopModel:
    """A ``LoopModel`` over one head; its buffers are what captured steps read and write."""

    def __init__(self, head: DraftHead, *, max_rows: int, max_prefill: int) -> None:
        config = head.config
        self.head, self.device = head, head.device
        width = config.target_hidden_size * len(config.hidden_state_layers)
        self.states = torch.zeros(max_rows * max_prefill, width, dtype=head.dtype, device=head.device)  # [T, F]
        """The target's, of the tokens of a first step; to be written before it runs."""
        self._carried = torch.zeros(max_rows, config.layer.hidden_size, dtype=head.dtype, device=head.device)  # [R, H]
        self._logits = head.empty_logits(max_rows)  # [R, V]

    def draft_logits(self, batch: DeviceBatch, kv_cache: KVCacheTensors, indices: torch.Tensor | None) -> torch.Tensor:
        """Run one step: logits [R, V], valid until the next; ``indices`` [R] are the rows' last tokens in a first step,
        None in any other.
        """
        count = len(batch.token_ids)
        states = self._carried[:count] if indices is None else self.head.fuse(self.states[:count])
        following, normed = self.head(batch, states, kv_cache)
        if indices is not None:
            following, normed = following.index_select(0, indices), normed.index_select(0, indices)
        self._carried[: following.shape[0]].copy_(following)
        return self.head.logits(normed, None if self._logits is None else self._logits[: normed.shape[0]])
