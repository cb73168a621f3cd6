"""Verdicts on direct proposals, which a target sends back to the draft before its answer reaches the coordinator.

Under the greedy and coupled rules a target knows from its own tokens which draft tokens are accepted. A verdict is a
hint: the coordinator judges, and its own command says which text a proposal continues. Little-endian on the socket.

Shape letters: ``B`` sessions.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from outrider.batched import U4, U8, AnswerBatch, Column
from outrider.limits import LINK_COMMANDS
from outrider.values import step_value

UNKNOWN = 0xFFFFFFFF
"""Next token of a verdict that a draft gives itself: all of its tokens are accepted, and it guesses what comes next."""
_HEAD = struct.Struct("<I")
_TYPES = (U8, U8, U4, U4, U4, U4)
_ROW_BYTES = sum(dtype.itemsize for dtype in _TYPES)


@step_value(frozen=True, slots=True)
class Verdicts:
    """Verdicts on the proposals of one step, in arrays."""

    sessions: Column  # [B] uint64
    generations: Column  # [B] uint64, of the ``Score`` that was answered
    base_lengths: Column  # [B] uint32, committed tokens before the proposal
    num_accepted: Column  # [B] uint32
    last_token_ids: Column  # [B] uint32, the last accepted draft token; any token where none was accepted
    next_token_ids: Column  # [B] uint32, the token after the accepted ones

    def __len__(self) -> int:
        return len(self.sessions)


def verdicts_on(scores: AnswerBatch[Any]) -> Verdicts | None:
    """Verdicts of a target's own tokens on the draft tokens that it scored; None where the coordinator draws coins."""
    drafts = scores.draft_token_ids
    if drafts is None or scores.is_sparse:
        return None
    token_ids = scores.token_ids
    ends = scores.counts.cumsum(dtype=np.int64)
    starts = ends - scores.counts
    differs = np.ones(token_ids.size, dtype=np.bool_)
    has_draft = differs.copy()
    has_draft[ends - 1] = False
    differs[has_draft] = token_ids[has_draft] != drafts
    rejections = differs.nonzero()[0]
    firsts = rejections[rejections.searchsorted(starts)]
    return Verdicts(
        scores.sessions,
        scores.generations,
        scores.base_lengths,
        firsts - starts,
        token_ids[np.maximum(firsts - 1, 0)],
        token_ids[firsts],
    )


def all_accepted(proposals: AnswerBatch[Any]) -> Verdicts:
    """The verdicts by which a draft goes on from its own proposals."""
    ends = proposals.counts.cumsum(dtype=np.int64)
    following = np.full(len(ends), UNKNOWN, dtype=U4)
    heads = proposals.sessions, proposals.generations + U8.type(1), proposals.base_lengths
    return Verdicts(*heads, proposals.counts, proposals.token_ids[ends - 1], following)


def to_bytes(verdicts: Verdicts) -> bytes:
    """Verdicts as one message."""
    fields = [getattr(verdicts, name) for name in Verdicts.__slots__]
    parts = [field.astype(dtype, copy=False).tobytes() for field, dtype in zip(fields, _TYPES, strict=True)]
    return b"".join([_HEAD.pack(len(verdicts)), *parts])


def take_verdicts(received: bytearray) -> Verdicts | None:
    """The first message in ``received``, which is removed from it; None while it is not complete. ``ConnectionError``
    for an impossible number of sessions.
    """
    if len(received) < _HEAD.size:
        return None
    (count,) = _HEAD.unpack_from(received)
    if not 0 < count <= LINK_COMMANDS.most:
        raise ConnectionError(f"{count} is no number of verdicts in a message")
    end = _HEAD.size + count * _ROW_BYTES
    if len(received) < end:
        return None
    content = bytes(received[:end])
    del received[:end]
    batched, start = [], _HEAD.size
    for dtype in _TYPES:
        batched.append(np.frombuffer(content, dtype, count, start))
        start += count * dtype.itemsize
    return Verdicts(*batched)
