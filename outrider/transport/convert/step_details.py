"""``link.proto``: the fields of answers that few have, which readers take one by one.

Typical scores, whole rows of probabilities, logprobs, and hidden states that are not by one reference.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from outrider.columns import F4, I4, U4, Column
from outrider.errors import ProtocolError
from outrider.limits import LINK_CANDIDATES, LINK_FIELDS, LINK_POSITIONS, LINK_TOKEN_IDS, Bound
from outrider.transport.convert.arrays import Fetch, Place, tensor_from_proto, tensor_to_proto
from outrider.transport.convert.column_bytes import array_bytes, check_largest, from_bytes
from outrider.transport.convert.tensors import hidden_states_of_rows, write_hidden_states
from outrider.types import CandidateLogprobs, DenseEvidence, DenseScores, TypicalScores
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
    if details.HasField("logprobs"):
        found["logprobs"] = _read_candidates("logprobs", details.logprobs, size, LINK_POSITIONS)
    if details.HasField("prompt_logprobs"):
        found["prompt_logprobs"] = _read_candidates("prompt_logprobs", details.prompt_logprobs, size, LINK_TOKEN_IDS)
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


def _write_candidates(name: str) -> Callable[[pb.AnswerDetails, Sequence[Any], Place], None]:
    def write(message: pb.AnswerDetails, answers: Sequence[Any], place: Place) -> None:
        columns: pb.CandidateColumns = getattr(message, name)
        positions = list(itertools.chain.from_iterable(answers))
        columns.num_positions = np.array(list(map(len, answers)), dtype=U4).tobytes()
        columns.counts = np.array([each.token_ids.size for each in positions], dtype=U4).tobytes()
        columns.top_counts = np.array([each.top_token_ids.size for each in positions], dtype=U4).tobytes()
        for field, dtype in _CANDIDATES.items():
            setattr(columns, field, array_bytes(np.concatenate([getattr(each, field) for each in positions]), dtype))

    return write


def _read_candidates(
    name: str, message: pb.CandidateColumns, size: int, bound: Bound
) -> list[tuple[CandidateLogprobs, ...]]:
    """The candidates of all positions of each answer."""
    num_positions = from_bytes(f"{name}.num_positions", message.num_positions, U4, size).tolist()
    check_largest(f"{name}.num_positions", max(num_positions), bound)
    if sum(num_positions) > LINK_FIELDS.most:  # each becomes values of many times its bytes
        raise ProtocolError(f"columns: {name} has {sum(num_positions)} positions; at most {LINK_FIELDS.most}")
    edges = {}
    for field in ("counts", "top_counts"):
        counts = from_bytes(f"{name}.{field}", getattr(message, field), U4, sum(num_positions))
        check_largest(f"{name}.{field}", max(counts.tolist(), default=0), LINK_CANDIDATES)
        edges[field] = [0, *counts.cumsum(dtype=np.int64).tolist()]
    columns = []
    for field, dtype in _CANDIDATES.items():
        own = edges["top_counts" if field.startswith("top_") else "counts"]
        values = from_bytes(f"{name}.{field}", getattr(message, field), dtype, own[-1]).copy()
        columns.append([values[start:stop] for start, stop in itertools.pairwise(own)])
    positions = iter([CandidateLogprobs(*parts) for parts in zip(*columns, strict=True)])
    return [tuple(itertools.islice(positions, count)) for count in num_positions]


_CANDIDATES = {"token_ids": I4, "logprobs": F4, "ranks": I4, "top_token_ids": I4, "top_logprobs": F4}
"""Fields of ``CandidateLogprobs``, in their order, and their types."""


# Hidden states.


def _write_states(message: pb.AnswerDetails, states: Sequence[Any], place: Place) -> None:
    for each in states:
        write_hidden_states(message.hidden_states.add(), each)


_WRITERS: dict[str, Callable[[pb.AnswerDetails, Sequence[Any], Place], None]] = {
    "form": _write_forms,
    "evidence": _write_evidence,
    "logprobs": _write_candidates("logprobs"),
    "prompt_logprobs": _write_candidates("prompt_logprobs"),
    "hidden_states": _write_states,
}
_FORMS = {
    DenseEvidence: pb.ANSWER_FORM_DENSE,
    DenseScores: pb.ANSWER_FORM_DENSE,
    TypicalScores: pb.ANSWER_FORM_TYPICAL,
}
