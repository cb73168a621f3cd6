"""Dispatch: when the commands that wait for a link are sent, so that sessions share forwards.

A forward of many sessions takes hardly longer than that of one. Sessions that fell out of step stay so by themselves:
while some are served the others wait, and the other way round. Two rules bring them together, each at the price of one
wait:

* What a draft and a target compute on the same device takes the time of both. So on one device there is one turn at a
  time: all that drafts, then all that is scored.
* Tokens that the target decodes by itself, without a draft, follow each other at once. So they wait for those that are
  under way.

Apart from that, whatever waits at the end of an event loop's turn is sent. Owns what is under way on each link. Prompts
are outside of all this: they are cut into chunks, and a chunk is served beside whatever else there is.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol, TypeVar

from outrider.batched import AnswerBatch, CommandBatch, ScoreBatch
from outrider.ports import Extend, HiddenStateChunk, Opened, Release, Score

_LONGEST_STEP = 64
"""Tokens that a step's ``Score`` brings at most; one with more is part of a prompt."""
LONGEST_WAIT_S = 0.1
"""Seconds to wait for what is under way: what takes longer is a prompt, or a service that does not answer."""
_ONE_PAIR = 2
"""Links to one target and one draft."""


_exhaust = partial(deque[Any], maxlen=0)
"""Goes through an iterator, without a step of the interpreter for each entry."""


class SessionItem(Protocol):
    """Any command and any event."""

    @property
    def session(self) -> int:
        """The session's number on its link."""
        ...


CommandT = TypeVar("CommandT", bound=SessionItem)
EventT = TypeVar("EventT", bound=SessionItem)


class _Steps:
    """Steps that were put since the link last sent, all plain or all with drafts."""

    __slots__ = ("is_plain", "sent_at")

    def __init__(self, *, is_plain: bool) -> None:
        self.is_plain = is_plain
        """True if they are decoded by the target without a draft."""
        self.sent_at = 0.0


class LinkQueue:
    """Command queue of one link."""

    def __init__(self, dispatch: DispatchScheduler, send_all: Callable[[], None]) -> None:
        self.device_id = ""
        """The same for all links to services on one device; empty: of no device that is shared."""
        self.is_waiting = False
        self.waiting_since = 0.0
        self.waiting: dict[int, _Steps] = {}
        """Sessions whose step waits to be sent."""
        self.under_way: dict[int, _Steps] = {}
        """Sessions whose step was sent and not answered."""
        self._prompts: dict[int, tuple[float, int]] = {}
        """Sessions whose part of a prompt was not answered: when it was put, and its tokens."""
        self._put = (_Steps(is_plain=False), _Steps(is_plain=True))
        self.send_all = send_all
        self._dispatch = dispatch

    def put(self, command: SessionItem) -> None:
        """Queue a command; ``send_all`` is called when the link may send."""
        self._wait()
        if (is_plain := _is_plain(command)) is not None:
            self.waiting[command.session] = self._put[is_plain]
        elif isinstance(command, Score | Extend):
            self._prompts[command.session] = (self._dispatch.now(), len(command.token_ids))

    def put_batch(self, batched: CommandBatch) -> None:
        """Queue one command each of many sessions."""
        self._wait()
        is_plain = isinstance(batched, ScoreBatch) and not batched.draft_token_ids.size
        self.waiting |= dict.fromkeys(batched.sessions.tolist(), self._put[is_plain])

    def _wait(self) -> None:
        if not self.is_waiting:
            self.is_waiting = True
            self.waiting_since = self._dispatch.now()
            self._dispatch.schedule()

    def note_sent(self, commands: Iterable[SessionItem | CommandBatch]) -> None:
        """The queued commands were sent."""
        if self.waiting:
            now = self._dispatch.now()
            for steps in self._put:
                steps.sent_at = now
            self.under_way |= self.waiting
            self.waiting.clear()
            self._put = (_Steps(is_plain=False), _Steps(is_plain=True))
        self.is_waiting = False
        for command in commands:
            if isinstance(command, Release):
                self._prompts.pop(command.session, None)
                if self.under_way.pop(command.session, None) is not None:
                    self._dispatch.schedule()

    @property
    def oldest_step_at(self) -> float | None:
        """Time at which the oldest unanswered step was sent; None without one."""
        return min((steps.sent_at for steps in set(self.under_way.values())), default=None)

    @property
    def oldest_prompt_at(self) -> float | None:
        """Time at which the oldest unanswered part of a prompt was put; None without one."""
        return min((put_at for put_at, _ in self._prompts.values()), default=None)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all parts of prompts that were not answered."""
        return sum(num_tokens for _, num_tokens in self._prompts.values())

    @property
    def num_open(self) -> int:
        """Sessions whose step waits to be sent, or was not answered."""
        return len(self.waiting) + len(self.under_way)

    def note_direct(self, batched: CommandBatch) -> None:
        """Steps that are under way without having been sent from here."""
        steps = _Steps(is_plain=False)
        steps.sent_at = self._dispatch.now()
        self.under_way |= dict.fromkeys(batched.sessions.tolist(), steps)

    def note_answers(self, events: Iterable[SessionItem], batched: Iterable[AnswerBatch[Any]] = ()) -> None:
        """The sessions were answered."""
        for answers in batched:
            sessions = answers.sessions.tolist()
            _exhaust(map(self.under_way.pop, sessions, itertools.repeat(None)))
            if self._prompts:
                _exhaust(map(self._prompts.pop, sessions, itertools.repeat(None)))
        for event in events:
            if not isinstance(event, Opened | HiddenStateChunk):  # which answer no step
                self.under_way.pop(event.session, None)
                self._prompts.pop(event.session, None)
        self._dispatch.schedule()

    def clear(self) -> None:
        """The link has ended."""
        self.is_waiting = False
        self.waiting.clear()
        self.under_way.clear()
        self._prompts.clear()
        self._dispatch.schedule()

    def close(self) -> None:
        """The link is no longer used; idempotent."""
        self.clear()
        self._dispatch.remove(self)


class DispatchScheduler:
    """Scheduler of all links of one coordinator."""

    def __init__(self) -> None:
        self._link_queues: list[LinkQueue] = []
        self._is_due = False
        self._timer: asyncio.TimerHandle | None = None

    def now(self) -> float:
        """Seconds."""
        return time.monotonic()

    def link_queue(self, send_all: Callable[[], None]) -> LinkQueue:
        """A new link."""
        self._link_queues.append(link_queue := LinkQueue(self, send_all))
        return link_queue

    def remove(self, link_queue: LinkQueue) -> None:
        """Remove a link that is no longer used."""
        if link_queue in self._link_queues:
            self._link_queues.remove(link_queue)

    def schedule(self) -> None:
        """Send what is due at the end of this turn of the event loop."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._send_due)

    def begin_message(self) -> None:
        """A message of a service is received: commands that follow from it are sent by ``end_message``."""
        self._is_due = True

    def end_message(self) -> None:
        """Send what is due, at once: nothing else follows for the other link in this turn. Where there are several
        targets or drafts, whose messages may have come together, at its end.
        """
        if len(self._link_queues) <= _ONE_PAIR:
            self._send_due()
        else:
            self._is_due = False
            self.schedule()

    def _send_due(self) -> None:
        """Send the commands that have waited longest first; others may then have to wait longer."""
        self._is_due = False
        waiting = [link_queue for link_queue in self._link_queues if link_queue.is_waiting]
        if len(waiting) > 1:
            waiting.sort(key=lambda link_queue: link_queue.waiting_since)
        try:
            for link_queue in waiting:
                if not link_queue.waiting or not self._must_wait(link_queue):
                    link_queue.send_all()
        finally:
            if any(link_queue.is_waiting for link_queue in waiting):
                self._schedule_later()

    def _must_wait(self, link_queue: LinkQueue) -> bool:
        oldest, device_id = self.now() - LONGEST_WAIT_S, link_queue.device_id
        sharing = [other for other in self._link_queues if other.device_id == device_id] if device_id else ()
        if len(sharing) > 1:
            return any(steps.sent_at > oldest for other in sharing for steps in set(other.under_way.values()))
        return all(steps.is_plain for steps in set(link_queue.waiting.values())) and any(
            steps.is_plain and steps.sent_at > oldest for steps in set(link_queue.under_way.values())
        )

    def _schedule_later(self) -> None:
        """Send what waits in vain for an answer, once that has taken too long."""
        if self._timer is None:
            oldest = self.now() - LONGEST_WAIT_S
            sent = (
                steps.sent_at
                for link_queue in self._link_queues
                for steps in set(link_queue.under_way.values())
                if steps.sent_at > oldest
            )
            delay_s = min(sent, default=self.now()) - oldest
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.schedule()


def _is_plain(command: SessionItem) -> bool | None:
    """True for a plain step, False for a step with drafts; None for prompts, openings and ends."""
    if isinstance(command, Score):
        is_text = not command.num_kept_tokens or len(command.token_ids) > _LONGEST_STEP
        return None if is_text else not command.draft_token_ids
    return False if isinstance(command, Extend) and command.draft_length else None
