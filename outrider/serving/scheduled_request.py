"""One item between its arrival and its answer, and where its time went.

Owns the readings of the clock and the sums between them. Refuses to know who is served when.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from outrider.ports import ItemTiming
from outrider.recording import ItemRecord, PassRecord
from outrider.serving.executor import CommonEvent, EventT, ItemT, JobT, SequenceT
from outrider.serving.session_table import Session


@dataclass(slots=True)
class ScheduledRequest(Generic[SequenceT, ItemT, JobT, EventT]):
    """An item that is to be answered, or that was foreseen."""

    session: Session[SequenceT]
    generation: int
    job: JobT
    arrived_ns: int
    left_ns: int
    """When it was last touched: its arrival, or the end of the last forward that served it."""
    record: ItemRecord | None = None
    """None when it is not traced."""
    foreseen: ItemT | None = None
    """What it is computed for, as long as nobody has asked for it."""
    asked: ItemT | None = None
    """What has then come."""
    is_under_way: bool = False
    """Whether a forward that serves it was started and has not ended: nobody may cut its session's text."""
    overtaken_by: tuple[ItemT, int] | None = None
    """What its session has asked for meanwhile instead, and when that arrived."""
    answer: EventT | CommonEvent | None = None
    """What was found; None until then."""
    queue_ns: int | None = None
    forward_ns: int = 0
    sample_ns: int = 0
    wait_ns: int = 0
    batch_size: int = 0
    """Of the last forward that served it."""
    num_tokens: int = 0
    """Of the last forward that served it."""

    def ask(self, item: ItemT, arrived_ns: int, record: ItemRecord | None) -> None:
        """The item that was foreseen has come: its time begins now, whatever was done before."""
        self.foreseen, self.asked = None, item
        self.generation, self.record = item.generation, record
        self.arrived_ns = self.left_ns = arrived_ns
        self.queue_ns, self.forward_ns, self.sample_ns, self.wait_ns = None, 0, 0, 0

    def note_pass(self, found: PassRecord) -> None:
        """A forward served it. Each stage lies between two readings of the clock; none is what the others leave.

        A foreseen item may have come while the forward ran: only what was left of it then is its time.
        """
        started = max(found.started_ns, self.left_ns)
        computed = max(found.computed_ns, started)
        idle = started - self.left_ns
        if self.queue_ns is None:
            self.queue_ns = idle
        else:
            self.wait_ns += idle
        self.forward_ns += computed - started
        self.sample_ns += found.ended_ns - computed
        self.left_ns = found.ended_ns
        self.batch_size, self.num_tokens = found.batch_size, found.num_tokens
        if self.record is not None:
            self._record(self.record, found, started, computed)

    def timing(self, now_ns: int) -> ItemTiming:
        """Where its time went, if it is answered now."""
        return ItemTiming(
            queue_ns=self.queue_ns or 0,
            forward_ns=self.forward_ns,
            sample_ns=self.sample_ns,
            wait_ns=self.wait_ns + now_ns - self.left_ns,
            total_ns=now_ns - self.arrived_ns,
        )

    def _record(self, record: ItemRecord, found: PassRecord, started_ns: int, computed_ns: int) -> None:
        if started_ns == found.started_ns:
            found.items.append(record)
            record.passes.append(found)
        else:
            share = PassRecord(
                started_ns, computed_ns, found.ended_ns, found.batch_size, found.num_tokens, found.used_graph, [record]
            )
            record.passes.append(share)
