"""One model on one device: load it once, then run ragged forwards over its paged KV cache.

Owns the weights, the cache and the sequence table, and the order of a forward: check, plan, copy forked pages, move to
the device, compute. Not thread-safe: one thread calls it. Refuses to know sampling, sessions and requests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch

from outrider.engine.batch import ForwardBatch, ForwardRow, check_rows, plan_forward
from outrider.engine.execution import Execution, make_cache
from outrider.engine.graphs import CaptureProgress, GpuForward
from outrider.engine.loading import Progress, fill_weights, load_weights
from outrider.engine.memory import KvRequest, choose_num_pages
from outrider.engine.models import Decoder, ModelConfig, read_model_config
from outrider.engine.models.dummy import fill_with_noise
from outrider.engine.pages import PagePool
from outrider.engine.sequences import SequenceTable
from outrider.engine.synthetic.recipe import synthetic_tensors
from outrider.errors import ConfigError, InvalidRequestError

LoadFormat = Literal["safetensors", "dummy", "synthetic"]
_WARM_UP_TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 9)
_GPU_WARM_UP_TOKENS = (1, 2, 5, 9, 16, 32, 512)
"""The last are not captured: each finds kernels tiled for more queries."""


class ModelRunner:
    """A loaded model. ``sequences`` holds its KV sequences; ``forward`` appends tokens to them and gives logits."""

    def __init__(self, decoder: Decoder, *, page_size: int, num_pages: int, max_model_len: int) -> None:
        self.config: ModelConfig = decoder.config
        self.max_model_len = max_model_len
        """No sequence may hold more tokens."""
        self.page_size = page_size
        self.num_forwards = 0
        """Forwards that rows went through since loading; warm-up does not count."""
        self.sequences = SequenceTable(PagePool(num_pages, page_size))
        self._execution = Execution(decoder, page_size=page_size, num_pages=num_pages, max_model_len=max_model_len)

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
    ) -> ModelRunner:
        """Load a folder in the Hugging Face layout. With the ``load_format`` "dummy" only its config.json is read and
        the weights are noise, made on the device: for measuring shapes.

        ``dtype`` "auto" is the type of the weights on file. ``max_model_len`` None is the model's own limit. The cache
        takes ``num_pages``, else what fits ``kv_cache_bytes``, else a share of the memory that is free (on a GPU: once
        the CUDA graphs have theirs). ``progress(done, total)`` counts bytes of weights, ``capture_progress`` the graphs
        captured to know that. ``ModelError`` when the folder
        cannot be served, ``ConfigError`` when a setting does not fit it.
        """
        config = read_model_config(Path(folder))
        length = _choose_length(config, max_model_len)
        target_dtype = _choose_dtype(config, dtype)
        with torch.inference_mode():
            decoder = Decoder(config, dtype=target_dtype, device=torch.device(device))
            if load_format == "dummy":
                fill_with_noise(decoder)
            elif load_format == "synthetic":
                fill_weights(decoder, synthetic_tensors(Path(folder), config, target_dtype, decoder.device))
            else:
                load_weights(decoder, Path(folder), progress)
            request = KvRequest(page_size, length, config.kv_bytes_per_token(target_dtype), num_pages, kv_cache_bytes)
            pages = _choose_pages(decoder, request, capture_progress)
            return cls(decoder, page_size=page_size, num_pages=pages, max_model_len=length)

    def forward(self, rows: Sequence[ForwardRow]) -> torch.Tensor:
        """Append each row's tokens to its sequence in one pass; returns their logits [N, V] float32, row by row.

        ``InvalidRequestError``, and nothing changed, if any row is bad: an id out of range, a length past the
        reservation or past ``max_model_len``, a sequence named twice. When the device fails midway the sequences keep
        their former lengths.
        """
        if not rows:
            return torch.empty(0, self.config.vocab_size, device=self.device)
        check_rows(self.sequences, rows)
        self._check_tokens(rows)
        with self._restoring_lengths(rows), torch.inference_mode():
            logits = self._compute(plan_forward(self.sequences, rows))
        self.num_forwards += 1
        return logits

    def warm_up(self, progress: CaptureProgress | None = None) -> None:
        """Make the first request find everything allocated, compiled and chosen; leaves no trace.

        On a GPU the shapes of decoding and scoring are captured as CUDA graphs; ``progress(done, total)`` counts them.
        """
        with torch.inference_mode():
            self._execution.capture(progress)
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


def _choose_pages(decoder: Decoder, request: KvRequest, progress: CaptureProgress | None) -> int:
    """On a GPU whose free memory decides, forwards are captured once over a cache of one page, and what is free while
    they hold their memory is shared out.
    """
    if decoder.device.type != "cuda" or request.num_pages is not None or request.kv_cache_bytes is not None:
        return choose_num_pages(request, decoder.device)
    cache = make_cache(decoder, request.page_size)
    trial = GpuForward(decoder, cache, page_size=request.page_size, max_model_len=request.max_model_len)
    trial.capture(progress)
    return choose_num_pages(request, decoder.device)


def _choose_length(config: ModelConfig, max_model_len: int | None) -> int:
    if max_model_len is None:
        return config.max_position
    if not 1 <= max_model_len <= config.max_position:
        raise ConfigError("max_model_len", f"must be from 1 to {config.max_position}, not {max_model_len}")
    return max_model_len


def _choose_dtype(config: ModelConfig, dtype: torch.dtype | str) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return config.dtype
    chosen = getattr(torch, dtype, None)
    if not isinstance(chosen, torch.dtype) or not chosen.is_floating_point:
        raise ConfigError("dtype", f"{dtype!r} is not auto, float32, bfloat16 or float16")
    return chosen
