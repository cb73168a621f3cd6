"""Proposals by prompt lookup: no model, no torch.

Owns the search: of all n from ``max_n`` down to ``min_n``, the first whose last n tokens stand somewhere earlier in the
text, at the earliest such place; what followed there is proposed. vLLM too takes the longest match within the bounds
and, among those, the earliest (``vllm/v1/spec_decode/ngram_proposer.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.config import DraftSettings
from outrider.errors import ConfigError
from outrider_draft.proposers.base import UNLIMITED_LENGTH, DraftTokens, ProposalRequest, Proposer
from outrider_draft.proposers.registry import LoadHooks, ServedProposer, without_kv


def load(settings: DraftSettings, hooks: LoadHooks) -> ServedProposer:
    """Prompt lookup, served."""
    return without_kv(NgramProposer.load(settings), settings, name="ngram")


class NgramProposer(Proposer):
    """Proposes what followed the same tokens earlier in the text."""

    def __init__(self, *, min_n: int, max_n: int, max_model_len: int = UNLIMITED_LENGTH) -> None:
        if min_n < 1:
            raise ConfigError("prompt_lookup_min", f"must be at least 1, not {min_n}")
        if max_n < min_n:
            raise ConfigError("prompt_lookup_max", f"must be at least prompt_lookup_min, {min_n}, not {max_n}")
        self.max_model_len = max_model_len
        self._min_n = min_n
        self._max_n = max_n

    @classmethod
    def load(cls, settings: DraftSettings) -> NgramProposer:
        """Proposer with the settings' bounds."""
        return cls(
            min_n=settings.prompt_lookup_min,
            max_n=settings.prompt_lookup_max,
            max_model_len=settings.max_model_len or UNLIMITED_LENGTH,
        )

    def propose(self, requests: Sequence[ProposalRequest]) -> Sequence[DraftTokens]:
        """Look up for every request."""
        return [self._look_up(request) for request in requests]

    def _look_up(self, request: ProposalRequest) -> DraftTokens:
        text = np.asarray(request.token_ids, dtype=np.int32)
        found = look_up(text, min_n=self._min_n, max_n=self._max_n, count=request.num_tokens)
        return DraftTokens(found.tolist())


def look_up(text: NDArray[np.int32], *, min_n: int, max_n: int, count: int) -> NDArray[np.int32]:  # [L] -> [<= count]
    """Up to ``count`` tokens that followed the earliest other occurrence of the longest repeated ending."""
    for n in range(min(max_n, len(text) - 1), min_n - 1, -1):
        start = _earliest(text, n)
        if start is not None:
            return text[start + n : start + n + count]
    return text[:0]


def _earliest(text: NDArray[np.int32], n: int) -> int | None:
    """First place of the last n tokens, if that is not at the end."""
    num_starts = len(text) - n
    hits = np.ones(num_starts, dtype=bool)
    for offset in range(n):
        hits &= text[offset : offset + num_starts] == text[num_starts + offset]
    found = int(hits.argmax())
    return found if hits[found] else None
