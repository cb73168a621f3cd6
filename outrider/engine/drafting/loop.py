"""A draft loop on its device: one launch for all its tokens, captured once for each shape.

Owns the shapes, their CUDA graphs, and what these read and write. A launch is a function of its shape and one row of
numbers, which it takes in itself; what it drew it writes to the host's memory. Refuses to know sequences and requests.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from outrider.engine.capturing import Capturing
from outrider.engine.device_inputs import BatchFrame, IntArray
from outrider.engine.drafting.plan import DraftPlan, LoopShape, draft_step, unpack_draft
from outrider.engine.drafting.results import Numbers
from outrider.engine.drafting.rows import MAX_CATCH_UP, MAX_STEPS, DraftingRules
from outrider.engine.inlet import Inlet
from outrider.engine.kernels.draft_sampling import DraftSink, make_sampler
from outrider.engine.kernels.draft_sampling.layout import NUM_FIELDS
from outrider.engine.models.decoder import DeviceBatch
from outrider.engine.steps import Step
from outrider.engine.waiting import mark_reached

_NUM_ROWS = (1, 2, 4, 8, 16, 32, 64)
MAX_ROWS = _NUM_ROWS[-1]
_PREPARED_STEPS = 2
"""Longer loops only repeat the second step."""

LoopProgress = Callable[[int], None]
"""Called with the number of loops captured."""


class LoopModel(Protocol):
    """What a loop needs of a model; ``outrider.engine.models.Decoder`` is one."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        ...

    def hidden_states(self, batch: DeviceBatch, kv_cache: torch.Tensor) -> torch.Tensor:
        """[T, hidden]."""
        ...

    def head_logits(self, hidden: torch.Tensor, indices: torch.Tensor | None) -> torch.Tensor:
        """[N, V] of the chosen rows of ``hidden``, of all where ``indices`` is None."""
        ...


def captured_loops() -> tuple[LoopShape, ...]:
    """Largest first, so that smaller ones find memory to reuse."""
    return tuple(
        LoopShape(rows, steps, catch_up)
        for rows in reversed(_NUM_ROWS)
        for catch_up in range(MAX_CATCH_UP, 0, -1)
        for steps in range(MAX_STEPS, 0, -1)
    )


def choose_loop(own: LoopShape) -> LoopShape:
    """The smallest shape that is captured and holds a plan of ``own``, which has at most ``MAX_ROWS`` rows."""
    return LoopShape(next(rows for rows in _NUM_ROWS if rows >= own.num_rows), own.num_steps, own.catch_up)


@dataclass(frozen=True, slots=True)
class _Outputs:
    """What the launches of one shape write to, for the device and for the host."""

    sink: DraftSink
    supports: torch.Tensor  # [K, R, 2, S] on the host, to be copied there


class DraftLoop:
    """Runs loops of one model over one cache; for one thread, on the current stream."""

    def __init__(
        self, model: LoopModel, kv_cache: torch.Tensor, frame: BatchFrame, rules: DraftingRules, *, pages_per_row: int
    ) -> None:
        self.rules = rules
        self._model = model
        self._kv_cache = kv_cache
        self._frame = frame
        self._sampler = make_sampler(model.device, mass=rules.support_mass, limit=rules.support_limit)
        self._captured: dict[LoopShape, Callable[[], None]] = {}
        largest = LoopShape(MAX_ROWS, MAX_STEPS, MAX_CATCH_UP)
        draws = largest.num_rows * largest.num_steps
        self._inlet = Inlet(largest.num_fixed + MAX_ROWS * pages_per_row, model.device)
        self._next_ids = self._on_device(draws)
        self._records = self._on_host(draws * NUM_FIELDS)
        self._supports = self._on_device(draws * 2 * rules.support_limit)
        self._read_supports = self._on_host(draws * 2 * rules.support_limit)
        self._outputs: dict[LoopShape, _Outputs] = {}

    def step_for(self, plan: DraftPlan) -> Step:
        """The loop of a plan, laid out in the captured shape that fits it."""
        return draft_step(plan, choose_loop(plan.shape))

    def run(self, shape: LoopShape, numbers: IntArray) -> None:
        """Draft by what ``pack_draft`` gave; returns before the device is done."""
        self._inlet.put(numbers)
        captured = self._captured.get(shape)
        if captured is None:
            self.launch(shape)
        else:
            captured()

    def results(self, shape: LoopShape, *, with_supports: bool) -> tuple[Numbers, Numbers | None]:
        """Wait for the loop that ran last: records [K, R, NUM_FIELDS] and supports [K, R, 2, S], valid until the next
        ``run``.
        """
        outputs = self._outputs_of(shape)
        if with_supports:
            outputs.supports.copy_(outputs.sink.supports, non_blocking=True)
        records = outputs.sink.records.numpy()
        mark_reached(self._model.device)()
        return records, outputs.supports.numpy() if with_supports else None

    def capture(self, capturing: Capturing, progress: LoopProgress) -> None:
        """Capture every shape; what was captured before is forgotten. The cache's content stays as it is."""
        self._captured.clear()
        prepared: set[tuple[int, int]] = set()
        for done, shape in enumerate(captured_loops(), 1):
            kind = (shape.num_rows, shape.catch_up)
            if kind not in prepared:
                prepared.add(kind)
                few_steps = LoopShape(shape.num_rows, _PREPARED_STEPS, shape.catch_up)
                self._empty(few_steps)
                capturing.prepare(functools.partial(self.launch, few_steps))
            self._captured[shape] = capturing.capture(functools.partial(self.launch, shape))
            progress(done)

    def launch(self, shape: LoopShape) -> None:
        """The whole loop, kernel by kernel: what is captured."""
        self._inlet.take_in()
        sink = self._outputs_of(shape).sink
        inputs = unpack_draft(self._inlet.numbers, shape, self._frame, sink.next_ids)
        for step, batch in enumerate((inputs.first, *inputs.later)):
            hidden = self._model.hidden_states(batch, self._kv_cache)
            logits = self._model.head_logits(hidden, batch.logit_indices if step == 0 else None)
            self._sampler(logits, inputs.parameters, step, sink)

    def _empty(self, shape: LoopShape) -> None:
        """Inputs of a loop in which no row has queries, no token a slot, and nothing is drawn."""
        self._inlet.numbers.zero_()
        loop = unpack_draft(self._inlet.numbers, shape, self._frame, self._outputs_of(shape).sink.next_ids)
        for batch in (loop.first, *loop.later):
            batch.slots.fill_(-1)

    def _outputs_of(self, shape: LoopShape) -> _Outputs:
        known = self._outputs.get(shape)
        if known is None:
            known = self._outputs[shape] = self._view_outputs(shape)
        return known

    def _view_outputs(self, shape: LoopShape) -> _Outputs:
        draws, support = (shape.num_steps, shape.num_rows), (2, self.rules.support_limit)
        sink = DraftSink(
            next_ids=_view(self._next_ids, draws),
            records=_view(self._records, (*draws, NUM_FIELDS)),
            supports=_view(self._supports, (*draws, *support)),
        )
        return _Outputs(sink, _view(self._read_supports, (*draws, *support)))

    def _on_device(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32, device=self._model.device)

    def _on_host(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32, pin_memory=self._model.device.type == "cuda")


def _view(numbers: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
    """The first of them."""
    return numbers[: math.prod(size)].view(size)
