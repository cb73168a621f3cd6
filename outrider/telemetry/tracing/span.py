"""A finished span as a plain value, for export and for reading from files or receivers.

Does not require OpenTelemetry. Times are nanoseconds since 1970 by the clock of the host that made the span.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

AttributeValue = str | bool | int | float | tuple[str, ...]


class SpanKind(enum.IntEnum):
    """Kind of a span; the numbers are OTLP's."""

    INTERNAL = 1
    SERVER = 2
    CLIENT = 3


@dataclass(frozen=True, slots=True)
class SpanLink:
    """A link to a span of any trace."""

    trace_id: str
    span_id: str


@dataclass(frozen=True, slots=True)
class Span:
    """One span. Ids are lower-case hexadecimal digits."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    """Empty: it has none."""
    start_ns: int
    end_ns: int
    kind: SpanKind = SpanKind.INTERNAL
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    links: tuple[SpanLink, ...] = ()
    error: str = ""
    """Error message of a failed span; empty otherwise."""
    trace_state: str = ""
    service: str = ""
    """Service that made it; set on reading only, since a process's spans all have its own name."""

    @property
    def duration_ns(self) -> int:
        """Duration in nanoseconds."""
        return self.end_ns - self.start_ns


BuildSpans = Callable[[], Iterable[Span]]
"""Makes spans of what was noted; called by a thread of its own."""
