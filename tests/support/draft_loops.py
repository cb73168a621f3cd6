"""Draft loops on a CPU, where services draw token by token: one forward a step, and the references of the kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.kernels.draft_advance import LoopState, advance
from outrider.kernels.draft_sampling import DraftSink, make_sampler
from outrider.kernels.draft_sampling.layout import NUM_FIELDS
from outrider.model_executor.draft_loop import DraftingRules, DraftRow
from outrider.model_executor.draft_loop.batched import DraftBatch
from outrider.model_executor.draft_loop.in_flight import BatchInFlight
from outrider.model_executor.draft_loop.results import DrawnBatch, Draws, read_batch, read_draws
from outrider.model_executor.input_batch import ForwardRow
from outrider.model_executor.model_runner import ModelRunner

_RULES = DraftingRules()


class LoopedRunner(ModelRunner):
    """A runner of a draft that draws in loops, as on a GPU."""

    @property
    def drafting(self) -> DraftingRules:
        return _RULES

    @property
    def max_draft_rows(self) -> int:
        return 64

    def draft(self, rows: Sequence[DraftRow]) -> list[Draws]:
        return self.begin_draft(DraftBatch.of(rows)).draws()

    def begin_draft(self, batched: DraftBatch) -> BatchInFlight:
        return _Loop(self, batched)


class _Loop(BatchInFlight):
    """A loop that has run."""

    def __init__(self, runner: ModelRunner, batched: DraftBatch) -> None:
        self._arrays = batched
        num_rows, num_steps = len(batched.sequences), max(batched.num_drafts)
        numbers = [torch.zeros(num_rows + 1, dtype=torch.int32) for _ in range(5)]
        step, ids, positions, slots, contexts = (each[: num_rows if place else 1] for place, each in enumerate(numbers))
        parameters = torch.from_numpy(batched.words().copy())
        state = LoopState(step, positions, slots, contexts, parameters, torch.zeros_like(numbers[0]), ids[:0])
        self._records = torch.zeros(num_steps, num_rows, NUM_FIELDS, dtype=torch.int32)
        self._supports = torch.zeros(num_steps, num_rows, 2, _RULES.support_limit, dtype=torch.int32)
        sampler = make_sampler(runner.device, mass=_RULES.support_mass, limit=_RULES.support_limit)
        for sequence, length in zip(batched.sequences, batched.lengths, strict=True):
            runner.sequences.truncate(sequence, length)
        tokens = batched.texts
        for index in range(num_steps):
            own = [place for place, count in enumerate(batched.num_drafts) if count > index]
            logits = runner.forward([ForwardRow(batched.sequences[place], tokens[place], 1) for place in own])
            whole = torch.zeros(num_rows, logits.shape[-1])
            whole[own] = logits.float()
            sampler(whole, parameters, DraftSink(step, ids, self._records, self._supports))
            advance(state, runner.page_size)
            tokens = [[token_id] for token_id in ids.tolist()]

    def is_done(self) -> bool:
        return True

    def finish(self) -> DrawnBatch | list[Draws]:
        batched = self._arrays
        supports = self._supports.numpy() if batched.metadata.needs_evidence else None
        records = self._records.numpy()
        return read_batch(batched, records, supports) or read_draws(batched.rows(), records, supports)

    def draws(self) -> list[Draws]:
        return read_draws(self._arrays.rows(), self._records.numpy(), self._supports.numpy())

    def postprocess(self) -> None:
        """Sequences hold what was drawn, but for the last token, from the start."""
