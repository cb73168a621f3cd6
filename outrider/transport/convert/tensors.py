"""``tensor.proto``: hidden states on a link, references to them, and the messages of the tensor plane.

Hidden states keep the type that the target computed them in: the coordinator passes them on unread. Messages of the
tensor plane belong to no session, so one beyond a limit is a ``ProtocolError`` of the link.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider import ports
from outrider.batched import U4, U8, StateBatch
from outrider.errors import ProtocolError
from outrider.limits import LINK_FILES, LINK_HIDDEN_STATE_BYTES, LINK_STATE_REFERENCES, LINK_TEXT, TENSOR_DIMENSIONS
from outrider.planes import ID_BYTES, PlaneKind, PlaneOffer, PlaneReference, PlaneReport
from outrider.transport.convert.packed_arrays import array_bytes, from_bytes
from outrider.transport.convert.reading import shortened
from outrider.types import STATE_BYTES, HiddenStates
from outrider.v1 import link_pb2, tensor_pb2


def write_hidden_states(message: link_pb2.HiddenStates, states: HiddenStates) -> None:
    """Hidden states, into an empty message."""
    message.start = states.start
    values = message.values
    values.dtype = states.dtype
    values.shape.extend((states.num_rows, states.width))
    if states.references:
        for reference in states.references:
            write_reference(message.references.add(), reference)
    else:
        values.inline = states.payload


def hidden_states_from_proto(message: link_pb2.HiddenStates) -> HiddenStates:
    """Hidden states; ``ProtocolError`` when type, shape and length disagree, ``InvalidRequestError`` for too many."""
    values = message.values
    TENSOR_DIMENSIONS.check("hidden_states", len(values.shape))
    is_twofold = bool(message.references and values.inline)
    if values.dtype not in STATE_BYTES or is_twofold or len(values.shape) != 2:
        raise ProtocolError(
            f"hidden_states: must be a tensor of {', '.join(STATE_BYTES)}, inline or by reference, of two dimensions,"
            f" not {values.dtype[:20] or 'nothing'}"
        )
    num_rows, width = values.shape
    num_bytes = num_rows * width * STATE_BYTES[values.dtype]
    LINK_HIDDEN_STATE_BYTES.check("hidden_states", num_bytes)
    if message.references:
        return _by_reference(message, num_rows, width, num_bytes)
    payload = values.inline
    if not width or len(payload) != num_bytes:
        raise ProtocolError(f"hidden_states: {len(payload)} bytes do not fill {num_rows} x {width} {values.dtype}")
    return HiddenStates(message.start, num_rows, width, values.dtype, payload)


def _by_reference(message: link_pb2.HiddenStates, num_rows: int, width: int, num_bytes: int) -> HiddenStates:
    LINK_STATE_REFERENCES.check("hidden_states", len(message.references))
    references = tuple(map(reference_from_proto, message.references))
    row_bytes = width * STATE_BYTES[message.values.dtype]
    has_rows = all(each.num_bytes and each.num_bytes % row_bytes == 0 for each in references) if width else False
    if not has_rows or sum(each.num_bytes for each in references) != num_bytes:
        raise ProtocolError(f"hidden_states: the references are not to {num_rows} rows of {row_bytes} bytes")
    return HiddenStates(message.start, num_rows, width, message.values.dtype, b"", references)


def hidden_states_of_rows(messages: Sequence[link_pb2.HiddenStates], size: int) -> Sequence[HiddenStates]:
    """Hidden states of ``size`` sessions, or none; raises as ``hidden_states_from_proto``."""
    if messages and len(messages) != size:
        raise ProtocolError(f"columns: {len(messages)} hidden_states are not one for each of {size} rows")
    return tuple([hidden_states_from_proto(message) for message in messages])


def write_state_batch(message: link_pb2.StateBatch, states: StateBatch) -> None:
    """Hidden states of many sessions, into an empty message."""
    message.plane_id, message.dtype, message.width = states.plane_id, states.dtype, states.width
    message.starts = array_bytes(states.starts, U4)
    message.counts = array_bytes(states.counts, U4)
    message.offsets_bytes = array_bytes(states.offsets_bytes, U8)
    message.sequences = array_bytes(states.sequences, U8)


def state_batch_from_proto(message: link_pb2.StateBatch, size: int) -> StateBatch:
    """Hidden states of ``size`` sessions; ``ProtocolError`` where the fields disagree, or a row is of none or too many
    positions.
    """
    check_id("plane_id", message.plane_id)
    if message.dtype not in STATE_BYTES or not message.width:
        raise ProtocolError(f"states: must be of {', '.join(STATE_BYTES)}, not {message.dtype[:20] or 'nothing'}")
    batched = StateBatch(
        message.plane_id,
        message.width,
        message.dtype,
        from_bytes("starts", message.starts, U4, size),
        from_bytes("counts", message.counts, U4, size),
        from_bytes("offsets_bytes", message.offsets_bytes, U8, size),
        from_bytes("sequences", message.sequences, U8, size),
    )
    most = LINK_HIDDEN_STATE_BYTES.most // batched.row_bytes
    if not size or not 1 <= int(batched.counts.min()) <= int(batched.counts.max()) <= most:
        raise ProtocolError(f"states: each session must have from 1 to {most} positions of {batched.row_bytes} bytes")
    return batched


def write_reference(message: tensor_pb2.TensorPlaneReference, reference: PlaneReference) -> None:
    """A reference, into an empty message."""
    message.plane_id, message.sequence = reference.plane_id, reference.sequence
    message.offset_bytes, message.num_bytes = reference.offset_bytes, reference.num_bytes


def reference_from_proto(message: tensor_pb2.TensorPlaneReference) -> PlaneReference:
    """A reference; ``ProtocolError`` where its plane's id is none."""
    check_id("plane_id", message.plane_id)
    return PlaneReference(message.plane_id, message.offset_bytes, message.num_bytes, message.sequence)


def request_to_proto(command: ports.RequestPlane) -> tensor_pb2.TensorPlaneRequest:
    """A request for an offer."""
    return tensor_pb2.TensorPlaneRequest(connection=command.connection)


def request_from_proto(message: tensor_pb2.TensorPlaneRequest) -> ports.RequestPlane:
    """A request for an offer."""
    return ports.RequestPlane(message.connection)


def close_to_proto(command: ports.ClosePlane) -> tensor_pb2.TensorPlaneClose:
    """The end of a connection."""
    return tensor_pb2.TensorPlaneClose(connection=command.connection)


def close_from_proto(message: tensor_pb2.TensorPlaneClose) -> ports.ClosePlane:
    """The end of a connection."""
    return ports.ClosePlane(message.connection)


def offer_to_proto(message: ports.OfferPlane) -> tensor_pb2.TensorPlaneOffer:
    """An offer."""
    offer = message.offer
    return tensor_pb2.TensorPlaneOffer(
        connection=message.connection, offer_id=offer.offer_id, token=offer.token, host=offer.host, port=offer.port
    )


def offer_from_proto(message: tensor_pb2.TensorPlaneOffer) -> ports.OfferPlane:
    """An offer; ``ProtocolError`` for an id, token, host or port out of its format."""
    check_id("offer_id", message.offer_id)
    check_id("token", message.token)
    if not 0 < message.port < 1 << 16 or len(message.host) > LINK_TEXT.most:
        raise ProtocolError(f"plane_offer: {shortened(message.host)!r} port {message.port} is no address")
    offer = PlaneOffer(message.offer_id, message.token, message.host, message.port)
    return ports.OfferPlane(message.connection, offer)


def chosen_to_proto(event: ports.PlaneChosen) -> tensor_pb2.TensorPlaneChosen:
    """Outcome of a connection."""
    report = event.report
    return tensor_pb2.TensorPlaneChosen(
        connection=event.connection,
        kind=report.kind,
        round_trip_ms=report.round_trip_ms,
        reasons=[tensor_pb2.TensorPlaneReason(kind=kind, reason=reason) for kind, reason in report.reasons],
        is_closed=event.is_closed,
    )


def chosen_from_proto(message: tensor_pb2.TensorPlaneChosen) -> ports.PlaneChosen:
    """Result of a connection; ``ProtocolError`` for a kind that is not known, or too many reasons."""
    try:
        kind = PlaneKind(message.kind)
    except ValueError as error:
        raise ProtocolError(f"plane_chosen: {shortened(message.kind)!r} is no kind of tensor plane") from error
    if len(message.reasons) > LINK_FILES.most:
        raise ProtocolError(f"plane_chosen: {len(message.reasons)} reasons are more than {LINK_FILES.most}")
    reasons = tuple((shortened(each.kind), shortened(each.reason)) for each in message.reasons)
    return ports.PlaneChosen(message.connection, PlaneReport(kind, message.round_trip_ms, reasons), message.is_closed)


def check_id(name: str, content: bytes) -> None:
    """``ProtocolError`` for content that is no id."""
    if len(content) != ID_BYTES:
        raise ProtocolError(f"{name}: must have {ID_BYTES} bytes, not {len(content)}")
