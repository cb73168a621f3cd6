"""Logprobs of output: from a target's candidates at a position to those of the emitted token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.batched import LogprobBatch
from outrider.errors import ProtocolError
from outrider.ports import Scores
from outrider.types import CandidateLogprobs, TokenLogprob

_MISSING = "scores came without the logprobs that were asked for"


def token_logprob(position: CandidateLogprobs, token_id: int) -> TokenLogprob:
    """The logprob of the emitted token and the most likely tokens; ``ProtocolError`` if the target left it out."""
    (found,) = np.nonzero(position.token_ids == token_id)
    if not found.size:
        raise ProtocolError(_left_out(token_id))
    index = int(found[0])
    top = tuple(zip(position.top_token_ids.tolist(), position.top_logprobs.tolist(), strict=True))
    return TokenLogprob(token_id, float(position.logprobs[index]), int(position.ranks[index]), top)


def emitted_logprobs(scores: Scores, token_ids: Sequence[int]) -> tuple[TokenLogprob, ...]:
    """The logprobs of a verdict's tokens, the first at position 0 of the scores."""
    if len(scores.logprobs) < len(token_ids):
        raise ProtocolError(_MISSING)
    return tuple(map(token_logprob, scores.logprobs, token_ids))


class JointLogprobs:
    """Logprobs of the scores of many sessions, read at once: arrays of one position take as long as all of these."""

    def __init__(self, batched: LogprobBatch) -> None:
        self._edges = [0, *batched.num_positions.cumsum(dtype=np.int64).tolist()]
        self._own_edges = [0, *batched.counts.cumsum(dtype=np.int64).tolist()]
        self._top_edges = [0, *batched.top_counts.cumsum(dtype=np.int64).tolist()]
        self._ids, self._ranks = batched.token_ids.tolist(), batched.ranks.tolist()
        self._logprobs = batched.logprobs.tolist()
        self._tops = list(zip(batched.top_token_ids.tolist(), batched.top_logprobs.tolist(), strict=True))

    def emitted(self, place: int, token_ids: Sequence[int]) -> tuple[TokenLogprob, ...]:
        """``emitted_logprobs`` of the session at this place."""
        first, stop = self._edges[place : place + 2]
        if stop - first < len(token_ids):
            raise ProtocolError(_MISSING)
        return tuple([self._at(first + index, token_id) for index, token_id in enumerate(token_ids)])

    def _at(self, position: int, token_id: int) -> TokenLogprob:
        start, stop = self._own_edges[position : position + 2]
        try:
            index = self._ids.index(token_id, start, stop)
        except ValueError:
            raise ProtocolError(_left_out(token_id)) from None
        top = tuple(self._tops[self._top_edges[position] : self._top_edges[position + 1]])
        return TokenLogprob(token_id, self._logprobs[index], self._ranks[index], top)


def _left_out(token_id: int) -> str:
    return f"scores hold no logprob of token {token_id}, which was emitted"


def prompt_logprobs(scores: Scores, prompt_token_ids: Sequence[int]) -> tuple[TokenLogprob | None, ...]:
    """One for each prompt token; the first has none."""
    if len(scores.prompt_logprobs) != len(prompt_token_ids) - 1:
        raise ProtocolError(
            f"scores hold prompt logprobs of {len(scores.prompt_logprobs)} tokens, not of {len(prompt_token_ids) - 1}"
        )
    found = zip(scores.prompt_logprobs, prompt_token_ids[1:], strict=True)
    return (None, *(token_logprob(position, token_id) for position, token_id in found))
