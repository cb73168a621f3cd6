"""Retry policy of the SDK: the next address, the pause before it, and when an error is final.

Opens no connection and does not sleep: both clients apply its decisions.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import TypeGuard

from outrider.client.addresses import Addresses
from outrider.errors import (
    CapacityError,
    DeadlineError,
    LostTooOftenError,
    OutriderError,
    ProtocolError,
    RequestCancelledError,
    TlsError,
    UnauthenticatedError,
    UnavailableError,
)
from outrider.transport.security.tokens import NO_TOKEN

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
"""Bounds of the pause between rounds over all addresses, which doubles and is drawn at random."""
_GIVE_TOKEN = "--token-file FILE, the variable OUTRIDER_API_TOKEN, or token= of the client"
_MAX_FAILURES = 2
"""Failures of an address that waiting does not help, after which the client gives it up."""
MAX_FRUITLESS = 30
"""Maximum number of attempts in a row that were accepted without new output, so that a request is not sent forever."""


def _advised(error: OutriderError) -> OutriderError:
    """The error with what its reader may do, where only a user of the SDK or of the command line can do it."""
    if isinstance(error, UnauthenticatedError) and NO_TOKEN in str(error):
        return UnauthenticatedError(f"{error}: {_GIVE_TOKEN}")
    if type(error) is UnavailableError and "Connection refused" in str(error):
        return UnavailableError(f"{error}; is `outrider serve` running there?")
    return error


class Attempts:
    """The attempts of one request.

    Without ``resume_timeout_s`` each address is tried once, until one has answered. With it, every interruption is
    followed by another attempt, until no attempt was accepted for this time, or too many accepted attempts gave no
    output.
    """

    def __init__(
        self,
        addresses: Addresses,
        *,
        timeout_s: float | None,
        resume_timeout_s: float | None,
        is_closed: Callable[[], bool],
        max_retries: int = 0,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """``timeout_s`` is the caller's timeout over all attempts. ``max_retries``: retries after a refusal for lack of
        room. ``jitter`` returns numbers from 0 to 1.
        """
        self._num_retries_left = max_retries
        self._addresses = addresses
        self._timeout_s, self._resume_timeout_s = timeout_s, resume_timeout_s
        self._is_closed, self._clock, self._jitter = is_closed, clock, jitter
        self._deadline: float | None = None
        """Starts with the first attempt."""
        self._address = ""
        self._untried: list[str] = []
        """Addresses not yet tried in this round."""
        self._num_rounds = 0
        """Rounds without new output."""
        self._failing_since: float | None = None
        self._has_received = False
        self._is_answered = False
        """True if the current call was accepted."""
        self._num_failures: Counter[str] = Counter()
        """Failures of addresses that waiting does not help."""
        self._num_fruitless = 0
        """Accepted attempts since the last output."""

    def begin(self) -> tuple[str, float | None]:
        """Return the next address and its timeout in seconds; ``DeadlineError`` after the caller's timeout."""
        if self._is_closed():
            raise RequestCancelledError("the client was closed")
        left = self._seconds_left()
        if left is not None and left <= 0:
            raise DeadlineError(f"no answer came within the timeout of {self._timeout_s:g} s")
        self._untried = self._untried or self._addresses.in_order()
        self._address = self._untried.pop(0)
        self._is_answered = False
        return self._address, left

    def note_message(self, *, is_output: bool) -> None:
        """Record that the address accepted the request, or gave new output."""
        if not self._has_received or self._failing_since is not None:
            self._addresses.note_up(self._address)
        self._has_received = self._is_answered = True
        self._failing_since = None
        self._num_failures.clear()
        if is_output:
            self._untried, self._num_rounds, self._num_fruitless = [], 0, 0
        else:
            self._num_fruitless += 1

    def failed(self, error: OutriderError) -> float:
        """Return the seconds to wait before the next attempt, or raise the error if there is none."""
        error = _advised(error)
        if self._may_retry(error):
            self._num_retries_left -= 1
            return self._capacity_pause(error)
        self._count_failure(error)
        if self._is_closed() or not (self._may_pass(error) or self._is_elsewhere(error)):
            raise error
        if not isinstance(error, CapacityError):
            self._addresses.note_down(self._address)
        if self._resume_timeout_s is None:
            if self._has_received or not self._untried:
                raise error
            return 0.0
        if all(self._num_failures[name] >= _MAX_FAILURES for name in self._addresses.names):
            raise error
        return self._pause_or_raise(error, self._resume_timeout_s)

    def _count_failure(self, error: OutriderError) -> None:
        """Count an address without coordinator as failed, and one whose TLS fails at the second time, because a server
        that is ending may look like it.
        """
        if self._is_elsewhere(error):
            self._num_failures[self._address] += _MAX_FAILURES
        elif isinstance(error, TlsError):
            self._num_failures[self._address] += 1
        else:
            self._num_failures[self._address] = 0

    def _is_elsewhere(self, error: OutriderError) -> bool:
        """True if the address is no coordinator, or one that cannot serve the request."""
        return isinstance(error, ProtocolError) and not self._is_answered

    def _may_retry(self, error: OutriderError) -> TypeGuard[CapacityError]:
        """True if to retry after a refusal of a new request for lack of room."""
        is_new = isinstance(error, CapacityError) and not self._has_received
        return is_new and self._num_retries_left > 0 and not self._is_closed()

    def _capacity_pause(self, error: CapacityError) -> float:
        """Return the server's retry delay plus up to as much again, so that refused clients do not return together.

        Raises the error if the caller's timeout would end before.
        """
        pause = error.retry_after_ms / 1000 * (1 + self._jitter())
        left = self._seconds_left()
        if left is not None and left <= pause:
            raise error
        self._untried = []
        return pause

    def _may_pass(self, error: OutriderError) -> bool:
        """True if the error concerns availability, so that another address, or the same one later, may succeed."""
        if isinstance(error, LostTooOftenError):
            return False
        if isinstance(error, UnavailableError):
            return True
        if self._resume_timeout_s is None:
            return False
        # A server that shuts down cancels its calls. A full queue refuses only new requests, and this one was accepted
        # before.
        return isinstance(error, RequestCancelledError) or (isinstance(error, CapacityError) and self._has_received)

    def _pause_or_raise(self, error: OutriderError, resume_timeout_s: float) -> float:
        now = self._clock()
        self._failing_since = now if self._failing_since is None else self._failing_since
        left = self._failing_since + resume_timeout_s - now
        if left <= 0 or self._num_fruitless > MAX_FRUITLESS:
            raise error
        pause = min(self._pause(error), left)  # so that the last attempt is made when the time is nearly over
        callers = self._seconds_left()
        return pause if callers is None else min(pause, max(0.0, callers))

    def _seconds_left(self) -> float | None:
        """Rest of the caller's timeout; None without one."""
        if self._timeout_s is None:
            return None
        now = self._clock()
        self._deadline = now + self._timeout_s if self._deadline is None else self._deadline
        return self._deadline - now

    def _pause(self, error: OutriderError) -> float:
        """Return 0 while there are untried addresses; then an exponential backoff with jitter."""
        if self._untried:
            return 0.0
        longest = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self._num_rounds, 30))
        self._num_rounds += 1
        pause = longest * (0.5 + 0.5 * self._jitter())
        return max(pause, error.retry_after_ms / 1000) if isinstance(error, CapacityError) else pause
