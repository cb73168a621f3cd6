"""Logprobs of many sessions' scores are those of each by itself."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.batched import LogprobBatch
from outrider.errors import ProtocolError
from outrider.types import CandidateLogprobs, TokenLogprob
from outrider_coordinator.session.logprobs import JointLogprobs


def position(*token_ids: int, num_top: int = 2) -> CandidateLogprobs:
    own, top = np.array(token_ids, dtype=np.int32), np.arange(num_top, dtype=np.int32)
    return CandidateLogprobs(own, -own.astype(np.float32), own + 1, top, -top.astype(np.float32))


def alone(position: CandidateLogprobs, token_id: int) -> TokenLogprob:
    (index,) = np.flatnonzero(position.token_ids == token_id)
    top = tuple(zip(position.top_token_ids.tolist(), position.top_logprobs.tolist(), strict=True))
    return TokenLogprob(token_id, float(position.logprobs[index]), int(position.ranks[index]), top)


ROWS = [
    [position(3), position(4, 9, 7, num_top=0)],
    [],
    [position(3, num_top=5)],
    [position(8), position(8), position()],
]


def joint() -> JointLogprobs:
    batched = LogprobBatch.of(ROWS)
    assert batched is not None
    return JointLogprobs(batched)


@pytest.mark.parametrize(("place", "token_ids"), [(0, (3, 9)), (0, (3,)), (2, (3,)), (3, (8, 8)), (1, ())])
def test_emitted_tokens_have_the_logprobs_of_their_position(place: int, token_ids: tuple[int, ...]) -> None:
    expected = tuple(map(alone, ROWS[place], token_ids))
    assert joint().emitted(place, token_ids) == expected


@pytest.mark.parametrize(
    ("place", "token_ids", "message"),
    [
        (0, (4,), "no logprob of token 4"),
        (3, (8, 8, 8), "no logprob of token 8"),
        (2, (3, 8), "came without"),
        (1, (3,), "came without"),
    ],
)
def test_a_target_that_leaves_one_out_is_told(place: int, token_ids: tuple[int, ...], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        joint().emitted(place, token_ids)
