"""``link.proto``: answers of many sessions as columns.

In steady decoding a message answers every running session in the same form. A message of its own for each takes
several times as long to write and to read as one array for each field. Owns which answers may go so, and the checks
on the arrays before anything is made of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from outrider import ports
from outrider.errors import InvalidRequestError, ProtocolError
from outrider.limits import LINK_DRAFT_TOKEN_IDS, LINK_FIELDS, LINK_POSITIONS, Bound
from outrider.transport.convert.arrays import little_endian
from outrider.types import DenseScores, SparseScores, TokenScores
from outrider.v1 import link_pb2 as pb

CAPABILITY = ("outrider-columns", "1")
"""In the metadata of the call that opens a link: the caller reads columns."""
FEWEST_ANSWERS = 4
"""Fewer are no faster as columns."""
_BYTES_OF_A_SESSION = 8
_MOST_INT32 = (1 << 31) - 1
_NO_PROBS = np.zeros(0, dtype=np.float32)

Indices = list[int]


def reads_columns(metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
    """Whether a caller announces in its call's metadata that it reads columns."""
    return CAPABILITY in (metadata or ())


def column_groups(events: Sequence[Any]) -> list[Indices]:
    """Places of the events that go as columns together, group by group; those in none go one by one.

    None go where a session has two events, whose order would be lost, and where rows of probabilities travel.
    """
    if len(events) < FEWEST_ANSWERS or len({event.session for event in events}) < len(events):
        return []
    tokens: Indices = []
    sampled: Indices = []
    for index, event in enumerate(events):
        if isinstance(event, ports.Proposal):
            if event.evidence is None:
                tokens.append(index)
        elif isinstance(event, ports.Scores):
            if isinstance(event.form, DenseScores):
                return []
            if event.logprobs or event.prompt_logprobs or event.hidden_states is not None:
                continue
            if isinstance(event.form, TokenScores):
                tokens.append(index)
            elif isinstance(event.form, SparseScores) and _is_plain(event.form):
                sampled.append(index)
    return [group for group in (tokens, sampled) if len(group) >= FEWEST_ANSWERS]


def _is_plain(form: SparseScores) -> bool:
    return form.support_probs.size == 0 and form.outside_token_ids.size == 1 == form.outside_mass.size


def write_columns(message: pb.AnswerColumns, answers: Sequence[ports.Proposal | ports.Scores]) -> None:
    """One group of ``column_groups``, into an empty message; ``OverflowError`` when a value does not fit."""
    rows = [_token_ids(answer) for answer in answers]
    message.sessions = _to_bytes("Q", [answer.session for answer in answers])
    message.generations = _to_bytes("Q", [answer.generation for answer in answers])
    message.base_lengths = _to_bytes("I", [answer.base_length for answer in answers])
    message.counts = _to_bytes("I", [len(row) for row in rows])
    message.token_ids = _to_bytes("I", [token_id for row in rows for token_id in row])
    masses = [
        float(answer.form.outside_mass[0])
        for answer in answers
        if isinstance(answer, ports.Scores) and isinstance(answer.form, SparseScores)
    ]
    message.outside_mass = np.array(masses, dtype="<f4").tobytes()


def _token_ids(answer: ports.Proposal | ports.Scores) -> Sequence[int]:
    if isinstance(answer, ports.Proposal):
        return answer.token_ids
    form = answer.form
    if isinstance(form, TokenScores):
        return form.token_ids
    found: list[int] = form.outside_token_ids.tolist()  # type: ignore[union-attr]  # of a group, so sparse
    return found


def proposals_from_columns(message: pb.AnswerColumns) -> Iterator[ports.Proposal | ports.SessionFailed]:
    """The proposals of a group; ``ProtocolError`` for columns that do not fit each other."""
    if message.outside_mass:
        raise ProtocolError("columns: outside_mass belongs to scores, not to proposals")
    return _answers(message, LINK_DRAFT_TOKEN_IDS, ports.Proposal)


def scores_from_columns(message: pb.AnswerColumns) -> Iterator[ports.Scores | ports.SessionFailed]:
    """The scores of a group; ``ProtocolError`` for columns that do not fit each other."""
    if not message.outside_mass:
        return _answers(message, LINK_POSITIONS, _token_scores)
    return _sampled_scores(message)


def _token_scores(session: int, generation: int, base_length: int, token_ids: tuple[int, ...]) -> ports.Scores:
    return ports.Scores(session, generation, base_length, TokenScores(token_ids))


def _sampled_scores(message: pb.AnswerColumns) -> Iterator[ports.Scores]:
    sessions, generations, bases, counts, token_ids = _columns(message)
    masses = _from_bytes("outside_mass", message.outside_mass, "<f4")
    if masses.size != len(sessions) or any(count != 1 for count in counts):
        raise ProtocolError(f"columns: {masses.size} of outside_mass are not one for each of {len(sessions)} tokens")
    if any(token_id > _MOST_INT32 for token_id in token_ids):
        raise ProtocolError("columns: token_ids has one that is no int32")
    ids = np.array(token_ids, dtype=np.int32)
    for index, (session, generation, base) in enumerate(zip(sessions, generations, bases, strict=True)):
        row = slice(index, index + 1)
        yield ports.Scores(session, generation, base, SparseScores(_NO_PROBS, masses[row], ids[row]))


def _answers(
    message: pb.AnswerColumns, bound: Bound, make: Callable[[int, int, int, tuple[int, ...]], Any]
) -> Iterator[Any]:
    sessions, generations, bases, counts, token_ids = _columns(message)
    start = 0
    for session, generation, base, count in zip(sessions, generations, bases, counts, strict=True):
        if count > bound.most:
            yield _too_many(session, generation, bound, count)
        else:
            yield make(session, generation, base, tuple(token_ids[start : start + count]))
        start += count


def _too_many(session: int, generation: int, bound: Bound, count: int) -> ports.SessionFailed:
    error = InvalidRequestError("token_ids", f"has {count} {bound.unit}; at most {bound.most}")
    return ports.SessionFailed(session, generation, "ProtocolError", str(error), error.field)


def num_answers(groups: Iterable[pb.AnswerColumns]) -> int:
    """Answers of all groups; a group without any counts as one."""
    return sum(max(len(group.sessions) // _BYTES_OF_A_SESSION, 1) for group in groups)


def _columns(message: pb.AnswerColumns) -> tuple[list[int], ...]:
    """Sessions, generations, base lengths, counts and tokens, once their lengths are known to fit."""
    sessions, generations = message.sessions, message.generations
    base_lengths, counts, token_ids = message.base_lengths, message.counts, message.token_ids
    num_rows = len(sessions) // _BYTES_OF_A_SESSION
    if len(token_ids) > 4 * LINK_FIELDS.most:
        raise ProtocolError(f"columns: {len(token_ids)} bytes of token_ids are more than {LINK_FIELDS.most} tokens")
    expected = {"sessions": (sessions, 8), "generations": (generations, 8), "base_lengths": (base_lengths, 4)}
    for name, (content, width) in (expected | {"counts": (counts, 4)}).items():
        if len(content) != num_rows * width:
            raise ProtocolError(f"columns: {name} has {len(content)} bytes, not {width} for each of {num_rows} answers")
    each = _from_bytes("counts", counts, "<u4")
    if len(token_ids) != 4 * int(each.sum(dtype=np.uint64)):
        raise ProtocolError(f"columns: {len(token_ids)} bytes of token_ids are not what counts comes to")
    return (
        _from_bytes("sessions", sessions, "<u8").tolist(),
        _from_bytes("generations", generations, "<u8").tolist(),
        _from_bytes("base_lengths", base_lengths, "<u4").tolist(),
        each.tolist(),
        _from_bytes("token_ids", token_ids, "<u4").tolist(),
    )


def _from_bytes(name: str, content: bytes, dtype: str) -> np.ndarray:  # -> [B]
    if len(content) % np.dtype(dtype).itemsize:
        raise ProtocolError(f"columns: {len(content)} bytes of {name} are no whole number of values")
    return np.frombuffer(content, dtype=dtype)


def _to_bytes(code: str, values: list[int]) -> bytes:
    return little_endian(array(code, values)).tobytes()
