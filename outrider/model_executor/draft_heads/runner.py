"""Runner of a draft head: its KV cache and sequences, and one ragged forward over pairs of tokens and states.

Not thread-safe: one thread calls it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.kernels.device_stream import to_device
from outrider.kernels.launching import has_kernels, num_processors
from outrider.kernels.paged_attention.device_plan import num_counters
from outrider.kv_cache import KVCacheManager, PagePool
from outrider.model_executor.device_inputs import BatchFrame, BatchShape, inputs_on_cpu, pack, unpack
from outrider.model_executor.draft_heads.contract import DraftHead
from outrider.model_executor.input_batch import ForwardBatch, ForwardRow, TokenLimits, check_rows, plan_checked
from outrider.model_executor.kv_cache_tensors import KVCacheTensors
from outrider.model_executor.layers.contract import DeviceBatch
from outrider.sampling.sampler import Sampler
from outrider.sampling.support import DraftingRules


class DraftHeadRunner:
    """A loaded head. ``sequences`` holds its KV sequences, one slot a pair."""

    def __init__(
        self,
        head: DraftHead,
        *,
        num_pages: int,
        page_size: int,
        max_model_len: int,
        rules: DraftingRules,
        prefix_caching: bool = True,
    ) -> None:
        self.head, self.max_model_len, self.page_size = head, max_model_len, page_size
        self.sequences = KVCacheManager(PagePool(num_pages, page_size), prefix_caching=prefix_caching)
        self.sampler = Sampler(rules)
        self.kv_cache = KVCacheTensors(
            head.kv_cache_layout, num_pages * page_size, dtype=head.dtype, device=head.device
        )
        counters = torch.zeros(num_counters(num_processors(head.device)), dtype=torch.int32, device=head.device)
        self._frame = BatchFrame(page_size, head.kv_cache_layout.windows, counters)
        self._limits = TokenLimits(max_model_len, head.config.layer.vocab_size)

    @property
    def device(self) -> torch.device:
        """Where the head computes."""
        return self.head.device

    def forward(self, rows: Sequence[ForwardRow], states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append each row's tokens, paired with ``states`` [T, H], to its sequence; returns the states that follow and
        what ``DraftHead.logits`` takes, [T, H] each, row by row.

        ``InvalidRequestError``, and nothing changed, if any row is bad.
        """
        check_rows(self.sequences, rows, self._limits)
        lengths = [row.sequence.length for row in rows]
        try:
            with torch.inference_mode():
                return self.head(self._inputs_of(self._plan(rows)), states, self.kv_cache)
        except BaseException:
            for row, length in zip(rows, lengths, strict=True):
                if row.sequence.length > length:
                    self.sequences.truncate(row.sequence, length)
            raise

    def _plan(self, rows: Sequence[ForwardRow]) -> ForwardBatch:
        """The batch of rows that were checked; pages are copied as it needs."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self._frame.counters.device)
        batch = plan_checked(self.sequences, rows)
        if batch.page_copies:
            self.kv_cache.copy_pages(batch.page_copies, page_size=self.page_size)
            self.sequences.confirm_copies()
        return batch

    def _inputs_of(self, batch: ForwardBatch) -> DeviceBatch:
        if not has_kernels(self.device):
            return inputs_on_cpu(batch, self._frame, self.head.dtype)
        shape = BatchShape.of(batch)
        return unpack(to_device(pack(batch, shape), self.device), shape, self._frame, 0)
