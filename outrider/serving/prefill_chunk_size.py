"""How large a prompt's chunk may be beside running sessions: these wait for the forward that it is part of.

A chunk's time grows with its tokens and, through attention, with all that stands before them, so no fixed size is right
for short prompts and long ones. What forwards without and with a chunk took tells how many tokens keep the wait within
bounds. Owns these figures. Knows no clock and computes nothing.
"""

from __future__ import annotations

from outrider.serving.moving_mean import moving_mean

_NEW = 0.25
"""The weight of what was seen last."""
_MOST_MORE = 0.9
"""A forward with a chunk may take so much longer, of what one without takes."""
_LEAST = 4
"""A chunk is never smaller than the largest by more than this factor: prompts get on, however long."""
_STEP = 16
"""Sizes are multiples of it."""


class PrefillChunkSize:
    """Times are in nanoseconds of one clock."""

    def __init__(self, most: int) -> None:
        """``most`` tokens, where forwards bear it."""
        self._most = most
        self._least = max(1, most // _LEAST)
        self._without_ns: float | None = None
        self._a_token_ns: float | None = None

    def note_forward(self, duration_ns: int, num_chunk_tokens: int) -> None:
        """A forward that served running sessions took so long, with so many tokens of prompts beside them."""
        if not num_chunk_tokens:
            self._without_ns = moving_mean(self._without_ns, duration_ns, _NEW)
        elif self._without_ns is not None:
            more_ns = max(0.0, duration_ns - self._without_ns)
            self._a_token_ns = moving_mean(self._a_token_ns, more_ns / num_chunk_tokens, _NEW)

    def note_end_of_prompts(self) -> None:
        """The next one begins at its beginning, where tokens cost least."""
        self._a_token_ns = None

    @property
    def tokens(self) -> int:
        """The most that the next chunk should have."""
        if self._without_ns is None or not self._a_token_ns:
            return self._most
        fitting = int(_MOST_MORE * self._without_ns / self._a_token_ns)
        return min(self._most, max(self._least, fitting // _STEP * _STEP))
