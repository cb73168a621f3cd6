"""``link.proto``: answers of many sessions as columns.

In steady decoding a message answers every running session in the same form. A message of its own for each takes
several times as long to write and to read as one array for each field. Owns which answers may go so, and the checks
on the arrays before anything is made of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from outrider import ports
from outrider.columns import (
    F4,
    I4,
    U4,
    U8,
    AnswerColumns,
    Column,
    StateColumns,
    SupportColumns,
    are_enough,
    has_whole_evidence,
    token_scores,
)
from outrider.errors import InvalidRequestError, ProtocolError
from outrider.limits import LINK_DRAFT_TOKEN_IDS, LINK_FIELDS, LINK_POSITIONS, LINK_SUPPORT_IDS, Bound
from outrider.transport.convert.column_bytes import (
    SESSION_BYTES,
    array_bytes,
    from_bytes,
    joined,
    spans,
    sums_by_row,
    to_bytes,
    total,
)
from outrider.transport.convert.tensors import state_columns_from_proto, write_state_columns
from outrider.types import DenseEvidence, DenseScores, SparseEvidence, SparseScores, TokenScores
from outrider.v1 import link_pb2 as pb

CAPABILITY = ("outrider-columns", "1")
"""In the metadata of the call that opens a link: the caller reads columns."""

NUMBERS_IN_A_TIMING = len(ports.ItemTiming.__slots__)

Indices = list[int]
Head = tuple[int, int, int]
_NO_IDS = np.zeros(0, dtype=np.int32)
_NO_PROBS = np.zeros(0, dtype=np.float32)


def reads_columns(metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
    """True if a caller announces in its call's metadata that it reads columns."""
    return CAPABILITY in (metadata or ())


def column_groups(events: Sequence[Any]) -> list[Indices]:
    """Places of the events that go as columns together, group by group; those in none go one by one.

    None go where a session has two events, whose order would be lost, and where rows of probabilities travel.
    """
    if not are_enough(events) or len({event.session for event in events}) < len(events):
        return []
    groups: defaultdict[object, Indices] = defaultdict(list)
    for index, event in enumerate(events):
        if isinstance(event, ports.Proposal):
            if event.evidence is None:
                groups["tokens"].append(index)
            elif isinstance(event.evidence, DenseEvidence):
                return []
            elif has_whole_evidence(event):
                groups["sparse"].append(index)
        elif isinstance(event, ports.Scores):
            if isinstance(event.form, DenseScores):
                return []
            if (form := _form_of(event)) is not None:
                groups[form].append(index)
    return [group for group in groups.values() if are_enough([events[index] for index in group])]


def _form_of(event: ports.Scores) -> tuple[object, ...] | None:
    """What scores that go as columns together have in common; None for scores that go alone."""
    states = None if event.hidden_states is None else StateColumns.form_of(event.hidden_states)
    if event.logprobs or event.prompt_logprobs or (event.hidden_states is not None and states is None):
        return None
    if event.draft_token_ids:
        return None  # of a step that was taken apart
    if isinstance(event.form, TokenScores) or (isinstance(event.form, SparseScores) and _is_whole_form(event.form)):
        return type(event.form), states
    return None


def _is_whole_form(form: SparseScores) -> bool:
    return 0 < form.outside_token_ids.size == form.outside_mass.size


def write_columns(message: pb.AnswerColumns, answers: Sequence[ports.Proposal | ports.Scores]) -> None:
    """One group of ``column_groups``, into an empty message; ``OverflowError`` when a value does not fit."""
    message.sessions = to_bytes("Q", [answer.session for answer in answers])
    message.generations = to_bytes("Q", [answer.generation for answer in answers])
    message.base_lengths = to_bytes("I", [answer.base_length for answer in answers])
    first = answers[0]
    if isinstance(first, ports.Scores) and first.hidden_states is not None:
        write_state_columns(message.states, StateColumns.of([answer.hidden_states for answer in answers]))  # type: ignore[union-attr,misc]
    if isinstance(first, ports.Scores) and isinstance(first.form, SparseScores):
        _write_sparse_scores(message, [answer.form for answer in answers])  # type: ignore[union-attr]
        return
    rows = [_token_ids(answer) for answer in answers]
    message.counts = to_bytes("I", [len(row) for row in rows])
    message.token_ids = to_bytes("I", [token_id for row in rows for token_id in row])
    if isinstance(first, ports.Proposal) and first.evidence is not None:
        _write_evidence(message, [answer.evidence for answer in answers])  # type: ignore[union-attr]


def write_answer_arrays(message: pb.AnswerColumns, answers: AnswerColumns[Any]) -> None:
    """Answers that are columns already, into an empty message."""
    message.sessions = array_bytes(answers.sessions, U8)
    message.generations = array_bytes(answers.generations, U8)
    message.base_lengths = array_bytes(answers.base_lengths, U4)
    message.counts = array_bytes(answers.counts, U4)
    if answers.outside_masses is None:
        message.token_ids = array_bytes(answers.token_ids, U4)
    else:
        message.token_ids = array_bytes(answers.token_ids, I4)
        message.outside_mass = array_bytes(answers.outside_masses, F4)
    if answers.states is not None:
        write_state_columns(message.states, answers.states)
    if answers.channel:
        message.channel = answers.channel
    if answers.draft_token_ids is not None:
        message.draft_token_ids = array_bytes(answers.draft_token_ids, U4)
    if (supports := answers.supports) is not None:
        message.support_probs = array_bytes(supports.probs, F4)
        if answers.outside_masses is None:
            message.support_counts = array_bytes(supports.counts, I4)
            message.support_token_ids = array_bytes(supports.token_ids, I4)
        elif supports.probs.size:
            message.support_sizes = array_bytes(supports.counts, U4)


def _token_ids(answer: Any) -> Sequence[int]:  # noqa: ANN401 - of a group
    found: Sequence[int] = answer.token_ids if isinstance(answer, ports.Proposal) else answer.form.token_ids
    return found


def _write_sparse_scores(message: pb.AnswerColumns, forms: Sequence[Any]) -> None:
    message.counts = to_bytes("I", [form.outside_token_ids.size for form in forms])
    message.token_ids = joined([form.outside_token_ids for form in forms], I4)
    message.outside_mass = joined([form.outside_mass for form in forms], F4)
    sizes = [form.support_probs.size for form in forms]
    if any(sizes):
        message.support_sizes = to_bytes("I", sizes)
        message.support_probs = joined([form.support_probs for form in forms], F4)


def _write_evidence(message: pb.AnswerColumns, evidence: Sequence[Any]) -> None:
    message.support_counts = joined([each.counts for each in evidence], I4)
    message.support_token_ids = joined([each.token_ids for each in evidence], I4)
    message.support_probs = joined([each.probs for each in evidence], F4)


def proposals_from_columns(message: pb.AnswerColumns) -> Iterator[ports.Proposal | ports.SessionFailed]:
    """The proposals of a group; ``ProtocolError`` for columns that do not fit each other."""
    _check_kind(message, are_scores=False)
    if not message.support_counts:
        return _answers(message, LINK_DRAFT_TOKEN_IDS, ports.Proposal)
    return _drawn_proposals(message)


def _drawn_proposals(message: pb.AnswerColumns) -> Iterator[ports.Proposal | ports.SessionFailed]:
    heads, counts = _heads(message)
    token_ids = _token_column(message, sum(counts), U4).tolist()
    rows = from_bytes("support_counts", message.support_counts, I4, len(token_ids)).copy()
    num_ids = total("support_counts", rows)
    ids = from_bytes("support_token_ids", message.support_token_ids, I4, num_ids).copy()
    probs = from_bytes("support_probs", message.support_probs, F4, num_ids).copy()
    sizes = sums_by_row(rows, counts)
    for head, own, support in zip(heads, spans(counts), spans(sizes), strict=True):
        failure = _beyond(head, own, LINK_DRAFT_TOKEN_IDS) or _beyond(head, support, LINK_SUPPORT_IDS)
        evidence = SparseEvidence(rows[own], ids[support], probs[support])
        yield failure or ports.Proposal(*head, tuple(token_ids[own]), evidence)


def scores_from_columns(message: pb.AnswerColumns) -> Iterator[ports.Scores | ports.SessionFailed]:
    """The scores of a group; ``ProtocolError`` for columns that do not fit each other."""
    _check_kind(message, are_scores=True)
    found = _sparse_scores(message) if message.outside_mass else _answers(message, LINK_POSITIONS, token_scores)
    if message.draft_token_ids:
        found = _with_drafts(message, found)
    return _with_states(message, found) if message.HasField("states") else found


def _with_drafts(
    message: pb.AnswerColumns, scores: Iterator[ports.Scores | ports.SessionFailed]
) -> Iterator[ports.Scores | ports.SessionFailed]:
    _, counts = _heads(message)
    drafts = _scored_drafts(message, counts).tolist()
    for event, own in zip(scores, spans([count - 1 for count in counts]), strict=True):
        yield replace(event, draft_token_ids=tuple(drafts[own])) if isinstance(event, ports.Scores) else event


def _with_states(
    message: pb.AnswerColumns, scores: Iterator[ports.Scores | ports.SessionFailed]
) -> Iterator[ports.Scores | ports.SessionFailed]:
    columns = state_columns_from_proto(message.states, len(message.sessions) // SESSION_BYTES)
    for event, states in zip(scores, columns.hidden_states(), strict=True):
        yield replace(event, hidden_states=states) if isinstance(event, ports.Scores) else event


def answer_arrays(
    message: pb.DraftEvents | pb.TargetEvents, make: Callable[[int, int, int, tuple[int, ...]], Any]
) -> list[AnswerColumns[Any]] | None:
    """The answers of a message of events that came as columns, as such; None unless each is within its limits.
    ``ProtocolError`` for columns that do not fit each other.
    """
    numbers: Sequence[int] = message.item_timings_ns
    start = NUMBERS_IN_A_TIMING * len(message.events)
    found = []
    for group in message.columns:
        sessions = from_bytes("sessions", group.sessions, U8)
        stop = start + NUMBERS_IN_A_TIMING * sessions.size
        own = numbers if not start and stop == len(numbers) else numbers[start:stop]  # mostly all: they are read later
        columns = _answer_arrays(group, sessions, make, own)
        if columns is None:
            return None
        found.append(columns)
        start = stop
    return found


def _answer_arrays(
    group: pb.AnswerColumns,
    sessions: Column,
    make: Callable[[int, int, int, tuple[int, ...]], Any],
    timings_ns: Sequence[int],
) -> AnswerColumns[Any] | None:
    are_scores, size = make is token_scores, sessions.size
    _check_kind(group, are_scores=are_scores)
    counts = from_bytes("counts", group.counts, U4, size)
    each = counts.tolist()  # less than a hundred numbers, mostly: reductions of arrays take longer
    if not size or max(each) > (LINK_POSITIONS if are_scores else LINK_DRAFT_TOKEN_IDS).most:
        return None
    num_tokens, masses = sum(each), group.outside_mass
    supports = None
    if masses:
        supports = _score_supports(group, size)
    elif group.support_counts:
        supports = _proposal_supports(group, num_tokens)
    if supports is not None and supports.probs.size > LINK_SUPPORT_IDS.most:
        sizes = supports.counts.tolist() if are_scores else sums_by_row(supports.counts, each)
        if max(sizes) > LINK_SUPPORT_IDS.most:
            return None
    return AnswerColumns(
        sessions,
        from_bytes("generations", group.generations, U8, size),
        from_bytes("base_lengths", group.base_lengths, U4, size),
        counts,
        _token_column(group, num_tokens, I4 if masses else U4),
        timings_ns,
        make,
        from_bytes("outside_mass", masses, F4, num_tokens) if masses else None,
        state_columns_from_proto(group.states, size) if group.HasField("states") else None,
        supports,
        group.channel,
        _scored_drafts(group, each) if group.draft_token_ids else None,
    )


def _scored_drafts(message: pb.AnswerColumns, counts: Sequence[int]) -> Column:
    """The draft tokens that came by a proposal channel."""
    if 0 in counts:
        raise ProtocolError("columns: scores have at least one position")
    return from_bytes("draft_token_ids", message.draft_token_ids, U4, sum(counts) - len(counts))


def _check_kind(message: pb.AnswerColumns, *, are_scores: bool) -> None:
    """``ProtocolError`` for columns that answers of this kind do not have."""
    if are_scores and (message.support_counts or message.support_token_ids):
        raise ProtocolError("columns: support_counts and support_token_ids belong to proposals, not to scores")
    is_scored = message.outside_mass or message.support_sizes or message.HasField("states") or message.draft_token_ids
    if not are_scores and is_scored:
        raise ProtocolError(
            "columns: outside_mass, support_sizes, states and draft_token_ids belong to scores, not to proposals"
        )


def _proposal_supports(message: pb.AnswerColumns, num_tokens: int) -> SupportColumns:
    """Supports of all draft tokens."""
    rows = from_bytes("support_counts", message.support_counts, I4, num_tokens)
    num_ids = total("support_counts", rows)
    ids = from_bytes("support_token_ids", message.support_token_ids, I4, num_ids)
    return SupportColumns(rows, ids, from_bytes("support_probs", message.support_probs, F4, num_ids))


def _score_supports(message: pb.AnswerColumns, num_answers: int) -> SupportColumns | None:
    """What sparse scores say of supports."""
    content = message.support_sizes
    sizes = from_bytes("support_sizes", content, U4, num_answers if content else 0)
    num_ids = total("support_sizes", sizes)
    if not sizes.size:
        from_bytes("support_probs", message.support_probs, F4, 0)
        return None
    return SupportColumns(sizes, _NO_IDS, from_bytes("support_probs", message.support_probs, F4, num_ids))


def _sparse_scores(message: pb.AnswerColumns) -> Iterator[ports.Scores | ports.SessionFailed]:
    heads, counts = _heads(message)
    ids = _token_column(message, sum(counts), I4).copy()
    masses = from_bytes("outside_mass", message.outside_mass, F4, ids.size).copy()
    each = from_bytes("support_sizes", message.support_sizes, U4, len(counts) if message.support_sizes else 0)
    probs = from_bytes("support_probs", message.support_probs, F4, total("support_sizes", each)).copy()
    sizes = each.tolist() or [0] * len(counts)
    for head, own, support in zip(heads, spans(counts), spans(sizes), strict=True):
        failure = _beyond(head, own, LINK_POSITIONS) or _beyond(head, support, LINK_SUPPORT_IDS)
        support_probs = probs[support] if support.stop > support.start else _NO_PROBS
        yield failure or ports.Scores(*head, SparseScores(support_probs, masses[own], ids[own]))


def _answers(
    message: pb.AnswerColumns, bound: Bound, make: Callable[[int, int, int, tuple[int, ...]], Any]
) -> Iterator[Any]:
    heads, counts = _heads(message)
    token_ids = _token_column(message, sum(counts), U4).tolist()
    most, start = bound.most, 0
    for (session, generation, base), count in zip(heads, counts, strict=True):
        if count > most:
            yield _too_many(session, generation, bound, count)
        else:
            yield make(session, generation, base, tuple(token_ids[start : start + count]))
        start += count


def _beyond(head: Head, row: slice, bound: Bound) -> ports.SessionFailed | None:
    count = row.stop - row.start
    return _too_many(head[0], head[1], bound, count) if count > bound.most else None


def _too_many(session: int, generation: int, bound: Bound, count: int) -> ports.SessionFailed:
    error = InvalidRequestError("token_ids", f"has {count} {bound.unit}; at most {bound.most}")
    return ports.SessionFailed(session, generation, "ProtocolError", str(error), error.field)


def _heads(message: pb.AnswerColumns) -> tuple[list[Head], list[int]]:
    """(session, generation, base length) of each answer, and counts, once their lengths are known to fit."""
    sessions = from_bytes("sessions", message.sessions, U8)
    num_rows = sessions.size
    generations = from_bytes("generations", message.generations, U8, num_rows).tolist()
    base_lengths = from_bytes("base_lengths", message.base_lengths, U4, num_rows).tolist()
    heads = list(zip(sessions.tolist(), generations, base_lengths, strict=True))
    return heads, from_bytes("counts", message.counts, U4, num_rows).tolist()


def _token_column(message: pb.AnswerColumns, num_tokens: int, dtype: np.dtype[Any]) -> Column:  # -> [sum(counts)]
    content = message.token_ids
    if len(content) > 4 * LINK_FIELDS.most:
        raise ProtocolError(f"columns: {len(content)} bytes of token_ids are more than {LINK_FIELDS.most} tokens")
    return from_bytes("token_ids", content, dtype, num_tokens)
