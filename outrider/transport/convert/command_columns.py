"""``link.proto``: commands of many sessions as columns.

In steady decoding every running session is asked for the same: an ``Extend`` or a ``Score`` of a few tokens. As columns
they take a fraction of the time, at both ends. Owns which commands may go so, and the checks on the arrays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from outrider import ports
from outrider.columns import (
    I4,
    MAX_ROW_TOKENS,
    U4,
    U8,
    CommandColumns,
    ExtendColumns,
    ScoreColumns,
    StateColumns,
    are_enough,
    may_bring_states,
    states_form,
)
from outrider.errors import InvalidRequestError, ProtocolError
from outrider.limits import LINK_DRAFT_TOKEN_IDS, LINK_SUPPORT_IDS, LINK_TOKEN_IDS
from outrider.prefix_hash import BLOCK_TOKENS, CHAIN_BYTES, chain_size
from outrider.transport.convert.column_bytes import (
    array_bytes,
    from_bytes,
    joined,
    spans,
    sums_by_row,
    to_bytes,
    total,
)
from outrider.transport.convert.tensors import state_columns_from_proto, write_state_columns
from outrider.types import HiddenStates, PackedTokenIds, Support
from outrider.v1 import link_pb2 as pb

Item: TypeAlias = ports.Extend | ports.Score


def split_steady(commands: Sequence[Any]) -> tuple[list[list[Item]], Sequence[Any]]:
    """The groups of commands that go as columns, and the commands that are left to go one by one, before them.

    Where a session has two commands both go one by one, so their order stays.
    """
    steady = [command for command in commands if _is_steady(command)]
    if not are_enough(steady):
        return [], commands
    if len({command.session for command in commands}) < len(commands):
        counts = Counter(command.session for command in commands)
        steady = [command for command in steady if counts[command.session] == 1]
    bare = [command for command in steady if type(command) is ports.Extend or command.support is None]
    drawn = [] if len(bare) == len(steady) else _with_whole_supports(steady)
    groups = [group for each in (bare, drawn) for group in _by_states(each) if are_enough(group)]
    num_steady = sum(map(len, groups))
    if num_steady == len(commands):
        return groups, ()
    chosen = {id(command) for group in groups for command in group}
    return groups, [command for command in commands if id(command) not in chosen]


def _by_states(commands: list[Any]) -> list[list[Any]]:
    """Those whose hidden states go together: by one plane, or none."""
    groups: dict[object, list[Any]] = {}
    for command in commands:
        groups.setdefault(states_form(command), []).append(command)
    return list(groups.values())


def _is_steady(command: Any) -> bool:  # noqa: ANN401 - any command
    return (
        type(command) in (ports.Extend, ports.Score)
        and may_bring_states(command)
        and not command.trace_parent
        and len(command.token_ids) <= MAX_ROW_TOKENS
        and not isinstance(command.token_ids, PackedTokenIds)
        and len(command.prefix_hash[0]) == chain_size(command.num_kept_tokens)
    )


def _with_whole_supports(scores: Sequence[Any]) -> list[Any]:
    """Those whose support has a row for each draft token. Any other is for the service to refuse."""
    shaped = [
        score
        for score in scores
        if score.support is not None and 0 < score.support.counts.size == len(score.draft_token_ids)
    ]
    if not shaped:
        return []
    counts = np.concatenate([score.support.counts for score in shaped])
    sizes = sums_by_row(counts, [len(score.draft_token_ids) for score in shaped])
    if int(counts.min()) < 0:
        return []
    return [score for score, size in zip(shaped, sizes, strict=True) if size == score.support.token_ids.size]


def write_column_arrays(message: pb.CommandColumns, columns: CommandColumns) -> None:
    """Commands that are columns already, into an empty message; ``OverflowError`` when a value does not fit."""
    message.sessions = array_bytes(columns.sessions, U8)
    message.generations = array_bytes(columns.generations, U8)
    message.num_kept_tokens = array_bytes(columns.num_kept_tokens, U4)
    message.prefix_chains = columns.chains
    message.prefix_rests = array_bytes(columns.rests, U8)
    message.counts = array_bytes(columns.counts, U4)
    message.token_ids = array_bytes(columns.token_ids, I4)
    message.draft_lengths = array_bytes(columns.draft_lengths, U4)
    if isinstance(columns, ScoreColumns):
        message.draft_token_ids = array_bytes(columns.draft_token_ids, U4)
        if columns.hidden_states_from is not None:
            message.hidden_states_from = array_bytes(columns.hidden_states_from, U4)
            message.plane = columns.plane
        if columns.support_counts is not None and columns.support_token_ids is not None:
            message.support_counts = array_bytes(columns.support_counts, I4)
            message.support_token_ids = array_bytes(columns.support_token_ids, I4)
        return
    if columns.states is not None:
        write_state_columns(message.states, columns.states)
    if columns.channel:
        message.channel = columns.channel


def write_command_columns(message: pb.CommandColumns, commands: Sequence[Item]) -> None:
    """One group of ``split_steady``, into an empty message; ``OverflowError`` when a value does not fit."""
    message.sessions = to_bytes("Q", [command.session for command in commands])
    message.generations = to_bytes("Q", [command.generation for command in commands])
    message.num_kept_tokens = to_bytes("I", [command.num_kept_tokens for command in commands])
    hashes = [command.prefix_hash for command in commands]
    message.prefix_chains = b"".join([chain for chain, _ in hashes])
    message.prefix_rests = to_bytes("Q", [rest for _, rest in hashes])
    rows = [command.token_ids for command in commands]
    message.counts = to_bytes("I", [len(row) for row in rows])
    message.token_ids = to_bytes("i", [token_id for row in rows for token_id in row])
    if isinstance(commands[0], ports.Extend):
        message.draft_lengths = to_bytes("I", [command.draft_length for command in commands])  # type: ignore[union-attr]
        states: list[Any] = [command.hidden_states for command in commands]  # type: ignore[union-attr]
        if states[0] is not None:
            write_state_columns(message.states, StateColumns.of(states))
    else:
        _write_drafts(message, commands)


def _write_drafts(message: pb.CommandColumns, scores: Sequence[Any]) -> None:
    drafts = [score.draft_token_ids for score in scores]
    message.draft_lengths = to_bytes("I", [len(draft) for draft in drafts])
    message.draft_token_ids = to_bytes("I", [token_id for draft in drafts for token_id in draft])
    if scores[0].support is not None:
        message.support_counts = joined([score.support.counts for score in scores], I4)
        message.support_token_ids = joined([score.support.token_ids for score in scores], I4)
    if scores[0].hidden_states_from is not None:
        message.hidden_states_from = to_bytes("I", [score.hidden_states_from for score in scores])
        message.plane = scores[0].plane


def extend_arrays(message: pb.CommandColumns) -> ExtendColumns | None:
    """The ``Extend`` of a group as columns; None where one is beyond its limits. Raises as ``extends_from_columns``."""
    _require_extends(message)
    heads, lengths = _head_arrays(message)
    return None if heads is None else ExtendColumns(*(*heads, lengths, _states(message, lengths.size), message.channel))


def score_arrays(message: pb.CommandColumns, *, are_ahead: bool = False) -> ScoreColumns | None:
    """The ``Score`` of a group as columns; None where one is beyond its limits. Raises as
    ``scores_from_command_columns``. ``are_ahead``: their draft tokens come later.
    """
    heads, lengths = _head_arrays(message)
    each = lengths.tolist()  # as in ``_head_arrays``
    if heads is None or max(each) > LINK_DRAFT_TOKEN_IDS.most:
        return None
    num_drafts = 0 if are_ahead else sum(each)
    drafts = from_bytes("draft_token_ids", message.draft_token_ids, U4, num_drafts)
    firsts = _firsts(message, lengths.size)
    if not message.support_counts:
        return ScoreColumns(*(*heads, lengths, drafts, firsts, message.plane))
    counts, ids = _support_arrays(message, num_drafts)
    if ids.size > LINK_SUPPORT_IDS.most:
        _check_support_sizes(sums_by_row(counts, each))
    return ScoreColumns(*(*heads, lengths, drafts, firsts, message.plane, counts, ids))


def _require_extends(message: pb.CommandColumns) -> None:
    if message.draft_token_ids or message.support_counts or message.support_token_ids or message.hidden_states_from:
        raise ProtocolError("columns: draft_token_ids, supports and hidden_states_from belong to Score, not to Extend")


def _states(message: pb.CommandColumns, size: int) -> StateColumns | None:
    return state_columns_from_proto(message.states, size) if message.HasField("states") else None


def _firsts(message: pb.CommandColumns, size: int) -> NDArray[np.uint32] | None:
    """``hidden_states_from`` of a group of ``Score``; None if none asks for any."""
    if message.HasField("states"):
        raise ProtocolError("columns: states belong to Extend, not to Score")
    found = message.hidden_states_from
    return from_bytes("hidden_states_from", found, U4, size) if found else None


def _head_arrays(message: pb.CommandColumns) -> tuple[Any, NDArray[np.uint32]]:
    """What both kinds begin with, and the draft lengths; None for a row beyond its limits, or none at all."""
    sessions = from_bytes("sessions", message.sessions, U8)
    size = sessions.size
    kept = from_bytes("num_kept_tokens", message.num_kept_tokens, U4, size)
    counts = from_bytes("counts", message.counts, U4, size)
    lengths = from_bytes("draft_lengths", message.draft_lengths, U4, size)
    each = counts.tolist()  # less than a hundred numbers, mostly: reductions of arrays take longer
    if not size or max(each) > LINK_TOKEN_IDS.most:
        return None, lengths
    num_chains, chains = sum([length >= BLOCK_TOKENS for length in kept.tolist()]), message.prefix_chains
    if len(chains) != CHAIN_BYTES * num_chains:
        raise ProtocolError(_wrong_chains(len(chains), num_chains))
    heads = (
        sessions,
        from_bytes("generations", message.generations, U8, size),
        kept,
        chains,
        from_bytes("prefix_rests", message.prefix_rests, U8, size),
        counts,
        from_bytes("token_ids", message.token_ids, I4, sum(each)),
    )
    return heads, lengths


def _wrong_chains(num_bytes: int, num_chains: int) -> str:
    return f"columns: {num_bytes} bytes of prefix_chains are not {CHAIN_BYTES} for each of {num_chains}"


def extends_from_columns(message: pb.CommandColumns) -> Iterator[ports.Extend | ports.Rejected]:
    """The ``Extend`` of a group; ``ProtocolError`` for columns that do not fit each other."""
    _require_extends(message)
    sessions, generations, kept, hashes, rows, lengths = _heads(message)
    columns = _states(message, len(lengths))
    states: Iterable[HiddenStates | None] = [None] * len(lengths) if columns is None else columns.hidden_states()
    most = LINK_TOKEN_IDS.most
    for session, generation, held, prefix, row, length, own in zip(
        sessions, generations, kept, hashes, rows, lengths, states, strict=True
    ):
        if len(row) > most:
            yield _rejected(session, generation, "token_ids", len(row))
        else:
            yield ports.Extend(session, generation, held, prefix, row, length, "", own)


def scores_from_command_columns(message: pb.CommandColumns) -> Iterator[ports.Score | ports.Rejected]:
    """The ``Score`` of a group; ``ProtocolError`` for columns that do not fit each other."""
    sessions, generations, kept, hashes, rows, lengths = _heads(message)
    drafted = from_bytes("draft_token_ids", message.draft_token_ids, U4, sum(lengths)).tolist()
    supports = _supports(message, lengths) if message.support_counts else [None] * len(lengths)
    found = _firsts(message, len(lengths))
    firsts = [None] * len(lengths) if found is None else found.tolist()
    most, most_drafts, start = LINK_TOKEN_IDS.most, LINK_DRAFT_TOKEN_IDS.most, 0
    for session, generation, held, prefix, row, length, support, first in zip(
        sessions, generations, kept, hashes, rows, lengths, supports, firsts, strict=True
    ):
        if len(row) > most or length > most_drafts:
            name, count = ("token_ids", len(row)) if len(row) > most else ("draft_token_ids", length)
            yield _rejected(session, generation, name, count)
        else:
            draft = tuple(drafted[start : start + length])
            yield ports.Score(session, generation, held, prefix, row, draft, support, "", first, message.plane)
        start += length


def _supports(message: pb.CommandColumns, lengths: Sequence[int]) -> list[Support | None]:
    counts, ids = (values.copy() for values in _support_arrays(message, sum(lengths)))
    sizes = sums_by_row(counts, lengths)
    _check_support_sizes(sizes)
    return [
        Support(counts[own], ids[support]) if support.stop > support.start else None
        for own, support in zip(spans(lengths), spans(sizes), strict=True)
    ]


def _support_arrays(message: pb.CommandColumns, num_drafts: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    counts = from_bytes("support_counts", message.support_counts, I4, num_drafts)
    ids = from_bytes("support_token_ids", message.support_token_ids, I4, total("support_counts", counts))
    return counts, ids


def _check_support_sizes(sizes: Sequence[int]) -> None:
    if max(sizes, default=0) > LINK_SUPPORT_IDS.most:
        raise ProtocolError(f"columns: a support has {max(sizes)} ids; at most {LINK_SUPPORT_IDS.most}")


def _rejected(session: int, generation: int, name: str, count: int) -> ports.Rejected:
    bound = LINK_TOKEN_IDS if name == "token_ids" else LINK_DRAFT_TOKEN_IDS
    error = InvalidRequestError(name, f"has {count} {bound.unit}; at most {bound.most}")
    return ports.Rejected(session, generation, error)


def _heads(message: pb.CommandColumns) -> tuple[list[Any], ...]:
    """Sessions, generations, kept tokens, hashes, tokens and draft lengths, once their sizes are known to fit."""
    sessions = from_bytes("sessions", message.sessions, U8)
    size = sessions.size
    kept = from_bytes("num_kept_tokens", message.num_kept_tokens, U4, size).tolist()
    counts = from_bytes("counts", message.counts, U4, size)
    total("counts", counts)
    token_ids = from_bytes("token_ids", message.token_ids, I4, int(counts.sum())).tolist()
    lengths = from_bytes("draft_lengths", message.draft_lengths, U4, size)
    if message.draft_token_ids:
        total("draft_lengths", lengths)
    return (
        sessions.tolist(),
        from_bytes("generations", message.generations, U8, size).tolist(),
        kept,
        _hashes(message, kept),
        [tuple(token_ids[row]) for row in spans(counts.tolist())],
        lengths.tolist(),
    )


def _hashes(message: pb.CommandColumns, kept: Sequence[int]) -> list[tuple[bytes, int]]:
    chains, rests = message.prefix_chains, from_bytes("prefix_rests", message.prefix_rests, U8, len(kept)).tolist()
    num_chains = sum([held >= BLOCK_TOKENS for held in kept])
    if len(chains) != CHAIN_BYTES * num_chains:
        raise ProtocolError(_wrong_chains(len(chains), num_chains))
    each = spans(list(map(chain_size, kept)))
    return [(chains[span], rest) for span, rest in zip(each, rests, strict=True)]
