"""``link.proto``: what a draft and a target answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider import ports
from outrider.transport.convert.one_of import Readers, read_one_of
from outrider.transport.convert.ranges import out_of_range_breaks_the_contract
from outrider.transport.convert.scores import (
    FORM_READERS,
    candidates_from_proto,
    candidates_to_proto,
    evidence_from_proto,
    evidence_to_proto,
    form_to_proto,
)
from outrider.v1 import link_pb2 as pb


def proposal_to_proto(event: ports.Proposal) -> pb.Proposal:
    """A proposal."""
    return pb.Proposal(
        session=event.session,
        generation=event.generation,
        base_length=event.base_length,
        token_ids=event.token_ids,
        evidence=evidence_to_proto(event.evidence),
    )


def proposal_from_proto(message: pb.Proposal) -> ports.Proposal:
    """A proposal."""
    return ports.Proposal(
        session=message.session,
        generation=message.generation,
        base_length=message.base_length,
        token_ids=tuple(message.token_ids),
        evidence=evidence_from_proto(message.evidence),
    )


def branches_to_proto(event: ports.Branches) -> pb.Branches:
    """Pushed branches."""
    return pb.Branches(
        session=event.session,
        generation=event.generation,
        base_length=event.base_length,
        branches=[
            pb.Branch(
                branch_id=branch.branch_id,
                num_accepted=branch.num_accepted,
                next_token_id=branch.next_token_id,
                token_ids=branch.token_ids,
                evidence=evidence_to_proto(branch.evidence),
            )
            for branch in event.branches
        ],
    )


def branches_from_proto(message: pb.Branches) -> ports.Branches:
    """Pushed branches."""
    return ports.Branches(
        session=message.session,
        generation=message.generation,
        base_length=message.base_length,
        branches=tuple(
            ports.Branch(
                branch_id=branch.branch_id,
                num_accepted=branch.num_accepted,
                next_token_id=branch.next_token_id,
                token_ids=tuple(branch.token_ids),
                evidence=evidence_from_proto(branch.evidence),
            )
            for branch in message.branches
        ),
    )


def scores_to_proto(event: ports.Scores) -> pb.Scores:
    """Scores."""
    return pb.Scores(
        session=event.session,
        generation=event.generation,
        base_length=event.base_length,
        logprobs=candidates_to_proto(event.logprobs),
        prompt_logprobs=candidates_to_proto(event.prompt_logprobs),
        **form_to_proto(event.form),
    )


def scores_from_proto(message: pb.Scores) -> ports.Scores:
    """Scores; ``ProtocolError`` when they are of no known form."""
    return ports.Scores(
        session=message.session,
        generation=message.generation,
        base_length=message.base_length,
        form=read_one_of(message, "form", FORM_READERS),
        logprobs=candidates_from_proto(message.logprobs),
        prompt_logprobs=candidates_from_proto(message.prompt_logprobs),
    )


def _lost_from_proto(message: pb.SessionLost) -> ports.SessionLost:
    return ports.SessionLost(message.session, message.generation, message.reason)


def _failed_from_proto(message: pb.SessionFailed) -> ports.SessionFailed:
    return ports.SessionFailed(message.session, message.generation, message.code, message.message, message.field)


def _refused_from_proto(message: pb.Refused) -> ports.Refused:
    return ports.Refused(message.session, message.generation, message.retry_after_ms, message.reason)


_COMMON_READERS: Readers = {
    "session_lost": _lost_from_proto,
    "session_failed": _failed_from_proto,
    "refused": _refused_from_proto,
}
_DRAFT_READERS: Readers = {"proposal": proposal_from_proto, "branches": branches_from_proto, **_COMMON_READERS}
_TARGET_READERS: Readers = {"scores": scores_from_proto, **_COMMON_READERS}


def _common_event_to_proto(event: ports.SessionLost | ports.SessionFailed | ports.Refused) -> dict[str, Any]:
    if isinstance(event, ports.SessionLost):
        return {"session_lost": pb.SessionLost(session=event.session, generation=event.generation, reason=event.reason)}
    if isinstance(event, ports.SessionFailed):
        failed = pb.SessionFailed(session=event.session, generation=event.generation, code=event.code)
        failed.message, failed.field = event.message, event.field
        return {"session_failed": failed}
    refused = pb.Refused(session=event.session, generation=event.generation, reason=event.reason)
    refused.retry_after_ms = event.retry_after_ms
    return {"refused": refused}


def _draft_event_to_proto(event: ports.DraftEvent) -> pb.DraftEvent:
    if isinstance(event, ports.Proposal):
        return pb.DraftEvent(proposal=proposal_to_proto(event))
    if isinstance(event, ports.Branches):
        return pb.DraftEvent(branches=branches_to_proto(event))
    return pb.DraftEvent(**_common_event_to_proto(event))


def _target_event_to_proto(event: ports.TargetEvent) -> pb.TargetEvent:
    if isinstance(event, ports.Scores):
        return pb.TargetEvent(scores=scores_to_proto(event))
    return pb.TargetEvent(**_common_event_to_proto(event))


def report_to_proto(report: ports.ForwardReport | None) -> pb.ForwardReport | None:
    """What a forward cost; None when there was none."""
    if report is None:
        return None
    return pb.ForwardReport(**{name: getattr(report, name) for name in ports.ForwardReport.__slots__})


def report_from_proto(message: pb.ForwardReport) -> ports.ForwardReport:
    """What a forward cost."""
    return ports.ForwardReport(**{name: getattr(message, name) for name in ports.ForwardReport.__slots__})


def draft_events_to_proto(batch: ports.EventBatch[ports.DraftEvent]) -> pb.DraftEvents:
    """One message from a draft; ``ProtocolError`` when a value does not fit its field."""
    with out_of_range_breaks_the_contract():
        return pb.DraftEvents(events=map(_draft_event_to_proto, batch.events), report=report_to_proto(batch.report))


def draft_events_from_proto(message: pb.DraftEvents) -> ports.EventBatch[ports.DraftEvent]:
    """One message from a draft; ``ProtocolError`` for an event nobody knows."""
    return _batch_from_proto(message, _DRAFT_READERS)


def target_events_to_proto(batch: ports.EventBatch[ports.TargetEvent]) -> pb.TargetEvents:
    """One message from a target; ``ProtocolError`` when a value does not fit its field."""
    with out_of_range_breaks_the_contract():
        return pb.TargetEvents(events=map(_target_event_to_proto, batch.events), report=report_to_proto(batch.report))


def target_events_from_proto(message: pb.TargetEvents) -> ports.EventBatch[ports.TargetEvent]:
    """One message from a target; ``ProtocolError`` for an event nobody knows."""
    return _batch_from_proto(message, _TARGET_READERS)


def _batch_from_proto(message: pb.DraftEvents | pb.TargetEvents, readers: Readers) -> ports.EventBatch[Any]:
    events: Sequence[Any] = [read_one_of(event, "event", readers) for event in message.events]
    report = report_from_proto(message.report) if message.HasField("report") else None
    return ports.EventBatch(tuple(events), report)
