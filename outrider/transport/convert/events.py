"""``link.proto``: what a draft and a target answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from outrider import ports
from outrider.errors import ProtocolError
from outrider.transport.convert.arrays import Fetch, Place, fetch_nothing, place_nothing
from outrider.transport.convert.one_of import Readers, read_one_of
from outrider.transport.convert.ranges import out_of_range_breaks_the_contract
from outrider.transport.convert.scores import (
    candidates_from_proto,
    candidates_to_proto,
    evidence_from_proto,
    evidence_to_proto,
    form_from_proto,
    form_to_proto,
)
from outrider.v1 import link_pb2 as pb

NUMBERS_IN_A_TIMING = len(ports.ItemTiming.__slots__)


def proposal_to_proto(event: ports.Proposal, place: Place = place_nothing) -> pb.Proposal:
    """A proposal."""
    return pb.Proposal(
        session=event.session,
        generation=event.generation,
        base_length=event.base_length,
        token_ids=event.token_ids,
        evidence=evidence_to_proto(event.evidence, place),
    )


def proposal_from_proto(message: pb.Proposal, fetch: Fetch = fetch_nothing) -> ports.Proposal:
    """A proposal."""
    return ports.Proposal(
        session=message.session,
        generation=message.generation,
        base_length=message.base_length,
        token_ids=tuple(message.token_ids),
        evidence=evidence_from_proto(message.evidence, fetch),
    )


def branches_to_proto(event: ports.Branches, place: Place = place_nothing) -> pb.Branches:
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
                evidence=evidence_to_proto(branch.evidence, place),
            )
            for branch in event.branches
        ],
    )


def branches_from_proto(message: pb.Branches, fetch: Fetch = fetch_nothing) -> ports.Branches:
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
                evidence=evidence_from_proto(branch.evidence, fetch),
            )
            for branch in message.branches
        ),
    )


def scores_to_proto(event: ports.Scores, place: Place = place_nothing) -> pb.Scores:
    """Scores."""
    return pb.Scores(
        session=event.session,
        generation=event.generation,
        base_length=event.base_length,
        logprobs=candidates_to_proto(event.logprobs),
        prompt_logprobs=candidates_to_proto(event.prompt_logprobs),
        **form_to_proto(event.form, place),
    )


def scores_from_proto(message: pb.Scores, fetch: Fetch = fetch_nothing) -> ports.Scores:
    """Scores; ``ProtocolError`` when they are of no known form."""
    return ports.Scores(
        session=message.session,
        generation=message.generation,
        base_length=message.base_length,
        form=form_from_proto(message, fetch),
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


def _draft_event_to_proto(event: ports.DraftEvent, place: Place) -> pb.DraftEvent:
    if isinstance(event, ports.Proposal):
        return pb.DraftEvent(proposal=proposal_to_proto(event, place))
    if isinstance(event, ports.Branches):
        return pb.DraftEvent(branches=branches_to_proto(event, place))
    return pb.DraftEvent(**_common_event_to_proto(event))


def _target_event_to_proto(event: ports.TargetEvent, place: Place) -> pb.TargetEvent:
    if isinstance(event, ports.Scores):
        return pb.TargetEvent(scores=scores_to_proto(event, place))
    return pb.TargetEvent(**_common_event_to_proto(event))


def report_to_proto(report: ports.ForwardReport | None) -> pb.ForwardReport | None:
    """What a forward cost; None when there was none."""
    if report is None:
        return None
    return pb.ForwardReport(**{name: getattr(report, name) for name in ports.ForwardReport.__slots__})


def report_from_proto(message: pb.ForwardReport) -> ports.ForwardReport:
    """What a forward cost."""
    return ports.ForwardReport(**{name: getattr(message, name) for name in ports.ForwardReport.__slots__})


def timings_to_proto(timings: Iterable[ports.ItemTiming]) -> list[int]:
    """Five numbers each, in the order of their names."""
    return [
        number
        for timing in timings
        for number in (timing.queue_ns, timing.forward_ns, timing.sample_ns, timing.wait_ns, timing.total_ns)
    ]


def timings_from_proto(numbers: Sequence[int], *, num_events: int) -> tuple[ports.ItemTiming, ...]:
    """One for each event, or none; ``ProtocolError`` when there are fewer or more."""
    if not numbers:
        return ()
    if len(numbers) != NUMBERS_IN_A_TIMING * num_events:
        raise ProtocolError(f"item_timings_ns: {len(numbers)} numbers are not five for each of {num_events} events")
    return tuple(
        ports.ItemTiming(*numbers[start : start + NUMBERS_IN_A_TIMING])
        for start in range(0, len(numbers), NUMBERS_IN_A_TIMING)
    )


def draft_events_to_proto(batch: ports.EventBatch[ports.DraftEvent], place: Place = place_nothing) -> pb.DraftEvents:
    """One message from a draft; ``ProtocolError`` when a value does not fit its field."""
    with out_of_range_breaks_the_contract():
        events = [_draft_event_to_proto(event, place) for event in batch.events]
        timings = timings_to_proto(batch.timings)
        return pb.DraftEvents(events=events, report=report_to_proto(batch.report), item_timings_ns=timings)


def draft_events_from_proto(
    message: pb.DraftEvents, fetch: Fetch = fetch_nothing
) -> ports.EventBatch[ports.DraftEvent]:
    """One message from a draft; ``ProtocolError`` for an event nobody knows."""
    return _batch_from_proto(message, lambda event: _draft_event_from_proto(event, fetch))


def target_events_to_proto(batch: ports.EventBatch[ports.TargetEvent], place: Place = place_nothing) -> pb.TargetEvents:
    """One message from a target; ``ProtocolError`` when a value does not fit its field."""
    with out_of_range_breaks_the_contract():
        events = [_target_event_to_proto(event, place) for event in batch.events]
        timings = timings_to_proto(batch.timings)
        return pb.TargetEvents(events=events, report=report_to_proto(batch.report), item_timings_ns=timings)


def target_events_from_proto(
    message: pb.TargetEvents, fetch: Fetch = fetch_nothing
) -> ports.EventBatch[ports.TargetEvent]:
    """One message from a target; ``ProtocolError`` for an event nobody knows."""
    return _batch_from_proto(message, lambda event: _target_event_from_proto(event, fetch))


def _draft_event_from_proto(message: pb.DraftEvent, fetch: Fetch) -> ports.DraftEvent:
    chosen = message.WhichOneof("event")
    if chosen == "proposal":
        return proposal_from_proto(message.proposal, fetch)
    if chosen == "branches":
        return branches_from_proto(message.branches, fetch)
    event: ports.DraftEvent = read_one_of(message, "event", _COMMON_READERS)
    return event


def _target_event_from_proto(message: pb.TargetEvent, fetch: Fetch) -> ports.TargetEvent:
    if message.WhichOneof("event") == "scores":
        return scores_from_proto(message.scores, fetch)
    event: ports.TargetEvent = read_one_of(message, "event", _COMMON_READERS)
    return event


def _batch_from_proto(message: pb.DraftEvents | pb.TargetEvents, read: Callable[[Any], Any]) -> ports.EventBatch[Any]:
    events: Sequence[Any] = [read(event) for event in message.events]
    report = report_from_proto(message.report) if message.HasField("report") else None
    timings = timings_from_proto(message.item_timings_ns, num_events=len(events))
    return ports.EventBatch(tuple(events), report, timings)
