"""What a service's log says of sessions that failed, are lost or found no room.

Owns the lines and what names the request in them. Refuses to know how they are written.
"""

from __future__ import annotations

import logging

from outrider.ports import Open, Preempted, Refused, SessionFailed, SessionLost

_log = logging.getLogger(__name__)


def log_trouble(event: object, opening: Open | None, trace_parent: str = "") -> None:
    """A line about an answer that says that something went wrong; nothing about any other.

    ``opening`` is the session's. None for one that is not open here: then only the item's ``trace_parent`` tells whose
    it is, where there is one.
    """
    if isinstance(event, SessionFailed):
        _log.warning("a session failed: %s: %s", event.code, event.message, extra=_about(event, opening, trace_parent))
    elif isinstance(event, SessionLost):
        _log.warning("a session is lost: %s", event.reason, extra=_about(event, opening, trace_parent))
    elif isinstance(event, Preempted):
        _log.info("a session is preempted for older ones", extra=_about(event, opening, trace_parent))
    elif isinstance(event, Refused):
        _log.debug("a session is refused: %s", event.reason, extra=_about(event, opening, trace_parent))


def _about(
    event: SessionFailed | SessionLost | Preempted | Refused, opening: Open | None, trace_parent: str
) -> dict[str, dict[str, object]]:
    if opening is None:
        named = {"trace_id": _trace_id(trace_parent)}
    else:
        named = {"request_id": opening.request_id, "trace_id": opening.trace_id}
    return {"fields": {"session": event.session, **{key: value for key, value in named.items() if value}}}


def _trace_id(trace_parent: str) -> str:
    """The second part of what W3C calls ``traceparent``; empty when there is none."""
    _, _, after_version = trace_parent.partition("-")
    return after_version.partition("-")[0]
