"""A draft loop on its device: steps queued one behind the other, the host asked for nothing between.

Owns the steps that are captured as CUDA graphs, one for each number of rows (and some for rows that append several
tokens first), and what these read and write. A loop is a function of its shape and one row of numbers, which it takes
in itself; what it drew it writes to the host's memory.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from outrider.kernels.device_stream import Mark, mark_reached
from outrider.kernels.draft_advance import advance
from outrider.kernels.draft_sampling import DraftSink, make_sampler
from outrider.kernels.draft_sampling.layout import NUM_FIELDS
from outrider.model_executor.device_inputs import BatchFrame, IntArray
from outrider.model_executor.draft_loop.plan import DeviceLoop, DraftPlan, LoopShape, draft_command, unpack_draft
from outrider.model_executor.draft_loop.results import Numbers
from outrider.model_executor.draft_loop.rows import MAX_STEPS, MAX_UNCOMPUTED_TOKENS
from outrider.model_executor.graph_capture import CaptureBound, GraphRecorder
from outrider.model_executor.graph_shapes import DEFAULT_LIMITS, GraphLimits, padded_size, padded_sizes
from outrider.model_executor.input_buffer import PinnedInputBuffer
from outrider.model_executor.kv_cache_tensors import KVCacheTensors
from outrider.model_executor.layers.contract import DeviceBatch
from outrider.model_executor.worker_commands import WorkerCommand
from outrider.sampling.support import DraftingRules

LoopProgress = Callable[[int], None]
"""Called with the number of steps captured or left out."""


class LoopModel(Protocol):
    """Model as a draft loop uses it; implemented by ``outrider.model_executor.models.Decoder``."""

    @property
    def device(self) -> torch.device:
        """Device of the loop."""
        ...

    def draft_logits(self, batch: DeviceBatch, kv_cache: KVCacheTensors, indices: torch.Tensor | None) -> torch.Tensor:
        """Run one step: logits [R, V] of the rows' last tokens, which ``indices`` [R] names in a first step of several
        tokens a row; None: of each row's one token, which the step before has drawn.
        """
        ...


@dataclass(frozen=True, slots=True, order=True)
class StepShape:
    """Shape of one captured step."""

    num_rows: int
    num_prefill: int
    """Tokens that a row may append: 1, or more in a first step."""


@dataclass(frozen=True, slots=True)
class _Views:
    """Buffers that the steps of one number of rows read and write, on the device and on the host."""

    loop: DeviceLoop
    sink: DraftSink
    supports: torch.Tensor  # [K, R, 2, S] on the host, to be copied there


class DraftLoop:
    """Runs loops of one model over one cache; for one thread, on the current stream."""

    def __init__(
        self,
        model: LoopModel,
        kv_cache: KVCacheTensors,
        frame: BatchFrame,
        rules: DraftingRules,
        *,
        pages_per_row: int,
        limits: GraphLimits = DEFAULT_LIMITS,
        prefill_sizes: Sequence[int] = (1, MAX_UNCOMPUTED_TOKENS),
    ) -> None:
        """First steps are captured for rows that append as many tokens as one of ``prefill_sizes``, ascending, or
        fewer.
        """
        self.rules = rules
        self.max_rows = limits.max_sequences
        """Largest number of rows of one loop."""
        self.max_prefill = max(prefill_sizes)
        """Tokens that a row may append before its first draw."""
        self._prefill_sizes = tuple(prefill_sizes)
        self._model = model
        self._kv_cache = kv_cache
        self._frame = frame
        self._sampler = make_sampler(model.device, mass=rules.support_mass, limit=rules.support_limit)
        self._barrier = torch.zeros(1, dtype=torch.int32, device=model.device)
        """Written by an ordinary launch, ahead of which no kernel is placed."""
        self._copy_inputs: Callable[[], None] | None = None
        self._captured: dict[StepShape, Callable[[], None]] = {}
        largest, draws = self._layout(self.max_rows), self.max_rows * MAX_STEPS
        size = largest.num_fixed + frame.num_of_states(self.max_rows) + self.max_rows * pages_per_row
        self._input_buffer = PinnedInputBuffer(size, model.device)
        self._records = self._on_host(draws * NUM_FIELDS)
        self._supports = torch.zeros(draws * 2 * rules.support_limit, dtype=torch.int32, device=model.device)
        self._read_supports = self._on_host(draws * 2 * rules.support_limit)
        self._views: dict[int, _Views] = {}

    @property
    def num_graphs(self) -> int:
        """Captured by ``capture`` where nothing is left out."""
        return 1 + len(self._shapes())

    def command_for(self, plan: DraftPlan) -> WorkerCommand:
        """The loop of a plan, laid out for as many rows as a step was captured for; of ``max_rows`` rows at most."""
        num_rows = padded_size(len(plan.contexts), self.max_rows)
        num_prefill = self._prefill_sizes[bisect.bisect_left(self._prefill_sizes, plan.num_prefill)]
        return draft_command(plan, LoopShape(num_rows, plan.num_steps, num_prefill, self.max_prefill))

    def run(self, shape: LoopShape, numbers: IntArray) -> bool:
        """Draft by what ``pack_draft`` gave; returns before the device is done, whether all steps were captured."""
        self._input_buffer.put(numbers)
        (self._copy_inputs or self._input_buffer.copy_inputs)()
        num_captured = 0
        for step in range(shape.num_steps):
            own = StepShape(shape.num_rows, 1 if step else shape.num_prefill)
            captured = self._captured.get(own)
            if captured is None:
                self.launch(own)
                self._barrier.zero_()
            else:
                captured()
                num_captured += 1
        return num_captured == shape.num_steps

    def mark(self) -> Mark:
        """Mark that is reached when all loops so far have ended."""
        return Mark(self._model.device)

    def results(self, shape: LoopShape, *, with_supports: bool) -> tuple[Numbers, Numbers | None]:
        """Wait for the loop that ran last: records [K, R, NUM_FIELDS] and supports [K, R, 2, S], valid until the next
        ``run``.
        """
        views = self._views_of(shape.num_rows)
        if with_supports:
            views.supports[: shape.num_steps].copy_(views.sink.supports[: shape.num_steps], non_blocking=True)
        records = views.sink.records[: shape.num_steps].numpy()
        mark_reached(self._model.device)()
        return records, views.supports[: shape.num_steps].numpy() if with_supports else None

    def capture(self, recorder: GraphRecorder, bound: CaptureBound, progress: LoopProgress) -> None:
        """Capture every step; what was captured before is forgotten. The cache's content stays as it is."""
        self._captured.clear()
        for done, shape in enumerate(self._shapes(), 1):
            self._empty(shape.num_rows)
            captured = bound.capture(recorder, functools.partial(self.launch, shape))
            if captured is not None:
                self._captured[shape] = captured
            progress(done)
        self._copy_inputs = bound.capture(recorder, self._input_buffer.copy_inputs)
        progress(self.num_graphs)

    def launch(self, shape: StepShape) -> None:
        """A whole step, kernel by kernel: what is captured. Kernels read positions, slots and pages before they wait
        for their predecessors, so none may be placed before the step ahead has ended; none of another graph's is.
        """
        views = self._views_of(shape.num_rows)
        loop = views.loop
        batch = loop.first.get(shape.num_prefill, loop.single)
        indices = None if batch is loop.single else batch.logit_indices
        logits = self._model.draft_logits(batch, self._kv_cache, indices)
        self._sampler(logits, loop.state.parameters, views.sink)
        advance(loop.state, self._frame.page_size)
        if batch.states is not None:  # where the next step finds them
            batch.states.starts.copy_(batch.states.ends)

    def _shapes(self) -> tuple[StepShape, ...]:
        """Largest first, so that smaller ones find memory to reuse."""
        sizes = reversed(padded_sizes(self.max_rows))
        return tuple(
            StepShape(rows, num_prefill) for rows in sizes for num_prefill in sorted({1, *self._prefill_sizes})[::-1]
        )

    def _empty(self, num_rows: int) -> None:
        """Inputs of a step in which no row has queries, no token a slot, and nothing is drawn."""
        self._input_buffer.numbers.zero_()
        loop = self._views_of(num_rows).loop
        for batch in (*loop.first.values(), loop.single):
            batch.clear_slots()

    def _layout(self, num_rows: int) -> LoopShape:
        return LoopShape(num_rows, MAX_STEPS, self.max_prefill, self.max_prefill)

    def _views_of(self, num_rows: int) -> _Views:
        known = self._views.get(num_rows)
        if known is None:
            known = self._views[num_rows] = self._view(num_rows)
        return known

    def _view(self, num_rows: int) -> _Views:
        firsts = [size for size in self._prefill_sizes if size > 1]
        loop = unpack_draft(self._input_buffer.numbers, self._layout(num_rows), self._frame, firsts)
        draws, support = (MAX_STEPS, num_rows), (2, self.rules.support_limit)
        sink = DraftSink(
            step=loop.state.step,
            next_ids=loop.next_ids,
            records=_view(self._records, (*draws, NUM_FIELDS)),
            supports=_view(self._supports, (*draws, *support)),
        )
        return _Views(loop, sink, _view(self._read_supports, (*draws, *support)))

    def _on_host(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32, pin_memory=self._model.device.type == "cuda")


def _view(numbers: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
    """The first of them."""
    return numbers[: math.prod(size)].view(size)
