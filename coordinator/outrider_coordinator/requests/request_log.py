"""Request log: the end of each request, and what services say is wrong before it.

The driver adds the ids of the request and of its trace to each line.
"""

from __future__ import annotations

import logging

from outrider.generation import Timing
from outrider.ports import Preempted, Refused, SessionFailed, SessionLost
from outrider_coordinator.session.actions import Fail, Finish
from outrider_coordinator.session.loop import SessionLoop

_log = logging.getLogger(__name__)


def log_trouble(side: str, event: object) -> None:
    """Log an event that reports a problem; other events are not logged."""
    if isinstance(event, SessionLost):
        _log.warning("the %s lost the session: %s", side, event.reason, extra=_about(event))
    elif isinstance(event, SessionFailed):
        _log.warning("the session failed on the %s: %s: %s", side, event.code, event.message, extra=_about(event))
    elif isinstance(event, Preempted):
        _log.info("the session is preempted on the %s", side, extra=_about(event))
    elif isinstance(event, Refused):
        _log.debug("the %s has no capacity: %s", side, event.reason, extra=_about(event))


def _about(event: SessionLost | SessionFailed | Preempted | Refused) -> dict[str, object]:
    """Session number, by which the service's own log names the session."""
    return {"fields": {"session": event.session}}


def log_refusal(request_id: str, trace_id: str, error: BaseException) -> None:
    """Log that the request was not admitted. Other errors are logged where they become a response."""
    fields = {"request_id": request_id, "trace_id": trace_id, "error": type(error).__name__}
    said = {key: value for key, value in fields.items() if value}
    _log.debug("the request is refused: %s", error, extra={"fields": said})


def log_ending(loop: SessionLoop, ending: Finish | Fail, timing: Timing) -> None:
    """Log that the request has ended."""
    spec_stats = loop.spec_stats
    if spec_stats.num_bad_evidence:
        _log.warning(
            "%d proposals of the request violated the protocol and were not judged", spec_stats.num_bad_evidence
        )
    fields: dict[str, object] = {
        "prompt_tokens": len(loop.engine_request.prompt_token_ids),
        "completion_tokens": loop.tokens.num_output,
        "queue_ms": round(1e3 * timing.queue, 2),
        "first_token_ms": round(1e3 * timing.first_token, 2),
        "total_ms": round(1e3 * timing.total, 2),
    }
    if loop.engine_request.emitted_token_ids:
        fields["resumed_tokens"] = len(loop.engine_request.emitted_token_ids)
    if spec_stats.num_draft_tokens:
        fields["acceptance_rate"] = round(spec_stats.num_accepted_tokens / spec_stats.num_draft_tokens, 3)
    if isinstance(ending, Fail):
        fields["error"] = type(ending.error).__name__
        _log.info("the request failed: %s", ending.error, extra={"fields": fields})
    else:
        _log.info("the request ended: %s", ending.reason.value, extra={"fields": fields})
