"""One model: load it once, then run ragged forwards over its paged KV cache.

Owns the sequence table and the order of a forward: check, plan, copy forked pages, compute. Weights and cache are the
``Execution``'s, here and, where several ranks share the model, on each of them. Not thread-safe: one thread calls it.
Refuses to know sampling, sessions and requests.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from outrider.engine.batch import ForwardBatch, ForwardRow, check_rows, plan_forward
from outrider.engine.execution import Execution
from outrider.engine.graphs import CaptureProgress
from outrider.engine.loading import Progress
from outrider.engine.models import ModelConfig
from outrider.engine.opening import LoadFormat, Ranks, load_execution
from outrider.engine.pages import PagePool
from outrider.engine.sequences import SequenceTable
from outrider.errors import InvalidRequestError

_WARM_UP_TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 9)
_GPU_WARM_UP_TOKENS = (1, 2, 5, 9, 16, 32, 512)
"""The last are not captured: each finds kernels tiled for more queries."""


class ModelRunner:
    """A loaded model. ``sequences`` holds its KV sequences; ``forward`` appends tokens to them and gives logits."""

    def __init__(self, execution: Execution, ranks: Ranks | None = None) -> None:
        self.config: ModelConfig = execution.decoder.config
        self.max_model_len = execution.max_model_len
        """No sequence may hold more tokens."""
        self.page_size = execution.page_size
        self.num_forwards = 0
        """Forwards that rows went through since loading; warm-up does not count."""
        self.capture_seconds = 0.0
        """How long the warm-up spent on CUDA graphs."""
        self.sequences = SequenceTable(PagePool(execution.num_pages, execution.page_size))
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
        max_model_len: int | None = None,
        load_format: LoadFormat = "safetensors",
        progress: Progress | None = None,
        capture_progress: CaptureProgress | None = None,
        ranks: Ranks | None = None,
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
            max_model_len=max_model_len,
            load_format=load_format,
            progress=progress,
            capture_progress=capture_progress,
            ranks=ranks,
        )
        return cls(execution, ranks)

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
        check_rows(self.sequences, rows)
        self._check_tokens(rows)
        self._execution.take_device()
        with self._restoring_lengths(rows), torch.inference_mode():
            logits = self._compute(plan_forward(self.sequences, rows))
        self.num_forwards += 1
        return logits if as_computed else logits.float()

    def warm_up(self, progress: CaptureProgress | None = None) -> None:
        """Make the first request find everything allocated, compiled and chosen; leaves no trace.

        On a GPU the shapes of decoding and scoring are captured as CUDA graphs; ``progress(done, total)`` counts them.
        """
        with torch.inference_mode():
            began = time.perf_counter()
            self._execution.capture(progress)
            self.capture_seconds = time.perf_counter() - began if self._execution.is_on_gpu else 0.0
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

    def _compute(self, batch: ForwardBatch) -> torch.Tensor:
        self._execution.copy_pages(batch.page_copies)
        self.sequences.confirm_copies()
        return self._execution.forward(batch)

    def _check_tokens(self, rows: Sequence[ForwardRow]) -> None:
        for row in rows:
            length = row.sequence.length + len(row.token_ids)
            if length > self.max_model_len:
                raise InvalidRequestError("token_ids", f"{length} tokens pass max_model_len {self.max_model_len}")
            if min(row.token_ids) < 0 or max(row.token_ids) >= self.config.vocab_size:
                wrong = next(token for token in row.token_ids if not 0 <= token < self.config.vocab_size)
                raise InvalidRequestError("token_ids", f"{wrong} is not from 0 to {self.config.vocab_size - 1}")

    @contextlib.contextmanager
    def _restoring_lengths(self, rows: Sequence[ForwardRow]) -> Iterator[None]:
        lengths = [row.sequence.length for row in rows]
        try:
            yield
        except BaseException:
            for row, length in zip(rows, lengths, strict=True):
                if row.sequence.length > length:
                    self.sequences.truncate(row.sequence, length)
            raise
