"""Idle sessions: sessions without commands for a timeout are ended, so that a lost coordinator holds no KV pages."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic

from outrider.serving.session import SequenceT, SessionKey
from outrider.serving.session_registry import SessionRegistry

_log = logging.getLogger(__name__)

_CHECKS_PER_TIMEOUT = 4
"""Checks in the time of one timeout, so that a session is ended at most a quarter of it late."""
_NANOSECONDS = 1e9


class IdleSessions(Generic[SequenceT]):
    """Ends sessions that receive nothing for the timeout. ``end_all`` is due when ``next_check_s`` is 0."""

    def __init__(
        self,
        session_registry: SessionRegistry[SequenceT],
        *,
        is_busy: Callable[[SessionKey], bool],
        end: Callable[[SessionKey], None],
        clock: Callable[[], int],
    ) -> None:
        """``is_busy`` says whether a session waits for an answer; ``clock`` gives nanoseconds."""
        self._session_registry = session_registry
        timeout_s = session_registry.session_limits.idle_timeout_s
        self._timeout_ns = None if timeout_s is None else round(timeout_s * _NANOSECONDS)
        self._is_busy, self._end, self._clock = is_busy, end, clock
        self._next_ns = 0

    @property
    def next_check_s(self) -> float | None:
        """Seconds until the next check; None without sessions."""
        if self._timeout_ns is None or not len(self._session_registry):
            return None
        return max(0, self._next_ns - self._clock()) / _NANOSECONDS

    def end_all(self) -> None:
        """End the sessions that have been idle for the timeout."""
        if self._timeout_ns is None:
            return
        now = self._clock()
        self._next_ns = now + self._timeout_ns // _CHECKS_PER_TIMEOUT
        idle = []
        for session in self._session_registry.sessions():
            if self._is_busy(session.key):
                session.used_ns = now
            elif now - session.used_ns >= self._timeout_ns:
                idle.append(session.key)
        for key in idle:
            self._end(key)
        if idle:
            seconds = self._timeout_ns / _NANOSECONDS
            _log.info("%d sessions without a command for %g s were released", len(idle), seconds)
