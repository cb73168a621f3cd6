"""Records of traced items: plain numbers that are later made into spans.

The engine records, ``outrider.telemetry`` makes spans; they are independent. Times are readings of the service's
monotonic clock, in nanoseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
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


class Recorder(Protocol):
    """Receiver of records; called by the engine's thread, returns at once."""

    def wants(self, trace_parent: str) -> bool:
        """True if an item with this nonempty ``traceparent`` is recorded."""
        ...

    def ended(self, item: ItemRecord) -> None:
        """An item was answered or abandoned; its record and those of its forwards are final."""
        ...
