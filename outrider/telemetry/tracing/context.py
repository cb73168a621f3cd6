"""Trace contexts in W3C format: parsing, formatting, creation, and the context of the caller's active span.

Does not require OpenTelemetry, so that links and the SDK can carry a context without it.
"""

from __future__ import annotations

import random
import re
import sys
from dataclasses import dataclass

TRACE_PARENT, TRACE_STATE = "traceparent", "tracestate"
"""The keys under which a context travels in gRPC metadata."""

_PATTERN = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16
_SAMPLED = 1
# Not `random`'s own generator: a program that seeds that one would give two processes the same ids.
_random = random.SystemRandom()
_ids = random.Random(_random.getrandbits(256))


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Identity of a span, sent to other processes. Ids are lower-case hexadecimal digits."""

    trace_id: str
    span_id: str
    is_sampled: bool
    state: str = ""
    """``tracestate``, passed on unchanged."""

    @classmethod
    def parse(cls, trace_parent: str, state: str = "") -> TraceContext | None:
        """Parse a ``traceparent``; None if it is invalid, as W3C requires of a receiver."""
        found = _PATTERN.fullmatch(trace_parent.strip())
        if found is None:
            return None
        version, trace_id, span_id, flags, more = found.groups()
        is_wrong = version == "ff" or (version == "00" and more is not None)
        if is_wrong or trace_id == _NO_TRACE or span_id == _NO_SPAN:
            return None
        return cls(trace_id, span_id, bool(int(flags, 16) & _SAMPLED), state)

    @property
    def trace_parent(self) -> str:
        """The context as a ``traceparent``."""
        return f"00-{self.trace_id}-{self.span_id}-{_SAMPLED if self.is_sampled else 0:02x}"


def new_trace_id() -> str:
    """A trace id, never all zeros."""
    return f"{_ids.getrandbits(128) or 1:032x}"


def new_span_id() -> str:
    """A span id, never all zeros."""
    return f"{_ids.getrandbits(64) or 1:016x}"


def active_context() -> TraceContext | None:
    """Context of the active span of this program, if OpenTelemetry traces it; otherwise None.

    OpenTelemetry is not imported: a program with an active span has imported it.
    """
    api = sys.modules.get("opentelemetry.trace")
    if api is None:
        return None
    context = api.get_current_span().get_span_context()
    if not context.is_valid:
        return None
    return TraceContext(
        f"{context.trace_id:032x}",
        f"{context.span_id:016x}",
        bool(context.trace_flags & 1),
        context.trace_state.to_header(),
    )
