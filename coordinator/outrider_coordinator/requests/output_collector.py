"""Output collector: passes the output of a session to its reader.

Text is detokenized when it is read, after the next commands have left. A slow reader gets the output of several steps
as one delta. What waits to be read is bounded: ``on_behind`` pauses the session. A stream counts as read as far as its
transport takes messages, so the windows of gRPC and the buffers of the hosts fill first.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeAlias

from outrider.errors import OutriderError
from outrider.generation import Delta, GenerationResult, Progress
from outrider.types import TokenLogprob

MAX_UNREAD_TOKENS = 64
"""Tokens that may wait for the reader ..."""
MAX_UNREAD_S = 2.0
"""... and how long the oldest may, checked when a step ends."""

_Tokens: TypeAlias = "tuple[Sequence[int], tuple[TokenLogprob, ...] | None]"
"""Tokens of steps and their logprobs."""


def _ignore() -> None:
    pass


class OutputCollector:
    """The deltas of one request, for one reader."""

    def __init__(self, take_text: Callable[[int | None], str], *, num_tokens: int = 0) -> None:
        """``take_text`` returns the text that became final since its last call, up to this many tokens (None: all).

        ``num_tokens``: number of tokens that an interrupted call gave to its reader.
        """
        self._take_text = take_text
        self._num_tokens = num_tokens
        """Tokens given to the reader, those of interrupted calls included."""
        self._held_progress: Progress | None = None
        self._progress: Progress | None = None
        """Released, and not yet read."""
        self._held: list[_Tokens] = []
        self._released: list[_Tokens] = []
        self._ending: GenerationResult | OutriderError | None = None
        self._reader_wait: asyncio.Future[None] | None = None
        """Set while the reader waits."""
        self._num_unread = 0
        self._unread_since = 0.0
        """Release time of the oldest output that waits, by the monotonic clock."""
        self._is_behind = False
        self.has_released = False
        """Any output was made available."""
        self.on_behind: Callable[[], None] = _ignore
        """Called once too much output waits ..."""
        self.on_caught_up: Callable[[], None] = _ignore
        """... and then once the reader has taken it."""

    def put(
        self,
        token_ids: Sequence[int],
        logprobs: tuple[TokenLogprob, ...] | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Queue the output of a step, and at times the progress of the call, for the next ``release``."""
        self._held.append((token_ids, logprobs))
        self._held_progress = progress or self._held_progress

    def release(self) -> None:
        """Make the queued output available to the reader."""
        if self._held:
            self.has_released = True
            self._note_unread(self._held)
            self._released += self._held
            self._held = []
            self._progress, self._held_progress = self._held_progress or self._progress, None
            if not self._wake():
                self._check_reader()

    def end(self, ending: GenerationResult | OutriderError) -> None:
        """No more output follows: the result is sent with the last delta, an error after it."""
        self.release()
        self._ending = ending
        self.on_behind = self.on_caught_up = _ignore  # they hold the request, which holds this: freed with it now
        self._wake()

    async def deltas(self) -> AsyncIterator[Delta]:
        """Yield new output; the last delta has the result. Raises the error of the request."""
        while True:
            if not self._released and self._ending is None:
                await self._wait()
            ending = self._ending
            if isinstance(ending, OutriderError):
                if self._released:
                    yield self._take(None)
                raise ending
            yield self._take(ending)
            if ending is not None:
                return

    def _take(self, result: GenerationResult | None) -> Delta:
        steps, self._released = self._released, []
        self._num_unread = 0
        if len(steps) == 1:
            token_ids, logprobs = tuple(steps[0][0]), steps[0][1]
        else:
            token_ids = tuple(itertools.chain.from_iterable(own for own, _ in steps))
            found = [logprobs for _, logprobs in steps if logprobs is not None]
            logprobs = tuple(logprob for some in found for logprob in some) if found else None
        self._num_tokens += len(token_ids)
        text = self._take_text(self._num_tokens if result is None else None)
        progress, self._progress = self._progress, None
        if self._is_behind:
            self._is_behind = False
            self.on_caught_up()
        return Delta(text, token_ids, logprobs, result, progress=progress)

    def _note_unread(self, steps: list[_Tokens]) -> None:
        if not self._released:
            self._unread_since = time.monotonic()
        self._num_unread += sum([len(token_ids) for token_ids, _ in steps])

    def _check_reader(self) -> None:
        if self._is_behind or self._ending is not None:
            return
        unread_s = time.monotonic() - self._unread_since
        if self._num_unread >= MAX_UNREAD_TOKENS or unread_s > MAX_UNREAD_S:
            self._is_behind = True
            self.on_behind()

    async def _wait(self) -> None:
        self._reader_wait = asyncio.get_running_loop().create_future()
        try:
            await self._reader_wait
        finally:
            self._reader_wait = None

    def _wake(self) -> bool:
        """Let the reader go on; whether it had waited, so that it is not behind however much there is."""
        if self._reader_wait is None or self._reader_wait.done():
            return False
        self._reader_wait.set_result(None)
        return True
