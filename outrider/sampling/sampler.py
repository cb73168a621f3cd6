"""Sampler: from a forward's logits to scores for a target, or to draft tokens for a draft.

One per model runner. ``begin_scoring`` starts the kernels, whose outcomes are read later; ``propose`` draws at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.kernels.device_stream import pinned_numbers
from outrider.kernels.launching import has_kernels
from outrider.kernels.scoring import warm_up
from outrider.kernels.token_mask import mask_tokens
from outrider.sampling.proposing import Drawn, propose
from outrider.sampling.rows import LogitRow, ScoreRequest
from outrider.sampling.scoring.fused import Scoring, begin_scoring
from outrider.sampling.scoring.row_scoring import RowScoring, ScoredRows
from outrider.sampling.support import DraftingRules
from outrider.structured_output import GrammarCompiler, MaskThreads, PositionMasks


class Sampler:
    """Scores and draws over logits of one vocabulary; ``rules`` say what draft tokens are drawn from."""

    def __init__(self, rules: DraftingRules) -> None:
        self.rules = rules
        self.grammars: GrammarCompiler | None = None
        """Compiles the grammars of sessions; None: the service has no tokenizer."""
        self._mask_threads = MaskThreads()

    def use_grammars(self, grammars: GrammarCompiler | None) -> None:
        """Compile grammars with this, from now on; prepares it, which takes up to a second."""
        self.grammars = grammars
        if grammars is not None:
            grammars.num_lexers = self._mask_threads.num_threads
            grammars.warm_up()

    def begin_masks(self, masks: Sequence[PositionMasks], *, is_awaited: bool = False) -> None:
        """Start to make the masks of different sessions, while the forward runs whose logits they are for.
        ``is_awaited``: they are needed next.
        """
        self._mask_threads.begin(masks, is_awaited=is_awaited)

    def begin_scoring(self, logits: torch.Tensor, requests: Sequence[ScoreRequest]) -> Scoring:
        """Start to score every request's K+1 positions over ``logits`` [R, V] of any floating type."""
        return begin_scoring(logits, requests)

    @torch.inference_mode()
    def begin_rows(self, logits: torch.Tensor, scored: ScoredRows) -> RowScoring:
        """Start to score the K+1 positions of each session of a running batch over ``logits`` [R, V] of any floating
        type.
        """
        return RowScoring(logits, scored)

    def propose(self, logits: torch.Tensor, rows: Sequence[LogitRow]) -> list[Drawn]:
        """Draw one token for each row of ``logits`` [N, V] float32."""
        rules = self.rules
        return propose(logits, rows, rules)

    @torch.inference_mode()
    def warm_up(self, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Compile what any batch of sessions may need to be scored, on a GPU."""
        if has_kernels(device):
            logits = torch.zeros(1, vocab_size, dtype=dtype, device=device)
            warm_up(logits)
            self._mask_threads.make_words = pinned_numbers
            words = torch.zeros(1, -(-vocab_size // 32), dtype=torch.int32, device=device)
            mask_tokens(logits, words[0, :1], words)
