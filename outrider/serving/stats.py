"""Statistics of a service since its start.

Owns the counts of forwards and sessions. Written by the engine's thread alone, read from any. Refuses to know who shows
them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from outrider.errors import InvalidRequestError, NonFiniteLogitsError
from outrider.ports import Preempted, Refused, SessionFailed, SessionLost
from outrider.readings import AMOUNTS, STAGE_SECONDS, Histogram, Reading, each
from outrider.recording import ForwardRecord

_NUM_SIZES = 40
"""Sizes are powers of 2."""
_DECAY = 0.9
"""Decay of a size's slowest forward with each forward of that size: one that compiled kernels is soon forgotten."""


class ForwardTimes:
    """Slowest recent forward of each size, and from them the longest that a forward may reasonably take.

    A limit for hung forwards must not end a service that is merely slow: on a CPU a large model takes minutes for a
    chunk of a prompt. ``note`` is called by the engine thread, ``longest_s`` by any.
    """

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


_NANOSECOND = 1e-9
NO_ROOM, ENDING = "no_room", "ending"
"""Reasons why a session is refused."""
USUAL_FAILURES = (NonFiniteLogitsError.__name__, InvalidRequestError.__name__)
"""Usual reasons why a session fails, by the error's name; other errors of ours may join."""


class ServiceStats:
    """Counts of one service."""

    def __init__(self) -> None:
        self.forward_times = ForwardTimes()
        """Kept by ``clear``."""
        self.clear()

    def clear(self) -> None:
        """Begin anew, as after a warm-up; not while the service computes."""
        self.queue = Histogram(STAGE_SECONDS)
        self.forward = Histogram(STAGE_SECONDS)
        self.sample = Histogram(STAGE_SECONDS)
        self.batch_size = Histogram(AMOUNTS)
        self.num_tokens = Histogram(AMOUNTS)
        self.num_opened = 0
        self.num_lost = 0
        self.num_preempted = 0
        self.num_lookahead_used = self.num_lookahead_unused = 0
        """Steps computed before they were asked for, by whether they were."""
        self.refused: Counter[str] = Counter({NO_ROOM: 0, ENDING: 0})
        self.failed: Counter[str] = Counter(dict.fromkeys(USUAL_FAILURES, 0))
        """Sessions that failed, by the error's name; the usual ones from the start: a series that begins with its
        first failure does not show as a rise."""

    def note_forward(self, found: ForwardRecord, waits_ns: Sequence[int]) -> None:
        """A forward has ended; ``waits_ns`` are how long the items waited that it served for the first time."""
        for wait_ns in waits_ns:
            self.queue.observe(wait_ns * _NANOSECOND)
        self.forward.observe((found.computed_ns - found.started_ns) * _NANOSECOND)
        self.sample.observe((found.ended_ns - found.computed_ns) * _NANOSECOND)
        self.batch_size.observe(found.batch_size)
        self.num_tokens.observe(found.num_tokens)
        self.forward_times.note(found.num_tokens, (found.ended_ns - found.started_ns) * _NANOSECOND)

    def note_opened(self, event: object, *, is_ending: bool) -> None:
        """A session was opened, or the event says why not."""
        if isinstance(event, Refused):
            self.refused[ENDING if is_ending else NO_ROOM] += 1
        elif event is None:
            self.num_opened += 1

    def note_refused(self) -> None:
        """A session was opened, and found no pages for its text."""
        self.refused[NO_ROOM] += 1

    def note_answer(self, event: object) -> None:
        """An answer that may say that a session ended badly."""
        if isinstance(event, SessionLost):
            self.num_lost += 1
        elif isinstance(event, Preempted):
            self.num_preempted += 1
        elif isinstance(event, SessionFailed):
            self.failed[event.code] += 1

    def readings(self) -> list[Reading]:
        """All of it."""
        stages = (("queue", self.queue), ("forward", self.forward), ("sample", self.sample))
        return [
            *(
                Reading("outrider_forward_stage_seconds", histogram.read(), (("stage", stage),))
                for stage, histogram in stages
            ),
            Reading("outrider_forward_batch_size", self.batch_size.read()),
            Reading("outrider_forward_tokens", self.num_tokens.read()),
            Reading("outrider_sessions_opened_total", self.num_opened),
            Reading("outrider_sessions_lost_total", self.num_lost),
            Reading("outrider_sessions_preempted_total", self.num_preempted),
            Reading("outrider_lookahead_steps_total", self.num_lookahead_used, (("outcome", "used"),)),
            Reading("outrider_lookahead_steps_total", self.num_lookahead_unused, (("outcome", "unused"),)),
            *each("outrider_sessions_refused_total", "reason", list(self.refused.items())),
            *each("outrider_sessions_failed_total", "error", list(self.failed.items())),
        ]
