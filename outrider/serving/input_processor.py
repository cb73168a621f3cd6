"""What arrives, and what ends without an answer.

Owns what becomes of a command: which items are taken, which are overtaken by others, which sessions end. Refuses to
know forwards; what an item means is the ``Executor``'s.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic

from outrider.errors import OutriderError
from outrider.ports import Open, Rejected, Release, SessionFailed, SessionLost
from outrider.serving.executor import CommonEvent, EventT, Executor, ItemT, JobT, SequenceT
from outrider.serving.failure_log import log_trouble
from outrider.serving.lookahead import LookaheadScheduler
from outrider.serving.output_processor import OutputProcessor
from outrider.serving.preemption import PageBudget
from outrider.serving.prefill_delay import PrefillDelayPolicy
from outrider.serving.request_queue import RequestQueue
from outrider.serving.scheduled_request import ScheduledRequest
from outrider.serving.session_table import Session, SessionKey, SessionTable
from outrider.serving.stats import ServiceStats


class InputProcessor(Generic[SequenceT, ItemT, JobT, EventT]):
    """Of all links."""

    def __init__(
        self,
        session_table: SessionTable[SequenceT],
        stage: Executor[SequenceT, ItemT, JobT, EventT],
        request_queue: RequestQueue[SequenceT, ItemT, JobT, EventT],
        *,
        ahead: LookaheadScheduler[SequenceT, ItemT, JobT, EventT],
        telling: OutputProcessor[SequenceT, ItemT, JobT, EventT],
        budget: PageBudget[SequenceT, ItemT, JobT, EventT],
        prefill_delay: PrefillDelayPolicy,
        activity: ServiceStats,
    ) -> None:
        self._budget = budget
        self._session_table, self._stage, self._request_queue = session_table, stage, request_queue
        self._ahead, self._lookahead_policy = ahead, ahead.lookahead_policy
        self._output_processor, self._prefill_delay, self._activity = telling, prefill_delay, activity

    def open(self, link_id: int, command: Open, arrived_ns: int) -> None:
        """A session is opened, or opened anew, or refused."""
        event = self._session_table.open(link_id, command)
        if (session := self._session_table.get(link_id, command.session)) is not None:
            session.used_ns = arrived_ns
        self._activity.note_opened(event, is_ending=self._session_table.is_closed)
        key = link_id, command.session
        before = self._request_queue.first(key)
        if before is not None and not self._session_table.holds(before.session):
            self._give_up(key, "session closed")
        self._note_end(key)  # of what it was before, if it was anything
        if event is not None:
            self._output_processor.put(link_id, event, command)

    def release(self, link_id: int, command: Release) -> None:
        """A session ends, because its coordinator says so."""
        if self._session_table.release(link_id, command):
            key = link_id, command.session
            self._give_up(key, "released")
            self._note_end(key)

    def reject(self, link_id: int, command: Rejected) -> None:
        """A session ends, because a command for it broke a bound."""
        key = link_id, command.session
        if self._session_table.is_overtaken(*key, command.generation):
            return
        known = self._session_table.get(*key)
        failure = self._session_table.fail(*key, command.generation, command.error)
        self._give_up(key, "rejected")
        self._note_end(key)
        self._output_processor.put(link_id, failure, known.open if known else None)

    def item(self, link_id: int, item: ItemT, arrived_ns: int) -> None:
        """A session asks for something, as ever, or instead of what it asked for before."""
        session = self._session_table.find(link_id, item.session, item.generation)
        if session is None:
            return
        if isinstance(session, SessionLost):
            self._note_end((link_id, item.session))
            self._output_processor.put(link_id, session, trace_parent=item.trace_parent)
            return
        session.used_ns = arrived_ns
        self._prefill_delay.note_return(session.key, arrived_ns)
        due = self._request_queue.due_of(session.key)
        if self._is_foreseen(session.key, item, arrived_ns):
            return
        if due is not None and due.is_under_way:
            due.overtaken_by = item, arrived_ns
            return
        self._give_up(session.key, "superseded")
        self._begin(session, item, arrived_ns)

    def expire(self, key: SessionKey) -> None:
        """A session ends, because nothing has come for it for long."""
        self._session_table.expire(*key)
        self._give_up(key, "idle")
        self._note_end(key)

    def take_overtaking(self, served: Iterable[ScheduledRequest[SequenceT, ItemT, JobT, EventT]]) -> None:
        """A forward that served these has ended: what has come for their sessions meanwhile is taken now."""
        for pending in served:
            if pending.overtaken_by is not None:
                self.item(pending.session.link_id, *pending.overtaken_by)
                pending.overtaken_by = None

    def fail(self, pending: ScheduledRequest[SequenceT, ItemT, JobT, EventT], error: OutriderError) -> SessionFailed:
        """A session ends, because what it asked for could not be computed."""
        failure = self._session_table.fail(*pending.session.key, pending.generation, error)
        self._note_end(pending.session.key)
        self._activity.note_answer(failure)
        log_trouble(failure, pending.session.open)
        return failure

    def drop_link(self, link_id: int) -> None:
        """All sessions of a link end."""
        for key in self._request_queue.keys_of(link_id):
            self._give_up(key, "link closed")
        self._output_processor.drop_link(link_id)
        self._prefill_delay.drop_link(link_id)
        self._lookahead_policy.drop_link(link_id)
        self._session_table.drop_link(link_id)

    def _is_foreseen(self, key: SessionKey, item: ItemT, arrived_ns: int) -> bool:
        """Whether this is the item that was foreseen; its answer is under way then, or told."""
        pending = self._ahead.claim(key, item)
        if pending is None:
            return False
        pending.ask(item, arrived_ns, self._output_processor.record_of(item, arrived_ns))
        if pending.answer is not None:
            if not isinstance(pending.answer, CommonEvent):
                self._session_table.commit(pending.session, pending.answer.base_length)
            self._output_processor.put_found(pending)
        return True

    def _begin(self, session: Session[SequenceT], item: ItemT, arrived_ns: int) -> None:
        try:
            answer: EventT | CommonEvent | None = self._stage.check(session, item)
        except OutriderError as error:
            answer = self._session_table.fail(*session.key, item.generation, error)
        else:
            answer = answer or self._session_table.rewind(session, item.base_length, item.prefix_hash)
        if answer is not None:
            self._note_end(session.key)
            self._output_processor.put(session.link_id, answer, session.open)
            return
        opened = None
        if not item.base_length and item.token_ids:
            opened = self._session_table.adopt_prefix(session, item.token_ids)
        job = self._stage.begin(session, item)
        if not item.base_length and not self._budget.admits(session, job):
            self._refuse(session)
            return
        if opened is not None:
            self._output_processor.put_opened(session.link_id, opened)
        self._lookahead_policy.note_item(session.key, job)
        record = self._output_processor.record_of(item, arrived_ns)
        self._request_queue.put(ScheduledRequest(session, item.generation, job, arrived_ns, arrived_ns, record))

    def preempt(self, session: Session[SequenceT]) -> None:
        """A session ends, because its pages are needed for older ones."""
        self._give_up(session.key, "preempted")
        self._note_end(session.key)
        self._output_processor.put(session.link_id, self._session_table.preempt(session), session.open)

    def _refuse(self, session: Session[SequenceT]) -> None:
        """A session ends before it began: there are no pages for its text."""
        self._note_end(session.key)
        refused = self._session_table.refuse(session, "too few KV pages are free")
        self._activity.note_refused()
        self._output_processor.put(session.link_id, refused, session.open)

    def _give_up(self, key: SessionKey, why: str) -> None:
        """Drop a session's jobs, if there are any, without an answer."""
        for pending in self._request_queue.drop(key):
            self._activity.num_foreseen_unused += pending.foreseen is not None
            pending.overtaken_by = None
            self._output_processor.end_unanswered(pending, why)

    def _note_end(self, key: SessionKey) -> None:
        self._prefill_delay.note_end(key)
        self._lookahead_policy.note_end(key)
