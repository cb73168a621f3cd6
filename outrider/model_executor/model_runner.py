"""Model runner: one rank's model with its KV cache, from rows of token ids to logits and to draft tokens.

A forward is checked and planned (``input_batch``), laid out as a ``WorkerCommand``, published to the ranks that share
the model, and run: as a CUDA graph where its shape was captured, else eagerly. A draft loop is planned, published and
run in the same way. Other ranks call ``run`` with what rank 0 published. Not thread-safe: one thread calls it.

What sessions are, and who is served when, is ``outrider.serving``'s.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from outrider.errors import ConfigError
from outrider.kernels.device_stream import to_device
from outrider.kernels.launching import has_kernels, num_processors
from outrider.kernels.paged_attention.device_plan import num_counters
from outrider.kv_cache import KVCacheManager, KVSequence, PageCopy, PagePool
from outrider.model_executor.cuda_graphs import Captured, CaptureProgress, ForwardGraphs, capture_all
from outrider.model_executor.device_inputs import BatchFrame, BatchShape, inputs_on_cpu, unpack
from outrider.model_executor.draft_loop import DraftingRules, DraftRow, check_draft_rows
from outrider.model_executor.draft_loop.loop import DraftLoop
from outrider.model_executor.draft_loop.plan import loop_of, plan_draft
from outrider.model_executor.draft_loop.results import Draws, read_draws
from outrider.model_executor.graph_coverage import describe_coverage
from outrider.model_executor.graph_shapes import DEFAULT_LIMITS, GraphLimits
from outrider.model_executor.input_batch import ForwardBatch, ForwardRow, TokenLimits, check_rows, plan_checked
from outrider.model_executor.kv_cache_sizing import graph_bytes, naming_what_lacks
from outrider.model_executor.kv_cache_tensors import KVCacheTensors
from outrider.model_executor.layers.contract import DeviceBatch
from outrider.model_executor.loader.model import LoadedModel, LoadFormat, Ranks, load_model
from outrider.model_executor.loader.weights import Progress
from outrider.model_executor.models import AttentionWindow
from outrider.model_executor.worker_commands import (
    Operation,
    WorkerCommand,
    batch_of,
    capture_command,
    copies_of,
    copy_command,
    forward_command,
    layers_of,
    shape_of,
)
from outrider.sampling.sampler import Sampler

_log = logging.getLogger(__name__)

_WARM_UP_TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 9)
_GPU_WARM_UP_TOKENS = (1, 2, 5, 9, 512)
"""The last are not captured: they find kernels tiled for as many queries as there can be."""


class ModelRunner:
    """Model runner of one rank: decoder, KV cache, CUDA graphs, sampler and draft loop.

    ``sequences`` manages the KV sequences; ``forward`` appends tokens to them and returns logits.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        drafting: DraftingRules | None = None,
        graphs: GraphLimits = DEFAULT_LIMITS,
        ranks: Ranks | None = None,
        prefix_caching: bool = True,
        hidden_state_layers: Sequence[int] = (),
    ) -> None:
        """``drafting``: rules of draft sampling, with draft loops on a GPU; ``graphs``: limits of the CUDA graphs.

        Graphs return the states of ``hidden_state_layers``.
        """
        model = loaded.model
        self.model, self.config = model, model.config
        self.page_size, self.max_model_len = loaded.page_size, loaded.max_model_len
        """No sequence may hold more tokens than ``max_model_len``."""
        self.kv_cache = KVCacheTensors(
            model.kv_cache_layout, loaded.num_pages * loaded.page_size, dtype=model.dtype, device=model.device
        )
        pool = PagePool(loaded.num_pages, loaded.page_size)
        self.sequences = KVCacheManager(pool, prefix_caching=prefix_caching)
        self.sampler = Sampler(drafting or DraftingRules())
        self.is_on_gpu = has_kernels(model.device)
        """Whether kernels run: on a GPU, or in Triton's interpreter for tests."""
        self.num_forwards = 0
        """Forwards since loading, without the warm-up."""
        self.captured: Captured | None = None
        """Captured graphs; None before ``capture`` and where nothing is captured."""
        self._limits = TokenLimits(self.max_model_len, self.config.vocab_size)
        self._graph_limits, self._ranks = graphs, ranks
        counters = torch.zeros(num_counters(num_processors(model.device)), dtype=torch.int32, device=model.device)
        self._frame = BatchFrame(self.page_size, model.kv_cache_layout.windows, counters, model.kv_cache_layout.sinks)
        pages_per_row = -(-self.max_model_len // self.page_size)
        self._graphs = ForwardGraphs(
            model, self.kv_cache, self._frame, pages_per_row=pages_per_row, limits=graphs, layers=hidden_state_layers
        )
        self._draft_loop = (
            DraftLoop(model, self.kv_cache, self._frame, drafting, pages_per_row=pages_per_row, limits=graphs)
            if drafting is not None and drafting.in_loops and self.is_on_gpu
            else None
        )

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
        attention_window: AttentionWindow | None = None,
        hidden_state_layers: Sequence[int] = (),
    ) -> ModelRunner:
        """Load a model folder, as ``load_model`` does.

        With ``ranks`` this process loads its part, and every other rank loads its own at the same time.
        """
        loaded = load_model(
            Path(folder),
            device=device,
            dtype=dtype,
            page_size=page_size,
            num_pages=num_pages,
            kv_cache_bytes=kv_cache_bytes,
            gpu_memory_utilization=gpu_memory_utilization,
            max_model_len=max_model_len,
            max_sequences=graphs.max_sequences,
            load_format=load_format,
            graph_memory_bytes=graphs.memory_bytes,
            progress=progress,
            ranks=ranks,
            attention_window=attention_window,
        )
        with torch.inference_mode(), naming_what_lacks(loaded.model.device):
            return cls(
                loaded, drafting=drafting, graphs=graphs, ranks=ranks, prefix_caching=prefix_caching,
                hidden_state_layers=hidden_state_layers,
            )  # fmt: skip

    @property
    def device(self) -> torch.device:
        """Device of weights, cache and logits."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights and cache."""
        return self.model.dtype

    @property
    def tensor_parallel_size(self) -> int:
        """Number of processes that share the model."""
        return self.model.shard.size

    @property
    def capture_seconds(self) -> float:
        """Seconds that the warm-up spent on CUDA graphs."""
        return 0.0 if self.captured is None else self.captured.seconds

    @property
    def drafting(self) -> DraftingRules | None:
        """Rules of ``draft``; None if ``draft`` is not available: on a CPU, or without draft loops."""
        return None if self._draft_loop is None else self._draft_loop.rules

    @property
    def takes_drawn(self) -> bool:
        """Whether ``forward_drawn`` is available: on one GPU, because other ranks do not have the drawn tokens."""
        return self.is_on_gpu and self._publish is None

    def close(self) -> None:
        """End the other ranks, if any. The runner cannot be used afterwards. Idempotent."""
        if self._ranks is not None:
            self._ranks.close()

    # Forwards

    def forward(self, rows: Sequence[ForwardRow], *, as_computed: bool = False) -> torch.Tensor:
        """Append each row's tokens to its sequence in one forward, and return logits [N, V], row by row.

        Logits are float32, or with ``as_computed`` of the weights' type, which saves a copy.

        Raises ``InvalidRequestError``, and changes nothing, for an id out of range, a length past the reservation or
        past ``max_model_len``, or a sequence in two rows. If the device fails, sequences keep their former lengths.
        """
        if not rows:
            return torch.empty(0, self.config.vocab_size, device=self.device)
        check_rows(self.sequences, rows, self._limits)
        logits, _ = self._append(rows)
        return logits if as_computed else logits.float()

    def forward_with_states(
        self, rows: Sequence[ForwardRow], layers: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``forward``, its logits of the weights' type, and the hidden states of ``layers`` of all tokens, row by row:
        [T, F] of the weights' type, F the layers' states side by side; see ``Decoder.layer_states``. The states are
        valid until the next forward begins.
        """
        check_rows(self.sequences, rows, self._limits)
        logits, states = self._append(rows, layers=layers)
        return logits, states[: sum(len(row.token_ids) for row in rows)]  # a captured shape may have more

    def forward_drawn(self, sequences: Sequence[KVSequence], drawn: torch.Tensor) -> torch.Tensor:
        """``forward`` of one more token per sequence that is only on the device: ``drawn`` [R] int32.

        Returns logits [R, V] of the weights' type. Numbers out of range are clamped. The sequences hold a 0 in place
        of the token until they are truncated and given it. Raises as ``forward`` does.
        """
        if not self.takes_drawn:
            raise ValueError(f"nothing is drawn on {self.device} that is not known here")
        rows = [ForwardRow(sequence, (0,)) for sequence in sequences]
        check_rows(self.sequences, rows, self._limits)
        return self._append(rows, drawn)[0]

    def _append(
        self, rows: Sequence[ForwardRow], drawn: torch.Tensor | None = None, layers: Sequence[int] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Forward of checked rows: logits, and hidden states, an empty tensor without ``layers``."""
        self.take_device()
        lengths = [row.sequence.length for row in rows]
        try:
            with torch.inference_mode():
                found = self._execute(plan_checked(self.sequences, rows), drawn, layers)
        except BaseException:
            self._restore(rows, lengths)
            raise
        self.num_forwards += 1
        return found

    def _execute(
        self, batch: ForwardBatch, drawn: torch.Tensor | None, layers: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._copy_pages(batch.page_copies)
        command = forward_command(batch, self._graphs.shape_for(BatchShape.of(batch)), layers)
        self._tell(command)
        return self._run_forward(command, None if drawn is None else drawn.clamp(0, self.config.vocab_size - 1))

    def _run_forward(
        self, command: WorkerCommand, drawn: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [N, V], of the weights' type, and the hidden states [T, F] that the command asks for; ``drawn`` takes
        the place of the first token ids.
        """
        layers = layers_of(command)
        if (replayed := self._graphs.replay(command, drawn, layers)) is not None:
            return self.model.logits(replayed.hidden, replayed.logit_indices), replayed.states
        batch = self._inputs_of(command, drawn)
        hidden, states = self.model.layer_states(batch, self.kv_cache, layers)
        return self.model.logits(hidden, batch.logit_indices), states

    def _inputs_of(self, command: WorkerCommand, drawn: torch.Tensor | None) -> DeviceBatch:
        """Inputs of a forward without a graph."""
        if not self.is_on_gpu:
            return inputs_on_cpu(batch_of(command), self._frame, self.dtype)
        numbers = to_device(command.numbers, self.device)
        if drawn is not None:
            numbers[: len(drawn)].copy_(drawn)
        shape, num_logits = shape_of(command)
        return unpack(numbers, shape, self._frame, num_logits)

    # Draft loops

    def draft(self, rows: Sequence[DraftRow]) -> list[Draws]:
        """Append each row's tokens and draw its draft tokens in order, in loops of at most ``max_rows`` rows.

        The requests must fit (``fits_loop``). A row's draws end before the first that failed. Its sequence then holds
        the appended tokens and the drawn ones; without a failure, all drawn ones but the last. Raises as ``forward``
        does.
        """
        if self._draft_loop is None:
            raise ConfigError("drafting", "this runner was loaded without draft loops")
        check_draft_rows(self.sequences, rows, self._limits)
        self.take_device()
        most = self._draft_loop.max_rows
        groups = [rows[start : start + most] for start in range(0, len(rows), most)]
        return [draws for group in groups for draws in self._draft(self._draft_loop, group)]

    def _draft(self, loop: DraftLoop, rows: Sequence[DraftRow]) -> list[Draws]:
        lengths = [row.sequence.length for row in rows]
        try:
            with torch.inference_mode():
                plan = plan_draft(self.sequences, rows)
                self._copy_pages(plan.page_copies)
                command = loop.command_for(plan)
                self._tell(command)
                loop.run(loop_of(command), command.numbers)
                with_supports = any(row.terms.needs_evidence for row in rows)
                found = loop.results(loop_of(command), with_supports=with_supports)
        except BaseException:
            self._restore(rows, lengths)
            raise
        drawn = read_draws(rows, *found)
        for row, length, draws in zip(rows, lengths, drawn, strict=True):
            # The manager learns what the ids were that it made room for.
            appended = draws.token_ids[: row.num_drafts - 1]
            self.sequences.amend(row.sequence, length + len(row.token_ids), appended)
        self.num_forwards += plan.num_steps
        return drawn

    # Commands, which other ranks run too

    def run(self, command: WorkerCommand) -> None:
        """Run a command of rank 0; the results stay on this rank."""
        if command.operation == Operation.FORWARD:
            self._run_forward(command)
        elif command.operation == Operation.COPY_PAGES:
            self.kv_cache.copy_pages(copies_of(command), page_size=self.page_size)
        elif command.operation == Operation.DRAFT and self._draft_loop is not None:
            self._draft_loop.run(loop_of(command), command.numbers)
        elif command.operation == Operation.CAPTURE and self.is_on_gpu:
            self._capture(_ignore_progress)
        else:
            raise ValueError(f"there is no command {command.operation} on {self.device}")

    def take_device(self) -> None:
        """Select the device for launches of this thread; CUDA's current device is per thread."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self._frame.counters.device)  # unlike the setting's name, this has an index

    def wait(self) -> None:
        """Return when the device has done all queued work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @property
    def _publish(self) -> Callable[[WorkerCommand], None] | None:
        return None if self._ranks is None else self._ranks.publish

    def _tell(self, command: WorkerCommand) -> None:
        if (publish := self._publish) is not None:
            publish(command)

    def _copy_pages(self, copies: tuple[PageCopy, ...]) -> None:
        """Copy pages; every source is read before any destination is written."""
        if copies:
            self._tell(command := copy_command(copies))
            self.run(command)
            self.sequences.confirm_copies()

    def _restore(self, rows: Sequence[ForwardRow | DraftRow], lengths: Sequence[int]) -> None:
        for row, length in zip(rows, lengths, strict=True):
            if row.sequence.length > length:
                self.sequences.truncate(row.sequence, length)

    # Warm-up

    def warm_up(self, progress: CaptureProgress | None = None) -> None:
        """Allocate, compile, tune and capture before the first request; changes no visible state."""
        self.capture(progress)
        count = self.num_forwards
        longest = min(self.max_model_len, self.sequences.pool.num_free * self.page_size)
        lengths = _GPU_WARM_UP_TOKENS if self.is_on_gpu else _WARM_UP_TOKENS
        sequence = self.sequences.open(min(longest, max(lengths)))
        for num_tokens in lengths:
            if num_tokens <= sequence.max_length:
                self.forward([ForwardRow(sequence, [0] * num_tokens, num_tokens)])
                self.sequences.truncate(sequence, 0)
        self.sequences.release(sequence)
        self.num_forwards = count

    def capture(self, progress: CaptureProgress | None = None) -> None:
        """On a GPU, capture forwards and draft loops as CUDA graphs; ``progress(done, total)`` counts them."""
        if self.is_on_gpu:
            self.take_device()
            with torch.inference_mode(), naming_what_lacks(self.device):
                self._tell(capture_command())
                self._capture(progress or _ignore_progress)

    def _capture(self, progress: CaptureProgress) -> None:
        limit = graph_bytes(self._graph_limits.memory_bytes, self.device)
        self.captured = capture_all(self._graphs, self._draft_loop, self.device, limit, progress)
        _log.info("CUDA graphs, %s", self.graph_coverage)

    @property
    def graph_coverage(self) -> str:
        """Forwards with and without a CUDA graph, in words."""
        return describe_coverage(self._graph_limits, self._graphs.shapes)


def _ignore_progress(done: int, total: int) -> None:
    """Discard progress."""
