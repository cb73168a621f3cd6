"""``link.proto``: ``Extend`` and ``Score`` as arrays.

The lengths of all arrays are checked against each other before anything is made of them, and a row beyond a limit is
a ``ProtocolError`` of its link.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.batched import I4, U4, U8, CommandBatch, ExtendBatch, ScoreBatch
from outrider.errors import ProtocolError
from outrider.limits import LINK_DRAFT_TOKEN_IDS, LINK_SUPPORT_IDS, LINK_TOKEN_IDS, REQUEST_ID
from outrider.prefix_hash import BLOCK_TOKENS, CHAIN_BYTES
from outrider.transport.convert.packed_arrays import array_bytes, check_largest, from_bytes, sums_by_row, total
from outrider.transport.convert.tensors import (
    hidden_states_of_rows,
    state_batch_from_proto,
    write_hidden_states,
    write_state_batch,
)
from outrider.v1 import link_pb2 as pb


def write_step_commands(message: pb.StepCommands, batched: CommandBatch) -> None:
    """Write commands into an empty message."""
    message.sessions = array_bytes(batched.sessions, U8)
    message.generations = array_bytes(batched.generations, U8)
    message.num_kept_tokens = array_bytes(batched.num_kept_tokens, U4)
    message.prefix_chains = batched.chains
    message.hash_tails = array_bytes(batched.hash_tails, U8)
    message.counts = array_bytes(batched.counts, U4)
    message.token_ids = array_bytes(batched.token_ids, I4)
    message.draft_lengths = array_bytes(batched.draft_lengths, U4)
    if batched.trace_parents:
        message.trace_parents.extend(batched.trace_parents)
    if isinstance(batched, ScoreBatch):
        _write_scores(message, batched)
        return
    if batched.states is not None:
        write_state_batch(message.states, batched.states)
    for states in batched.hidden_states:
        write_hidden_states(message.hidden_states.add(), states)
    if batched.channel:
        message.channel = batched.channel


def _write_scores(message: pb.StepCommands, batched: ScoreBatch) -> None:
    message.draft_token_ids = array_bytes(batched.draft_token_ids, U4)
    if batched.hidden_states_from is not None:
        message.hidden_states_from = array_bytes(batched.hidden_states_from, U4)
        message.plane = batched.plane
    if batched.support_counts is not None and batched.support_token_ids is not None:
        message.support_counts = array_bytes(batched.support_counts, I4)
        message.support_token_ids = array_bytes(batched.support_token_ids, I4)


def extends_from_proto(message: pb.StepCommands) -> ExtendBatch:
    """Convert ``Extend``; ``ProtocolError`` for arrays that do not fit each other or are beyond a limit."""
    heads = _heads(message)
    size = heads["sessions"].size
    return ExtendBatch(
        **heads,
        states=state_batch_from_proto(message.states, size) if message.HasField("states") else None,
        channel=message.channel,
        hidden_states=hidden_states_of_rows(message.hidden_states, size),
    )


def scores_from_proto(message: pb.StepCommands, *, are_ahead: bool = False) -> ScoreBatch:
    """Convert ``Score``; ``ProtocolError`` as for ``Extend``. ``are_ahead``: their draft tokens come later."""
    heads = _heads(message)
    lengths = heads["draft_lengths"].tolist()  # less than a hundred numbers, mostly: reductions of arrays take longer
    check_largest("draft_lengths", max(lengths), LINK_DRAFT_TOKEN_IDS)
    num_drafts = 0 if are_ahead else sum(lengths)
    firsts = message.hidden_states_from
    counts, ids = _supports(message, num_drafts, lengths) if message.support_counts else (None, None)
    return ScoreBatch(
        **heads,
        draft_token_ids=from_bytes("draft_token_ids", message.draft_token_ids, U4, num_drafts),
        hidden_states_from=from_bytes("hidden_states_from", firsts, U4, len(lengths)) if firsts else None,
        plane=message.plane,
        support_counts=counts,
        support_token_ids=ids,
    )


def _heads(message: pb.StepCommands) -> dict[str, Any]:
    """The fields that both kinds have."""
    sessions = from_bytes("sessions", message.sessions, U8)
    size = sessions.size
    if not size:
        raise ProtocolError("columns: sessions must have at least one row")
    kept = from_bytes("num_kept_tokens", message.num_kept_tokens, U4, size)
    counts = from_bytes("counts", message.counts, U4, size)
    each = counts.tolist()  # as in ``scores_from_proto``
    check_largest("counts", max(each), LINK_TOKEN_IDS)
    num_chains, chains = sum([length >= BLOCK_TOKENS for length in kept.tolist()]), message.prefix_chains
    if len(chains) != CHAIN_BYTES * num_chains:
        raise ProtocolError(
            f"columns: {len(chains)} bytes of prefix_chains are not {CHAIN_BYTES} for each of {num_chains}"
        )
    return {
        "sessions": sessions,
        "generations": from_bytes("generations", message.generations, U8, size),
        "num_kept_tokens": kept,
        "chains": chains,
        "hash_tails": from_bytes("hash_tails", message.hash_tails, U8, size),
        "counts": counts,
        "token_ids": from_bytes("token_ids", message.token_ids, I4, sum(each)),
        "draft_lengths": from_bytes("draft_lengths", message.draft_lengths, U4, size),
        "trace_parents": _trace_parents(message, size),
    }


def _supports(
    message: pb.StepCommands, num_drafts: int, lengths: Sequence[int]
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    counts = from_bytes("support_counts", message.support_counts, I4, num_drafts)
    ids = from_bytes("support_token_ids", message.support_token_ids, I4, total("support_counts", counts))
    if ids.size > LINK_SUPPORT_IDS.most:
        check_largest("support_counts", max(sums_by_row(counts, lengths)), LINK_SUPPORT_IDS)
    return counts, ids


def _trace_parents(message: pb.StepCommands, size: int) -> Sequence[str]:
    parents = message.trace_parents
    if not parents:
        return ()
    if len(parents) != size:
        raise ProtocolError(f"columns: {len(parents)} trace_parents are not one for each of {size} rows")
    check_largest("trace_parents", max(map(len, parents)), REQUEST_ID)
    return tuple(parents)
