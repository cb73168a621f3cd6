"""``link.proto``: events of draft and target.

Answers to items occur once per running session and step, and are written field by field into the batch: separate
messages would be copied into it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from outrider import ports
from outrider.columns import AnswerColumns, token_scores
from outrider.errors import ProtocolError
from outrider.limits import LINK_DRAFT_TOKEN_IDS, LINK_ITEMS, LONGEST_RETRY_DELAY_MS, LONGEST_STAGE_NS
from outrider.transport.convert.arrays import Fetch, Place, fetch_nothing, place_nothing
from outrider.transport.convert.bounds import check_scores
from outrider.transport.convert.channels import (
    channel_offer_from_proto,
    channel_offer_to_proto,
    channel_state_from_proto,
    channel_state_to_proto,
)
from outrider.transport.convert.column_bytes import num_rows
from outrider.transport.convert.columns import (
    NUMBERS_IN_A_TIMING,
    answer_arrays,
    column_groups,
    proposals_from_columns,
    scores_from_columns,
    write_answer_arrays,
    write_columns,
)
from outrider.transport.convert.reading import (
    Readers,
    event_within,
    out_of_range_breaks_the_contract,
    read_one_of,
    shortened,
)
from outrider.transport.convert.scores import (
    candidates_from_proto,
    candidates_to_proto,
    evidence_from_proto,
    form_from_proto,
    write_evidence,
    write_form,
)
from outrider.transport.convert.tensors import (
    chosen_from_proto,
    chosen_to_proto,
    hidden_states_from_proto,
    offer_from_proto,
    offer_to_proto,
    write_hidden_states,
)
from outrider.v1 import link_pb2 as pb


def write_proposal(message: pb.Proposal, event: ports.Proposal, place: Place) -> None:
    """Write a proposal into an empty message."""
    message.session, message.generation, message.base_length = event.session, event.generation, event.base_length
    message.token_ids.extend(event.token_ids)
    if event.evidence is not None:
        write_evidence(message.evidence, event.evidence, place)


def proposal_from_proto(message: pb.Proposal, fetch: Fetch = fetch_nothing) -> ports.Proposal:
    """Convert a proposal; ``InvalidRequestError`` beyond the maximum length."""
    LINK_DRAFT_TOKEN_IDS.check("token_ids", len(message.token_ids))
    return ports.Proposal(
        message.session,
        message.generation,
        message.base_length,
        tuple(message.token_ids),
        evidence_from_proto(message.evidence, fetch) if message.HasField("evidence") else None,
    )


def write_scores(message: pb.Scores, event: ports.Scores, place: Place) -> None:
    """Write scores into an empty message."""
    message.session, message.generation, message.base_length = event.session, event.generation, event.base_length
    write_form(message, event.form, place)
    if event.logprobs:
        message.logprobs.extend(candidates_to_proto(event.logprobs))
    if event.prompt_logprobs:
        message.prompt_logprobs.extend(candidates_to_proto(event.prompt_logprobs))
    if event.hidden_states is not None:
        write_hidden_states(message.hidden_states, event.hidden_states)
    if event.draft_token_ids:
        message.draft_token_ids.extend(event.draft_token_ids)


def scores_from_proto(message: pb.Scores, fetch: Fetch = fetch_nothing) -> ports.Scores:
    """Convert scores; ``ProtocolError`` for an unknown form, ``InvalidRequestError`` for too many positions."""
    check_scores(message)
    return ports.Scores(
        message.session,
        message.generation,
        message.base_length,
        form_from_proto(message, fetch),
        candidates_from_proto(message.logprobs),
        candidates_from_proto(message.prompt_logprobs),
        hidden_states_from_proto(message.hidden_states) if message.HasField("hidden_states") else None,
        tuple(message.draft_token_ids),
    )


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


def _write_draft_event(message: pb.DraftEvent, event: ports.DraftEvent, place: Place) -> None:
    if isinstance(event, ports.Proposal):
        write_proposal(message.proposal, event, place)
    elif isinstance(event, ports.PlaneChosen):
        message.plane_chosen.CopyFrom(chosen_to_proto(event))
    elif isinstance(event, ports.ChannelState):
        message.channel_state.CopyFrom(channel_state_to_proto(event))
    else:
        _write_common(message, event)


def _write_target_event(message: pb.TargetEvent, event: ports.TargetEvent, place: Place) -> None:
    if isinstance(event, ports.Scores):
        write_scores(message.scores, event, place)
    elif isinstance(event, ports.HiddenStateChunk):
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


def timings_to_proto(timings: Iterable[ports.ItemTiming]) -> list[int]:
    """Five numbers for each item, in the order of their names."""
    timings = list(timings)
    if len(timings) > 1 and all(timing is timings[0] for timing in timings):  # of one message and one forward
        return timings_to_proto(timings[:1]) * len(timings)
    return [number for timing in timings for number in timing.numbers]


def timings_from_proto(numbers: Sequence[int], *, num_events: int) -> tuple[ports.ItemTiming, ...]:
    """One timing for each event, or none; ``ProtocolError`` for any other number."""
    if not numbers:
        return ()
    if len(numbers) != NUMBERS_IN_A_TIMING * num_events:
        raise ProtocolError(f"item_timings_ns: {len(numbers)} numbers are not five for each of {num_events} events")
    one_by_one = iter(numbers)
    return tuple(itertools.starmap(ports.ItemTiming, zip(*[one_by_one] * NUMBERS_IN_A_TIMING, strict=True)))


def draft_events_to_proto(
    batch: ports.EventBatch[ports.DraftEvent], place: Place = place_nothing, *, columns: bool = False
) -> pb.DraftEvents:
    """One message from a draft; ``ProtocolError`` when a value does not fit its field.

    ``columns``: the reader takes answers of many sessions as columns.
    """
    with out_of_range_breaks_the_contract():
        if not columns:
            batch = _one_by_one(batch)
        groups = column_groups(batch.events) if columns else []
        message = pb.DraftEvents(report=report_to_proto(batch.report))
        for event in _write_columns(message, batch, groups):
            _write_draft_event(message.events.add(), event, place)
        return message


def _write_columns(message: Any, batch: ports.EventBatch[Any], groups: list[list[int]]) -> Sequence[Any]:  # noqa: ANN401
    """Write the groups, what are columns already, and all timings; returns the events that are left to be written one
    by one.
    """
    left = _write_groups(message, batch, groups)
    for columns in batch.columns:
        write_answer_arrays(message.columns.add(), columns)
        message.item_timings_ns.extend(columns.timings_ns)
    return left


def _write_groups(message: Any, batch: ports.EventBatch[Any], groups: list[list[int]]) -> Sequence[Any]:  # noqa: ANN401
    if not groups:
        message.item_timings_ns.extend(timings_to_proto(batch.timings))
        return batch.events
    for group in groups:
        write_columns(message.columns.add(), [batch.events[index] for index in group])
    grouped = {index for group in groups for index in group}
    left = [index for index in range(len(batch.events)) if index not in grouped]
    if batch.timings:
        order = [*left, *itertools.chain.from_iterable(groups)]
        message.item_timings_ns.extend(timings_to_proto([batch.timings[index] for index in order]))
    return [batch.events[index] for index in left]


def _one_by_one(batch: ports.EventBatch[Any]) -> ports.EventBatch[Any]:
    """The batch for a reader that takes no columns."""
    events, timings = list(batch.events), list(batch.timings)
    for columns in batch.columns:
        places = range(len(columns.sessions))
        events += columns.events(places)
        timings += [timing for timing in columns.timings(places) if timing is not None]
    return ports.EventBatch(tuple(events), batch.report, tuple(timings))


def draft_events_from_proto(
    message: pb.DraftEvents, fetch: Fetch = fetch_nothing, *, keeps_columns: bool = False
) -> ports.EventBatch[ports.DraftEvent]:
    """One message from a draft; ``ProtocolError`` for unknown or too many events.

    ``keeps_columns``: proposals that came as columns stay columns.
    """
    _check_num_events(message)
    events = [_draft_event_from_proto(event, fetch) for event in message.events]
    if keeps_columns and message.columns and (columns := answer_arrays(message, ports.Proposal)) is not None:
        return _batch_from_proto(message, events, columns)
    for group in message.columns:
        events += proposals_from_columns(group)
    return _batch_from_proto(message, events)


def target_events_to_proto(
    batch: ports.EventBatch[ports.TargetEvent], place: Place = place_nothing, *, columns: bool = False
) -> pb.TargetEvents:
    """One message from a target; ``ProtocolError`` when a value does not fit its field.

    ``columns``: the reader takes answers of many sessions as columns.
    """
    with out_of_range_breaks_the_contract():
        if not columns:
            batch = _one_by_one(batch)
        groups = column_groups(batch.events) if columns else []
        message = pb.TargetEvents(report=report_to_proto(batch.report))
        for event in _write_columns(message, batch, groups):
            _write_target_event(message.events.add(), event, place)
        return message


def target_events_from_proto(
    message: pb.TargetEvents, fetch: Fetch = fetch_nothing, *, keeps_columns: bool = False
) -> ports.EventBatch[ports.TargetEvent]:
    """One message from a target; ``ProtocolError`` for unknown or too many events.

    ``keeps_columns``: scores that came as columns stay columns.
    """
    _check_num_events(message)
    events = [_target_event_from_proto(event, fetch) for event in message.events]
    if keeps_columns and message.columns and (columns := answer_arrays(message, token_scores)) is not None:
        return _batch_from_proto(message, events, columns)
    for group in message.columns:
        events += scores_from_columns(group)
    return _batch_from_proto(message, events)


def _draft_event_from_proto(message: pb.DraftEvent, fetch: Fetch) -> ports.DraftEvent:
    if message.HasField("proposal"):  # nearly always
        return event_within(proposal_from_proto, message.proposal, fetch)
    event: ports.DraftEvent = read_one_of(message, "event", _DRAFT_READERS)
    return event


def _target_event_from_proto(message: pb.TargetEvent, fetch: Fetch) -> ports.TargetEvent:
    if message.HasField("scores"):  # nearly always
        return event_within(scores_from_proto, message.scores, fetch)
    event: ports.TargetEvent = read_one_of(message, "event", _TARGET_READERS)
    return event


def _check_num_events(message: pb.DraftEvents | pb.TargetEvents) -> None:
    count = len(message.events) + num_rows(message.columns)
    if count > LINK_ITEMS.most:
        raise ProtocolError(f"events: has {count} {LINK_ITEMS.unit}; at most {LINK_ITEMS.most}")


def _batch_from_proto(
    message: pb.DraftEvents | pb.TargetEvents, events: Sequence[Any], columns: Sequence[AnswerColumns[Any]] = ()
) -> ports.EventBatch[Any]:
    report = report_from_proto(message.report) if message.HasField("report") else None
    num_events = len(events)
    numbers: Sequence[int] = message.item_timings_ns
    if columns and numbers:
        if len(numbers) != NUMBERS_IN_A_TIMING * (num_events + sum([each.sessions.size for each in columns])):
            raise ProtocolError(f"item_timings_ns: {len(numbers)} numbers are not five for each event")
        numbers = numbers[: NUMBERS_IN_A_TIMING * num_events] if num_events else ()
    return ports.EventBatch(tuple(events), report, timings_from_proto(numbers, num_events=num_events), tuple(columns))
