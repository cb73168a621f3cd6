"""A target's model of a few numbers, whose device does what it is given in the order in which it was given it.

What a text's next token is, is told from what lies in the slots of the cache: pages that go to somebody else too soon,
a text that was cut wrongly and a token that was never told show in the logits.
"""

from __future__ import annotations

import itertools
import random
import string
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch

from outrider.kv_cache import KVCacheManager, PagePool
from outrider.model_executor.input_batch import ForwardBatch, ForwardRow, plan_forward
from outrider.model_executor.row_batch import RowBatch
from outrider.ports import Score, Scores
from outrider.prefix_hash import prefix_hash
from outrider.sampling.parameters import needs_adjusting
from outrider.sampling.rows import ScoreRequest
from outrider.sampling.scoring.fused import Scoring
from outrider.sampling.scoring.row_scoring import NextTokens, RowScoring
from outrider.sampling.scoring.score import score
from outrider.serving.decode.lookahead_step import LookaheadStep
from outrider.serving.decode.step import DecodeBatch
from outrider.serving.executor import QueuedForward
from outrider.structured_output import MaskThreads
from outrider_target.executor import TargetSession, next_token
from outrider_target.jobs import ScoreJob
from outrider_target.scoring_forward import ScoringForward
from tests.structured_output.vocabularies import letters
from tests.support.async_target import AsyncTargetExecutor

VOCAB_SIZE, MAX_LENGTH, PAGE_SIZE = 40, 48, 4
_ONE_FAILS_IN = 197


class Runner:
    """Runner with the parts of a ``ModelRunner`` that the executor needs."""

    max_model_len = MAX_LENGTH
    takes_drawn = True
    used_graph = False
    device = torch.device("cpu")

    def __init__(self, num_pages: int) -> None:
        self.sequences = KVCacheManager(PagePool(num_pages, PAGE_SIZE))
        self.config = SimpleNamespace(vocab_size=VOCAB_SIZE, num_layers=0)
        self.sampler = SimpleNamespace(
            grammars=letters(string.ascii_letters[:29] + string.digits),
            begin_scoring=begin_drawing,
            begin_rows=RowDrawing,
            begin_masks=MaskThreads().begin,
        )
        self._slots = [-1] * (num_pages * PAGE_SIZE)

    def forward(self, rows: Sequence[ForwardRow]) -> torch.Tensor:
        batch = plan_forward(self.sequences, rows)
        return self._run(batch, batch.token_ids)

    def forward_batch(
        self, columns: RowBatch, layers: Sequence[int] = (), *, drawn: torch.Tensor | None = None, plan: None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for sequence, length in zip(columns.sequences, columns.lengths.tolist(), strict=True):
            self.sequences.truncate(sequence, length)
        wanted = columns.num_drafts + 1 if columns.num_logits is None else columns.num_logits
        heads = zip(columns.sequences, columns.tails(), wanted.tolist(), strict=True)
        batch = plan_forward(self.sequences, [ForwardRow(*head) for head in heads])
        token_ids = batch.token_ids if drawn is None else drawn.clamp(0, VOCAB_SIZE - 1).tolist()
        return self._run(batch, token_ids), torch.empty(0, 0)

    def _run(self, batch: ForwardBatch, token_ids: Sequence[int]) -> torch.Tensor:
        indices = range(PAGE_SIZE)
        read = {copy: [self._slots[copy[0] * PAGE_SIZE + place] for place in indices] for copy in batch.page_copies}
        for (_, destination), content in read.items():
            self._slots[destination * PAGE_SIZE : (destination + 1) * PAGE_SIZE] = content
        self.sequences.confirm_copies()
        for slot, token_id in zip(batch.slots, token_ids, strict=True):
            self._slots[slot] = token_id
        texts: list[list[int]] = []
        for pages, (start, stop) in zip(batch.page_tables, itertools.pairwise(batch.query_starts), strict=True):
            held = [self._slots[page * PAGE_SIZE + place] for page in pages for place in range(PAGE_SIZE)]
            texts += [held[: position + 1] for position in batch.positions[start:stop]]
        return torch.cat([torch.empty(0, VOCAB_SIZE), *(_logits(texts[i]) for i in batch.logit_indices)])


def _logits(text: Sequence[int]) -> torch.Tensor:  # [1, V]
    _, known = prefix_hash([1 + token_id for token_id in text])
    choose = random.Random(known)
    logits = torch.tensor([[choose.gauss(0, 2) for _ in range(VOCAB_SIZE)]])
    return logits * torch.nan if known % _ONE_FAILS_IN == 0 else logits


class Drawing(Scoring):
    """Says at once what follows, as a GPU would, and is sometimes wrong, as where the kernels cannot tell."""

    choose = random.Random()

    def drawn(self) -> torch.Tensor | None:
        requests = self._requests
        if any(needs_adjusting(one.open) or one.open.num_logprobs is not None for one in requests) or self._has_drafts:
            return None
        self._words = [self._drawn(outcome.form) for outcome in score(self._logits, requests)]
        return torch.tensor(self._words, dtype=torch.int32)

    def launch_all(self) -> bool:
        return not any(needs_adjusting(one.open) or one.open.num_logprobs is not None for one in self._requests)

    def drawn_token(self, index: int) -> int:
        return self._words[index]

    def _drawn(self, form: object) -> int:
        token_id = None if form is None else next_token(form)  # type: ignore[arg-type]
        return self.choose.randint(-9, 99) if token_id is None or self.choose.random() < 0.05 else token_id


class RowDrawing(RowScoring):
    """Drawing for the rows of a decode step."""

    _words: Sequence[int] = ()

    def drawn(self) -> torch.Tensor:
        choose, found = Drawing.choose, super().next_tokens().token_ids.tolist()
        self._words = [choose.randint(-9, 99) if choose.random() < 0.01 else token_id for token_id in found]
        return torch.tensor(self._words, dtype=torch.int32)

    def next_tokens(self) -> NextTokens:
        found = super().next_tokens()
        return replace(found, drawn=np.array(self._words)) if self._words else found


def begin_drawing(logits: torch.Tensor, requests: Sequence[ScoreRequest]) -> Drawing:
    return Drawing(logits, requests, fused=False)


class CountingExecutor(AsyncTargetExecutor):
    """Counts the items that it foresaw, too."""

    num_prepared = num_plain = 0
    """Items, and rows of plain steps."""
    _confirms = False

    def next_step(self, session: TargetSession, answer: Scores) -> Score | None:
        item = super().next_step(session, answer)
        self.num_prepared += item is not None and not self._confirms
        return item

    def start_step(
        self, step: LookaheadStep | DecodeBatch, batch: Sequence[tuple[ScoreJob, int]] = ()
    ) -> ScoringForward:
        self.num_plain += len(step) if isinstance(step, LookaheadStep) else 0
        return super().start_step(step, batch)

    def resolve(
        self, queued: QueuedForward[ScoreJob, Scores], index: int, session: TargetSession, answer: Scores
    ) -> Score | None:
        self._confirms = True
        item = super().resolve(queued, index, session, answer)
        self._confirms = False
        return item
