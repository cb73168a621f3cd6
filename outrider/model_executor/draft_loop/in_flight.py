"""A draft loop of arrays that was launched, and what the sequences hold meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.kernels.device_stream import Mark
from outrider.kv_cache import KVCacheManager
from outrider.model_executor.draft_loop.batched import DraftBatch
from outrider.model_executor.draft_loop.loop import DraftLoop
from outrider.model_executor.draft_loop.plan import LoopShape
from outrider.model_executor.draft_loop.results import DrawnBatch, Draws, read_batch, read_draws
from outrider.model_executor.draft_loop.rows import UNKNOWN


class BatchInFlight:
    """A loop that runs. Its sequences hold what is appended, with zeros for what will be drawn, or nothing of that."""

    def __init__(
        self,
        loop: DraftLoop,
        shape: LoopShape,
        batched: DraftBatch,
        manager: KVCacheManager,
        *,
        keeps_drafts: bool = True,
    ) -> None:
        """``keeps_drafts``: sequences hold drawn tokens afterwards, whose KV is that of committed ones."""
        self._loop, self._shape, self._arrays, self._manager = loop, shape, batched, manager
        self._keeps_drafts = keeps_drafts
        self._drawn: DrawnBatch | list[Draws] = []
        self._mark: Mark | None = None
        tails = batched.texts
        if keeps_drafts:
            heads = zip(batched.texts, batched.num_drafts, strict=True)
            tails = [ids + UNKNOWN[num_drafts - 1] for ids, num_drafts in heads]
        manager.replace_tails(batched.sequences, batched.lengths, tails)

    def is_done(self) -> bool:
        """True if ``finish`` would return without waiting. First called before anything else is queued."""
        if self._mark is None:
            self._mark = self._loop.mark()
        return self._mark.is_reached()

    def finish(self) -> DrawnBatch | list[Draws]:
        """Wait for the draws: of all rows as arrays, or row by row where one lacks a draw. Then ``postprocess`` is to
        be called, before the sequences are used.
        """
        batched = self._arrays
        with torch.inference_mode():
            found = self._loop.results(self._shape, with_supports=batched.metadata.needs_evidence)
        self._drawn = read_batch(batched, *found) or read_draws(batched.rows(), *found)
        return self._drawn

    def draws(self) -> list[Draws]:
        """``finish`` and ``postprocess`` for rows whose evidence may be of several forms: the draws row by row."""
        rows = self._arrays.rows()
        with torch.inference_mode():
            found = self._loop.results(self._shape, with_supports=any(row.metadata.needs_evidence for row in rows))
        self._drawn = drawn = read_draws(rows, *found)
        self.postprocess()
        return drawn

    def postprocess(self) -> None:
        """Say what the ids were that there was room for: sequences that keep drafts then hold all but the last, or the
        ones before the first that failed. Where none failed, they hold as many pages as before.
        """
        batched, drawn = self._arrays, self._drawn
        if self._keeps_drafts:
            texts: Sequence[Sequence[int]] = (
                drawn.texts() if isinstance(drawn, DrawnBatch) else [draws.token_ids for draws in drawn]
            )
            heads = zip(texts, batched.num_drafts, strict=True)
            held = [token_ids[: num_drafts - 1] for token_ids, num_drafts in heads]
            self._manager.replace_tails(batched.sequences, batched.contexts, held)
