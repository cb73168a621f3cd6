"""End of a serving process: the first SIGTERM or SIGINT drains it, a second one or a failure ends it at once."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable

from outrider.errors import RequestCancelledError, UnavailableError

_SIGNALS = (signal.SIGTERM, signal.SIGINT)

Progress = Callable[[int, int], None]
"""Called with (done, in all)."""


class Ending:
    """State of the end: the signal or the engine failure that caused it. A second signal skips the drain."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.begun = asyncio.Event()
        self.hurried = asyncio.Event()
        self.failure: BaseException | None = None
        self.is_stopped = threading.Event()
        self._loop = loop
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._stop)

    def stop_listening(self) -> None:
        """Restore the previous signal handlers."""
        for number in _SIGNALS:
            self._loop.remove_signal_handler(number)

    def fail(self, error: BaseException) -> None:
        """Record an engine failure; thread-safe."""
        self._loop.call_soon_threadsafe(self._fail, error)

    def watched(self, progress: Progress) -> Progress:
        """Wrap a function so that it raises ``RequestCancelledError`` after a signal; thread-safe."""

        def watched(done: int, total: int) -> None:
            if self.is_stopped.is_set():
                raise RequestCancelledError("stopped while loading")
            progress(done, total)

        return watched

    def raise_failure(self) -> None:
        """Raise ``UnavailableError`` if the engine failed."""
        if self.failure is not None:
            raise UnavailableError(f"the engine failed: {self.failure}") from self.failure

    async def wait_hurried(self, seconds: float) -> None:
        """Wait for a time, or until a second signal or a failure."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.hurried.wait(), seconds)

    def _stop(self) -> None:
        if self.begun.is_set():
            self.hurried.set()
        self.is_stopped.set()
        self.begun.set()

    def _fail(self, error: BaseException) -> None:
        self.failure = error
        self.begun.set()
        self.hurried.set()
