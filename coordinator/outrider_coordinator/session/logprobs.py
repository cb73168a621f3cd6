"""Logprobs of output: from a target's candidates at a position to those of the emitted token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.batched import LogprobBatch
from outrider.errors import ProtocolError
from outrider.ports import Scores
from outrider.types import CandidateLogprobs, TokenLogprob


def emitted_logprobs(rows: Sequence[CandidateLogprobs], token_ids: Sequence[int]) -> tuple[TokenLogprob, ...]:
    """Logprobs of tokens, the first at the first position; ``ProtocolError`` if the target left one out."""
    return JointLogprobs(LogprobBatch.of([rows])).emitted(0, token_ids)


class JointLogprobs:
    """Logprobs of the scores of many sessions, read at once: arrays of one position take as long as all of these."""

    def __init__(self, batched: LogprobBatch | None, num_sessions: int = 1) -> None:
        """``batched``: of all sessions; None: scores came without."""
        batched = batched or LogprobBatch.nothing(num_sessions)
        self._edges = [0, *batched.num_positions.cumsum(dtype=np.int64).tolist()]
        self._own_edges = [0, *batched.counts.cumsum(dtype=np.int64).tolist()]
        self._top_edges = [0, *batched.top_counts.cumsum(dtype=np.int64).tolist()]
        self._ids, self._ranks = batched.token_ids.tolist(), batched.ranks.tolist()
        self._logprobs = batched.logprobs.tolist()
        self._tops = list(zip(batched.top_token_ids.tolist(), batched.top_logprobs.tolist(), strict=True))

    def emitted(self, place: int, token_ids: Sequence[int]) -> tuple[TokenLogprob, ...]:
        """Logprobs of new tokens of the session at this place, the first at its first position."""
        first, stop = self._edges[place : place + 2]
        if stop - first < len(token_ids):
            raise ProtocolError("scores came without the logprobs that were asked for")
        return tuple([self._at(first + index, token_id) for index, token_id in enumerate(token_ids)])

    def _at(self, position: int, token_id: int) -> TokenLogprob:
        start, stop = self._own_edges[position : position + 2]
        try:
            index = self._ids.index(token_id, start, stop)
        except ValueError:
            raise ProtocolError(f"scores hold no logprob of token {token_id}, which was emitted") from None
        top = tuple(self._tops[self._top_edges[position] : self._top_edges[position + 1]])
        return TokenLogprob(token_id, self._logprobs[index], self._ranks[index], top)


def prompt_logprobs(scores: Scores, prompt_token_ids: Sequence[int]) -> tuple[TokenLogprob | None, ...]:
    """One for each prompt token; the first has none."""
    if len(scores.prompt_logprobs) != len(prompt_token_ids) - 1:
        raise ProtocolError(
            f"scores hold prompt logprobs of {len(scores.prompt_logprobs)} tokens, not of {len(prompt_token_ids) - 1}"
        )
    return (None, *emitted_logprobs(scores.prompt_logprobs, prompt_token_ids[1:]))
