"""Durations of recent forwards by size, and from them the longest that a forward may reasonably take.

A limit for hung forwards must not end a service that is merely slow: on a CPU a large model takes minutes for a chunk
of a prompt. ``note`` is called by the engine thread, ``longest_s`` by any.
"""

from __future__ import annotations

_NUM_SIZES = 40
"""Sizes are powers of 2."""
_DECAY = 0.9
"""Decay of a size's slowest forward with each forward of that size: one that compiled kernels is soon forgotten."""


class ForwardTimes:
    """Slowest recent forward of each size."""

    def __init__(self) -> None:
        self._slowest_s = [0.0] * _NUM_SIZES

    def note(self, num_tokens: int, seconds: float) -> None:
        """Record the duration of a forward."""
        size = num_tokens.bit_length()
        self._slowest_s[size] = max(seconds, _DECAY * self._slowest_s[size])

    def knows(self, num_tokens: int) -> bool:
        """True if a forward of this size was recorded."""
        return self._slowest_s[num_tokens.bit_length()] > 0.0

    def longest_s(self, num_tokens: int) -> float:
        """Upper estimate for a forward over this number of tokens; 0 if none was recorded.

        A forward over n times as many tokens as another takes at most n times as long.
        """
        recorded = [(1 << max(0, size - 1), seconds) for size, seconds in enumerate(self._slowest_s) if seconds]
        return min((seconds * max(1.0, num_tokens / least) for least, seconds in recorded), default=0.0)
