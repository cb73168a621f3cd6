"""The tensor plane's messages on a link: offers, references, and what became of a connection.

They belong to no session, so what breaks a bound breaks the contract.
"""

from __future__ import annotations

from outrider import ports
from outrider.errors import ProtocolError
from outrider.limits import LINK_FILES, LINK_TEXT
from outrider.planes import ID_BYTES, PlaneKind, PlaneOffer, PlaneReference, PlaneReport
from outrider.transport.convert.link_bounds import shortened
from outrider.v1 import tensor_pb2 as pb


def write_reference(message: pb.TensorPlaneReference, reference: PlaneReference) -> None:
    """A reference, into an empty message."""
    message.plane_id, message.sequence = reference.plane_id, reference.sequence
    message.offset_bytes, message.num_bytes = reference.offset_bytes, reference.num_bytes


def reference_from_proto(message: pb.TensorPlaneReference) -> PlaneReference:
    """A reference; ``ProtocolError`` where its plane's id is none."""
    _check_id("plane_id", message.plane_id)
    return PlaneReference(message.plane_id, message.offset_bytes, message.num_bytes, message.sequence)


def request_to_proto(command: ports.RequestPlane) -> pb.TensorPlaneRequest:
    """A request for an offer."""
    return pb.TensorPlaneRequest(connection=command.connection)


def request_from_proto(message: pb.TensorPlaneRequest) -> ports.RequestPlane:
    """A request for an offer."""
    return ports.RequestPlane(message.connection)


def close_to_proto(command: ports.ClosePlane) -> pb.TensorPlaneClose:
    """The end of a connection."""
    return pb.TensorPlaneClose(connection=command.connection)


def close_from_proto(message: pb.TensorPlaneClose) -> ports.ClosePlane:
    """The end of a connection."""
    return ports.ClosePlane(message.connection)


def offer_to_proto(message: ports.OfferPlane) -> pb.TensorPlaneOffer:
    """An offer."""
    offer = message.offer
    return pb.TensorPlaneOffer(
        connection=message.connection, offer_id=offer.offer_id, token=offer.token, host=offer.host, port=offer.port
    )


def offer_from_proto(message: pb.TensorPlaneOffer) -> ports.OfferPlane:
    """An offer; ``ProtocolError`` for one that nobody can have made."""
    _check_id("offer_id", message.offer_id)
    _check_id("token", message.token)
    if not 0 < message.port < 1 << 16 or len(message.host) > LINK_TEXT.most:
        raise ProtocolError(f"plane_offer: {shortened(message.host)!r} port {message.port} is no address")
    offer = PlaneOffer(message.offer_id, message.token, message.host, message.port)
    return ports.OfferPlane(message.connection, offer)


def chosen_to_proto(event: ports.PlaneChosen) -> pb.TensorPlaneChosen:
    """What became of a connection."""
    report = event.report
    return pb.TensorPlaneChosen(
        connection=event.connection,
        kind=report.kind,
        round_trip_ms=report.round_trip_ms,
        reasons=[pb.TensorPlaneReason(kind=kind, reason=reason) for kind, reason in report.reasons],
        is_closed=event.is_closed,
    )


def chosen_from_proto(message: pb.TensorPlaneChosen) -> ports.PlaneChosen:
    """What became of a connection; ``ProtocolError`` for a kind that is not known, or too many reasons."""
    try:
        kind = PlaneKind(message.kind)
    except ValueError as error:
        raise ProtocolError(f"plane_chosen: {shortened(message.kind)!r} is no kind of tensor plane") from error
    if len(message.reasons) > LINK_FILES.most:
        raise ProtocolError(f"plane_chosen: {len(message.reasons)} reasons are more than {LINK_FILES.most}")
    reasons = tuple((shortened(each.kind), shortened(each.reason)) for each in message.reasons)
    return ports.PlaneChosen(message.connection, PlaneReport(kind, message.round_trip_ms, reasons), message.is_closed)


def _check_id(name: str, content: bytes) -> None:
    if len(content) != ID_BYTES:
        raise ProtocolError(f"{name}: must have {ID_BYTES} bytes, not {len(content)}")
