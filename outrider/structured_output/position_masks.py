"""Masks of the positions of one session in one forward, and the threads that make them while the forward runs.

The masks of many sessions are filled into one array by one call of the engine for each position, on several threads and
without the interpreter lock. New grammars are compiled first, also beside each other.

Shape letters: ``K`` draft tokens, ``N`` positions of all sessions, ``W`` words of 32 tokens each.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from outrider.errors import IntegrityError, OutriderError
from outrider.structured_output.matcher import (
    MaskExecutors,
    Matcher,
    Outcome,
    Words,
    as_session_error,
    consume_tokens,
    fill_masks,
)

_MOST_THREADS = 8
"""Bound on the threads on machines with many processors."""
_NO_WORDS: Words = np.zeros(0, dtype=np.int32)
_ALL_TOKENS = -1


class PositionMasks:
    """Allowed tokens at a position and after each of the draft tokens behind it.

    After a draft token that the grammar refuses, or an end of sequence, nothing is masked: the refused token has
    probability 0, so that no acceptance rule reads what follows it. An output that is refused fails the session.
    """

    __slots__ = (
        "_drafts", "_find_matcher", "_is_made", "_matcher", "_num_made", "_output", "_position", "_threads", "_words",
        "began_ns", "ended_ns", "error", "is_compiled", "made_in", "num_positions",
    )  # fmt: skip

    def __init__(
        self,
        find_matcher: Callable[[], Matcher | None],
        output: Sequence[int],
        draft_token_ids: Sequence[int],
        *,
        position: int,
        is_compiled: bool = False,
    ) -> None:
        """``find_matcher`` compiles the session's grammar, unless it ``is_compiled``. ``output``: its tokens before
        ``position``, which counts those of the prompt too.
        """
        self._find_matcher, self._output, self._drafts = find_matcher, output, draft_token_ids
        self._position = position
        self.num_positions = len(draft_token_ids) + 1
        """K+1."""
        self.is_compiled = is_compiled
        self._words: Words = _NO_WORDS  # [K+1, W]
        self.made_in: tuple[Words, int] | None = None
        """The array [N, W] that holds those of other sessions too, and the first row."""
        self._num_made = 0
        """Positions that are masked, of K+1."""
        self._is_made = False
        self._threads: Sequence[Future[None]] = ()
        self._matcher: Matcher | None = None
        self.error: OutriderError | None = None
        """Error of the session: the grammar cannot be compiled, or not be followed further."""
        self.began_ns = self.ended_ns = 0
        """Readings of ``time.perf_counter_ns`` before and after the masks were made."""

    @property
    def matcher(self) -> Matcher | None:
        """Matcher of the session, once ``compile`` was called; None: no token is masked, or the session fails."""
        return self._matcher

    def at(self, position: int) -> Words | None:  # [W]
        """Allowed tokens at one position, none if the grammar cannot be followed; None: all tokens are allowed. Waits
        for the threads, or makes the masks if none was started.
        """
        self.wait()
        place = position - self._position
        if self.error is not None:
            return _NO_WORDS
        return self._words[place] if place < self._num_made else None

    def all_positions(self, num_words: int) -> Words:  # [K+1, num_words]
        """Allowed tokens at each position, none if the grammar cannot be followed. Waits as ``at`` does."""
        self.wait()
        if self.error is None and self._words.shape[1:] == (num_words,):
            return self._words
        words: Words = np.full((self.num_positions, num_words), _ALL_TOKENS, dtype=np.int32)
        if self.error is not None:
            words.fill(0)
        else:
            known = self._words[:, :num_words]
            words[: self._num_made] = 0  # of a smaller vocabulary
            words[:, : known.shape[1]] = known
        return words

    def is_made_in(self, words: Words, first: int) -> bool:  # [N, W]
        """True if these rows of an array hold the masks."""
        return self.made_in is not None and self.made_in[0] is words and self.made_in[1] == first

    @property
    def is_ready(self) -> bool:
        """True if ``wait`` would not wait for a thread."""
        return all(thread.done() for thread in self._threads)

    def wait(self) -> None:
        """Wait for the threads, or make the masks if none was started."""
        for thread in self._threads:
            thread.result()
        self._threads = ()
        if not self._is_made:
            make_together([self])

    def await_threads(self, threads: Sequence[Future[None]]) -> None:
        """Have ``wait`` wait for these threads, which make the masks."""
        self._threads = threads

    # For ``make_together``.

    def compile(self) -> None:
        """Find the matcher, once."""
        self.began_ns = self.began_ns or time.perf_counter_ns()
        if self._matcher is None and self.error is None:
            try:
                self._matcher = self._find_matcher()
            except Exception as error:
                self.error = as_session_error(error)

    def begin(self, words: Words, first: int) -> None:  # [N, W]
        """Take the memory of the masks, from row ``first`` on."""
        self.made_in, self._words = (words, first), words[first : first + self.num_positions]
        self._is_made = True

    def next_token(self) -> tuple[Matcher, int] | None:
        """The token to consume, if that is all there is to do to follow the output."""
        if self._matcher is None:
            return None
        token_id = self._matcher.next_token(self._output)
        return None if token_id is None else (self._matcher, token_id)

    def go_to(self, place: int) -> bool:
        """Follow the text up to a position; False if that and all after it stay unmasked, or the session fails, as it
        does where the grammar refuses the output.
        """
        if self._matcher is None or place > len(self._drafts):
            return False
        try:
            outcome = self._matcher.follow([*self._output, *self._drafts[:place]] if place else self._output)
            if outcome is Outcome.REFUSED and not place:
                raise IntegrityError(f"the output before position {self._position} is refused by the request's grammar")
            return outcome is Outcome.OPEN
        except Exception as error:
            self.error = as_session_error(error)
            return False

    def keep(self) -> None:
        """The next forward goes on from the text before the draft tokens, or soon after it."""
        if self._drafts and self._matcher is not None:
            self._matcher.keep()

    def end(self, num_made: int, ended_ns: int) -> None:
        """``num_made`` positions are masked."""
        self._num_made, self.ended_ns = num_made, ended_ns


def make_together(masks: Sequence[PositionMasks], executors: MaskExecutors | None = None) -> None:
    """Make the masks of different sessions, position by position; ``executors`` have the threads for it."""
    for each in masks:
        each.compile()
    *starts, num_rows = itertools.accumulate((each.num_positions for each in masks), initial=0)
    num_words = max((each.matcher.num_words for each in masks if each.matcher is not None), default=0)
    words: Words = np.empty((num_rows, num_words), dtype=np.int32)
    for each, start in zip(masks, starts, strict=True):
        each.begin(words, start)
    steps = [step for each in masks if (step := each.next_token()) is not None] if executors is not None else []
    followed = set[Matcher]() if executors is None else consume_tokens(steps, executors)
    num_made = [0] * len(masks)
    going: Sequence[int] = range(len(masks))
    place = 0
    while going := [
        index
        for index in going
        if masks[index].error is None and (masks[index].matcher in followed or masks[index].go_to(place))
    ]:
        rows = [(matcher, starts[index] + place) for index in going if (matcher := masks[index].matcher) is not None]
        for index, error in zip(going, fill_masks(rows, words, executors), strict=True):
            masks[index].error = error
            num_made[index] = place + 1
        if not place:
            for index in going:
                masks[index].keep()
        followed = set()
        place += 1
    ended_ns = time.perf_counter_ns()
    for each, start, count in zip(masks, starts, num_made, strict=True):
        if count < each.num_positions:
            words[start + count : start + each.num_positions] = _ALL_TOKENS
        each.end(count, ended_ns)


def joined_words(masks: Sequence[PositionMasks], num_words: int) -> Words:  # [N, num_words]
    """Masks of all positions of different sessions. Waits for them; no copy if they were made together, in order."""
    for each in masks:
        each.wait()
    words, first = masks[0].made_in or (_NO_WORDS, 0)
    *firsts, end = itertools.accumulate((each.num_positions for each in masks), initial=first)
    is_whole = words.shape[1:] == (num_words,) and all(
        each.error is None and each.is_made_in(words, row) for each, row in zip(masks, firsts, strict=True)
    )
    return words[first:end] if is_whole else np.concatenate([each.all_positions(num_words) for each in masks])


def made_within(masks: Sequence[PositionMasks]) -> tuple[int, int] | None:
    """Time span from the start of the first of these masks to the end of the last; None if there are none."""
    made = [each for each in masks if each.ended_ns]
    return (min(each.began_ns for each in made), max(each.ended_ns for each in made)) if made else None


class MaskThreads:
    """Threads that make the masks of forwards. They start with the first grammar."""

    def __init__(self) -> None:
        self.num_threads = _num_threads()
        self._pool: ThreadPoolExecutor | None = None
        self._executors: MaskExecutors | None = None

    def begin(self, masks: Sequence[PositionMasks], *, is_awaited: bool = False) -> None:
        """Start to make masks of different sessions. ``is_awaited``: the caller waits for them next, so that another
        thread would only have to be waited for.
        """
        if not masks:
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.num_threads, thread_name_prefix="grammar-masks")
            self._executors = MaskExecutors(self.num_threads)
        compiled = [each for each in masks if each.is_compiled]
        new = [each for each in masks if not each.is_compiled]
        left = deque(new)
        threads = [self._pool.submit(_make_each, left) for _ in range(min(self.num_threads, len(new)))]
        for each in new:
            each.await_threads(threads)
        if compiled and is_awaited:
            make_together(compiled, self._executors)
        elif compiled:
            together = [self._pool.submit(make_together, compiled, self._executors)]
            for each in compiled:
                each.await_threads(together)


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
        make_together([masks])
