"""Masks of the positions of one session in one forward, and the threads that make them while the forward runs.

Compiling a grammar and making its masks release the interpreter lock for most of their time, so that they overlap with
a forward that waits for a device, and with one that computes on other processors.

Shape letters: ``K`` draft tokens, ``W`` words of 32 tokens each.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from outrider.errors import InvalidRequestError
from outrider.structured_output.matcher import Matcher, Outcome, Words

_MOST_THREADS = 8
_NO_WORDS: Words = np.zeros(0, dtype=np.int32)


class PositionMasks:
    """Allowed tokens at a position and after each of the draft tokens behind it.

    After a draft token that the grammar refuses, or an end of sequence, nothing is masked: the refused token has
    probability 0, so that no acceptance rule reads what follows it.
    """

    def __init__(
        self,
        find_matcher: Callable[[], Matcher | None],
        output: Sequence[int],
        draft_token_ids: Sequence[int],
        *,
        position: int,
    ) -> None:
        """``find_matcher`` may compile the session's grammar. ``output``: its tokens before ``position``, which counts
        those of the prompt too.
        """
        self._find_matcher, self._output, self._drafts = find_matcher, output, draft_token_ids
        self._position = position
        self._made: list[Words] | None = None  # K+1 at most
        self._threads: Sequence[Future[None]] = ()
        self.error: InvalidRequestError | None = None
        """Why the session fails: the grammar cannot be compiled, or not be followed further."""
        self.began_ns = self.ended_ns = 0
        """Readings of ``time.perf_counter_ns`` before and after the masks were made."""

    def at(self, position: int) -> Words | None:  # [W]
        """Allowed tokens at one position, none if the grammar cannot be followed; None: all tokens are allowed. Waits
        for the threads, or makes the masks if none was started.
        """
        for thread in self._threads:
            thread.result()
        self._threads = ()
        made = self.make() if self._made is None else self._made
        place = position - self._position
        if self.error is not None:
            return _NO_WORDS
        return made[place] if place < len(made) else None

    def make(self) -> list[Words]:
        """Make the masks of all positions."""
        self.began_ns = time.perf_counter_ns()
        self._made = []
        try:
            matcher = self._find_matcher()
            if matcher is not None:
                self._made += self._masks(matcher)
        except InvalidRequestError as error:
            self.error = error
        self.ended_ns = time.perf_counter_ns()
        return self._made

    def await_threads(self, threads: Sequence[Future[None]]) -> None:
        """Have ``at`` wait for these threads, which make the masks."""
        self._threads = threads

    def _masks(self, matcher: Matcher) -> Iterator[Words]:
        text = list(self._output)
        for place in range(len(self._drafts) + 1):
            if matcher.follow(text) is not Outcome.OPEN:
                return
            yield matcher.mask()
            text += self._drafts[place : place + 1]


def made_within(masks: Sequence[PositionMasks]) -> tuple[int, int] | None:
    """When the first of these masks was begun and the last was ready; None if there are none."""
    made = [each for each in masks if each.ended_ns]
    return (min(each.began_ns for each in made), max(each.ended_ns for each in made)) if made else None


class MaskThreads:
    """Threads that make the masks of forwards. They start with the first grammar."""

    def __init__(self) -> None:
        self._num_threads = 0
        self._pool: ThreadPoolExecutor | None = None

    def begin(self, masks: Sequence[PositionMasks]) -> None:
        """Start to make masks of different sessions."""
        if not masks:
            return
        if self._pool is None:
            self._num_threads = _num_threads()
            self._pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="grammar-masks")
        left = deque(masks)
        threads = [self._pool.submit(_make_each, left) for _ in range(min(self._num_threads, len(left)))]
        for each in masks:
            each.await_threads(threads)


def _num_threads() -> int:
    """Half of the processors that this process may use: the others compute the forward."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(_MOST_THREADS, processors // 2))


def _make_each(left: deque[PositionMasks]) -> None:
    while True:
        try:
            masks = left.popleft()
        except IndexError:
            return
        masks.make()
