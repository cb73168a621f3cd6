"""Watch for items that a connected service never answers.

Heartbeats show that a service is alive, not that it answers what it was asked. A step of a running session waits for
one or two forwards, a prompt for the chunks of all prompts that the service was sent, and each forward may take as long
as the service's heartbeats say. Waiting for KV pages is no exception: a service refuses the item, or preempts its
session, and either is an answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from outrider.stalls import DEFAULT_HANG_TIMEOUT_S, StallClock
from outrider_coordinator.routing.dispatch import LinkQueue

LOOK_INTERVAL_S = 0.5
"""Interval of the checks, short beside the limits that they look for."""
_FORWARDS_OF_STEP = 3
"""Forwards that a step may wait for: the one in flight, the one queued behind it, and its own."""
_TOKENS_OF_FORWARD = 256
"""Prompt tokens that a service computes in one forward, at least, where there are as many."""


class AnswerWatch:
    """Ages of the oldest unanswered step and prompt of one link; looks are to come every ``LOOK_INTERVAL_S``."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._steps, self._prompts = StallClock(clock), StallClock(clock)

    def overdue_s(self, queue: LinkQueue, forward_limit_s: float) -> float | None:
        """Age of an item that the service will not answer any more; None without one.

        ``forward_limit_s``: how long a forward may take, by the service's heartbeats; 0: not known.
        """
        forward_s = max(forward_limit_s, DEFAULT_HANG_TIMEOUT_S)
        limit_s = _FORWARDS_OF_STEP * forward_s
        step_s = self._steps.look(queue.oldest_step_at)
        if step_s >= limit_s:
            return step_s
        prompt_s = self._prompts.look(queue.oldest_prompt_at)
        limit_s += forward_s * (queue.num_prompt_tokens // _TOKENS_OF_FORWARD)
        return prompt_s if prompt_s >= limit_s else None
