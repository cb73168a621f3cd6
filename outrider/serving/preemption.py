"""Preemption: which sessions keep their KV pages when there are not enough for all.

Sessions take pages as they grow, so the pool can run out in the middle. Then the session of the lowest rank is
preempted: it ends here with ``Preempted``, and its coordinator rebuilds it when there is room. Ranks go by age, but
sessions beyond an equal share of the pages for their link come after all others, so that a burst of one target leaves
the others theirs. A session's age is its request's arrival, which survives rebuilds; no link's oldest session is beyond
its share, so the oldest of all always gets through. A new session is refused when the pages that are free, or held by
sessions of lower ranks, do not suffice for its whole text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from outrider.serving.executor import Executor
from outrider.serving.lookahead import Lookahead
from outrider.serving.request import RequestQueue, ScheduledTokens
from outrider.serving.session import Session, SessionKey
from outrider.serving.session_registry import SessionRegistry
from outrider.serving.token_budget import Job

_MOST_AHEAD = 66
"""Tokens that one launch writes for a session beyond those it was asked to append, at most: the longest draft."""
_WATERMARK = 100
"""One page of this many stays free for the sessions that run when a new one begins."""

Rank: TypeAlias = tuple[bool, tuple[int, str, int, int]]
"""Rank of a session, the least for the one that keeps its pages the longest: True beyond its link's share, and age."""


class PageBudget:
    """The KV pages of one service."""

    def __init__(
        self,
        sessions: SessionRegistry[Any],
        executor: Executor[Any, Any, Any, Any],
        queue: RequestQueue,
        lookahead: Lookahead,
        preempt: Callable[[Session[Any]], None],
    ) -> None:
        """``preempt`` ends a session and tells its coordinator so."""
        self._sessions, self._executor, self._queue = sessions, executor, queue
        self._lookahead, self._preempt = lookahead, preempt
        self._num_promised = self._num_puts = 0
        """Pages for all that was due when this many requests had been put: no fewer than it needs now."""

    def admits(self, session: Session[Any], job: Job) -> bool:
        """True if a session that begins would find pages for all of its job."""
        needed = self._executor.num_pages_needed(job, job.num_left)
        num_free = self._executor.num_pages_free
        if not needed or self._has_room_for_all(needed, num_free):
            return True
        self._num_promised = self._num_puts = 0  # counted anew for the next one
        promises = {
            request.session.key: self._executor.num_pages_needed(request.job, request.job.num_left)
            for request in self._queue.due
            if request.job.num_left  # one that runs has its pages
        }
        ranks = self._ranks({**promises, session.key: needed})
        own = ranks[session.key]
        others = [other for other in self._sessions.sessions() if other is not session]
        reserved = num_free // _WATERMARK if any(ranks[other.key] < own for other in others) else 0
        promised = sum(pages for key, pages in promises.items() if ranks[key] < own)
        of_lower = sum(self._sessions.num_pages(other) for other in others if ranks[other.key] > own)
        if needed + promised + reserved <= num_free + of_lower:
            return True
        is_alone = not promised and not any(self._sessions.num_pages(other) for other in others)
        return is_alone and self._executor.fits_alone(job)

    def _ranks(self, wanted: Mapping[SessionKey, int]) -> dict[SessionKey, Rank]:
        """Rank of every session; ``wanted`` pages are counted as if they were held."""
        sessions = sorted(self._sessions.sessions(), key=lambda session: session.age)
        held = [self._sessions.num_pages(session) for session in sessions]
        share = (self._executor.num_pages_free + sum(held)) // max(len({session.link_id for session in sessions}), 1)
        ranks, of_links = dict[SessionKey, Rank](), Counter[int]()
        for session, pages in zip(sessions, held, strict=True):
            is_oldest = session.link_id not in of_links
            of_links[session.link_id] += pages + wanted.get(session.key, 0)
            ranks[session.key] = not is_oldest and of_links[session.link_id] > share, session.age
        return ranks

    def _has_room_for_all(self, needed: int, num_free: int) -> bool:
        """True if there is room whatever the ages: of many sessions that begin together, each is counted once."""
        put, self._num_puts = self._queue.put_since(self._num_puts), self._queue.num_puts
        self._num_promised += sum(
            self._executor.num_pages_needed(each.job, each.job.num_left)
            for each in put
            if each.job.num_left  # one that runs has its pages
        )
        return needed + self._num_promised + num_free // _WATERMARK <= num_free

    def preempt_for(self, scheduled: ScheduledTokens) -> ScheduledTokens:
        """Part of a batch that can be served after the sessions of the lowest ranks were preempted to make room.

        Prepared requests are dropped first: no session is preempted for them.
        """
        num_tokens = sum(num_tokens for _, num_tokens in scheduled)
        if num_tokens + _MOST_AHEAD * len(scheduled) <= self._executor.num_pages_free:
            return scheduled  # no token takes more than a page
        if self.has_capacity(scheduled):
            return scheduled
        scheduled = self._without_prepared(scheduled)
        ranks = self._ranks({})
        for victim in sorted(self._sessions.sessions(), key=lambda session: ranks[session.key], reverse=True):
            if self.has_capacity(scheduled):
                break
            if self._sessions.num_pages(victim) or any(request.session is victim for request, _ in scheduled):
                scheduled = [entry for entry in scheduled if entry[0].session is not victim]
                self._preempt(victim)
        return scheduled

    def surely_fit(self, scheduled: ScheduledTokens, num_decode_rows: int) -> bool:
        """True if a batch can be served beside this many sessions with one token each, wherever their texts end."""
        num_tokens = sum(num_tokens for _, num_tokens in scheduled)
        most = (
            num_tokens + _MOST_AHEAD * len(scheduled) + 2 * num_decode_rows
        )  # no token takes more than a page and a copy
        return most <= self._executor.num_pages_free

    def has_capacity(self, scheduled: ScheduledTokens) -> bool:
        """True if a batch can be served without preempting a session."""
        return self._executor.fits([(request.job, num_tokens) for request, num_tokens in scheduled])

    def _without_prepared(self, scheduled: ScheduledTokens) -> ScheduledTokens:
        asked = []
        for request, num_tokens in scheduled:
            if request.is_asked:
                asked.append((request, num_tokens))
            else:
                self._lookahead.discard(request)
        return asked
