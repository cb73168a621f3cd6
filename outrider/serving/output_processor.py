"""What a core tells: answers by link, how long each took, and the records of those that are traced.

Owns what is ready to be told and how a message is made of it. Decides nothing about who is served.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeAlias

from outrider.ports import EventBatch, ForwardReport, Open, Opened, SessionFailed
from outrider.recording import ItemRecord, Recorder
from outrider.serving.executor import CommonEvent, EventT, ItemT, JobT, SequenceT
from outrider.serving.failure_log import log_trouble
from outrider.serving.scheduled_request import ScheduledRequest
from outrider.serving.stats import ServiceStats

Told: TypeAlias = list[tuple[int, EventBatch[EventT | CommonEvent]]]
"""Messages, each with the number of its link."""


class OutputProcessor(Generic[SequenceT, ItemT, JobT, EventT]):
    """The answers of one core."""

    def __init__(self, activity: ServiceStats, clock: Callable[[], int], num_pages_free: Callable[[], int]) -> None:
        self.recorder: Recorder | None = None
        """Told of traced items."""
        self._activity, self._clock, self._num_pages_free = activity, clock, num_pages_free
        self._ready: dict[int, list[EventT | CommonEvent]] = {}
        self._opened: dict[int, list[EventT | CommonEvent]] = {}
        """Told with the next message of their link, which answers the items that they came with."""
        self._found: list[ScheduledRequest[SequenceT, ItemT, JobT, EventT]] = []

    @property
    def has_any(self) -> bool:
        """Whether ``take`` would give anything."""
        return bool(self._ready or self._found)

    def put(
        self, link_id: int, event: EventT | CommonEvent, opening: Open | None = None, *, trace_parent: str = ""
    ) -> None:
        """An answer that needed no forward."""
        self._activity.note_answer(event)
        log_trouble(event, opening, trace_parent)
        self._ready.setdefault(link_id, []).append(event)

    def put_opened(self, link_id: int, event: Opened) -> None:
        """The answer to an ``Open``: told no sooner than something else."""
        self._opened.setdefault(link_id, []).append(event)

    def put_found(self, pending: ScheduledRequest[SequenceT, ItemT, JobT, EventT]) -> None:
        """An item that was answered before it came."""
        self._found.append(pending)

    def take(self) -> Told[EventT]:
        """All that was put, to be told now."""
        ready, self._ready = self._ready, {}
        found, self._found = self._found, []
        told: Told[EventT] = []
        for link_id, events in ready.items():
            told += [*self._take_opened(link_id), (link_id, EventBatch(tuple(events)))]
        return told + self.batches(found)

    def drop_link(self, link_id: int) -> None:
        """Nobody is there to be told."""
        self._ready.pop(link_id, None)
        self._opened.pop(link_id, None)
        gone = [pending for pending in self._found if pending.session.link_id == link_id]
        self._found = [pending for pending in self._found if pending.session.link_id != link_id]
        for pending in gone:
            self.end_unanswered(pending, "link closed")

    def batches(self, answered: Sequence[ScheduledRequest[SequenceT, ItemT, JobT, EventT]]) -> Told[EventT]:
        """Answers as messages, one a link; their time ends now."""
        links = dict.fromkeys(pending.session.link_id for pending in answered)
        told: Told[EventT] = []
        for link_id in links:
            batch = self._batch([one for one in answered if one.session.link_id == link_id])
            told += [*self._take_opened(link_id), (link_id, batch)]
        return told

    def record_of(self, item: ItemT, arrived_ns: int) -> ItemRecord | None:
        """Where the item is noted; None when it is not traced."""
        if item.trace_parent and self.recorder is not None and self.recorder.wants(item.trace_parent):
            return ItemRecord(item.trace_parent, item.session, item.generation, arrived_ns)
        return None

    def end_unanswered(self, pending: ScheduledRequest[SequenceT, ItemT, JobT, EventT], why: str) -> None:
        """Nothing will be told of an item."""
        if pending.record is not None:
            self._end(pending.record, self._clock(), why)
            pending.record = None  # a forward that is under way notes nothing of it any more

    def _take_opened(self, link_id: int) -> Told[EventT]:
        events = self._opened.pop(link_id, None)
        return [] if events is None else [(link_id, EventBatch(tuple(events)))]

    def _batch(
        self, answered: Sequence[ScheduledRequest[SequenceT, ItemT, JobT, EventT]]
    ) -> EventBatch[EventT | CommonEvent]:
        now = self._clock()
        timings = tuple(pending.timing(now) for pending in answered)
        events = tuple(pending.answer for pending in answered if pending.answer is not None)
        for pending, event, timing in zip(answered, events, timings, strict=True):
            if pending.record is not None:
                pending.record.error = event.message if isinstance(event, SessionFailed) else ""
                pending.record.timing = timing
                self._end(pending.record, now, type(event).__name__)
        report = ForwardReport(
            queue_ns=max(timing.queue_ns for timing in timings),
            forward_ns=max(timing.forward_ns for timing in timings),
            sample_ns=max(timing.sample_ns for timing in timings),
            total_ns=max(timing.total_ns for timing in timings),
            batch_size=max(pending.batch_size for pending in answered),
            num_tokens=max(pending.num_tokens for pending in answered),
            num_pages_free=self._num_pages_free(),
        )
        return EventBatch(events, report, timings)

    def _end(self, record: ItemRecord, now_ns: int, outcome: str) -> None:
        record.ended_ns, record.outcome = now_ns, outcome
        if self.recorder is not None:
            self.recorder.ended(record)
