"""``channel.proto``: introductions to proposal channels, and scores that wait for proposals."""

from __future__ import annotations

from outrider import ports
from outrider.addresses import form_problem
from outrider.batched import U8, ScoreAhead
from outrider.errors import ProtocolError
from outrider.limits import LINK_COMMANDS
from outrider.planes import PlaneOffer
from outrider.transport.convert.packed_arrays import array_bytes, from_bytes, num_rows
from outrider.transport.convert.reading import shortened
from outrider.transport.convert.step_commands import scores_from_proto, write_step_commands
from outrider.transport.convert.tensors import check_id
from outrider.types import PeerAddress
from outrider.v1 import channel_pb2
from outrider.v1 import link_pb2 as pb

_LOOPBACK = "127.0.0.1"
_MAX_NAME = 512
"""Bound on the characters of an address, and of a name in a certificate."""


def channel_request_to_proto(command: ports.RequestChannel) -> channel_pb2.ProposalChannelRequest:
    """A request for an offer."""
    return channel_pb2.ProposalChannelRequest(
        connection=command.connection, wants_verdicts=command.wants_verdicts, begins_next=command.begins_next
    )


def channel_request_from_proto(message: channel_pb2.ProposalChannelRequest) -> ports.RequestChannel:
    """A request for an offer."""
    return ports.RequestChannel(message.connection, message.wants_verdicts, message.begins_next)


def channel_close_to_proto(command: ports.CloseChannel) -> channel_pb2.ProposalChannelClose:
    """The end of a channel."""
    return channel_pb2.ProposalChannelClose(connection=command.connection)


def channel_close_from_proto(message: channel_pb2.ProposalChannelClose) -> ports.CloseChannel:
    """The end of a channel."""
    return ports.CloseChannel(message.connection)


def channel_offer_to_proto(message: ports.OfferChannel) -> channel_pb2.ProposalChannelOffer:
    """An offer."""
    offer = message.offer
    return channel_pb2.ProposalChannelOffer(
        connection=message.connection,
        offer_id=offer.offer_id,
        token=offer.token,
        port=offer.port,
        num_outcomes=message.num_outcomes,
        target_address="" if message.target is None else message.target.address,
        target_server_name="" if message.target is None else message.target.server_name,
    )


def channel_offer_from_proto(message: channel_pb2.ProposalChannelOffer) -> ports.OfferChannel:
    """An offer; ``ProtocolError`` for an id, token or port out of its format."""
    check_id("offer_id", message.offer_id)
    check_id("token", message.token)
    if not 0 < message.port < 1 << 16:
        raise ProtocolError(f"channel_offer: {message.port} is no port")
    offer = PlaneOffer(message.offer_id, message.token, _LOOPBACK, message.port)
    return ports.OfferChannel(message.connection, offer, message.num_outcomes, _target_of(message))


def _target_of(message: channel_pb2.ProposalChannelOffer) -> PeerAddress | None:
    address, name = message.target_address, message.target_server_name
    if not address:
        return None
    is_socket = address.startswith(("unix:", "unix-abstract:"))  # as gRPC names sockets of this host
    if max(len(address), len(name)) > _MAX_NAME or is_socket or form_problem(address):
        raise ProtocolError(f"channel_offer: target_address {shortened(address)!r} is no host:port")
    return PeerAddress(address, name)


def channel_state_to_proto(event: ports.ChannelState) -> channel_pb2.ProposalChannelState:
    """State of a channel."""
    return channel_pb2.ProposalChannelState(connection=event.connection, is_open=event.is_open, reason=event.reason)


def channel_state_from_proto(message: channel_pb2.ProposalChannelState) -> ports.ChannelState:
    """State of a channel."""
    return ports.ChannelState(message.connection, message.is_open, shortened(message.reason))


def write_score_ahead(message: pb.ScoreAhead, command: ScoreAhead) -> None:
    """Write scores that wait for proposals into an empty message."""
    write_step_commands(message.batched, command.batched)
    message.channel = command.channel
    message.proposal_generations = array_bytes(command.proposals, U8)


def score_ahead_from_proto(message: pb.ScoreAhead) -> ScoreAhead:
    """Scores that wait for proposals; ``ProtocolError`` for arrays that do not fit each other, or beyond limits,
    ``InvalidRequestError`` for too many sessions.
    """
    LINK_COMMANDS.check("score_ahead", num_rows(message.batched))
    if message.batched.draft_token_ids or message.batched.support_counts or message.batched.support_token_ids:
        raise ProtocolError("score_ahead: draft_token_ids and supports are brought by the proposals")
    batched = scores_from_proto(message.batched, are_ahead=True)
    size = batched.sessions.size
    return ScoreAhead(
        batched, message.channel, from_bytes("proposal_generations", message.proposal_generations, U8, size)
    )
