"""``link.proto``: the fields of answers that few have, which readers take one by one.

Typical scores, logprobs, and hidden states that are not by one reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from outrider.batched import F4, I4, U4, Column, LogprobBatch
from outrider.errors import ProtocolError
from outrider.limits import LINK_CANDIDATES, LINK_FIELDS, LINK_POSITIONS, LINK_TOKEN_IDS, Bound
from outrider.transport.convert.packed_arrays import array_bytes, check_largest, from_bytes
from outrider.transport.convert.tensors import hidden_states_of_rows, write_hidden_states
from outrider.types import TypicalScores
from outrider.v1 import link_pb2 as pb

Details = dict[str, Sequence[Any]]
"""Field of an event -> its value for each answer."""


def write_details(message: pb.StepAnswers, details: Mapping[str, Sequence[Any]]) -> None:
    """Write the details of answers into their message."""
    for name, values in details.items():
        if name == "form":
            message.form = pb.ANSWER_FORM_TYPICAL
        _WRITERS[name](message.details, values)


def read_score_details(message: pb.StepAnswers, token_ids: Column, counts: Sequence[int]) -> Details | None:
    """Details of scores; None without any. ``counts``: positions of each answer, whose ``token_ids`` these are."""
    found: Details = {}
    details, size = message.details, len(counts)
    if message.form == pb.ANSWER_FORM_TYPICAL:
        found["form"] = _read_typical(details, token_ids, counts)
    if details.HasField("prompt_logprobs"):
        logprobs = _read_candidates("prompt_logprobs", details.prompt_logprobs, size, LINK_TOKEN_IDS)
        found["prompt_logprobs"] = logprobs.rows()
    if details.hidden_states:
        found["hidden_states"] = hidden_states_of_rows(details.hidden_states, size)
    return found or None


# Forms.


def _write_forms(message: pb.AnswerDetails, forms: Sequence[Any]) -> None:
    message.draft_token_probs = array_bytes(np.concatenate([form.draft_token_probs for form in forms]), F4)
    message.entropies = array_bytes(np.concatenate([form.entropies for form in forms]), F4)


def _read_typical(message: pb.AnswerDetails, token_ids: Column, counts: Sequence[int]) -> list[TypicalScores]:
    if 0 in counts:
        raise ProtocolError("columns: scores have at least one position")
    num_drafts = sum(counts) - len(counts)
    probs = from_bytes("draft_token_probs", message.draft_token_probs, F4, num_drafts).copy()
    entropies = from_bytes("entropies", message.entropies, F4, num_drafts).copy()
    forms, start = [], 0
    for place, count in enumerate(counts):
        own, first = slice(start, start + count - 1), start + place
        tokens = token_ids[first : first + count]
        forms.append(TypicalScores(probs[own], entropies[own], tokens[:-1].astype(np.int32), int(tokens[-1])))
        start += count - 1
    return forms


# Logprobs.


def write_logprobs(message: pb.AnswerDetails, logprobs: LogprobBatch) -> None:
    """Write the logprobs of scores."""
    _write_candidates(message.logprobs, logprobs)


def read_logprobs(details: pb.AnswerDetails, size: int) -> LogprobBatch | None:
    """Logprobs of scores; None without any."""
    if not details.HasField("logprobs"):
        return None
    return _read_candidates("logprobs", details.logprobs, size, LINK_POSITIONS)


def _write_prompt_logprobs(message: pb.AnswerDetails, answers: Sequence[Any]) -> None:
    if (batched := LogprobBatch.of(answers)) is not None:
        _write_candidates(message.prompt_logprobs, batched)


def _write_candidates(message: pb.CandidateBatch, batched: LogprobBatch) -> None:
    for field, dtype in _CANDIDATES.items():
        setattr(message, field, array_bytes(getattr(batched, field), dtype))


def _read_candidates(name: str, message: pb.CandidateBatch, size: int, bound: Bound) -> LogprobBatch:
    """The candidates of all positions of each answer."""
    num_positions = from_bytes(f"{name}.num_positions", message.num_positions, U4, size)
    check_largest(f"{name}.num_positions", int(num_positions.max()), bound)
    sizes = {"positions": int(num_positions.sum(dtype=np.int64))}
    if sizes["positions"] > LINK_FIELDS.most:  # each becomes values of many times its bytes
        raise ProtocolError(f"columns: {name} has {sizes['positions']} positions; at most {LINK_FIELDS.most}")
    found = [num_positions]
    for field, dtype in list(_CANDIDATES.items())[1:]:
        is_count, of_top = field.endswith("counts"), field.startswith("top_")
        length = sizes["positions" if is_count else "top" if of_top else "own"]
        values = from_bytes(f"{name}.{field}", getattr(message, field), dtype, length)
        if is_count:
            check_largest(f"{name}.{field}", int(values.max(initial=0)), LINK_CANDIDATES)
            sizes["top" if of_top else "own"] = int(values.sum(dtype=np.int64))
        found.append(values.copy())
    return LogprobBatch(*found)


_CANDIDATES = {
    "num_positions": U4, "counts": U4, "token_ids": I4, "logprobs": F4, "ranks": I4, "top_counts": U4,
    "top_token_ids": I4, "top_logprobs": F4,
}  # fmt: skip
"""Fields of ``LogprobBatch``, in their order, and their types."""


# Hidden states.


def _write_states(message: pb.AnswerDetails, states: Sequence[Any]) -> None:
    for each in states:
        write_hidden_states(message.hidden_states.add(), each)


_WRITERS: dict[str, Callable[[pb.AnswerDetails, Sequence[Any]], None]] = {
    "form": _write_forms,
    "prompt_logprobs": _write_prompt_logprobs,
    "hidden_states": _write_states,
}
