"""CUDA graphs of one model's forwards, captured once for the shapes that decoding, scoring and chunks of prompts have.

A captured forward begins by copying its inputs from the pinned buffer and ends at the hidden states; the head follows
outside, for as many rows as logits were asked for, while the device is still busy with the graph. Hidden states of
layers that a draft reads are outputs of the graph too: a copy each. A shape that was captured without them is captured
again when they are first asked for. Draft loops (``draft_loop``) are captured after the forwards, into the same memory.
Which shapes there are is ``graph_shapes``'s.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from outrider.kernels.paged_attention.device_plan import can_take_chunks
from outrider.model_executor.device_inputs import BatchFrame, BatchShape, logit_indices_in, unpack
from outrider.model_executor.graph_capture import (
    CaptureBound,
    CaptureLimits,
    GraphRecorder,
    Least,
    garbage_kept,
    open_recorder,
)
from outrider.model_executor.graph_shapes import GraphLimits, choose_shape, forward_shapes
from outrider.model_executor.input_buffer import PinnedInputBuffer
from outrider.model_executor.kv_cache_sizing import graph_bytes
from outrider.model_executor.kv_cache_tensors import KVCacheTensors
from outrider.model_executor.layers.contract import DeviceBatch
from outrider.model_executor.models import Decoder
from outrider.model_executor.worker_commands import WorkerCommand, shape_of

_log = logging.getLogger(__name__)

CaptureProgress = Callable[[int, int], None]
"""Called with (graphs captured or left out, graphs in all)."""

_SHAPES_REMEMBERED = 4096
"""Batches' own shapes for which the one that was chosen is known."""


class Graphs(Protocol):
    """A set of CUDA graphs that is captured together."""

    @property
    def num_graphs(self) -> int:
        """Captured where nothing is left out."""
        ...

    def capture(self, recorder: GraphRecorder, bound: CaptureBound, progress: Callable[[int], None]) -> None:
        """Capture all that fits the bound; ``progress`` counts those captured or left out."""
        ...


@dataclass(frozen=True, slots=True)
class Captured:
    """Outcome of the capture."""

    num_forwards: int
    num_draft_steps: int
    num_left_out: int
    """Shapes left out by the limits of memory and time."""
    seconds: float
    memory: str
    """Memory use in words."""

    def __str__(self) -> str:
        loops = f" and {self.num_draft_steps} draft steps" if self.num_draft_steps else ""
        bound = (
            f", {self.num_left_out} more left out by the limits of their memory and time" if self.num_left_out else ""
        )
        return f"captured {self.num_forwards} forwards{loops} in {self.seconds:.1f} s{bound}; {self.memory}"


@dataclass(frozen=True, slots=True)
class Replayed:
    """A forward that a graph ran; valid until the next one runs."""

    hidden: torch.Tensor  # [T, hidden] what the head reads
    logit_indices: torch.Tensor  # [N] the rows of it that get logits
    states: torch.Tensor  # [T, F] of the layers that were asked for


@dataclass(frozen=True, slots=True)
class _ForwardGraph:
    """A captured forward."""

    layers: tuple[int, ...]
    """Layers whose hidden states it gives, ascending."""
    replay: Callable[[], tuple[torch.Tensor, torch.Tensor]]

    def batched(self, states: torch.Tensor, layers: Sequence[int]) -> torch.Tensor:
        """States of ``layers``, in their order, out of the states of all its layers."""
        if tuple(layers) == self.layers:
            return states
        size = states.shape[1] // max(1, len(self.layers))
        indices = [self.layers.index(layer) * size for layer in layers]
        return torch.cat([states[:, place : place + size] for place in indices], dim=-1) if indices else states[:, :0]


class ForwardGraphs:
    """Captured forwards by shape; none until ``capture``. For one thread, on the current stream."""

    def __init__(
        self,
        model: Decoder,
        kv_cache: KVCacheTensors,
        frame: BatchFrame,
        *,
        pages_per_row: int,
        limits: GraphLimits,
        layers: Sequence[int] = (),
    ) -> None:
        """``layers`` are those whose hidden states every graph gives from the beginning."""
        self._model, self._kv_cache, self._frame = model, kv_cache, frame
        self._layers = tuple(sorted(layers))
        self._pages_per_row = pages_per_row
        has_chunks = can_take_chunks(model.dtype, model.part.head_dim, model.device)
        self._wanted = forward_shapes(limits, has_chunks=has_chunks)
        self._input_buffer: PinnedInputBuffer | None = None
        self._recorder: GraphRecorder | None = None
        self._captured: dict[BatchShape, _ForwardGraph] = {}
        self._choose = _remembering_choice(())

    @property
    def shapes(self) -> tuple[BatchShape, ...]:
        """Shapes that were captured."""
        return tuple(self._captured)

    @property
    def num_graphs(self) -> int:
        """Captured where nothing is left out."""
        return len(self._wanted)

    def shape_for(self, own: BatchShape) -> BatchShape:
        """The captured shape that fits a batch best; the batch's own where none does."""
        return self._choose(own) or own

    def replay(self, command: WorkerCommand, drawn: torch.Tensor | None, layers: Sequence[int] = ()) -> Replayed | None:
        """Run a forward that hands out the hidden states of ``layers``; None: its shape was not captured. ``drawn`` [n]
        int32, on the device, takes the place of its first n token ids.
        """
        shape, num_logits = shape_of(command)
        graph, buffer = self._captured.get(shape), self._input_buffer
        if graph is None or buffer is None:
            return None
        if not set(layers) <= set(graph.layers):
            graph = self._capture_again(shape, layers)
        buffer.put(command.numbers)
        if drawn is not None:
            buffer.replace_first(drawn)
        hidden, states = graph.replay()
        return Replayed(hidden, logit_indices_in(buffer.numbers, shape, num_logits), graph.batched(states, layers))

    def capture(self, recorder: GraphRecorder, bound: CaptureBound, progress: Callable[[int], None]) -> None:
        """Capture every shape; what was captured before is forgotten. The cache's content stays as it is."""
        self._captured.clear()
        self._recorder = recorder
        if self._wanted:
            rows = max(shape.num_rows for shape in self._wanted)
            size = max(shape.num_fixed + self._frame.num_of_states(shape.num_rows) for shape in self._wanted)
            size += rows * self._pages_per_row
            self._input_buffer = PinnedInputBuffer(size, self._model.device)
        for done, shape in enumerate(self._wanted, 1):
            launch = self._launch_of(shape, self._layers)
            if (captured := bound.capture(recorder, launch)) is not None:
                self._captured[shape] = _ForwardGraph(self._layers, captured)
            progress(done)
        self._choose = _remembering_choice(self.shapes)

    def clear(self) -> None:
        """Forget what was captured: every forward is launched anew."""
        self._captured.clear()
        self._choose = _remembering_choice(())

    def _capture_again(self, shape: BatchShape, layers: Sequence[int]) -> _ForwardGraph:
        """Capture a shape's graph again so that it gives the states of ``layers`` too. All ranks of a model are told
        the same forwards and have captured the same ones, so that they do so together.
        """
        began, recorder = time.perf_counter(), self._recorder
        assert recorder is not None  # noqa: S101 - made by capture
        self._layers = tuple(sorted({*self._layers, *layers}))
        launch = self._launch_of(shape, self._layers)
        del self._captured[shape]
        with garbage_kept():
            recorder.prepare(launch)
            graph = self._captured[shape] = _ForwardGraph(self._layers, recorder.capture(launch))
        _log.info(
            "captured the forward of %d tokens again, with the hidden states of layers %s, in %.2f s",
            shape.num_tokens, self._layers, time.perf_counter() - began,
        )  # fmt: skip
        return graph

    def _launch_of(self, shape: BatchShape, layers: tuple[int, ...]) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        """Launch to capture: the inputs copied, then all layers, of a batch with no row, and no token with a slot."""
        buffer = self._input_buffer
        assert buffer is not None  # noqa: S101 - made by capture
        buffer.numbers.zero_()
        batch = unpack(buffer.numbers, shape, self._frame, shape.num_tokens)
        batch.clear_slots()
        return functools.partial(_copy_inputs_and_run, buffer, self._model, batch, self._kv_cache, layers)


def capture_limits(limits: GraphLimits, device: torch.device) -> CaptureLimits:
    """Limits of what a model captures on a device."""
    return CaptureLimits(graph_bytes(limits.memory_bytes, device), limits.capture_seconds)


def capture_loop(
    loop: Graphs, device: torch.device, limits: CaptureLimits, report: CaptureProgress | None = None
) -> Captured:
    """``capture_all`` of draft steps alone: a head has no other forwards with graphs."""
    return capture_all(None, loop, device, limits, report or (lambda done, total: None))


def capture_all(
    forwards: Graphs | None, loop: Graphs | None, device: torch.device, limits: CaptureLimits,
    report: CaptureProgress, *, least: Least | None = None,
) -> Captured:  # fmt: skip
    """Capture forwards and draft steps, within ``limits`` together. Ranks that share a model capture the same ones, as
    ``CaptureBound`` does by ``least``.
    """
    began, sets = time.perf_counter(), [forwards, loop]
    sizes = [0 if graphs is None else graphs.num_graphs for graphs in sets]
    total, counts = sum(sizes), []
    bound = CaptureBound(limits, total, least)
    with garbage_kept():
        recorder = open_recorder(device)
        for graphs, before in zip(sets, (0, sizes[0]), strict=True):
            if graphs is not None:
                graphs.capture(recorder, bound, functools.partial(_report, report, before, total))
            counts.append(bound.num_graphs)
    found = Captured(
        counts[0], bound.num_graphs - counts[0], total - bound.num_graphs, time.perf_counter() - began,
        recorder.describe_memory(),
    )  # fmt: skip
    _log.info("%s", found)
    return found


def _report(report: CaptureProgress, before: int, total: int, done: int) -> None:
    report(before + done, total)


def _remembering_choice(shapes: Sequence[BatchShape]) -> Callable[[BatchShape], BatchShape | None]:
    return functools.lru_cache(_SHAPES_REMEMBERED)(functools.partial(choose_shape, shapes=tuple(shapes)))


def _copy_inputs_and_run(
    buffer: PinnedInputBuffer, model: Decoder, batch: DeviceBatch, kv_cache: KVCacheTensors, layers: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    buffer.copy_inputs()
    return model.layer_states(batch, kv_cache, layers)
