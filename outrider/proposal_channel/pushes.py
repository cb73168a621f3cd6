"""Pushes: draft tokens that no command has asked for, with the draft's guess of the token before them.

A push names the text that it continues by its length and a part of its hash, and the target's step beside which it was
drawn: a draft that does not know the latest verdicts goes on from other texts, and one that knows more of them holds
what it pushed before no longer. A target that finds by its own tokens that the guess is right scores the rest in the
step after that one, which it begins by itself. A push decides nothing: any other is dropped. On the socket a push is a
message of proposals whose generations have the highest bit set, the hash's bits below it, and the length in the lower
half.

Shape letters: ``B`` sessions, ``T`` tokens of all of them.
"""

from __future__ import annotations

import struct

import numpy as np

from outrider.batched import U4, U8, Column
from outrider.proposal_channel.messages import DirectProposals
from outrider.proposal_channel.verdicts import Verdicts
from outrider.values import step_value

_HEAD = struct.Struct("<4I")
_IS_PUSH, _LENGTH_BITS, _LENGTH = U8.type(1 << 63), U8.type(32), U8.type((1 << 32) - 1)
_HASH = (1 << 31) - 1
"""Bits of a text's running hash that a push carries."""


@step_value(frozen=True, slots=True)
class Pushes:
    """Pushes of one draft step."""

    sessions: Column  # [B] uint64
    base_lengths: Column  # [B] tokens of the text before the guess
    text_hashes: Column  # [B] uint64, ``text_hash`` of that text and of the step under way
    counts: Column  # [B] uint32, the guess included
    token_ids: Column  # [T] uint32
    channel: int = 0
    """The proposal channel by which they go."""

    def rows(self) -> list[tuple[int, int, int, list[int]]]:
        """Session, length and hash of the text before the guess, and tokens of each."""
        ids, ends = self.token_ids.tolist(), self.counts.cumsum(dtype=np.int64).tolist()
        spans = zip([0, *ends], ends, strict=False)
        tokens = [ids[start:stop] for start, stop in spans]
        texts = self.base_lengths.tolist(), self.text_hashes.tolist()
        return list(zip(self.sessions.tolist(), *texts, tokens, strict=True))


@step_value(frozen=True, slots=True)
class ChainStart:
    """Proposals that were sent to a target that begins steps by itself: their draft goes on from them."""

    verdicts: Verdicts
    """Verdicts as if all were accepted."""
    channel: int


def text_hash(rest: int, step_base: int) -> int:
    """Number by which a push names a text and a step: a part of the text's running hash (``PrefixHash``; 0 of full
    blocks), and the length of the text on which the step's scores build.
    """
    return (rest ^ step_base) & _HASH


def to_bytes(pushes: Pushes) -> bytes:
    """Pushes as one message."""
    keys = np.empty((len(pushes.sessions), 2), dtype=U8)
    texts = pushes.text_hashes << _LENGTH_BITS | pushes.base_lengths.astype(U8)
    keys[:, 0], keys[:, 1] = pushes.sessions, texts | _IS_PUSH
    head = _HEAD.pack(len(pushes.sessions), pushes.token_ids.size, 0, 0)
    parts = keys.tobytes(), pushes.counts.astype(U4, copy=False).tobytes(), pushes.token_ids.astype(U4).tobytes()
    return b"".join([head, *parts])


def pushes_in(message: DirectProposals) -> Pushes | None:
    """A message of pushes; None for one of proposals."""
    keys = np.frombuffer(message.key, dtype=U8).reshape(-1, 2)
    if not keys.size or not int(keys[0, 1]) >> 63:
        return None
    lengths, hashes = keys[:, 1] & _LENGTH, (keys[:, 1] & ~_IS_PUSH) >> _LENGTH_BITS
    return Pushes(keys[:, 0], lengths.astype(np.int64), hashes, message.counts, message.token_ids)
