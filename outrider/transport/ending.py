"""The end of a serving process: SIGTERM and SIGINT drain it, a second one or a failure ends it at once."""

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
    """Whether it is time to end, and why: a signal, or the engine's failure. A second signal makes it quick."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.begun = asyncio.Event()
        self.hurried = asyncio.Event()
        self.failure: BaseException | None = None
        self.is_stopped = threading.Event()
        self._loop = loop
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._stop)

    def stop_listening(self) -> None:
        """Signals do again what they did before."""
        for number in _SIGNALS:
            self._loop.remove_signal_handler(number)

    def fail(self, error: BaseException) -> None:
        """The engine failed; from any thread."""
        self._loop.call_soon_threadsafe(self._fail, error)

    def watched(self, progress: Progress) -> Progress:
        """The same, but raising ``RequestCancelledError`` once a signal has come; from any thread."""

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
        """Wait so long, or until a second signal or a failure makes it quick."""
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
