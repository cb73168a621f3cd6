"""Model runner: from rows of token ids to logits and to draft tokens.

Owns the KV sequences and the sampler. A forward is checked and planned (``input_batch``), laid out as a
``WorkerCommand``, sent to the other ranks of the model, and launched by this rank's ``Worker``. A draft loop goes the
same way. Not thread-safe: one thread calls it.

Sessions, and the order in which they are served, are ``outrider.serving``'s.

Shape letters: ``T`` tokens of a forward, ``N`` positions that get logits, ``R`` rows, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

import torch

from outrider.errors import ConfigError
from outrider.kv_cache import KVCacheManager, KVSequence, PageCopy, PagePool, StateRows, StateSlots, WindowPages
from outrider.kv_cache.state_slots import DEFAULT_SNAPSHOT_INTERVAL
from outrider.model_executor.cuda_graphs import CaptureProgress
from outrider.model_executor.draft_loop import DraftingRules, DraftRow, check_draft_rows
from outrider.model_executor.draft_loop.batched import DraftBatch, plan_draft_batch, restore_sequences
from outrider.model_executor.draft_loop.in_flight import BatchInFlight
from outrider.model_executor.draft_loop.plan import loop_of
from outrider.model_executor.draft_loop.results import Draws
from outrider.model_executor.graph_shapes import DEFAULT_LIMITS, GraphLimits
from outrider.model_executor.input_batch import ForwardRow, TokenLimits, check_rows
from outrider.model_executor.kv_cache_sizing import explaining_out_of_memory
from outrider.model_executor.loader.model import LoadOptions, Ranks
from outrider.model_executor.row_batch import BatchLayout, RowBatch, plan_rows
from outrider.model_executor.worker import Worker
from outrider.model_executor.worker_commands import (
    WorkerCommand,
    capture_command,
    copy_command,
    forward_command,
    state_copy_command,
    window_commands,
)
from outrider.sampling.sampler import Sampler

_WARM_UP_TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 9)
_GPU_WARM_UP_TOKENS = (1, 2, 5, 9, 512)
"""The last are not captured: they find kernels tiled for as many queries as there can be."""


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """A forward that is laid out, and for which its sequences have pages."""

    sequences: Sequence[KVSequence]  # [B]
    layout: BatchLayout
    command: WorkerCommand


class ModelRunner:
    """Model runner of rank 0: KV sequences, sampler, and the forwards and draft loops over all ranks.

    ``sequences`` manages the KV sequences; ``forward`` appends tokens to them and returns logits.
    """

    def __init__(
        self,
        worker: Worker,
        *,
        drafting: DraftingRules | None = None,
        ranks: Ranks | None = None,
        prefix_caching: bool = True,
        snapshot_interval: int = DEFAULT_SNAPSHOT_INTERVAL,
    ) -> None:
        """``drafting``: rules of draft sampling; ``ranks``: the other ranks of the model, which get the commands;
        ``snapshot_interval``: that of ``StateSlots``.
        """
        self.worker, self._ranks = worker, ranks
        self.config, self.page_size, self.max_model_len = worker.config, worker.page_size, worker.max_model_len
        self.kv_cache = worker.kv_cache
        pool = PagePool(worker.num_pages, worker.page_size)
        layout = worker.kv_cache.layout
        states = None
        if layout.states is not None:
            states = StateSlots(
                worker.kv_cache.num_state_slots, layout.states.spec, page_size=worker.page_size,
                prefix_caching=prefix_caching, snapshot_interval=snapshot_interval,
            )  # fmt: skip
        window = None
        if (reach := layout.window_reach) is not None and worker.num_window_pages:
            window = WindowPages(worker.num_window_pages, pool, reach, forward_tokens=worker.forward_tokens)
        self.sequences = KVCacheManager(
            pool, prefix_caching=prefix_caching, reach=layout.reach, states=states, window=window
        )
        self.sampler = Sampler(drafting or DraftingRules())
        self.num_forwards = 0
        """Forwards since loading, without the warm-up."""
        self._limits = TokenLimits(self.max_model_len, self.config.vocab_size)

    @classmethod
    def load(
        cls,
        folder: Path | str,
        *,
        drafting: DraftingRules | None = None,
        graphs: GraphLimits = DEFAULT_LIMITS,
        prefix_caching: bool = True,
        snapshot_interval: int = DEFAULT_SNAPSHOT_INTERVAL,
        hidden_state_layers: Sequence[int] = (),
        **options: Unpack[LoadOptions],
    ) -> ModelRunner:
        """Load a model folder, as ``load_model`` does.

        With ``ranks`` this process loads its part, and every other rank loads its own at the same time.
        """
        worker = Worker.load(
            folder, drafting=drafting, graphs=graphs, hidden_state_layers=hidden_state_layers, **options
        )
        ranks = options.get("ranks")
        return cls(
            worker, drafting=drafting, ranks=ranks, prefix_caching=prefix_caching, snapshot_interval=snapshot_interval
        )

    @property
    def device(self) -> torch.device:
        """Device of weights, cache and logits."""
        return self.worker.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights and cache."""
        return self.worker.model.dtype

    @property
    def batch_invariant(self) -> bool:
        """True if a token's results do not depend on what is computed with it."""
        return self.worker.model.batch_invariant

    @property
    def tensor_parallel_size(self) -> int:
        """Number of processes that share the model."""
        return self.worker.model.shard.size

    @property
    def drafting(self) -> DraftingRules | None:
        """Rules of ``draft``; None if ``draft`` is not available: on a CPU, or without draft loops."""
        return None if self.worker.draft_loop is None else self.worker.draft_loop.rules

    @property
    def max_draft_rows(self) -> int:
        """Rows of one draft loop; 0 without loops."""
        return 0 if self.worker.draft_loop is None else self.worker.draft_loop.max_rows

    @property
    def used_graph(self) -> bool:
        """True if the last forward, or every step of the last draft loop, was a captured one."""
        return self.worker.used_graph

    @property
    def takes_drawn(self) -> bool:
        """True if ``forward_batch`` takes tokens that are ``drawn``: on GPUs."""
        return self.worker.is_on_gpu

    def close(self) -> None:
        """End the other ranks, if any. The runner cannot be used afterwards. Idempotent."""
        if self._ranks is not None:
            self._ranks.close()

    # Forwards

    def forward(self, rows: Sequence[ForwardRow]) -> torch.Tensor:
        """Append each row's tokens to its sequence in one forward, and return logits [N, V] float32, row by row.

        Raises ``InvalidRequestError``, and changes nothing, for an id out of range, a length past the reservation or
        past ``max_model_len``, or a sequence in two rows. If the device fails, sequences keep their former lengths.
        """
        if not rows:
            return torch.empty(0, self.config.vocab_size, device=self.device)
        check_rows(self.sequences, rows, self._limits)
        logits, _ = self.forward_batch(RowBatch.of(rows))
        return logits.float()

    def plan_batch(self, batch: RowBatch, layers: Sequence[int] = (), *, is_drawn: bool = False) -> PlannedBatch:
        """Lay out ``forward_batch`` before all of the draft tokens are known, and take the KV pages. The forward has
        to be the next one; otherwise ``drop_plan`` comes first.
        """
        layout = plan_rows(self.sequences, batch)
        shape = self.worker.shape_for(layout.pattern.shape)
        return PlannedBatch(batch.sequences, layout, forward_command(layout, shape, layers, is_drawn=is_drawn))

    def drop_plan(self, plan: PlannedBatch) -> None:
        """Give back the KV pages of a plan that is not run."""
        self.sequences.undo_states(plan.sequences, plan.layout.states)
        self.sequences.release_reserved(plan.sequences)

    def forward_batch(
        self,
        batch: RowBatch,
        layers: Sequence[int] = (),
        *,
        drawn: torch.Tensor | None = None,
        plan: PlannedBatch | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the rows of a batch, which the caller has checked. Sequences may hold more than what is kept of them.

        Returns logits [N, V] of the weights' type, and the hidden states of ``layers`` of all tokens: [T, F], F the
        layers' states side by side; see ``Decoder.layer_states``. The states are valid until the next forward begins.

        ``drawn`` [B] int32: tokens that are only on the device, if each row has one. Numbers out of range are clamped.
        The sequences hold a 0 in place of the token until they are truncated and given it.

        ``plan``: that of the same batch and layers, but for the draft tokens.

        If the device fails, they are left with what is kept. ``ValueError`` unless ``takes_drawn``, if any are drawn.
        """
        if drawn is not None and not self.takes_drawn:
            raise ValueError(f"nothing is drawn on {self.device} that is not known here")
        self.worker.take_device()
        with torch.inference_mode():
            if plan is None:
                plan = self.plan_batch(batch, layers, is_drawn=drawn is not None)
            else:
                plan.layout.put_drafts(plan.command.numbers, batch.draft_token_ids)
            try:
                self._copy_pages(plan.layout.page_copies)
                self._copy_states(plan.layout.states)
                self._broadcast(plan.command)
                known = None if drawn is None else drawn.clamp(0, self.config.vocab_size - 1)
                logits, states = self.worker.forward(plan.command, known)
            except BaseException:
                self.sequences.lose_states(batch.sequences)
                self.sequences.replace_tails(batch.sequences, batch.lengths.tolist(), [()] * len(batch.lengths))
                raise
        # The device computes.
        self.sequences.replace_tails(batch.sequences, batch.lengths.tolist(), batch.tails())
        self.num_forwards += 1
        return logits, states[: len(plan.layout.token_ids)]

    def _copy_pages(self, copies: tuple[PageCopy, ...]) -> None:
        commands = [copy_command(copies)] if copies else []
        if self.sequences.window is not None:
            commands += window_commands(self.sequences.window)
        for command in commands:
            self._broadcast(command)
            self.worker.run(command)
        if commands:
            self.sequences.confirm_copies()

    def _copy_states(self, states: StateRows | None) -> None:
        if states is not None and states.copies and self.sequences.states is not None:
            command = state_copy_command(states.copies)
            self._broadcast(command)
            self.worker.run(command)
            self.sequences.states.confirm_copies(states.copies)

    def _broadcast(self, command: WorkerCommand) -> None:
        """Send a command to the other ranks, if any."""
        if self._ranks is not None and (publish := self._ranks.publish) is not None:
            publish(command)

    # Draft loops

    def draft(self, rows: Sequence[DraftRow]) -> list[Draws]:
        """Append each row's tokens and draw its draft tokens in order, in loops of at most ``max_rows`` rows.

        A row's draws end before the first that failed. Its sequence then holds
        the appended tokens and the drawn ones; without a failure, all drawn ones but the last. Raises as ``forward``
        does.
        """
        if (loop := self.worker.draft_loop) is None:
            raise ConfigError("drafting", "this runner was loaded without draft loops")
        check_draft_rows(self.sequences, rows, self._limits)
        groups = [rows[start : start + loop.max_rows] for start in range(0, len(rows), loop.max_rows)]
        return [draws for group in groups for draws in self.begin_draft(DraftBatch.of(group)).draws()]

    def begin_draft(self, batched: DraftBatch) -> BatchInFlight:
        """``draft`` in two halves, of rows that are arrays: as many as one loop takes, checked by the caller
        (``takes_batch``). Sequences may hold more than what is kept of them.
        """
        if (loop := self.worker.draft_loop) is None:
            raise ConfigError("drafting", "this runner was loaded without draft loops")
        self.worker.take_device()
        plan = plan_draft_batch(self.sequences, batched)
        try:
            with torch.inference_mode():
                self._copy_pages(plan.page_copies)
                self._copy_states(plan.states)
                command = loop.command_for(plan)
                self._broadcast(command)
                self.worker.run(command)
        except BaseException:
            restore_sequences(self.sequences, batched.sequences)
            raise
        self.num_forwards += plan.num_steps
        return BatchInFlight(loop, loop_of(command), batched, self.sequences)

    # Warm-up

    def warm_up(self, progress: CaptureProgress | None = None) -> None:
        """Allocate, compile, tune and capture before the first request; changes no visible state."""
        self.capture(progress)
        count = self.num_forwards
        longest = min(self.max_model_len, self.sequences.num_free * self.page_size)
        lengths = _GPU_WARM_UP_TOKENS if self.worker.is_on_gpu else _WARM_UP_TOKENS
        sequence = self.sequences.open(min(longest, max(lengths)))
        for num_tokens in lengths:
            if num_tokens <= sequence.max_length:
                self.forward([ForwardRow(sequence, [0] * num_tokens, num_tokens)])
                self.sequences.truncate(sequence, 0)
        if self.takes_drawn:
            drawn = torch.zeros(1, dtype=torch.int32, device=self.device)
            self.forward_batch(RowBatch.drawn([sequence]), drawn=drawn)
            self.sequences.truncate(sequence, 0)
        self.sequences.release(sequence)
        self.num_forwards = count

    def capture(self, progress: CaptureProgress | None = None) -> None:
        """Capture forwards and draft loops as CUDA graphs, on a GPU; ``progress(done, total)`` counts them."""
        if self.worker.is_on_gpu:
            self.worker.take_device()
            with torch.inference_mode(), explaining_out_of_memory(self.device):
                self._broadcast(capture_command())
                self.worker.capture(progress)
