"""``link.proto``: messages from draft and target.

A message is a list of events in order. Answers are arrays, the others are items of one session or of none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outrider import ports
from outrider.batched import AnswerBatch
from outrider.errors import ProtocolError
from outrider.item_batch import batch_of_answers
from outrider.limits import LINK_ITEMS, LONGEST_RETRY_DELAY_MS, LONGEST_STAGE_NS
from outrider.transport.convert.channels import (
    channel_offer_from_proto,
    channel_offer_to_proto,
    channel_state_from_proto,
    channel_state_to_proto,
)
from outrider.transport.convert.order import in_runs
from outrider.transport.convert.packed_arrays import num_rows
from outrider.transport.convert.reading import (
    Readers,
    event_within,
    out_of_range_breaks_the_contract,
    read_one_of,
    shortened,
)
from outrider.transport.convert.step_answers import proposals_from_proto, scores_from_proto, write_step_answers
from outrider.transport.convert.tensors import (
    chosen_from_proto,
    chosen_to_proto,
    hidden_states_from_proto,
    offer_from_proto,
    offer_to_proto,
    write_hidden_states,
)
from outrider.v1 import link_pb2 as pb


def _chunk_from_proto(message: pb.HiddenStateChunk) -> ports.HiddenStateChunk | ports.SessionFailed:
    return event_within(_read_chunk, message)


def _read_chunk(message: pb.HiddenStateChunk) -> ports.HiddenStateChunk:
    return ports.HiddenStateChunk(message.session, message.generation, hidden_states_from_proto(message.states))


def _lost_from_proto(message: pb.SessionLost) -> ports.SessionLost:
    return ports.SessionLost(message.session, message.generation, shortened(message.reason))


def _failed_from_proto(message: pb.SessionFailed) -> ports.SessionFailed:
    said = map(shortened, (message.code, message.message, message.field))
    return ports.SessionFailed(message.session, message.generation, *said)


def _refused_from_proto(message: pb.Refused) -> ports.Refused:
    delay_ms = min(message.retry_after_ms, LONGEST_RETRY_DELAY_MS)
    return ports.Refused(message.session, message.generation, delay_ms, shortened(message.reason))


def _opened_from_proto(message: pb.Opened) -> ports.Opened:
    return ports.Opened(message.session, message.generation, message.num_cached_tokens)


def _preempted_from_proto(message: pb.Preempted) -> ports.Preempted:
    delay_ms = min(message.retry_after_ms, LONGEST_RETRY_DELAY_MS)
    return ports.Preempted(message.session, message.generation, delay_ms)


_COMMON_READERS: Readers = {
    "preempted": _preempted_from_proto,
    "opened": _opened_from_proto,
    "session_lost": _lost_from_proto,
    "session_failed": _failed_from_proto,
    "refused": _refused_from_proto,
}


_DRAFT_READERS: Readers = {
    **_COMMON_READERS,
    "plane_chosen": chosen_from_proto,
    "channel_state": channel_state_from_proto,
}
_TARGET_READERS: Readers = {
    **_DRAFT_READERS,
    "hidden_states": _chunk_from_proto,
    "plane_offer": offer_from_proto,
    "channel_offer": channel_offer_from_proto,
}


def _write_common(
    message: pb.DraftEvent | pb.TargetEvent,
    event: ports.Opened | ports.Preempted | ports.SessionLost | ports.SessionFailed | ports.Refused,
) -> None:
    answer: pb.Opened | pb.Preempted | pb.SessionLost | pb.SessionFailed | pb.Refused
    if isinstance(event, ports.Opened):
        answer = message.opened
        answer.num_cached_tokens = event.num_cached_tokens
    elif isinstance(event, ports.Preempted):
        answer = message.preempted
        answer.retry_after_ms = event.retry_after_ms
    elif isinstance(event, ports.SessionLost):
        answer = message.session_lost
        answer.reason = event.reason
    elif isinstance(event, ports.SessionFailed):
        answer = message.session_failed
        answer.code, answer.message, answer.field = event.code, event.message, event.field
    else:
        answer = message.refused
        answer.retry_after_ms, answer.reason = event.retry_after_ms, event.reason
    answer.session, answer.generation = event.session, event.generation


def _write_draft_event(message: pb.DraftEvent, event: Any) -> None:  # noqa: ANN401
    if isinstance(event, ports.PlaneChosen):
        message.plane_chosen.CopyFrom(chosen_to_proto(event))
    elif isinstance(event, ports.ChannelState):
        message.channel_state.CopyFrom(channel_state_to_proto(event))
    else:
        _write_common(message, event)


def _write_target_event(message: pb.TargetEvent, event: Any) -> None:  # noqa: ANN401
    if isinstance(event, ports.HiddenStateChunk):
        chunk = message.hidden_states
        chunk.session, chunk.generation = event.session, event.generation
        write_hidden_states(chunk.states, event.states)
    elif isinstance(event, ports.PlaneChosen):
        message.plane_chosen.CopyFrom(chosen_to_proto(event))
    elif isinstance(event, ports.OfferPlane):
        message.plane_offer.CopyFrom(offer_to_proto(event))
    elif isinstance(event, ports.ChannelState):
        message.channel_state.CopyFrom(channel_state_to_proto(event))
    elif isinstance(event, ports.OfferChannel):
        message.channel_offer.CopyFrom(channel_offer_to_proto(event))
    else:
        _write_common(message, event)


def report_to_proto(report: ports.ForwardReport | None) -> pb.ForwardReport | None:
    """Convert the report of a forward; None if there was none."""
    if report is None:
        return None
    return pb.ForwardReport(
        queue_ns=report.queue_ns,
        forward_ns=report.forward_ns,
        sample_ns=report.sample_ns,
        total_ns=report.total_ns,
        batch_size=report.batch_size,
        num_tokens=report.num_tokens,
        num_pages_free=report.num_pages_free,
        ended_ns=report.ended_ns,
        num_other_rows=report.num_other_rows,
        num_other_drafts=report.num_other_drafts,
    )


def report_from_proto(message: pb.ForwardReport) -> ports.ForwardReport:
    """Convert the report of a forward; a stage of more than an hour counts as an hour."""
    return ports.ForwardReport(
        min(message.queue_ns, LONGEST_STAGE_NS),
        min(message.forward_ns, LONGEST_STAGE_NS),
        min(message.sample_ns, LONGEST_STAGE_NS),
        min(message.total_ns, LONGEST_STAGE_NS),
        message.batch_size,
        message.num_tokens,
        message.num_pages_free,
        message.ended_ns,
        message.num_other_rows,
        message.num_other_drafts,
    )


def draft_events_to_proto(batch: ports.EventBatch[ports.DraftEvent]) -> pb.DraftEvents:
    """One message from a draft; ``ProtocolError`` when a value does not fit its field."""
    message = pb.DraftEvents(report=report_to_proto(batch.report))
    _write_events(message, batch, _write_draft_event)
    return message


def target_events_to_proto(batch: ports.EventBatch[ports.TargetEvent]) -> pb.TargetEvents:
    """One message from a target; ``ProtocolError`` when a value does not fit its field."""
    message = pb.TargetEvents(report=report_to_proto(batch.report))
    _write_events(message, batch, _write_target_event)
    return message


def _write_events(message: Any, batch: ports.EventBatch[Any], write: Callable[[Any, Any], None]) -> None:  # noqa: ANN401
    add = message.events.add
    with out_of_range_breaks_the_contract():
        if batch.events:
            _write_single(add, batch, write)
        for batched in batch.batched:
            write_step_answers(add().answers, batched)


def _write_single(add: Callable[[], Any], batch: ports.EventBatch[Any], write: Callable[[Any, Any], None]) -> None:
    timings = dict(zip(map(id, batch.events), batch.timings, strict=False))
    for before, answers, after in in_runs(batch.events, _ANSWERS):
        for event in before:
            write(add(), event)
        own = [timings[id(answer)] for answer in answers] if timings else ()
        for batched in batch_of_answers(answers, own) if answers else ():
            write_step_answers(add().answers, batched)
        for event in after:
            write(add(), event)


def draft_events_from_proto(message: pb.DraftEvents) -> ports.EventBatch[ports.DraftEvent]:
    """One message from a draft; ``ProtocolError`` for unknown or too many events, or malformed arrays."""
    return _read_events(message, proposals_from_proto, _DRAFT_READERS)


def target_events_from_proto(message: pb.TargetEvents) -> ports.EventBatch[ports.TargetEvent]:
    """One message from a target; ``ProtocolError`` as for a draft."""
    return _read_events(message, scores_from_proto, _TARGET_READERS)


def _read_events(
    message: pb.DraftEvents | pb.TargetEvents, read_answers: Callable[[Any], AnswerBatch[Any]], readers: Readers
) -> ports.EventBatch[Any]:
    """Answers behind all other events stay arrays, unless they have details; the rest become events, in order."""
    found: list[tuple[Any, ports.ItemTiming | None]] = []
    batched: list[AnswerBatch[Any]] = []
    num_events = len(message.events)
    _check_num_events(num_events)
    num_others = sum([not event.HasField("answers") for event in message.events])
    for event in message.events:
        if not event.HasField("answers"):
            found.append((read_one_of(event, "event", readers), None))
            num_others -= 1
            continue
        num_events += num_rows(event.answers) - 1
        _check_num_events(num_events)
        answers = read_answers(event.answers)
        if answers.details is None and not num_others:
            batched.append(answers)
        else:
            indices = range(len(answers.sessions))
            found += zip(answers.events(indices), answers.timings(indices), strict=True)
    report = report_from_proto(message.report) if message.HasField("report") else None
    if not found:
        return ports.EventBatch((), report, (), tuple(batched))
    timings: tuple[Any, ...] = tuple([timing for _, timing in found])
    return ports.EventBatch(
        tuple([event for event, _ in found]), report, timings if any(timings) else (), tuple(batched)
    )


def _check_num_events(count: int) -> None:
    if count > LINK_ITEMS.most:
        raise ProtocolError(f"events: has {count} {LINK_ITEMS.unit}; at most {LINK_ITEMS.most}")


_ANSWERS = (ports.Proposal, ports.Scores)
