"""``link.proto``: proposals and scores as arrays.

The lengths of all arrays are checked against each other before anything is made of them, and a row beyond a limit is
a ``ProtocolError`` of its link.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from outrider.batched import (
    F4,
    I4,
    NUMBERS_IN_A_TIMING,
    U1,
    U4,
    U8,
    AnswerBatch,
    Column,
    SupportBatch,
    token_scores,
)
from outrider.errors import ProtocolError
from outrider.limits import LINK_DRAFT_TOKEN_IDS, LINK_FIELDS, LINK_POSITIONS, LINK_SUPPORT_IDS
from outrider.ports import Proposal
from outrider.transport.convert.packed_arrays import array_bytes, check_largest, from_bytes, sums_by_row, total
from outrider.transport.convert.step_details import (
    read_logprobs,
    read_score_details,
    write_details,
    write_logprobs,
)
from outrider.transport.convert.tensors import state_batch_from_proto, write_state_batch
from outrider.v1 import link_pb2 as pb

_NO_IDS = np.zeros(0, dtype=np.int32)


def write_step_answers(message: pb.StepAnswers, answers: AnswerBatch[Any]) -> None:
    """Write answers into an empty message."""
    message.sessions = array_bytes(answers.sessions, U8)
    message.generations = array_bytes(answers.generations, U8)
    message.base_lengths = array_bytes(answers.base_lengths, U4)
    message.counts = array_bytes(answers.counts, U4)
    if len(answers.timings_ns):
        message.timings_ns = np.array(answers.timings_ns, dtype=U8).tobytes()
    message.token_ids = array_bytes(answers.token_ids, U4 if answers.outside_masses is None else I4)
    if answers.is_sparse:
        _write_sparse(message, answers)
    if answers.states is not None:
        write_state_batch(message.states, answers.states)
    if answers.channel:
        message.channel = answers.channel
    if answers.draft_token_ids is not None:
        message.draft_token_ids = array_bytes(answers.draft_token_ids, U4)
    if answers.goes_on is not None:
        message.goes_on = array_bytes(answers.goes_on, U1)
    if answers.details is not None:
        write_details(message, answers.details)
    if answers.logprobs is not None:
        write_logprobs(message.details, answers.logprobs)


def _write_sparse(message: pb.StepAnswers, answers: AnswerBatch[Any]) -> None:
    message.form = pb.ANSWER_FORM_SPARSE
    masses, supports = answers.outside_masses, answers.supports
    if masses is not None:
        message.outside_mass = array_bytes(masses, F4)
    if supports is None:
        return
    message.support_probs = array_bytes(supports.probs, F4)
    if masses is None:
        message.support_counts = array_bytes(supports.counts, I4)
        message.support_token_ids = array_bytes(supports.token_ids, I4)
    elif supports.probs.size:
        message.support_sizes = array_bytes(supports.counts, U4)


def proposals_from_proto(message: pb.StepAnswers) -> AnswerBatch[Any]:
    """Convert proposals; ``ProtocolError`` for arrays that do not fit each other or are beyond a limit."""
    sessions, generations, base_lengths, counts = _heads(message)
    each: list[int] = counts.tolist()  # less than a hundred numbers, mostly: reductions of arrays take longer
    check_largest("counts", max(each), LINK_DRAFT_TOKEN_IDS)
    is_sparse = message.form == pb.ANSWER_FORM_SPARSE
    return AnswerBatch(
        sessions,
        generations,
        base_lengths,
        counts,
        _token_column(message, sum(each), U4),
        _timings(message, len(each)),
        Proposal,
        supports=_proposal_supports(message, each) if is_sparse else None,
        channel=message.channel,
    )


def scores_from_proto(message: pb.StepAnswers) -> AnswerBatch[Any]:
    """Convert scores; ``ProtocolError`` for arrays that do not fit each other or are beyond a limit."""
    sessions, generations, base_lengths, counts = _heads(message)
    each: list[int] = counts.tolist()  # as in ``proposals_from_proto``
    check_largest("counts", max(each), LINK_POSITIONS)
    is_sparse, num_tokens, size = message.form == pb.ANSWER_FORM_SPARSE, sum(each), len(each)
    has_details = message.HasField("details")
    token_ids = _token_column(message, num_tokens, I4 if is_sparse else U4)
    return AnswerBatch(
        sessions,
        generations,
        base_lengths,
        counts,
        token_ids,
        _timings(message, size),
        token_scores,
        from_bytes("outside_mass", message.outside_mass, F4, num_tokens) if is_sparse else None,
        state_batch_from_proto(message.states, size) if message.HasField("states") else None,
        _score_supports(message, size) if is_sparse else None,
        0,
        _scored_drafts(message, each) if message.draft_token_ids else None,
        from_bytes("goes_on", message.goes_on, U1, size) if message.goes_on else None,
        read_score_details(message, token_ids, each) if has_details or message.form > pb.ANSWER_FORM_SPARSE else None,
        read_logprobs(message.details, size) if has_details else None,
    )


def _heads(message: pb.StepAnswers) -> tuple[Column, Column, Column, Column]:
    """Sessions, generations, base lengths and counts."""
    sessions = from_bytes("sessions", message.sessions, U8)
    size = sessions.size
    if not size:
        raise ProtocolError("columns: sessions must have at least one row")
    return (
        sessions,
        from_bytes("generations", message.generations, U8, size),
        from_bytes("base_lengths", message.base_lengths, U4, size),
        from_bytes("counts", message.counts, U4, size),
    )


def _token_column(message: pb.StepAnswers, num_tokens: int, dtype: np.dtype[Any]) -> Column:  # -> [sum(counts)]
    content = message.token_ids
    if len(content) > 4 * LINK_FIELDS.most:
        raise ProtocolError(f"columns: {len(content)} bytes of token_ids are more than {LINK_FIELDS.most} tokens")
    return from_bytes("token_ids", content, dtype, num_tokens)


def _timings(message: pb.StepAnswers, size: int) -> Sequence[int]:
    content = message.timings_ns
    if not content:
        return ()
    is_shared = len(content) == U8.itemsize * NUMBERS_IN_A_TIMING
    count = NUMBERS_IN_A_TIMING * (1 if is_shared else size)
    found: list[int] = from_bytes("timings_ns", content, U8, count).tolist()
    return found


def _scored_drafts(message: pb.StepAnswers, counts: Sequence[int]) -> Column:
    """The draft tokens that came by a proposal channel."""
    if 0 in counts:
        raise ProtocolError("columns: scores have at least one position")
    return from_bytes("draft_token_ids", message.draft_token_ids, U4, sum(counts) - len(counts))


def _proposal_supports(message: pb.StepAnswers, lengths: Sequence[int]) -> SupportBatch:
    """Supports of all draft tokens."""
    counts = from_bytes("support_counts", message.support_counts, I4, sum(lengths))
    num_ids = total("support_counts", counts)
    if num_ids > LINK_SUPPORT_IDS.most:
        check_largest("support_counts", max(sums_by_row(counts, lengths)), LINK_SUPPORT_IDS)
    ids = from_bytes("support_token_ids", message.support_token_ids, I4, num_ids)
    return SupportBatch(counts, ids, from_bytes("support_probs", message.support_probs, F4, num_ids))


def _score_supports(message: pb.StepAnswers, size: int) -> SupportBatch | None:
    """Probabilities of supports in sparse scores; None if there are none."""
    content = message.support_sizes
    sizes = from_bytes("support_sizes", content, U4, size if content else 0)
    num_ids = total("support_sizes", sizes)
    probs = from_bytes("support_probs", message.support_probs, F4, num_ids)
    if not sizes.size:
        return None
    if num_ids > LINK_SUPPORT_IDS.most:
        check_largest("support_sizes", max(sizes.tolist()), LINK_SUPPORT_IDS)
    return SupportBatch(sizes, _NO_IDS, probs)
