"""Forwards on a GPU: captured once for the shapes that decoding and scoring have, launched one by one for the rest.

Owns the shapes, their CUDA graphs and the inlet they read. A captured forward begins by taking its numbers in and ends
at the hidden states; the head follows outside, for as many rows as logits were asked for, while the device is still
busy with the graph. A draft's loops (``outrider.engine.drafting``) are captured after the forwards, into the same
memory. Refuses to know sequences, sampling and how large the cache is.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable

import torch

from outrider.engine.batch import ForwardBatch
from outrider.engine.capturing import open_capturing
from outrider.engine.device_inputs import BatchFrame, BatchShape, logit_indices_in, to_device, unpack
from outrider.engine.drafting import DraftingRules
from outrider.engine.drafting.loop import DraftLoop, captured_loops
from outrider.engine.inlet import Inlet
from outrider.engine.kernels.launching import num_processors
from outrider.engine.kernels.paged_attention.device_plan import num_counters
from outrider.engine.models import Decoder
from outrider.engine.models.decoder import DeviceBatch
from outrider.engine.scheduling import DEFAULT_PREFILL_BESIDE
from outrider.engine.steps import Step, forward_step, shape_of

_log = logging.getLogger(__name__)

CaptureProgress = Callable[[int, int], None]
"""Called with (shapes captured, shapes in all)."""

_NUM_ROWS = (1, 2, 4, 8, 16, 32, 64)
_TOKENS_PER_ROW = (1, 2, 5, 8)
_MOST_QUERIES = 8
_TOKENS_BESIDE_A_CHUNK = 5
_CHUNKS = (DEFAULT_PREFILL_BESIDE // 2, DEFAULT_PREFILL_BESIDE)
_PROMPT = 256
"""Tokens of a prompt alone; the forward of a longer one outlasts its launches, so that a graph gains nothing."""
_SHAPES_REMEMBERED = 4096
"""Batches' own shapes for which the one that was chosen is known."""


def captured_shapes() -> tuple[BatchShape, ...]:
    """Of decoding and scoring, and of these with a prefill's chunk beside; largest first, so that smaller ones find
    memory to reuse.
    """
    running = [
        BatchShape(rows, rows * tokens, 1 if tokens == 1 else _MOST_QUERIES)
        for rows in _NUM_ROWS
        for tokens in _TOKENS_PER_ROW
    ]
    mixed = [
        BatchShape(rows + 1, rows * _TOKENS_BESIDE_A_CHUNK + chunk, chunk) for rows in _NUM_ROWS for chunk in _CHUNKS
    ]
    shapes = [*running, *mixed, BatchShape(1, _PROMPT, _PROMPT)]
    return tuple(sorted(shapes, key=lambda shape: (shape.num_tokens, shape.num_rows), reverse=True))


def choose_shape(shape: BatchShape, shapes: tuple[BatchShape, ...]) -> BatchShape | None:
    """The one that holds ``shape`` and wastes least; None: none does."""
    fitting = [candidate for candidate in shapes if candidate.holds(shape)]
    return min(fitting, key=_waste, default=None)


def _remembering_choice(shapes: tuple[BatchShape, ...]) -> Callable[[BatchShape], BatchShape | None]:
    return functools.lru_cache(_SHAPES_REMEMBERED)(functools.partial(choose_shape, shapes=shapes))


def _take_in_and_run(inlet: Inlet, decoder: Decoder, batch: DeviceBatch, kv_cache: torch.Tensor) -> torch.Tensor:
    """What is captured of a forward: ``batch`` lies in the inlet's numbers."""
    inlet.take_in()
    return decoder.hidden_states(batch, kv_cache)


def _waste(shape: BatchShape) -> tuple[bool, int, int, int]:
    """Room for a prefill is dearest, and where it is needed tokens count more than rows."""
    if shape.max_queries > _MOST_QUERIES:
        return True, shape.num_tokens, shape.num_rows, shape.max_queries
    return False, shape.num_rows, shape.num_tokens, shape.max_queries


class GpuForward:
    """Runs batches of one model over one cache; for one thread, on the current stream."""

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: torch.Tensor,
        *,
        page_size: int,
        max_model_len: int,
        drafting: DraftingRules | None = None,
    ) -> None:
        self._decoder = decoder
        self._kv_cache = kv_cache
        device = decoder.device
        self._frame = BatchFrame(
            page_size,
            frozenset(decoder.config.sliding_windows),
            torch.zeros(num_counters(num_processors(device)), dtype=torch.int32, device=device),
        )
        self._pages_per_row = -(-max_model_len // page_size)
        self.loop = (
            DraftLoop(decoder, kv_cache, self._frame, drafting, pages_per_row=self._pages_per_row) if drafting else None
        )
        self._inlet: Inlet | None = None
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
        if captured is None or self._inlet is None:
            device = self._decoder.device
            buffer = to_device(step.numbers, device)
            if drawn is not None:
                buffer[: len(drawn)].copy_(drawn)
            return self._decoder(unpack(buffer, shape, self._frame, num_logits), self._kv_cache)
        self._inlet.put(step.numbers)
        if drawn is not None:
            self._inlet.replace_first(drawn)
        hidden = captured()
        return self._decoder.logits(hidden, logit_indices_in(self._inlet.numbers, shape, num_logits))

    def capture(self, progress: CaptureProgress | None = None) -> None:
        """Capture every shape; what was captured before is forgotten. The cache's content stays as it is."""
        began, capturing = time.perf_counter(), open_capturing(self._decoder.device)
        self._captured.clear()
        shapes = captured_shapes()
        rows = max(shape.num_rows for shape in shapes)
        size = max(shape.num_fixed for shape in shapes) + rows * self._pages_per_row
        self._inlet = inlet = Inlet(size, self._decoder.device)
        total = len(shapes) + (len(captured_loops()) if self.loop is not None else 0)
        report = progress or _ignore_progress
        for done, shape in enumerate(shapes, 1):
            batch = self._empty_batch(inlet.numbers, shape)
            launch = functools.partial(_take_in_and_run, inlet, self._decoder, batch, self._kv_cache)
            capturing.prepare(launch)
            self._captured[shape] = capturing.capture(launch)
            report(done, total)
        self._choose_shape = _remembering_choice(shapes)
        if self.loop is not None:
            self.loop.capture(capturing, lambda done: report(len(shapes) + done, total))
        _log.info(
            "captured %d forwards%s in %.1f s; %s",
            len(shapes), f" and {total - len(shapes)} draft loops" if self.loop is not None else "",
            time.perf_counter() - began, capturing.describe_memory(),
        )  # fmt: skip

    def _empty_batch(self, inputs: torch.Tensor, shape: BatchShape) -> DeviceBatch:
        """A batch in which no row has queries and no token a slot."""
        inputs.zero_()
        batch = unpack(inputs, shape, self._frame, shape.num_tokens)
        batch.slots.fill_(-1)
        return batch


def _ignore_progress(done: int, total: int) -> None:
    """Nobody asked."""
