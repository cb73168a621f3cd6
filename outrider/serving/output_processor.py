"""Output processor: events as messages of their links, how long each item took, and what is logged and traced of them.

Owns what is ready to leave. Decides nothing about who is served.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from outrider.batched import AnswerBatch, Column, CommandBatch, ExtendBatch
from outrider.item_batch import proposal_batch
from outrider.limits import RateLimit
from outrider.ports import (
    EventBatch,
    ForwardReport,
    ItemTiming,
    Open,
    Opened,
    Preempted,
    Proposal,
    Refused,
    Scores,
    SessionFailed,
    SessionLost,
)
from outrider.recording import AheadRecord, AnyRecord, ForwardRecord, ItemRecord, Recorder, is_sampled
from outrider.serving.decode.begun import BegunStep
from outrider.serving.decode.lookahead_steps import LookaheadAnswers
from outrider.serving.decode.step import DecodeBatch
from outrider.serving.link_loads import LinkLoads
from outrider.serving.request import AnyRequest, Batch
from outrider.serving.stats import ServiceStats

_log = logging.getLogger(__name__)

_WARNING_INTERVAL_S = 1.0
"""Interval for which warnings are counted against ``MAX_WARNINGS``."""
MAX_WARNINGS = 32
"""Warnings about sessions in one interval. One message can cause thousands, each of which takes the engine's thread
some 30 us; the metrics count all of them."""

Messages: TypeAlias = list[tuple[int, EventBatch[Any]]]
"""Messages, each with the number of its link."""


@dataclass(frozen=True, slots=True)
class _TracedRows:
    """Answers in arrays, some of whose items are traced."""

    answers: AnswerBatch[Any]
    trace_parents: Sequence[str]  # [B]
    arrived_ns: Sequence[int]  # [B]
    forward: ForwardRecord | None
    ended_ns: int
    kind: type[Proposal | Scores]

    def records(self) -> Iterator[ItemRecord]:
        """Records of the traced items."""
        indices = [place for place, parent in enumerate(self.trace_parents) if is_sampled(parent)]
        sessions, generations = self.answers.sessions.tolist(), self.answers.generations.tolist()
        for place, timing in zip(indices, self.answers.timings(indices), strict=True):
            arrived_ns = self.arrived_ns[place]
            record = ItemRecord(self.trace_parents[place], sessions[place], generations[place], arrived_ns)
            if self.forward is not None:
                record.note_forward(self.forward, arrived_ns)
            record.timing, record.ended_ns, record.outcome = timing, self.ended_ns, self.kind.__name__
            yield record


class OutputProcessor:
    """Events of one core."""

    def __init__(self, stats: ServiceStats, clock: Callable[[], int], num_pages_free: Callable[[], int]) -> None:
        self.recorder: Recorder | None = None
        """Takes the records of traced items."""
        self._ended: list[AnyRecord] = []
        """Records of answered items whose answers have not left yet, and of work ahead."""
        self._traced_rows: list[_TracedRows] = []
        """Answers of which no record is made yet."""
        self._stats, self._clock, self._num_pages_free = stats, clock, num_pages_free
        self._ready: dict[int, list[Any]] = {}
        self._opened: dict[int, list[Any]] = {}
        """Leave with the next message of their link, which answers the items that they came with."""
        self._finished: list[AnyRequest] = []
        self._plain: list[LookaheadAnswers] = []
        self._claimed: Messages = []
        self._loads = LinkLoads()
        self._warnings = RateLimit(_WARNING_INTERVAL_S, burst=MAX_WARNINGS)

    @property
    def is_ready(self) -> bool:
        """True if ``take`` would give anything."""
        return bool(self._ready or self._finished or self._plain or self._claimed)

    @property
    def finished(self) -> list[AnyRequest]:
        """Requests whose answers ``take`` would give, which were computed before they were asked for."""
        return self._finished

    def note_forward(self, batch: Batch) -> None:
        """A forward has ended, of which reports tell."""
        self._loads.note_forward(batch.rows_by_link, lambda: batch.drafts_by_link)

    def note_ahead(self, batch: Batch) -> None:
        """A forward has ended: record what ran of it before it was asked for, for sessions that are traced."""
        if self.recorder is None:
            return
        done = batch.record
        for session, base, asked_ns in batch.rows_ahead():
            if is_sampled(session.trace_parent):
                ended_ns = done.ended_ns if asked_ns is None else min(asked_ns, done.ended_ns)
                number, size = session.open.session, done.batch_size
                record = AheadRecord(session.trace_parent, number, base, done.started_ns, ended_ns, size)
                self._ended.append(record)

    def put(self, link_id: int, event: Any, opening: Open | None = None, *, trace_parent: str = "") -> None:  # noqa: ANN401
        """Queue an event that is no forward's result: an answer without a forward, or a push."""
        self.note(event, opening, trace_parent)
        self._ready.setdefault(link_id, []).append(event)

    def put_opened(self, link_id: int, event: Opened) -> None:
        """Queue the answer to an ``Open``: it leaves no sooner than something else."""
        self._opened.setdefault(link_id, []).append(event)

    def put_finished(self, request: AnyRequest) -> None:
        """Queue the answer to an item that was computed before it came."""
        self._finished.append(request)

    def put_plain(self, answers: Iterable[LookaheadAnswers]) -> None:
        """Queue the answers to rows that were computed before they came."""
        self._plain += answers

    def put_claimed(
        self, begun: BegunStep, batched: ExtendBatch, rows: Sequence[int], indices: Sequence[int], arrived_ns: int
    ) -> None:
        """Queue the answers to commands of one link that were computed before they came: ``rows`` of ``batched`` ask
        for what lies at ``indices`` of a step.
        """
        answers = begun.answers_to(batched, np.array(rows), np.array(indices))
        step = replace(
            begun.step, batched=batched, own=begun.step.own.selected(np.array(indices)), arrived_ns=arrived_ns
        )
        parents = [batched.trace_parents[row] for row in rows] if batched.trace_parents else ()
        self._claimed += self.batch_message(step, answers, begun.forward, parents)

    def put_messages(self, messages: Messages) -> None:
        """Queue messages as they are."""
        self._claimed += messages

    def take(self) -> Messages:
        """Take all messages that are ready."""
        ready, self._ready = self._ready, {}
        finished, self._finished = self._finished, []
        messages: Messages = []
        for link_id, events in ready.items():
            messages += [*self._take_opened(link_id), (link_id, EventBatch(tuple(events)))]
        plain, self._plain = self._plain, []
        claimed, self._claimed = self._claimed, []
        return messages + claimed + self.messages(finished, plain)

    def drop_link(self, link_id: int) -> None:
        """Forget what would go to a link that is gone."""
        self._ready.pop(link_id, None)
        self._opened.pop(link_id, None)
        self._loads.drop_link(link_id)
        gone = [request for request in self._finished if request.session.link_id == link_id]
        self._finished = [request for request in self._finished if request.session.link_id != link_id]
        for request in gone:
            self.end_unanswered(request, "link closed")
        self._plain = [own for answers in self._plain for link, own in answers.by_link() if link != link_id]
        self._claimed = [(link, batch) for link, batch in self._claimed if link != link_id]

    def messages(self, finished: Sequence[AnyRequest], plain: Sequence[LookaheadAnswers] = ()) -> Messages:
        """Answers as messages, one a link; their time ends now."""
        links = dict.fromkeys([request.session.link_id for request in finished])
        in_arrays: dict[int, list[LookaheadAnswers]] = {}
        for answers in plain:
            for link_id, part in answers.by_link():
                in_arrays.setdefault(link_id, []).append(part)
        messages: Messages = []
        for link_id in links | dict.fromkeys(in_arrays):
            own = finished if len(links) == 1 else [one for one in finished if one.session.link_id == link_id]
            own = own if link_id in links else ()
            batch = self._plain_batch(own, in_arrays[link_id]) if link_id in in_arrays else self._batch(own)
            messages += [*self._take_opened(link_id), (link_id, batch)]
        return messages

    def _plain_batch(self, finished: Sequence[AnyRequest], plain: Sequence[LookaheadAnswers]) -> EventBatch[Any]:
        """Answers of one link, some as arrays."""
        link_id = int(plain[0].step.own.link_ids[plain[0].indices[0]])
        now = self._clock()
        batched = []
        for answers in [own for one in plain for own in one.by_form()]:
            step, indices = answers.step, answers.indices
            batched.append(step.batched(indices, now))
            parents = step.trace_parents[indices].tolist()
            if self.recorder is not None:
                for place, parent in zip(indices, parents, strict=True):
                    step.sessions[place].trace_parent = parent
            if any(parents):
                arrived = step.arrived_ns[indices].tolist()
                self._traced_rows.append(_TracedRows(batched[-1], parents, arrived, step.forward, now, Scores))
        times = np.concatenate([answers.step.timings_ns(answers.indices, now) for answers in plain])
        queue_ns, forward_ns, sample_ns, _, total_ns, _ = times.max(axis=0).tolist()
        forwards = [answers.step.forward for answers in plain if answers.step.forward is not None]
        report = ForwardReport(
            queue_ns, forward_ns, sample_ns, total_ns,
            max([forward.batch_size for forward in forwards]), max([forward.num_tokens for forward in forwards]),
            self._num_pages_free(), max([forward.ended_ns for forward in forwards]),
            *self._loads.others_of(link_id),
        )  # fmt: skip
        if not finished:
            return EventBatch((), report, (), tuple(batched))
        beside = self._batch(finished)
        return EventBatch(beside.events, _larger(report, beside.report), beside.timings, (*batched, *beside.batched))

    def batch_message(
        self,
        step: DecodeBatch,
        answers: AnswerBatch[Any],
        forward: ForwardRecord,
        trace_parents: Sequence[str] = (),
    ) -> Messages:
        """The answers of a step, which all came and left together; their time ends now. ``trace_parents``: of each, or
        none.
        """
        now, arrived = self._clock(), step.arrived_ns
        started = max(forward.started_ns, arrived)
        computed = max(forward.computed_ns, started)
        ended = max(forward.ended_ns, computed)
        stages = started - arrived, computed - started, ended - computed
        timing = (*stages, now - ended, now - arrived, forward.mask_ns)
        report = ForwardReport(
            *stages, now - arrived, forward.batch_size, forward.num_tokens, self._num_pages_free(), forward.ended_ns,
            *self._loads.others_of(step.link_id),
        )  # fmt: skip
        batched = AnswerBatch(
            answers.sessions, answers.generations, answers.base_lengths, answers.counts, answers.token_ids,
            timing, answers.make, answers.outside_masses, answers.states, answers.supports,
            *_of_channel(step.batched), answers.goes_on, logprobs=answers.logprobs,
        )  # fmt: skip
        if self.recorder is not None:
            numbers = answers.sessions.tolist()
            for number, parent in zip(numbers, trace_parents or [""] * len(numbers), strict=True):
                step.sessions[step.own.indices[number]].trace_parent = parent
        if trace_parents:
            kind, times = Scores if step.is_scoring else Proposal, [arrived] * len(trace_parents)
            self._traced_rows.append(_TracedRows(batched, trace_parents, times, forward, now, kind))
        return [*self._take_opened(step.link_id), (step.link_id, EventBatch((), report, (), (batched,)))]

    def note(self, event: object, opening: Open | None, trace_parent: str = "") -> None:
        """Count and log an event that says that something went wrong; nothing of any other.

        ``opening`` is the session's. None for one that is not open here: then only the item's ``trace_parent`` tells
        whose it is, where there is one.
        """
        self._stats.note_answer(event)
        if isinstance(event, SessionFailed | SessionLost):
            num_suppressed = self._warnings.take()
            if num_suppressed is not None:
                _warn(event, _about(event, opening, trace_parent, num_suppressed))
        elif isinstance(event, Preempted):
            _log.info("a session is preempted for older ones", extra=_about(event, opening, trace_parent))
        elif isinstance(event, Refused) and _log.isEnabledFor(logging.DEBUG):
            _log.debug("a session is refused: %s", event.reason, extra=_about(event, opening, trace_parent))

    def hand_over_records(self) -> None:
        """Hand the records of traced items to the recorder; called when their answers have left."""
        rows, self._traced_rows = self._traced_rows, []
        for each in rows:
            self._ended += each.records()
        if self._ended:
            ended, self._ended = self._ended, []
            self._hand_over(ended)

    def end_unanswered(self, request: AnyRequest, why: str) -> None:
        """End the record of an item that gets no answer."""
        if (record := request.record) is not None:
            record.ended_ns, record.outcome = self._clock(), why
            self._hand_over([record])

    def _hand_over(self, ended: Sequence[AnyRecord]) -> None:
        if self.recorder is not None:
            self.recorder.ended(ended)
            return
        for record in ended:
            if isinstance(record, ItemRecord):
                record.forwards.clear()  # which refer to it

    def _take_opened(self, link_id: int) -> Messages:
        events = self._opened.pop(link_id, None)
        return [] if events is None else [(link_id, EventBatch(tuple(events)))]

    def _batch(self, finished: Sequence[AnyRequest]) -> EventBatch[Any]:
        now = self._clock()
        timings = _timings(finished, now)
        events = tuple([request.answer for request in finished])
        for index, request in enumerate(finished):
            request.session.trace_parent = request.item.trace_parent
            if (record := request.record) is not None:
                event = events[index]
                record.error = event.message if isinstance(event, SessionFailed) else ""
                record.timing, record.ended_ns, record.outcome = timings[index], now, type(event).__name__
                self._ended.append(record)
        report = ForwardReport(
            max([timing.queue_ns for timing in timings]), max([timing.forward_ns for timing in timings]),
            max([timing.sample_ns for timing in timings]), max([timing.total_ns for timing in timings]),
            max([request.batch_size for request in finished]), max([request.num_tokens for request in finished]),
            self._num_pages_free(), max([request.forward_ended_ns for request in finished]),
            *self._loads.others_of(finished[0].session.link_id),
        )  # fmt: skip
        if channel := _channel_of(finished):
            proposals = [event for event in events if isinstance(event, Proposal)]
            batched = proposal_batch(proposals, timings, channel)
            if batched is not None:
                return EventBatch((), report, (), (batched,))
        return EventBatch(events, report, timings)


def _channel_of(finished: Sequence[AnyRequest]) -> int:
    """The proposal channel that the answers of one step go by; 0 for none, or not all."""
    channel: int = getattr(finished[0].item, "channel", 0)
    if not channel:
        return 0
    are_proposals = all(
        isinstance(request.answer, Proposal) and request.item.channel == channel for request in finished
    )
    return channel if are_proposals else 0


def _of_channel(batched: CommandBatch) -> tuple[int, Column | None]:
    """``channel`` and ``draft_token_ids`` of the answers to arrays."""
    if isinstance(batched, ExtendBatch):
        return batched.channel, None
    return batched.channel, batched.draft_token_ids if batched.is_direct else None


def _larger(report: ForwardReport, other: ForwardReport | None) -> ForwardReport:
    """Report with the larger of each pair of numbers, and the pages that are free."""
    if other is None:
        return report
    return ForwardReport(
        max(report.queue_ns, other.queue_ns),
        max(report.forward_ns, other.forward_ns),
        max(report.sample_ns, other.sample_ns),
        max(report.total_ns, other.total_ns),
        max(report.batch_size, other.batch_size),
        max(report.num_tokens, other.num_tokens),
        other.num_pages_free,
        max(report.ended_ns, other.ended_ns),
        max(report.num_other_rows, other.num_other_rows),
        max(report.num_other_drafts, other.num_other_drafts),
    )


def _timings(finished: Sequence[AnyRequest], now_ns: int) -> tuple[ItemTiming, ...]:
    """Times of the requests; those that arrived in one message and shared one forward share a value."""
    known: dict[tuple[int, ...], ItemTiming] = {}
    found = []
    for request in finished:
        key = request.arrived_ns, request.waiting_since_ns, request.queue_ns or 0, request.wait_ns, request.forward_ns
        timing = known.get(key)
        if timing is None or timing.sample_ns != request.sample_ns:
            timing = known[key] = request.timing(now_ns)
        found.append(timing)
    return tuple(found)


def _warn(event: SessionFailed | SessionLost, about: dict[str, dict[str, object]]) -> None:
    if isinstance(event, SessionFailed):
        _log.warning("a session failed: %s: %s", event.code, event.message, extra=about)
    else:
        _log.warning("a session is lost: %s", event.reason, extra=about)


def _about(
    event: SessionFailed | SessionLost | Preempted | Refused,
    opening: Open | None,
    trace_parent: str,
    num_suppressed: int = 0,
) -> dict[str, dict[str, object]]:
    """Fields of a line; those without a value are left out."""
    if opening is None:
        named: dict[str, object] = {"trace_id": _trace_id(trace_parent)}
    else:
        named = {"request_id": opening.request_id, "trace_id": opening.trace_id}
    named["num_suppressed"] = num_suppressed
    return {"fields": {"session": event.session, **{key: value for key, value in named.items() if value}}}


def _trace_id(trace_parent: str) -> str:
    """The second part of what W3C calls ``traceparent``; empty when there is none."""
    _, _, after_version = trace_parent.partition("-")
    return after_version.partition("-")[0]
