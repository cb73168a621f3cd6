"""Records of traced items: plain numbers that are later made into spans.

The engine records, ``outrider.telemetry`` makes spans; they are independent. Times are readings of the service's
monotonic clock, in nanoseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from outrider.ports import ItemTiming


@dataclass(slots=True)
class ForwardRecord:
    """One forward that served at least one traced item."""

    started_ns: int
    computed_ns: int
    """The end of the model's work and the beginning of sampling."""
    ended_ns: int
    batch_size: int
    num_tokens: int
    used_graph: bool
    masked_ns: tuple[int, int] | None = None
    """Clock readings between which masks of grammars were made, beside the model's work; None without any."""
    items: list[ItemRecord] = field(default_factory=list)
    """The traced ones among those it served."""
    trace_id: str = ""
    span_id: str = ""
    """Both are set by the code that makes spans."""

    @property
    def mask_ns(self) -> int:
        """Time in which masks were made."""
        return 0 if self.masked_ns is None else self.masked_ns[1] - self.masked_ns[0]


@dataclass(slots=True)
class ItemRecord:
    """One traced ``Extend`` or ``Score``."""

    trace_parent: str
    """Trace parent in W3C's form."""
    session: int
    generation: int
    arrived_ns: int
    forwards: list[ForwardRecord] = field(default_factory=list)
    ended_ns: int = 0
    timing: ItemTiming | None = None
    """None when no forward was needed, or none was finished."""
    outcome: str = ""
    """The class of the event that answered it, or why none did."""
    error: str = ""
    span_id: str = ""
    """Set by the code that makes spans."""

    def note_forward(self, done: ForwardRecord, since_ns: int) -> None:
        """A forward served it, of which only what came after ``since_ns`` is its own."""
        if since_ns <= done.started_ns:
            done.items.append(self)
            self.forwards.append(done)
        elif since_ns < done.ended_ns:
            computed = max(done.computed_ns, since_ns)
            self.forwards.append(replace(done, started_ns=since_ns, computed_ns=computed, items=[self]))


@dataclass(frozen=True, slots=True)
class AheadRecord:
    """A forward, or its part, that ran for a traced session before its coordinator asked."""

    trace_parent: str
    session: int
    base_length: int
    """Tokens of the text after which it draws or scores draft tokens."""
    started_ns: int
    ended_ns: int
    batch_size: int


AnyRecord = ItemRecord | AheadRecord


class Recorder(Protocol):
    """Receiver of records; called by the engine's thread, returns at once."""

    def ended(self, records: Sequence[AnyRecord]) -> None:
        """Items were answered or abandoned, or work ahead is done; their records are final."""
        ...


def is_sampled(trace_parent: str) -> bool:
    """True for a ``traceparent`` whose lowest flag is set: items with it are recorded."""
    return trace_parent[-1:] in _ODD_DIGITS


_ODD_DIGITS = frozenset("13579bdf")
