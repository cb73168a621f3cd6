"""Command processor: commands of links, as sessions opened and ended and as requests queued.

Owns which items are taken, which replace others, and what a session's end takes with it. Knows no forwards; what an
item means is the executor's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from outrider.errors import InvalidRequestError, OutriderError, StaleReferenceError
from outrider.ports import Open, Prepare, Rejected, Release, SessionFailed, SessionLost
from outrider.serving.executor import CommonEvent, Executor, Item, References
from outrider.serving.output_processor import OutputProcessor
from outrider.serving.request import AnyRequest, Request, RequestStatus
from outrider.serving.scheduler import Scheduler
from outrider.serving.session import Session, SessionKey
from outrider.serving.session_registry import SessionRegistry
from outrider.serving.stats import ServiceStats
from outrider.types import part_of


class Invalidate(Protocol):
    """Called before anything happens to a session."""

    def __call__(self, key: SessionKey, *, is_prepare: bool = False) -> None:
        """``is_prepare``: its steps may go on as they are."""
        ...


class CommandProcessor:
    """Commands of all links."""

    def __init__(
        self,
        sessions: SessionRegistry[Any],
        executor: Executor[Any, Any, Any, Any],
        scheduler: Scheduler,
        outputs: OutputProcessor,
        stats: ServiceStats,
        *,
        references: References | None = None,
        invalidate: Invalidate,
    ) -> None:
        """``references`` are as for ``EngineCore``. ``invalidate`` is called before a session changes here."""
        self._references, self._invalidate = references, invalidate
        self._sessions, self._executor, self._scheduler = sessions, executor, scheduler
        self._outputs, self._stats = outputs, stats

    # Commands.

    def take(self, link_id: int, commands: Iterable[Any], arrived_ns: int) -> None:
        """Process the commands of a message, in their order."""
        for command in commands:
            if isinstance(command, Open):
                self.open(link_id, command, arrived_ns)
            elif isinstance(command, Release):
                self.release(link_id, command)
            elif isinstance(command, Rejected):
                self.reject(link_id, command)
            elif isinstance(command, Prepare):
                self.prepare(link_id, command, arrived_ns)
            else:
                self.item(link_id, command, arrived_ns)

    def open(self, link_id: int, command: Open, arrived_ns: int) -> None:
        """Open a session, or open it anew; it may be refused."""
        self._invalidate((link_id, command.session))
        event = self._sessions.open(link_id, command)
        if (session := self._sessions.get(link_id, command.session)) is not None:
            session.used_ns = arrived_ns
        self._stats.note_opened(event, is_ending=self._sessions.is_closed)
        key = link_id, command.session
        before = self._scheduler.queue.first(key)
        if before is not None and not self._sessions.holds(before.session):
            self._abort(key, "session closed")
        self._scheduler.end_session(key)  # what it was before, if it was anything
        if event is not None:
            self._outputs.put(link_id, event, command)

    def release(self, link_id: int, command: Release) -> None:
        """End a session, because its coordinator says so."""
        self._invalidate((link_id, command.session))
        if self._sessions.release(link_id, command):
            self._end((link_id, command.session), "released")

    def reject(self, link_id: int, command: Rejected) -> None:
        """End a session, because a command for it broke a bound."""
        key = link_id, command.session
        self._invalidate(key)
        if self._sessions.is_overtaken(*key, command.generation):
            return
        known = self._sessions.get(*key)
        failure = self._sessions.fail(*key, command.generation, command.error)
        self._end(key, "rejected")
        self._outputs.put(link_id, failure, known.open if known else None)

    def item(self, link_id: int, item: Item, arrived_ns: int) -> None:
        """Queue what a session asks for, instead of what it asked for before if that is not answered."""
        self._invalidate((link_id, item.session))
        session = self._sessions.find(link_id, item.session, item.generation)
        if session is None:
            return
        if isinstance(session, SessionLost):
            self._scheduler.end_session((link_id, item.session))
            self._outputs.put(link_id, session, trace_parent=item.trace_parent)
            return
        session.used_ns = arrived_ns
        self._scheduler.note_arrival(session.key, arrived_ns)
        if self._scheduler.queue.first(session.key) is None or not self._is_served_by_known(session, item, arrived_ns):
            self._begin(session, item, arrived_ns)

    def _is_served_by_known(self, session: Session[Any], item: Item, arrived_ns: int) -> bool:
        """True if what a session has asked for before, or is computed ahead, takes care of the item."""
        due = self._scheduler.queue.due_of(session.key)
        if self._match_prepared(session, item, arrived_ns):
            return True
        if due is not None and due.status is RequestStatus.RUNNING:
            due.superseded_by = item, arrived_ns
            return True
        self._abort(session.key, "superseded")
        return False

    def prepare(self, link_id: int, command: Prepare, arrived_ns: int) -> None:
        """Let steps of a session be computed before they are asked for; ignored unless its newest item is the one that
        the command follows.
        """
        self._invalidate((link_id, command.session), is_prepare=True)
        session = self._sessions.get(link_id, command.session)
        if session is not None and command.generation == session.generation:
            session.used_ns = arrived_ns
            self._scheduler.grant(session, command.num_steps)

    def take_superseding(self, requests: Iterable[AnyRequest]) -> None:
        """Take the items that came while these requests were running; those that run on in another batch wait."""
        for request in requests:
            if request.superseded_by is not None and request.status is not RequestStatus.RUNNING:
                self.item(request.session.link_id, *request.superseded_by)
                request.superseded_by = None

    # Ends of sessions.

    def expire(self, key: SessionKey) -> None:
        """End a session, because nothing has come for it for long."""
        self._invalidate(key)
        self._sessions.expire(*key)
        self._end(key, "idle")

    def fail(self, request: AnyRequest, error: OutriderError) -> SessionFailed:
        """End a session, because what it asked for could not be computed; the answer to its request."""
        key = request.session.key
        self._invalidate(key)
        failure = self._sessions.fail(*key, request.item.generation, error)
        self._scheduler.end_session(key)
        return failure

    def preempt(self, session: Session[Any]) -> None:
        """End a session, because its pages are needed for older ones."""
        self._invalidate(session.key)
        self._end(session.key, "preempted")
        self._outputs.put(session.link_id, self._sessions.preempt(session), session.open)

    def drop_link(self, link_id: int) -> None:
        """End all sessions of a link."""
        for key in self._scheduler.queue.keys_of(link_id):
            self._abort(key, "link closed")
        self._outputs.drop_link(link_id)
        self._scheduler.drop_link(link_id)
        self._sessions.drop_link(link_id)

    def _end(self, key: SessionKey, why: str) -> None:
        self._abort(key, why)
        self._scheduler.end_session(key)

    def _abort(self, key: SessionKey, why: str) -> None:
        """Give up a session's requests, if there are any, without an answer."""
        for request in self._scheduler.abort(key):
            self._outputs.end_unanswered(request, why)

    # Items.

    def _match_prepared(self, session: Session[Any], item: Item, arrived_ns: int) -> bool:
        """True if an item was prepared: its answer is held, and goes out now, or is being computed."""
        request = self._scheduler.lookahead.match(session.key, item)
        if request is None:
            return False
        request.ask(item, arrived_ns)
        if request.status is RequestStatus.PREPARED:
            answer: Any = request.answer
            self._sessions.commit(session, answer.base_length)
            request.finish(answer)
            self._outputs.put_finished(request)
        return True

    def _begin(self, session: Session[Any], item: Item, arrived_ns: int) -> None:
        if item.num_kept_tokens != session.sequence.length:
            self._scheduler.lookahead.revoke(session)  # it does not go on from where the session is
        if self._references is not None:
            try:
                item = self._references.fetch(item)
            except StaleReferenceError as error:
                self._lose(session, error)
                return
        answer = self._answer_at_once(session, item)
        if answer is not None:
            self._end_with(session, answer)
            return
        opened = None
        if not item.num_kept_tokens and item.token_ids:
            # The last token of all is computed, for what follows it.
            adoptable = part_of(item.token_ids, 0, self._executor.num_adoptable(session, item) + 1)
            opened = self._sessions.adopt_prefix(session, adoptable)
        try:
            job = self._executor.begin(session, item)
        except InvalidRequestError as error:  # what it begins with is not held any more
            self._lose(session, error)
            return
        if not item.num_kept_tokens and not self._scheduler.admits(session, job):
            self._refuse(session)
            return
        if opened is not None:
            self._outputs.put_opened(session.link_id, opened)
        self._scheduler.add(Request(session, item, job, arrived_ns))

    def _lose(self, session: Session[Any], error: OutriderError) -> None:
        self._end_with(session, SessionLost(session.open.session, session.generation, str(error)))

    def _end_with(self, session: Session[Any], answer: Any) -> None:  # noqa: ANN401 - an event of the executor, or a common one
        """Answer a session's item at once, and end all else that it has asked for."""
        self._scheduler.end_session(session.key)
        self._outputs.put(session.link_id, answer, session.open)

    def _answer_at_once(self, session: Session[Any], item: Item) -> Any:  # noqa: ANN401 - an event of the executor, or a common one
        """The answer to an item that needs no forward; None for one that does, whose session is cut to its base."""
        try:
            answer: CommonEvent | None = self._executor.check(session, item)
        except OutriderError as error:
            if getattr(item, "is_direct", False):
                # What a draft sent here was not seen by the coordinator, which sends what is sound of it.
                return SessionLost(session.open.session, item.generation, str(error))
            return self._sessions.fail(*session.key, item.generation, error)
        return answer or self._sessions.rewind(session, item.num_kept_tokens, item.prefix_hash)

    def _refuse(self, session: Session[Any]) -> None:
        """End a session before it begins: there are no pages for its text."""
        self._scheduler.end_session(session.key)
        refused = self._sessions.refuse(session, "too few KV pages are free")
        self._stats.note_refused()
        self._outputs.put(session.link_id, refused, session.open)
