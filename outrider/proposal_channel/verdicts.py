"""Verdicts on direct proposals, which a target sends back to the draft before its answer reaches the coordinator.

Under the greedy and coupled rules a target knows from its own tokens which draft tokens are accepted. A verdict is a
hint: the coordinator judges, and its own command says which text a proposal continues. Little-endian on the socket.

Shape letters: ``B`` sessions.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from outrider.batched import U4, U8, AnswerBatch, Column, StateBatch
from outrider.limits import LINK_COMMANDS, LINK_DRAFT_TOKEN_IDS
from outrider.types import STATE_BYTES
from outrider.values import step_value

UNKNOWN = 0xFFFFFFFF
"""Next token of a verdict that a draft gives itself: all of its tokens are accepted, and it guesses what comes next."""
_HEAD = struct.Struct("<I")
_WITH_STATES = 1 << 31
"""Bit of the number of sessions: hidden states follow the verdicts."""
_TYPES = (U8, U8, U4, U4, U4, U4)
_ROW_BYTES = sum(dtype.itemsize for dtype in _TYPES)
_STATES = struct.Struct("<16s2I")
"""Plane, width, and the type's place in ``_DTYPES``."""
_STATE_TYPES = (U4, U4, U8, U8)
_STATE_ROW_BYTES = sum(dtype.itemsize for dtype in _STATE_TYPES)
_DTYPES = tuple(STATE_BYTES)


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


@step_value(frozen=True, slots=True)
class StateVerdicts(Verdicts):
    """Verdicts for a draft that reads hidden states, with those of all that was scored."""

    states: StateBatch
    draft_token_ids: Column  # [sum(states.counts) - B] uint32, draft tokens that were scored


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
    fields = (
        scores.sessions,
        scores.generations,
        scores.base_lengths,
        firsts - starts,
        token_ids[np.maximum(firsts - 1, 0)],
        token_ids[firsts],
    )
    states = scores.states
    if states is None or not np.array_equal(states.counts, scores.counts):
        return Verdicts(*fields)
    return StateVerdicts(*fields, states, drafts)


def all_accepted(proposals: AnswerBatch[Any]) -> Verdicts:
    """The verdicts by which a draft goes on from its own proposals."""
    ends = proposals.counts.cumsum(dtype=np.int64)
    following = np.full(len(ends), UNKNOWN, dtype=U4)
    heads = proposals.sessions, proposals.generations + U8.type(1), proposals.base_lengths
    return Verdicts(*heads, proposals.counts, proposals.token_ids[ends - 1], following)


def to_bytes(verdicts: Verdicts) -> bytes:
    """Verdicts as one message."""
    parts = _packed([getattr(verdicts, name) for name in Verdicts.__slots__], _TYPES)
    if not isinstance(verdicts, StateVerdicts):
        return b"".join([_HEAD.pack(len(verdicts)), *parts])
    states = verdicts.states
    head = _STATES.pack(states.plane_id, states.width, _DTYPES.index(states.dtype))
    fields = (states.starts, states.counts, states.offsets_bytes, states.sequences, verdicts.draft_token_ids)
    parts += [head, *_packed(fields, (*_STATE_TYPES, U4))]
    return b"".join([_HEAD.pack(len(verdicts) | _WITH_STATES), *parts])


def _packed(fields: Sequence[Column], dtypes: Sequence[np.dtype[Any]]) -> list[bytes]:
    return [field.astype(dtype, copy=False).tobytes() for field, dtype in zip(fields, dtypes, strict=True)]


def take_verdicts(received: bytearray) -> Verdicts | None:
    """The first message in ``received``, which is removed from it; None while it is not complete. ``ConnectionError``
    for an impossible number of sessions.
    """
    if len(received) < _HEAD.size:
        return None
    (stated,) = _HEAD.unpack_from(received)
    count = stated & ~_WITH_STATES
    if not 0 < count <= LINK_COMMANDS.most:
        raise ConnectionError(f"{count} is no number of verdicts in a message")
    end = _HEAD.size + count * _ROW_BYTES
    found: Verdicts | None
    if stated == count:
        content = bytes(received[:end])
        found = Verdicts(*_arrays(content, _HEAD.size, count, _TYPES)) if len(content) == end else None
    else:
        states_end = end + _STATES.size + count * _STATE_ROW_BYTES
        content = bytes(received[:states_end])
        if len(content) < states_end:
            return None
        states = _states_of(content, end, count)
        num_drafts = int(states.counts.sum(dtype=np.int64)) - count
        end = states_end + num_drafts * U4.itemsize
        drafts = bytes(received[states_end:end])
        fields = _arrays(content, _HEAD.size, count, _TYPES)
        whole = len(drafts) == num_drafts * U4.itemsize
        found = StateVerdicts(*fields, states, np.frombuffer(drafts, U4)) if whole else None  # type: ignore[call-arg, arg-type]
    if found is not None:
        del received[:end]
    return found


def _states_of(content: bytes, start: int, count: int) -> StateBatch:
    plane_id, width, place = _STATES.unpack_from(content, start)
    starts, counts, offsets, sequences = _arrays(content, start + _STATES.size, count, _STATE_TYPES)
    if not width or place >= len(_DTYPES) or not 0 < counts.min() <= counts.max() <= LINK_DRAFT_TOKEN_IDS.most + 1:
        raise ConnectionError("the hidden states of a message of verdicts are not of a few positions each")
    return StateBatch(plane_id, width, _DTYPES[place], starts.astype(np.int64), counts, offsets, sequences)


def _arrays(content: bytes, start: int, count: int, dtypes: Sequence[np.dtype[Any]]) -> list[Column]:
    """Arrays of ``count`` values each, one after the other."""
    found = []
    for dtype in dtypes:
        found.append(np.frombuffer(content, dtype, count, start))
        start += count * dtype.itemsize
    return found
