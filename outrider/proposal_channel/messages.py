"""Messages of the proposal channel: the proposals of one step, as arrays one after the other. Little-endian.

Shape letters: ``B`` sessions, ``T`` draft tokens of all of them, ``N`` ids of all supports.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from outrider.batched import I4, U4, AnswerBatch, Column
from outrider.limits import LINK_COMMANDS, LINK_DRAFT_TOKEN_IDS, LINK_SUPPORT_IDS

_HEAD = struct.Struct("<4I")
"""B, T, T or 0 without supports, N."""
MessageT = TypeVar("MessageT")
_KEY_BYTES, _WORD_BYTES = 16, 4
_RECEIVED_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class DirectProposals:
    """Proposals of one step, as a target receives them."""

    key: bytes
    """``AnswerBatch.channel_key``: sessions and generations."""
    counts: Column  # [B] draft tokens of each
    token_ids: Column  # [T]
    supports: tuple[Column, Column] | None
    """[T] counts and [N] ids; None: the proposals have no evidence."""


def may_be_sent(answers: AnswerBatch[Any]) -> bool:
    """True if a message may be as large as these proposals."""
    return answers.supports is None or answers.supports.token_ids.size <= LINK_SUPPORT_IDS.most


def to_bytes(answers: AnswerBatch[Any]) -> bytes:
    """Proposals as one message."""
    supports = answers.supports
    counts, ids = (None, None) if supports is None else (supports.counts, supports.token_ids)
    head = _HEAD.pack(
        answers.sessions.size,
        answers.token_ids.size,
        0 if counts is None else counts.size,
        0 if ids is None else ids.size,
    )
    parts = [head, answers.channel_key, _bytes(answers.counts, U4), _bytes(answers.token_ids, U4)]
    if counts is not None and ids is not None:
        parts += [_bytes(counts, I4), _bytes(ids, I4)]
    return b"".join(parts)


class MessageReader(Generic[MessageT]):
    """Takes messages off a socket, one after the other. Called by one thread."""

    def __init__(self, connected: socket.socket, take: Callable[[bytearray], MessageT | None]) -> None:
        """``take`` removes the first message from what was received; None while it is not complete."""
        self._socket, self._take = connected, take
        self._rest = bytearray()

    @property
    def is_between(self) -> bool:
        """True if nothing of the next message has come."""
        return not self._rest

    def read(self) -> MessageT | None:
        """The next message, whose bytes are waited for as long as the socket's timeout; None where they are not all
        there by then. ``ConnectionError`` for the end of the connection, or what is no message.
        """
        while (found := self._take(self._rest)) is None:
            try:
                content = self._socket.recv(_RECEIVED_BYTES)
            except TimeoutError:
                return None
            if not content:
                raise ConnectionError("the other end has closed it")
            self._rest += content
        return found


def take_proposals(received: bytearray) -> DirectProposals | None:
    """The first message in ``received``, which is removed from it; None while it is not complete. ``ConnectionError``
    for what is no message.
    """
    if len(received) < _HEAD.size:
        return None
    num_sessions, num_tokens, num_counts, num_ids = _HEAD.unpack_from(received)
    _check(num_sessions, num_tokens, num_counts, num_ids)
    first = _HEAD.size + _KEY_BYTES * num_sessions
    end = first + _WORD_BYTES * (num_sessions + num_tokens + num_counts + num_ids)
    if len(received) < end:
        return None
    content = bytes(received[:end])
    del received[:end]
    # Lists are added up sooner than arrays: a scoring waits for it.
    counts = np.frombuffer(content, U4, num_sessions, first)
    are_sound = sum(counts.tolist()) == num_tokens
    first += _WORD_BYTES * num_sessions
    token_ids = np.frombuffer(content, U4, num_tokens, first)
    supports = None
    if num_counts:
        first += _WORD_BYTES * num_tokens
        sizes = np.frombuffer(content, I4, num_counts, first)
        supports = sizes, np.frombuffer(content, I4, num_ids, first + _WORD_BYTES * num_counts)
        listed = sizes.tolist()
        are_sound = are_sound and min(listed) >= 0 and sum(listed) == num_ids
    if not are_sound:
        raise ConnectionError("the numbers of tokens in a message do not add up")
    return DirectProposals(content[_HEAD.size : _HEAD.size + _KEY_BYTES * num_sessions], counts, token_ids, supports)


def _check(num_sessions: int, num_tokens: int, num_counts: int, num_ids: int) -> None:
    """``ConnectionError`` for what is no head of a message."""
    is_small = 0 < num_sessions <= LINK_COMMANDS.most and num_tokens <= num_sessions * LINK_DRAFT_TOKEN_IDS.most
    is_whole = num_counts in (0, num_tokens) and num_ids <= LINK_SUPPORT_IDS.most and (num_counts or not num_ids)
    if not (is_small and is_whole):
        raise ConnectionError(f"{num_sessions}, {num_tokens}, {num_counts} and {num_ids} are no sizes of a message")


def _bytes(column: Column, dtype: np.dtype[Any]) -> bytes:
    return column.astype(dtype, copy=False).tobytes()
