"""``link.proto``: evidence of a proposal and the forms of scores."""

from __future__ import annotations

from collections.abc import Iterable

from outrider.errors import ProtocolError
from outrider.limits import LINK_CANDIDATES, LINK_DRAFT_TOKEN_IDS, LINK_POSITIONS, LINK_SUPPORT_IDS
from outrider.transport.convert.arrays import (
    Fetch,
    Place,
    fetch_nothing,
    floats_from_bytes,
    floats_to_bytes,
    ints_from_bytes,
    ints_to_bytes,
    place_nothing,
    tensor_from_proto,
    tensor_to_proto,
)
from outrider.transport.convert.reading import Readers, read_one_of
from outrider.types import (
    CandidateLogprobs,
    DenseEvidence,
    DenseScores,
    Evidence,
    ScoreForm,
    SparseEvidence,
    SparseScores,
    TokenScores,
    TypicalScores,
)
from outrider.v1 import link_pb2 as pb


def write_evidence(message: pb.Evidence, evidence: Evidence, place: Place = place_nothing) -> None:
    """Write evidence into an empty message; None leaves it empty."""
    if isinstance(evidence, SparseEvidence):
        sparse = message.sparse
        sparse.counts = ints_to_bytes(evidence.counts)
        sparse.token_ids = ints_to_bytes(evidence.token_ids)
        sparse.probs = floats_to_bytes(evidence.probs)
    elif isinstance(evidence, DenseEvidence):
        message.dense.CopyFrom(tensor_to_proto(evidence.probs, place))


def evidence_from_proto(message: pb.Evidence, fetch: Fetch = fetch_nothing) -> Evidence:
    """Convert evidence. The reader checks whether it fits its proposal: bad evidence does not break the link."""
    form = message.WhichOneof("form")
    if form == "sparse":
        sparse = message.sparse
        return SparseEvidence(
            counts=ints_from_bytes("counts", sparse.counts, LINK_DRAFT_TOKEN_IDS),
            token_ids=ints_from_bytes("token_ids", sparse.token_ids, LINK_SUPPORT_IDS),
            probs=floats_from_bytes("probs", sparse.probs, LINK_SUPPORT_IDS),
        )
    if form == "dense":
        return DenseEvidence(tensor_from_proto("dense", message.dense, fetch))
    return None


def write_form(message: pb.Scores, form: ScoreForm, place: Place = place_nothing) -> None:
    """Set the field of ``Scores.form`` for these scores."""
    if isinstance(form, TokenScores):
        message.tokens.token_ids.extend(form.token_ids)
        message.tokens.SetInParent()
    elif isinstance(form, SparseScores):
        sparse = message.sparse
        sparse.support_probs = floats_to_bytes(form.support_probs)
        sparse.outside_mass = floats_to_bytes(form.outside_mass)
        sparse.outside_token_ids = ints_to_bytes(form.outside_token_ids)
    elif isinstance(form, TypicalScores):
        typical = message.typical
        typical.draft_token_probs = floats_to_bytes(form.draft_token_probs)
        typical.entropies = floats_to_bytes(form.entropies)
        typical.argmax_token_ids = ints_to_bytes(form.argmax_token_ids)
        typical.bonus_token_id = form.bonus_token_id
    else:
        message.dense.target_probs.CopyFrom(tensor_to_proto(form.target_probs, place))
        if form.logprobs is not None:
            message.dense.logprobs.CopyFrom(tensor_to_proto(form.logprobs, place))


def _sparse_from_proto(message: pb.SparseScores) -> SparseScores:
    return SparseScores(
        support_probs=floats_from_bytes("support_probs", message.support_probs, LINK_SUPPORT_IDS),
        outside_mass=floats_from_bytes("outside_mass", message.outside_mass, LINK_POSITIONS),
        outside_token_ids=ints_from_bytes("outside_token_ids", message.outside_token_ids, LINK_POSITIONS),
    )


def _typical_from_proto(message: pb.TypicalScores) -> TypicalScores:
    return TypicalScores(
        draft_token_probs=floats_from_bytes("draft_token_probs", message.draft_token_probs, LINK_POSITIONS),
        entropies=floats_from_bytes("entropies", message.entropies, LINK_POSITIONS),
        argmax_token_ids=ints_from_bytes("argmax_token_ids", message.argmax_token_ids, LINK_POSITIONS),
        bonus_token_id=message.bonus_token_id,
    )


def _dense_from_proto(message: pb.DenseScores, fetch: Fetch) -> DenseScores:
    logprobs = tensor_from_proto("logprobs", message.logprobs, fetch) if message.HasField("logprobs") else None
    return DenseScores(tensor_from_proto("target_probs", message.target_probs, fetch), logprobs)


def form_from_proto(message: pb.Scores, fetch: Fetch = fetch_nothing) -> ScoreForm:
    """The scores of a message; ``ProtocolError`` for an unknown form."""
    if message.HasField("tokens"):
        return TokenScores(tuple(message.tokens.token_ids))
    if message.HasField("dense"):
        return _dense_from_proto(message.dense, fetch)
    form: ScoreForm = read_one_of(message, "form", _FORM_READERS)
    return form


_FORM_READERS: Readers = {
    "sparse": _sparse_from_proto,
    "typical": _typical_from_proto,
}


def candidates_to_proto(positions: Iterable[CandidateLogprobs]) -> list[pb.CandidateLogprobs]:
    """The candidates of all positions."""
    return [
        pb.CandidateLogprobs(
            token_ids=ints_to_bytes(position.token_ids),
            logprobs=floats_to_bytes(position.logprobs),
            ranks=ints_to_bytes(position.ranks),
            top_token_ids=ints_to_bytes(position.top_token_ids),
            top_logprobs=floats_to_bytes(position.top_logprobs),
        )
        for position in positions
    ]


def candidates_from_proto(messages: Iterable[pb.CandidateLogprobs]) -> tuple[CandidateLogprobs, ...]:
    """The candidates of all positions; ``ProtocolError`` for arrays of inconsistent lengths."""
    return tuple([_position_from_proto(message) for message in messages])


def _position_from_proto(message: pb.CandidateLogprobs) -> CandidateLogprobs:
    position = CandidateLogprobs(
        token_ids=ints_from_bytes("token_ids", message.token_ids, LINK_CANDIDATES),
        logprobs=floats_from_bytes("logprobs", message.logprobs, LINK_CANDIDATES),
        ranks=ints_from_bytes("ranks", message.ranks, LINK_CANDIDATES),
        top_token_ids=ints_from_bytes("top_token_ids", message.top_token_ids, LINK_CANDIDATES),
        top_logprobs=floats_from_bytes("top_logprobs", message.top_logprobs, LINK_CANDIDATES),
    )
    candidates = {position.token_ids.size, position.logprobs.size, position.ranks.size}
    if len(candidates) > 1 or position.top_token_ids.size != position.top_logprobs.size:
        raise ProtocolError("logprobs: as many ids as logprobs and ranks are needed")
    return position
