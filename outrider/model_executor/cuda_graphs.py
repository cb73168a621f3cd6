"""CUDA graphs of a model's forwards: captured once for the shapes of decoding and scoring; other shapes run eagerly.

Owns the graphs and the input buffer that they read; ``graph_shapes`` lists the shapes. A captured forward begins by
copying its inputs in and ends at the hidden states. The head follows outside, for as many rows as logits were asked
for, while the device is still busy with the graph. A draft's steps (``draft_loop``) are captured after the forwards,
into the same memory. It knows nothing of sequences, sampling and the size of the cache.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from outrider.kernels.launching import num_processors
from outrider.kernels.paged_attention.device_plan import can_take_chunks, num_counters
from outrider.model_executor.device_inputs import BatchFrame, BatchShape, logit_indices_in, to_device, unpack
from outrider.model_executor.draft_loop import DraftingRules
from outrider.model_executor.draft_loop.loop import DraftLoop
from outrider.model_executor.graph_capture import Capturing, MemoryBound, capture_within, garbage_kept, open_capturing
from outrider.model_executor.graph_shapes import DEFAULT_LIMITS, GraphLimits, choose_shape, forward_shapes
from outrider.model_executor.input_batch import ForwardBatch
from outrider.model_executor.input_buffer import PinnedInputBuffer
from outrider.model_executor.kv_cache_sizing import graph_bytes
from outrider.model_executor.models import Decoder
from outrider.model_executor.models.decoder import DeviceBatch
from outrider.model_executor.steps import Step, forward_step, shape_of

_log = logging.getLogger(__name__)

CaptureProgress = Callable[[int, int], None]
"""Called with (shapes captured, shapes in all)."""

_SHAPES_REMEMBERED = 4096
"""Batches' own shapes for which the one that was chosen is known."""


@dataclass(frozen=True, slots=True)
class Captured:
    """What capturing came to."""

    num_forwards: int
    num_draft_steps: int
    num_left_out: int
    """For want of memory."""
    seconds: float
    memory: str
    """In words."""

    def __str__(self) -> str:
        loops = f" and {self.num_draft_steps} draft steps" if self.num_draft_steps else ""
        bound = f", {self.num_left_out} more left out by the limit of their memory" if self.num_left_out else ""
        return f"captured {self.num_forwards} forwards{loops} in {self.seconds:.1f} s{bound}; {self.memory}"


def _remembering_choice(shapes: tuple[BatchShape, ...]) -> Callable[[BatchShape], BatchShape | None]:
    return functools.lru_cache(_SHAPES_REMEMBERED)(functools.partial(choose_shape, shapes=shapes))


def _take_in_and_run(
    input_buffer: PinnedInputBuffer, decoder: Decoder, batch: DeviceBatch, kv_cache: torch.Tensor
) -> torch.Tensor:
    """What is captured of a forward: ``batch`` lies in the inlet's numbers."""
    input_buffer.take_in()
    return decoder.hidden_states(batch, kv_cache)


class CudaGraphRunner:
    """Runs batches of one model over one cache; for one thread, on the current stream."""

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: torch.Tensor,
        *,
        page_size: int,
        max_model_len: int,
        drafting: DraftingRules | None = None,
        limits: GraphLimits = DEFAULT_LIMITS,
    ) -> None:
        self._decoder = decoder
        self._kv_cache = kv_cache
        device = decoder.device
        self._frame = BatchFrame(
            page_size,
            frozenset(decoder.config.sliding_windows),
            torch.zeros(num_counters(num_processors(device)), dtype=torch.int32, device=device),
        )
        self._limits = limits
        self._pages_per_row = -(-max_model_len // page_size)
        self.loop = (
            DraftLoop(decoder, kv_cache, self._frame, drafting, pages_per_row=self._pages_per_row, limits=limits)
            if drafting
            else None
        )
        self.captured: Captured | None = None
        """What capturing came to."""
        self._input_buffer: PinnedInputBuffer | None = None
        self._captured: dict[BatchShape, Callable[[], torch.Tensor]] = {}
        self._choose_shape = _remembering_choice(())

    @property
    def shapes(self) -> tuple[BatchShape, ...]:
        """Those that were captured."""
        return tuple(self._captured)

    def step_for(self, batch: ForwardBatch) -> Step:
        """The batch laid out in the captured shape that fits best, or in its own."""
        own_shape = BatchShape.of(batch)
        return forward_step(batch, self._choose_shape(own_shape) or own_shape)

    def run(self, step: Step, drawn: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [N, V], of the weights' type, of a forward's step; ``drawn`` [n] int32, on the device, takes the place
        of its first n token ids.
        """
        shape, num_logits = shape_of(step)
        captured = self._captured.get(shape)
        if captured is None or self._input_buffer is None:
            device = self._decoder.device
            buffer = to_device(step.numbers, device)
            if drawn is not None:
                buffer[: len(drawn)].copy_(drawn)
            return self._decoder(unpack(buffer, shape, self._frame, num_logits), self._kv_cache)
        self._input_buffer.put(step.numbers)
        if drawn is not None:
            self._input_buffer.replace_first(drawn)
        hidden = captured()
        return self._decoder.logits(hidden, logit_indices_in(self._input_buffer.numbers, shape, num_logits))

    def capture(self, progress: CaptureProgress | None = None) -> None:
        """Capture every shape that fits the limits; what was captured before is forgotten. The cache's content stays as
        it is.
        """
        with garbage_kept():
            self._capture(progress or _ignore_progress)

    def _capture(self, report: CaptureProgress) -> None:
        began, capturing = time.perf_counter(), open_capturing(self._decoder.device)
        self._captured.clear()
        shapes = self._shapes()
        num_steps = self.loop.num_graphs if self.loop is not None else 0
        total = len(shapes) + num_steps
        bound = MemoryBound(graph_bytes(self._limits.memory_bytes, self._decoder.device), total)
        self._capture_forwards(capturing, bound, shapes, lambda done: report(done, total))
        self._choose_shape = _remembering_choice(tuple(self._captured))
        if self.loop is not None:
            self.loop.capture(capturing, bound, lambda done: report(len(shapes) + done, total))
        num_left_out, num_forwards = total - bound.num_graphs, len(self._captured)
        self.captured = Captured(
            num_forwards, bound.num_graphs - num_forwards, num_left_out, time.perf_counter() - began,
            capturing.describe_memory(),
        )  # fmt: skip
        _log.info("%s", self.captured)

    def _shapes(self) -> tuple[BatchShape, ...]:
        config, dtype = self._decoder.part, self._decoder.dtype
        has_chunks = can_take_chunks(dtype, config.head_dim, self._decoder.device)
        return forward_shapes(self._limits, has_chunks=has_chunks)

    def _capture_forwards(
        self,
        capturing: Capturing,
        bound: MemoryBound,
        shapes: tuple[BatchShape, ...],
        progress: Callable[[int], None],
    ) -> None:
        if not shapes:
            return
        rows = max(shape.num_rows for shape in shapes)
        size = max(shape.num_fixed for shape in shapes) + rows * self._pages_per_row
        self._input_buffer = input_buffer = PinnedInputBuffer(size, self._decoder.device)
        for done, shape in enumerate(shapes, 1):
            batch = self._empty_batch(input_buffer.numbers, shape)
            launch = functools.partial(_take_in_and_run, input_buffer, self._decoder, batch, self._kv_cache)
            if (captured := capture_within(bound, capturing, launch)) is not None:
                self._captured[shape] = captured
            progress(done)

    def _empty_batch(self, inputs: torch.Tensor, shape: BatchShape) -> DeviceBatch:
        """A batch in which no row has queries and no token a slot."""
        inputs.zero_()
        batch = unpack(inputs, shape, self._frame, shape.num_tokens)
        batch.slots.fill_(-1)
        return batch


def _ignore_progress(done: int, total: int) -> None:
    """Nobody asked."""
