"""Worker: one rank's part of a model on its device, and the launches of worker commands.

Owns the decoder, the tensors of the KV cache, CUDA graphs and the draft loop. Every rank has one worker and runs the
same commands with it; rank 0's ``ModelRunner`` makes them. Sequences and sampling are the ``ModelRunner``'s.

Shape letters: ``T`` tokens of a forward, ``N`` positions that get logits, ``V`` vocabulary, ``F`` the states of the
wanted layers side by side.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

import torch

from outrider.kernels.device_stream import Mark, to_device
from outrider.kernels.launching import has_kernels, num_processors
from outrider.kernels.paged_attention import prepare_prompts
from outrider.kernels.paged_attention.device_plan import num_counters
from outrider.kv_cache import page_table_of
from outrider.model_executor.cuda_graphs import Captured, CaptureProgress, ForwardGraphs, capture_all, capture_limits
from outrider.model_executor.device_inputs import BatchFrame, BatchShape, inputs_on_cpu, pack, spans_in, unpack
from outrider.model_executor.distributed.communicator import broadcast_token_ids
from outrider.model_executor.draft_loop import DraftingRules
from outrider.model_executor.draft_loop.loop import DraftLoop
from outrider.model_executor.draft_loop.plan import loop_of
from outrider.model_executor.graph_coverage import describe_coverage
from outrider.model_executor.graph_shapes import DEFAULT_LIMITS, GraphLimits
from outrider.model_executor.input_batch import ForwardBatch
from outrider.model_executor.kv_cache_sizing import explaining_out_of_memory
from outrider.model_executor.kv_cache_tensors import KVCacheTensors
from outrider.model_executor.layers.contract import DeviceBatch
from outrider.model_executor.loader.model import LoadedModel, LoadOptions, Ranks, load_model
from outrider.model_executor.worker_commands import Operation, WorkerCommand, batch_of, copies_of, layers_of, shape_of

_log = logging.getLogger(__name__)
_GRAPH_TOLERANCE = 0.02
"""Tolerance between a graph and its launches, as a share of the largest logit."""


def runs_loops(device: torch.device) -> bool:
    """True if draft loops take less time on a device than tokens that are drawn one by one: where kernels run."""
    return has_kernels(device)


class Worker:
    """Worker of one rank. Not thread-safe: one thread calls it."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        drafting: DraftingRules | None = None,
        graphs: GraphLimits = DEFAULT_LIMITS,
        hidden_state_layers: Sequence[int] = (),
        ranks: Ranks | None = None,
    ) -> None:
        """``drafting``: rules of draft sampling, with a draft loop on a GPU; ``graphs``: limits of the CUDA graphs.

        Graphs return the states of ``hidden_state_layers``. ``ranks``: the ranks that share the model, if there are
        several.
        """
        model = loaded.model
        if model.config.is_fallback:
            drafting = None
        self.model, self.config = model, model.config
        self.page_size, self.num_pages, self.max_model_len = loaded.page_size, loaded.num_pages, loaded.max_model_len
        """No sequence may hold more tokens than ``max_model_len``."""
        self.num_window_pages, self.forward_tokens = loaded.num_window_pages, graphs.forward_tokens
        """Window pages of layers with a window (0: their pages are those of all), and tokens of the largest forward."""
        layout = model.kv_cache_layout
        self.kv_cache = KVCacheTensors(
            layout, loaded.num_pages * loaded.page_size, dtype=loaded.kv_cache_dtype, device=model.device,
            num_state_slots=loaded.num_state_slots, state_dtype=model.dtype, page_size=loaded.page_size,
            num_window_pages=loaded.num_window_pages,
        )  # fmt: skip
        self.is_on_gpu = has_kernels(model.device)
        """True if kernels run: on a GPU, or in Triton's interpreter for tests."""
        self.captured: Captured | None = None
        """Captured graphs; None before ``capture`` and where nothing is captured."""
        self.used_graph = False
        """True if the last forward, or every step of the last draft loop, was a captured one."""
        self._graph_limits, self._ranks = graphs, ranks
        self._ready_in: int | None = None
        """The thread in which long prompts were last prepared for."""
        counters = torch.zeros(num_counters(num_processors(model.device)), dtype=torch.int32, device=model.device)
        self._cuda_index = counters.device.index if counters.is_cuda else None
        """The setting's name may have none."""
        self._frame = BatchFrame(
            self.page_size, layout.windows, counters, layout.sinks, batch_invariant=model.batch_invariant,
            has_states=layout.states is not None, window_map=self.kv_cache.window_map,
        )  # fmt: skip
        pages_per_row = -(-self.max_model_len // self.page_size)
        self._graphs = ForwardGraphs(
            model, self.kv_cache, self._frame, pages_per_row=pages_per_row, limits=graphs, layers=hidden_state_layers
        )
        self.draft_loop = (
            DraftLoop(model, self.kv_cache, self._frame, drafting, pages_per_row=pages_per_row, limits=graphs)
            if drafting is not None and drafting.in_loops and runs_loops(model.device)
            else None
        )
        """None on a CPU, and without ``drafting``."""

    @classmethod
    def load(
        cls,
        folder: Path | str,
        *,
        drafting: DraftingRules | None = None,
        graphs: GraphLimits = DEFAULT_LIMITS,
        hidden_state_layers: Sequence[int] = (),
        **options: Unpack[LoadOptions],
    ) -> Worker:
        """Load a model folder, or with ``ranks`` this rank's part of it; errors are those of ``load_model``."""
        loaded = load_model(
            Path(folder), max_sequences=graphs.max_sequences, graph_memory_bytes=graphs.memory_bytes,
            forward_tokens=graphs.forward_tokens, **options,
        )  # fmt: skip
        with torch.inference_mode(), explaining_out_of_memory(loaded.model.device):
            return cls(
                loaded,
                drafting=drafting,
                graphs=graphs,
                hidden_state_layers=hidden_state_layers,
                ranks=options.get("ranks"),
            )

    @property
    def device(self) -> torch.device:
        """Device of weights, cache and logits."""
        return self.model.device

    @property
    def capture_seconds(self) -> float:
        """Seconds that the capture of CUDA graphs took."""
        return 0.0 if self.captured is None else self.captured.seconds

    @property
    def graph_coverage(self) -> str:
        """Forwards with and without a CUDA graph, in words."""
        return describe_coverage(self._graph_limits, self._graphs.shapes)

    def shape_for(self, own: BatchShape) -> BatchShape:
        """The captured shape that fits a batch best; the batch's own where none does."""
        return self._graphs.shape_for(own)

    def run(self, command: WorkerCommand) -> None:
        """Run a command; its results stay on this rank."""
        if command.operation in {Operation.FORWARD, Operation.FORWARD_DRAWN}:
            self.forward(command)
        elif command.operation == Operation.COPY_PAGES:
            self.kv_cache.copy_pages(copies_of(command), page_size=self.page_size)
        elif command.operation == Operation.COPY_WINDOW_PAGES:
            self.kv_cache.copy_window_pages(copies_of(command), page_size=self.page_size)
        elif command.operation == Operation.MAP_WINDOW_PAGES:
            self.kv_cache.map_window_pages(command.numbers)
        elif command.operation == Operation.COPY_STATES:
            self.kv_cache.copy_states(copies_of(command))
        elif command.operation == Operation.DRAFT and self.draft_loop is not None:
            self.used_graph = self.draft_loop.run(loop_of(command), command.numbers)
        elif command.operation == Operation.CAPTURE and self.is_on_gpu:
            self.capture()
        else:
            raise ValueError(f"there is no command {command.operation} on {self.device}")

    def forward(self, command: WorkerCommand, drawn: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a forward: logits [N, V] of the weights' type, and the hidden states [T, F] that the command asks for.

        ``drawn`` [n] int32, on the device of rank 0, takes the place of the first n token ids on every rank. A shape
        that was captured runs as a CUDA graph.
        """
        self._make_ready()
        drawn = self._drawn_on_rank_0(command, drawn)
        layers = layers_of(command)
        replayed = self._graphs.replay(command, drawn, layers)
        self.used_graph = replayed is not None
        if replayed is not None:
            return self.model.logits(replayed.hidden, replayed.logit_indices), replayed.states
        batch = self._inputs_of(command, drawn)
        return self.model.run(batch, self.kv_cache, layers)

    def _drawn_on_rank_0(self, command: WorkerCommand, drawn: torch.Tensor | None) -> torch.Tensor | None:
        """The tokens [n] int32 of a command that only rank 0 knows; None for other commands."""
        if command.operation != Operation.FORWARD_DRAWN:
            return None
        _, num_drawn = shape_of(command)
        return broadcast_token_ids(self.model.communicator, drawn, num_drawn, self.device)

    def _make_ready(self) -> None:
        """Make ready for prompts that no graph takes; what the library prepares is the thread's own."""
        if self._ready_in == (thread := threading.get_ident()):
            return
        self._ready_in, part = thread, self.model.part
        if self._graph_limits.forward_tokens > self._graph_limits.max_tokens:
            prepare_prompts(
                part.num_heads, part.num_kv_heads, part.head_dim, dtype=self.model.dtype, device=self.device
            )

    def _inputs_of(self, command: WorkerCommand, drawn: torch.Tensor | None) -> DeviceBatch:
        """Inputs of a forward without a graph."""
        if not self.is_on_gpu:
            batch = batch_of(command, has_states=self._frame.has_states)
            return inputs_on_cpu(batch, self._frame, self.model.dtype)
        numbers = to_device(command.numbers, self.device)
        if drawn is not None:
            numbers[: len(drawn)].copy_(drawn)
        shape, num_logits = shape_of(command)
        return unpack(numbers, shape, self._frame, num_logits, spans=spans_in(command.numbers, shape))

    def capture(self, progress: CaptureProgress | None = None) -> None:
        """Capture forwards and draft loops as CUDA graphs; ``progress(done, total)`` counts them."""
        limits = capture_limits(self._graph_limits, self.device)
        least = None if self._ranks is None else self._ranks.least
        report = progress or _ignore_progress
        try:
            self.captured = capture_all(self._graphs, self.draft_loop, self.device, limits, report, least=least)
            if self.config.is_fallback and not self._graphs_agree():
                raise RuntimeError("a replayed forward gives other logits than its launches")
        except RuntimeError as error:
            if not self.config.is_fallback:
                raise
            self._graphs.clear()
            self.captured = None
            _log.warning(
                "%s runs without CUDA graphs: its code cannot be captured: %s", self.config.architecture, error
            )
        _log.info("CUDA graphs, %s", self.graph_coverage)

    def _graphs_agree(self) -> bool:
        """True if the tokens of a text, two alone and two together, get the same logits with and without a graph: code
        that is not ours may keep what it found while it was captured.
        """
        for first, stop in ((0, 1), (1, 2), (2, 4)):
            places = list(range(first, stop))
            batch = ForwardBatch(
                token_ids=places, positions=places, slots=places, context_lengths=[stop],
                page_tables=[page_table_of(range(-(-stop // self.page_size)))], query_starts=[0, len(places)],
                logit_indices=list(range(len(places))), page_copies=(),
            )  # fmt: skip
            shape = self.shape_for(BatchShape.of(batch))
            arguments = shape.num_rows, shape.num_tokens, shape.max_queries, len(places)
            command = WorkerCommand(Operation.FORWARD, arguments, pack(batch, shape))
            found = self.forward(command)[0].float()
            expected = self.model.run(self._inputs_of(command, None), self.kv_cache)[0].float()
            if not torch.allclose(found, expected, atol=_GRAPH_TOLERANCE * float(expected.abs().max()), rtol=0):
                return False
        return True

    def take_device(self) -> None:
        """Select the device for launches of this thread; CUDA's current device is per thread."""
        if self._cuda_index is not None:
            torch.cuda.set_device(self._cuda_index)

    def mark(self) -> Mark:
        """Mark behind all work that this thread has queued on the device."""
        return Mark(self.device)

    def wait(self) -> None:
        """Return when the device has done all queued work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _ignore_progress(done: int, total: int) -> None:
    """Discard progress."""
