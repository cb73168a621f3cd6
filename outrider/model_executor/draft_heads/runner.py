"""Runner of a draft head: its KV cache and sequences, one ragged forward over pairs of tokens and states, and on a GPU
loops that draw several tokens at once.

Not thread-safe: one thread calls it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.kernels.device_stream import to_device
from outrider.kernels.launching import has_kernels, num_processors
from outrider.kernels.paged_attention.device_plan import num_counters
from outrider.kv_cache import KVCacheManager, PageCopy, PagePool
from outrider.model_executor.cuda_graphs import CaptureProgress, Graphs, capture_limits, capture_loop
from outrider.model_executor.device_inputs import BatchFrame, BatchShape, inputs_on_cpu, pack, unpack
from outrider.model_executor.draft_heads.contract import DraftHead
from outrider.model_executor.draft_heads.loop_model import HeadLoopModel
from outrider.model_executor.draft_heads.state_rows import HeadStateRows
from outrider.model_executor.draft_loop import MAX_STEPS, DraftRow, check_draft_rows
from outrider.model_executor.draft_loop.batched import DraftBatch, plan_draft_batch, restore_sequences
from outrider.model_executor.draft_loop.in_flight import BatchInFlight
from outrider.model_executor.draft_loop.loop import DraftLoop
from outrider.model_executor.draft_loop.plan import loop_of
from outrider.model_executor.draft_loop.results import Draws
from outrider.model_executor.graph_shapes import DEFAULT_LIMITS, GraphLimits
from outrider.model_executor.input_batch import (
    ForwardBatch,
    ForwardRow,
    TokenLimits,
    check_rows,
    plan_checked,
    restoring_lengths,
)
from outrider.model_executor.kv_cache_tensors import KVCacheTensors
from outrider.model_executor.layers.contract import DeviceBatch
from outrider.sampling.sampler import Sampler
from outrider.sampling.support import DraftingRules

PAIR_OFFSET = 1
"""A sequence of pairs lacks the first token of its text."""
_CATCH_UPS = (2, 4, 6, 8, 12, MAX_STEPS + 1)
"""Pairs of a row for which first steps are captured: of all that a step has committed, since those of drafted tokens
are made anew from the target's states. A single pair is computed as two: steps of one read the head's own states."""


_WARM_UP_PAIRS = (1, 15, 16, 63, 64, 127, 128, 255, 256, 1023, 1024)
"""Pairs of forwards before the first request: each number of blocks of rows that kernels differ by, with a number that
16 divides and one that it does not, for which a kernel is compiled apart."""


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
        graphs: GraphLimits = DEFAULT_LIMITS,
    ) -> None:
        """``graphs`` bounds the loops and what is captured of them."""
        self.head, self.max_model_len, self.page_size = head, max_model_len, page_size
        self.sequences = KVCacheManager(PagePool(num_pages, page_size), prefix_caching=prefix_caching)
        self.sampler = Sampler(rules)
        self.kv_cache = KVCacheTensors(
            head.kv_cache_layout, num_pages * page_size, dtype=head.dtype, device=head.device
        )
        counters = torch.zeros(num_counters(num_processors(head.device)), dtype=torch.int32, device=head.device)
        self._frame = BatchFrame(page_size, head.kv_cache_layout.windows, counters)
        self._limits = TokenLimits(max_model_len, head.config.layer.vocab_size)
        self._graph_limits = graphs
        self._loop_model: HeadLoopModel | None = None
        self._loop: DraftLoop | None = None
        self.used_graph = False
        """True if every step of the last loop was a captured one."""
        if rules.in_loops and has_kernels(head.device):
            self._loop_model, self._loop = self._make_loop(rules, graphs)

    def _make_loop(self, rules: DraftingRules, graphs: GraphLimits) -> tuple[HeadLoopModel, DraftLoop]:
        most = min(graphs.max_draft_length, MAX_STEPS) + 1
        prefill_sizes = (*(size for size in _CATCH_UPS if size < most), max(most, _CATCH_UPS[0]))
        model = HeadLoopModel(self.head, max_rows=graphs.max_sequences, max_prefill=prefill_sizes[-1])
        pages_per_row = -(-self.max_model_len // self.page_size)
        loop = DraftLoop(
            model, self.kv_cache, self._frame, rules, pages_per_row=pages_per_row,
            limits=graphs, prefill_sizes=prefill_sizes
        )  # fmt: skip
        return model, loop

    @property
    def max_prefill(self) -> int:
        """Pairs that a row of ``draft`` may append before its first draw; 0 where there is no ``draft``: on a CPU."""
        return 0 if self._loop is None else self._loop.max_prefill

    @property
    def max_draft_rows(self) -> int:
        """Rows of one loop; 0 where there are none."""
        return 0 if self._loop is None else self._loop.max_rows

    def capture(self, progress: CaptureProgress | None = None) -> None:
        """Capture the steps of draft loops as CUDA graphs, and compile what prompts take, on a GPU."""
        if self._loop is not None:
            self._capture(self._loop, progress)
        if has_kernels(self.device):
            self._warm_up()

    def _warm_up(self) -> None:
        longest = min(self.max_model_len, self.sequences.num_free * self.page_size)
        sequence = self.sequences.open(min(longest, max(_WARM_UP_PAIRS)))
        width = self.head.config.target_hidden_size * len(self.head.config.hidden_state_layers)
        with torch.inference_mode():
            for count in _WARM_UP_PAIRS:
                if count <= sequence.max_length:
                    states = torch.zeros(count, width, dtype=self.head.dtype, device=self.device)
                    self.feed([ForwardRow(sequence, [0] * count, 0)], [states])
                    self.sequences.truncate(sequence, 0)
        self.sequences.release(sequence)

    def _capture(self, graphs: Graphs, progress: CaptureProgress | None) -> None:
        self._take_device()
        with torch.inference_mode():
            capture_loop(graphs, self.device, capture_limits(self._graph_limits, self.device), progress)

    @property
    def device(self) -> torch.device:
        """Device of the head."""
        return self.head.device

    def forward(self, rows: Sequence[ForwardRow], states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append each row's tokens, paired with ``states`` [T, H], to its sequence; returns the states that follow and
        what ``DraftHead.logits`` takes, [T, H] each, row by row.

        ``InvalidRequestError``, and nothing changed, if any row is bad.
        """
        check_rows(self.sequences, rows, self._limits)
        with restoring_lengths(self.sequences, rows), torch.inference_mode():
            return self.head(self._inputs_of(self._plan(rows)), states, self.kv_cache)

    def feed(self, rows: Sequence[ForwardRow], states: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """``forward`` of the target's ``states`` [N, F] of each row."""
        return self.forward(rows, self.head.fuse(torch.cat(list(states))))

    def draft(self, rows: Sequence[DraftRow], states: HeadStateRows) -> list[Draws]:
        """Append each row's tokens, paired with the target's ``states``, row by row, and draw what follows, in
        loops of as many rows as the graphs are for.

        A row's draws end before the first that failed. Its sequence then holds what it held and its tokens. Errors are
        those of ``forward``.
        """
        if self._loop is None:
            raise ValueError(f"there are no draft loops on {self.device}")
        check_draft_rows(self.sequences, rows, self._limits, self._loop.max_prefill)
        most, found, first = self._loop.max_rows, list[Draws](), 0
        for start in range(0, len(rows), most):
            batched = DraftBatch.of(rows[start : start + most])
            found += self.begin_draft(batched, states, first).draws()
            first += len(batched.token_ids)
        return found

    def begin_draft(self, batched: DraftBatch, states: HeadStateRows, first: int = 0) -> BatchInFlight:
        """``draft`` in two halves, of rows that are arrays: ``max_draft_rows`` at most, checked by the caller. Their
        sequences then hold no pairs of what is drawn. Their states are those from ``first`` on.
        """
        if (loop := self._loop) is None:
            raise ValueError(f"there are no draft loops on {self.device}")
        self._take_device()
        plan = plan_draft_batch(self.sequences, batched)
        try:
            self._put_states(states, first, first + len(batched.token_ids))
            with torch.inference_mode():
                self._copy_pages(plan.page_copies)
                command = loop.command_for(plan)
                self.used_graph = loop.run(loop_of(command), command.numbers)
        except BaseException:
            restore_sequences(self.sequences, batched.sequences)
            raise
        return BatchInFlight(loop, loop_of(command), batched, self.sequences, keeps_drafts=False)

    def _put_states(self, states: HeadStateRows, begin: int, end: int) -> None:
        """States of pairs ``begin`` to ``end`` - 1, put where the next loop's first step reads them."""
        assert self._loop_model is not None  # noqa: S101 - made with the loop
        with torch.inference_mode():
            states.copy_to(self._loop_model.states[: end - begin], begin)

    def _take_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self._frame.counters.device)

    def _copy_pages(self, copies: tuple[PageCopy, ...]) -> None:
        if copies:
            self.kv_cache.copy_pages(copies, page_size=self.page_size)
            self.sequences.confirm_copies()

    def _plan(self, rows: Sequence[ForwardRow]) -> ForwardBatch:
        """The batch of rows that were checked; pages are copied as it needs."""
        self._take_device()
        batch = plan_checked(self.sequences, rows)
        self._copy_pages(batch.page_copies)
        return batch

    def _inputs_of(self, batch: ForwardBatch) -> DeviceBatch:
        if not has_kernels(self.device):
            return inputs_on_cpu(batch, self._frame, self.head.dtype)
        shape = BatchShape.of(batch)
        return unpack(to_device(pack(batch, shape), self.device), shape, self._frame, len(batch.logit_indices))
