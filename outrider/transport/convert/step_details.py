"""``link.proto``: the fields of answers that few have, which readers take one by one.

Typical scores, whole rows of probabilities, logprobs, and hidden states that are not by one reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from outrider.batched import F4, I4, U4, Column, LogprobBatch
from outrider.errors import ProtocolError
from outrider.limits import LINK_CANDIDATES, LINK_FIELDS, LINK_POSITIONS, LINK_TOKEN_IDS, Bound
from outrider.transport.convert.arrays import Fetch, Place, tensor_from_proto, tensor_to_proto
from outrider.transport.convert.packed_arrays import array_bytes, check_largest, from_bytes
from outrider.transport.convert.tensors import hidden_states_of_rows, write_hidden_states
from outrider.types import DenseEvidence, DenseScores, TypicalScores
from outrider.v1 import link_pb2 as pb
from outrider.v1 import tensor_pb2

Details = dict[str, Sequence[Any]]
"""Field of an event -> its value for each answer."""


def write_details(message: pb.StepAnswers, details: Mapping[str, Sequence[Any]], place: Place) -> None:
    """Write the details of answers into their message."""
    for name, values in details.items():
        if name in ("form", "evidence"):
            message.form = _FORMS[type(values[0])]
        _WRITERS[name](message.details, values, place)


def read_proposal_details(message: pb.StepAnswers, size: int, fetch: Fetch) -> Details | None:
    """Details of proposals; None without any."""
    if message.form != pb.ANSWER_FORM_DENSE:
        return None
    return {"evidence": [DenseEvidence(probs) for probs in _tensors("probs", message.details.probs, size, fetch)]}


def read_score_details(
    message: pb.StepAnswers, token_ids: Column, counts: Sequence[int], fetch: Fetch
) -> Details | None:
    """Details of scores; None without any. ``counts``: positions of each answer, whose ``token_ids`` these are."""
    if not message.HasField("details") and message.form <= pb.ANSWER_FORM_SPARSE:
        return None
    found: Details = {}
    details, size = message.details, len(counts)
    if message.form == pb.ANSWER_FORM_TYPICAL:
        found["form"] = _read_typical(details, token_ids, counts)
    elif message.form == pb.ANSWER_FORM_DENSE:
        found["form"] = _read_dense(details, size, fetch)
    if details.HasField("prompt_logprobs"):
        logprobs = _read_candidates("prompt_logprobs", details.prompt_logprobs, size, LINK_TOKEN_IDS)
        found["prompt_logprobs"] = logprobs.rows()
    if details.hidden_states:
        found["hidden_states"] = hidden_states_of_rows(details.hidden_states, size)
    return found or None


# Forms.


def _write_forms(message: pb.AnswerDetails, forms: Sequence[Any], place: Place) -> None:
    if isinstance(forms[0], TypicalScores):
        message.draft_token_probs = array_bytes(np.concatenate([form.draft_token_probs for form in forms]), F4)
        message.entropies = array_bytes(np.concatenate([form.entropies for form in forms]), F4)
        return
    _write_rows(message, [form.target_probs for form in forms], place)
    if forms[0].logprobs is not None:
        message.dense_logprobs.extend([tensor_to_proto(form.logprobs, place) for form in forms])


def _write_evidence(message: pb.AnswerDetails, evidence: Sequence[Any], place: Place) -> None:
    _write_rows(message, [each.probs for each in evidence], place)


def _write_rows(message: pb.AnswerDetails, rows: Sequence[Any], place: Place) -> None:
    message.probs.extend([tensor_to_proto(each, place) for each in rows])


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


def _read_dense(message: pb.AnswerDetails, size: int, fetch: Fetch) -> list[DenseScores]:
    probs = _tensors("probs", message.probs, size, fetch)
    if not message.dense_logprobs:
        return [DenseScores(each) for each in probs]
    logprobs = _tensors("dense_logprobs", message.dense_logprobs, size, fetch)
    return [DenseScores(*each) for each in zip(probs, logprobs, strict=True)]


def _tensors(name: str, messages: Sequence[tensor_pb2.Tensor], size: int, fetch: Fetch) -> list[Any]:
    if len(messages) != size:
        raise ProtocolError(f"columns: {len(messages)} {name} are not one for each of {size} rows")
    return [tensor_from_proto(name, message, fetch) for message in messages]


# Logprobs.


def write_logprobs(message: pb.AnswerDetails, logprobs: LogprobBatch) -> None:
    """Write the logprobs of scores."""
    _write_candidates(message.logprobs, logprobs)


def read_logprobs(message: pb.StepAnswers, size: int) -> LogprobBatch | None:
    """Logprobs of scores; None without any."""
    if not message.details.HasField("logprobs"):
        return None
    return _read_candidates("logprobs", message.details.logprobs, size, LINK_POSITIONS)


def _write_prompt_logprobs(message: pb.AnswerDetails, answers: Sequence[Any], place: Place) -> None:
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


def _write_states(message: pb.AnswerDetails, states: Sequence[Any], place: Place) -> None:
    for each in states:
        write_hidden_states(message.hidden_states.add(), each)


_WRITERS: dict[str, Callable[[pb.AnswerDetails, Sequence[Any], Place], None]] = {
    "form": _write_forms,
    "evidence": _write_evidence,
    "prompt_logprobs": _write_prompt_logprobs,
    "hidden_states": _write_states,
}
_FORMS = {
    DenseEvidence: pb.ANSWER_FORM_DENSE,
    DenseScores: pb.ANSWER_FORM_DENSE,
    TypicalScores: pb.ANSWER_FORM_TYPICAL,
}
