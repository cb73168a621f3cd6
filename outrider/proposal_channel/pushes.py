"""Pushes: draft tokens that no command has asked for, with the draft's guess of the token before them.

A push names the text that it continues by its length. A target that finds by its own tokens that the guess is right
scores the rest in the step that it begins by itself. A push decides nothing: any other is dropped. On the socket a push
is a message of proposals whose generations have the highest bit set, and are lengths.

Shape letters: ``B`` sessions, ``T`` tokens of all of them.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from outrider.batched import U4, U8, AnswerBatch, Column
from outrider.proposal_channel.messages import DirectProposals
from outrider.proposal_channel.verdicts import Verdicts
from outrider.values import step_value

_HEAD = struct.Struct("<4I")
_IS_PUSH = U8.type(1 << 63)


@step_value(frozen=True, slots=True)
class Pushes:
    """Pushes of one draft step."""

    sessions: Column  # [B] uint64
    base_lengths: Column  # [B] tokens of the text before the guess
    counts: Column  # [B] uint32, the guess included
    token_ids: Column  # [T] uint32
    channel: int = 0
    """The proposal channel by which they go."""

    def rows(self) -> list[tuple[int, int, list[int]]]:
        """Session, length of the text before the guess, and tokens of each."""
        ids, ends = self.token_ids.tolist(), self.counts.cumsum(dtype=np.int64).tolist()
        spans = zip([0, *ends], ends, strict=False)
        tokens = [ids[start:stop] for start, stop in spans]
        return list(zip(self.sessions.tolist(), self.base_lengths.tolist(), tokens, strict=True))


@step_value(frozen=True, slots=True)
class ChainStart:
    """Proposals that were sent to a target that begins steps by itself: their draft goes on from them."""

    verdicts: Verdicts
    """Verdicts as if all were accepted."""
    channel: int
    num_outcomes: int = 1
    """Outcomes of a target's step for which proposals are prepared, at most."""


def pushes_of(proposals: AnswerBatch[Any], channel: int) -> Pushes:
    """Pushes of the tokens that a draft step has drawn."""
    return Pushes(proposals.sessions, proposals.base_lengths, proposals.counts, proposals.token_ids, channel)


def to_bytes(pushes: Pushes) -> bytes:
    """Pushes as one message."""
    keys = np.empty((len(pushes.sessions), 2), dtype=U8)
    keys[:, 0], keys[:, 1] = pushes.sessions, pushes.base_lengths.astype(U8) | _IS_PUSH
    head = _HEAD.pack(len(pushes.sessions), pushes.token_ids.size, 0, 0)
    parts = keys.tobytes(), pushes.counts.astype(U4, copy=False).tobytes(), pushes.token_ids.astype(U4).tobytes()
    return b"".join([head, *parts])


def pushes_in(message: DirectProposals) -> Pushes | None:
    """A message of pushes; None for one of proposals."""
    keys = np.frombuffer(message.key, dtype=U8).reshape(-1, 2)
    if not keys.size or not int(keys[0, 1]) >> 63:
        return None
    return Pushes(keys[:, 0], (keys[:, 1] & ~_IS_PUSH).astype(np.int64), message.counts, message.token_ids)
