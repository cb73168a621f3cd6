"""A draft loop of columns that was launched, and what the sequences hold meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.kv_cache import KVCacheManager
from outrider.model_executor.draft_loop.columns import DraftColumns
from outrider.model_executor.draft_loop.loop import DraftLoop
from outrider.model_executor.draft_loop.plan import LoopShape
from outrider.model_executor.draft_loop.results import DrawnColumns, Draws, read_columns, read_draws
from outrider.model_executor.draft_loop.rows import UNKNOWN


class ColumnsInFlight:
    """A loop that runs. Its sequences hold what is appended, with zeros for what will be drawn."""

    def __init__(self, loop: DraftLoop, shape: LoopShape, columns: DraftColumns, manager: KVCacheManager) -> None:
        self._loop, self._shape, self._columns, self._manager = loop, shape, columns, manager
        heads = zip(columns.texts, columns.num_drafts, strict=True)
        tails = [ids + UNKNOWN[num_drafts - 1] for ids, num_drafts in heads]
        manager.replace_tails(columns.sequences, columns.lengths, tails)

    def finish(self) -> DrawnColumns | list[Draws]:
        """Wait for the draws: of all rows as columns, or row by row where one lacks a draw. The sequences then hold all
        drawn tokens but the last, or those before the first that failed.
        """
        columns = self._columns
        with torch.inference_mode():
            found = self._loop.results(self._shape, with_supports=columns.metadata.needs_evidence)
        drawn = read_columns(columns, *found) or read_draws(columns.rows(), *found)
        texts: Sequence[Sequence[int]] = (
            drawn.texts() if isinstance(drawn, DrawnColumns) else [draws.token_ids for draws in drawn]
        )
        heads = zip(texts, columns.num_drafts, strict=True)
        held = [token_ids[: num_drafts - 1] for token_ids, num_drafts in heads]
        self._manager.replace_tails(columns.sequences, columns.contexts, held)
        return drawn
