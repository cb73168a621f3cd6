"""One model: load it once, then run ragged forwards over its paged KV cache.

Owns the sequence table and the order of a forward or a draft loop: check, plan, copy forked pages, compute. Weights and
cache are the ``ModelExecutor``'s, here and, where several ranks share the model, on each of them. Not thread-safe: one
thread calls it. Refuses to know sessions, and how tokens are drawn.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from outrider.errors import ConfigError, InvalidRequestError
from outrider.kv_cache import KVCacheManager, KVSequence, PageCopy, PagePool
from outrider.model_executor.cuda_graphs import CaptureProgress
from outrider.model_executor.draft_loop import MAX_CATCH_UP, MAX_STEPS, DraftingRules, DraftRow
from outrider.model_executor.draft_loop.plan import plan_draft
from outrider.model_executor.draft_loop.results import Draws, read_draws
from outrider.model_executor.graph_shapes import DEFAULT_LIMITS, GraphLimits
from outrider.model_executor.input_batch import ForwardBatch, ForwardRow, check_rows, plan_checked
from outrider.model_executor.kv_cache_sizing import naming_what_lacks
from outrider.model_executor.loader.executor import LoadFormat, Ranks, load_execution
from outrider.model_executor.loader.weights import Progress
from outrider.model_executor.model_executor import ModelExecutor
from outrider.model_executor.models import ModelConfig

_WARM_UP_TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 9)
_GPU_WARM_UP_TOKENS = (1, 2, 5, 9, 512)
"""The last are not captured: they find kernels tiled for as many queries as there can be."""


class ModelRunner:
    """A loaded model. ``sequences`` holds its KV sequences; ``forward`` appends tokens to them and gives logits."""

    def __init__(self, execution: ModelExecutor, ranks: Ranks | None = None, *, prefix_caching: bool = True) -> None:
        self.config: ModelConfig = execution.decoder.config
        self.max_model_len = execution.max_model_len
        """No sequence may hold more tokens."""
        self.page_size = execution.page_size
        self.num_forwards = 0
        """Forwards that rows went through since loading; warm-up does not count."""
        self.capture_seconds = 0.0
        """How long the warm-up spent on CUDA graphs."""
        pool = PagePool(execution.num_pages, execution.page_size)
        self.sequences = KVCacheManager(pool, prefix_caching=prefix_caching)
        self._execution = execution
        self._ranks = ranks

    @property
    def kv_cache(self) -> torch.Tensor:
        """[L, S, 2, H_kv, D], page after page."""
        return self._execution.kv_cache

    @property
    def device(self) -> torch.device:
        """Where weights, cache and logits are."""
        return self._execution.decoder.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of weights and cache."""
        return self._execution.decoder.dtype

    @property
    def tensor_parallel_size(self) -> int:
        """Processes that share the model."""
        return self._execution.decoder.shard.size

    @classmethod
    def load(
        cls,
        folder: Path | str,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | str = "auto",
        page_size: int = 16,
        num_pages: int | None = None,
        kv_cache_bytes: int | None = None,
        gpu_memory_utilization: float | None = None,
        max_model_len: int | None = None,
        load_format: LoadFormat = "safetensors",
        drafting: DraftingRules | None = None,
        graphs: GraphLimits = DEFAULT_LIMITS,
        progress: Progress | None = None,
        ranks: Ranks | None = None,
        prefix_caching: bool = True,
    ) -> ModelRunner:
        """Load a folder, as ``load_execution`` does; with ``ranks`` this process holds its part, and every other rank
        loads its own at the same time.
        """
        execution = load_execution(
            Path(folder),
            device=device,
            dtype=dtype,
            page_size=page_size,
            num_pages=num_pages,
            kv_cache_bytes=kv_cache_bytes,
            gpu_memory_utilization=gpu_memory_utilization,
            max_model_len=max_model_len,
            load_format=load_format,
            drafting=drafting,
            graphs=graphs,
            progress=progress,
            ranks=ranks,
        )
        return cls(execution, ranks, prefix_caching=prefix_caching)

    def close(self) -> None:
        """End the ranks that share the model, where there are any; nothing is run afterwards. Idempotent."""
        if self._ranks is not None:
            self._ranks.close()

    def forward(self, rows: Sequence[ForwardRow], *, as_computed: bool = False) -> torch.Tensor:
        """Append each row's tokens to its sequence in one pass; returns their logits [N, V], row by row: float32, or
        ``as_computed``, of the weights' type, which spares a copy.

        ``InvalidRequestError``, and nothing changed, if any row is bad: an id out of range, a length past the
        reservation or past ``max_model_len``, a sequence named twice. When the device fails midway the sequences keep
        their former lengths.
        """
        if not rows:
            return torch.empty(0, self.config.vocab_size, device=self.device)
        self._check_rows(rows)
        logits = self._append(rows)
        return logits if as_computed else logits.float()

    @property
    def takes_drawn(self) -> bool:
        """Whether ``forward_drawn`` can be."""
        return self._execution.takes_drawn

    def forward_drawn(self, sequences: Sequence[KVSequence], drawn: torch.Tensor) -> torch.Tensor:
        """``forward`` of one more token of each sequence that only the device knows: ``drawn`` [R] int32; logits
        [R, V], of the weights' type. Numbers that are no ids are taken for others that are.

        The sequences have a 0 in its place until they are cut and told what it was. Errors are those of ``forward``.
        """
        rows = [ForwardRow(sequence, (0,)) for sequence in sequences]
        self._check_rows(rows)
        return self._append(rows, drawn)

    @property
    def drafting(self) -> DraftingRules | None:
        """How ``draft`` draws; None where there is no ``draft``: on a CPU, and where nobody asked for it."""
        return self._execution.drafting

    def draft(self, rows: Sequence[DraftRow]) -> list[Draws]:
        """Append each row's tokens and draw what follows, one token after the other, in a loop for as many rows as the
        graphs are for.

        The requests must fit (``fits_loop``). A row's draws end before the first that failed; its sequence then holds
        what it held, its tokens, and what was drawn, or all but the last of it if none failed. Errors are those of
        ``forward``.
        """
        if self.drafting is None:
            raise ConfigError("drafting", "this runner was not made ready to draft")
        if len({row.sequence for row in rows}) < len(rows):
            raise InvalidRequestError("sequence", "stands in two rows of one draft loop")
        for row in rows:
            self._check_draft(row)
        self._execution.take_device()
        most = self._execution.max_draft_rows
        groups = [rows[start : start + most] for start in range(0, len(rows), most)]
        return [draws for group in groups for draws in self._draft(group)]

    def warm_up(self, progress: CaptureProgress | None = None) -> None:
        """Make the first request find everything allocated, compiled, chosen and captured; leaves no trace."""
        self.capture(progress)
        count = self.num_forwards
        longest = min(self.max_model_len, self.sequences.pool.num_free * self.page_size)
        lengths = _GPU_WARM_UP_TOKENS if self._execution.is_on_gpu else _WARM_UP_TOKENS
        sequence = self.sequences.open(min(longest, max(lengths)))
        for num_tokens in lengths:
            if num_tokens <= sequence.max_length:
                self.forward([ForwardRow(sequence, [0] * num_tokens, num_tokens)])
                self.sequences.truncate(sequence, 0)
        self.sequences.release(sequence)
        self.num_forwards = count

    def capture(self, progress: CaptureProgress | None = None) -> None:
        """On a GPU, capture forwards and draft loops as CUDA graphs; ``progress(done, total)`` counts them."""
        self._execution.take_device()
        began = time.perf_counter()
        with torch.inference_mode(), naming_what_lacks(self.device):
            self._execution.capture(progress)
        self.capture_seconds = time.perf_counter() - began if self._execution.is_on_gpu else 0.0

    def _append(self, rows: Sequence[ForwardRow], drawn: torch.Tensor | None = None) -> torch.Tensor:
        """One forward of rows that were checked."""
        self._execution.take_device()
        lengths = [row.sequence.length for row in rows]
        try:
            with torch.inference_mode():
                logits = self._compute(plan_checked(self.sequences, rows), drawn)
        except BaseException:
            self._restore(rows, lengths)
            raise
        self.num_forwards += 1
        return logits

    def _compute(self, batch: ForwardBatch, drawn: torch.Tensor | None) -> torch.Tensor:
        if batch.page_copies:
            self._copy_pages(batch.page_copies)
        if drawn is None:
            return self._execution.forward(batch)
        return self._execution.forward_drawn(batch, drawn.clamp(0, self.config.vocab_size - 1))

    def _copy_pages(self, copies: tuple[PageCopy, ...]) -> None:
        self._execution.copy_pages(copies)
        self.sequences.confirm_copies()

    def _draft(self, rows: Sequence[DraftRow]) -> list[Draws]:
        lengths = [row.sequence.length for row in rows]
        try:
            with torch.inference_mode():
                plan = plan_draft(self.sequences, rows)
                self._copy_pages(plan.page_copies)
                found = self._execution.draft(plan, with_supports=any(row.terms.needs_evidence for row in rows))
        except BaseException:
            self._restore(rows, lengths)
            raise
        drawn = read_draws(rows, *found)
        for row, length, draws in zip(rows, lengths, drawn, strict=True):
            # The table learns what the ids were that it made room for.
            appended = draws.token_ids[: row.num_drafts - 1]
            self.sequences.amend(row.sequence, length + len(row.token_ids), appended)
        self.num_forwards += plan.num_steps
        return drawn

    def _check_rows(self, rows: Sequence[ForwardRow]) -> None:
        check_rows(self.sequences, rows)
        longest, vocab_size = self.max_model_len, self.config.vocab_size
        for row in rows:
            ids, length = row.token_ids, row.sequence.length + len(row.token_ids)
            if length > longest or min(ids) < 0 or max(ids) >= vocab_size:
                self._check_tokens(ids, length)

    def _check_draft(self, row: DraftRow) -> None:
        if not 1 <= len(row.token_ids) <= MAX_CATCH_UP:
            raise InvalidRequestError("token_ids", f"must be 1 to {MAX_CATCH_UP}, not {len(row.token_ids)}")
        if not 1 <= row.num_drafts <= MAX_STEPS:
            raise InvalidRequestError("num_drafts", f"must be from 1 to {MAX_STEPS}, not {row.num_drafts}")
        more = len(row.token_ids) + row.num_drafts - 1
        self.sequences.require_room(row.sequence, more)
        self._check_tokens(row.token_ids, row.sequence.length + more)

    def _check_tokens(self, token_ids: Sequence[int], length: int) -> None:
        """Of one row, which they bring to ``length``."""
        if length > self.max_model_len:
            raise InvalidRequestError("token_ids", f"{length} tokens pass max_model_len {self.max_model_len}")
        if min(token_ids) < 0 or max(token_ids) >= self.config.vocab_size:
            wrong = next(token for token in token_ids if not 0 <= token < self.config.vocab_size)
            raise InvalidRequestError("token_ids", f"{wrong} is not from 0 to {self.config.vocab_size - 1}")

    def _restore(self, rows: Sequence[ForwardRow | DraftRow], lengths: Sequence[int]) -> None:
        for row, length in zip(rows, lengths, strict=True):
            if row.sequence.length > length:
                self.sequences.truncate(row.sequence, length)
