"""``link.proto``: what a draft and a target are told."""

from __future__ import annotations

from collections.abc import Iterable

from outrider import ports
from outrider.errors import ProtocolError
from outrider.transport.convert.arrays import ints_from_bytes, ints_to_bytes
from outrider.transport.convert.one_of import Readers, read_one_of
from outrider.transport.convert.ranges import out_of_range_breaks_the_contract
from outrider.transport.convert.sampling import (
    method_from_proto,
    method_to_proto,
    mode_from_proto,
    mode_to_proto,
    sampling_from_proto,
    sampling_to_proto,
)
from outrider.types import Support
from outrider.v1 import link_pb2 as pb


def open_to_proto(command: ports.Open) -> pb.Open:
    """Everything that opens a session."""
    return pb.Open(
        session=command.session,
        generation=command.generation,
        sampling=sampling_to_proto(command.sampling),
        seed=command.seed,
        acceptance_method=method_to_proto(command.acceptance_method),
        prompt_length=command.prompt_length,
        max_length=command.max_length,
        eos_token_ids=command.eos_token_ids,
        num_token_ids=command.num_token_ids,
        num_logprobs=command.num_logprobs,
        num_prompt_logprobs=command.num_prompt_logprobs,
        logprobs_mode=mode_to_proto(command.logprobs_mode),
        dense=command.dense,
        banned_token_ids=command.banned_token_ids,
        request_id=command.request_id,
        trace_id=command.trace_id,
    )


def open_from_proto(message: pb.Open) -> ports.Open:
    """``ProtocolError`` when no acceptance method is said."""
    method = method_from_proto(message.acceptance_method)
    if method is None:
        raise ProtocolError("acceptance_method: must be said on a link")
    return ports.Open(
        session=message.session,
        generation=message.generation,
        sampling=sampling_from_proto(message.sampling),
        seed=message.seed,
        acceptance_method=method,
        prompt_length=message.prompt_length,
        max_length=message.max_length,
        num_token_ids=message.num_token_ids,
        eos_token_ids=tuple(message.eos_token_ids),
        banned_token_ids=tuple(message.banned_token_ids),
        num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else None,
        num_prompt_logprobs=message.num_prompt_logprobs if message.HasField("num_prompt_logprobs") else None,
        logprobs_mode=mode_from_proto(message.logprobs_mode),
        dense=message.dense,
        request_id=message.request_id,
        trace_id=message.trace_id,
    )


def release_to_proto(command: ports.Release) -> pb.Release:
    """A release."""
    return pb.Release(session=command.session, generation=command.generation)


def release_from_proto(message: pb.Release) -> ports.Release:
    """A release."""
    return ports.Release(message.session, message.generation)


def extend_to_proto(command: ports.Extend) -> pb.Extend:
    """An extension."""
    return pb.Extend(
        session=command.session,
        generation=command.generation,
        base_length=command.base_length,
        prefix_hash=command.prefix_hash,
        token_ids=command.token_ids,
        draft_length=command.draft_length,
        ahead=command.ahead,
        adopt=command.adopt,
        trace_parent=command.trace_parent,
    )


def extend_from_proto(message: pb.Extend) -> ports.Extend:
    """An extension."""
    return ports.Extend(
        session=message.session,
        generation=message.generation,
        base_length=message.base_length,
        prefix_hash=message.prefix_hash,
        token_ids=tuple(message.token_ids),
        draft_length=message.draft_length,
        ahead=message.ahead,
        adopt=message.adopt if message.HasField("adopt") else None,
        trace_parent=message.trace_parent,
    )


def score_to_proto(command: ports.Score) -> pb.Score:
    """A support that is there, but empty, travels as none: there is nothing to be said of it."""
    message = pb.Score(
        session=command.session,
        generation=command.generation,
        base_length=command.base_length,
        prefix_hash=command.prefix_hash,
        token_ids=command.token_ids,
        draft_token_ids=command.draft_token_ids,
        trace_parent=command.trace_parent,
    )
    if command.support is not None:
        message.support_counts = ints_to_bytes(command.support.counts)
        message.support_token_ids = ints_to_bytes(command.support.token_ids)
    return message


def score_from_proto(message: pb.Score) -> ports.Score:
    """A score."""
    counts = ints_from_bytes("support_counts", message.support_counts)
    token_ids = ints_from_bytes("support_token_ids", message.support_token_ids)
    return ports.Score(
        session=message.session,
        generation=message.generation,
        base_length=message.base_length,
        prefix_hash=message.prefix_hash,
        token_ids=tuple(message.token_ids),
        draft_token_ids=tuple(message.draft_token_ids),
        support=Support(counts, token_ids) if counts.size or token_ids.size else None,
        trace_parent=message.trace_parent,
    )


def draft_commands_to_proto(commands: Iterable[ports.DraftCommand]) -> pb.DraftCommands:
    """One message to a draft; ``ProtocolError`` when a value does not fit its field."""
    with out_of_range_breaks_the_contract():
        return pb.DraftCommands(commands=map(_draft_command_to_proto, commands))


def _draft_command_to_proto(command: ports.DraftCommand) -> pb.DraftCommand:
    if isinstance(command, ports.Extend):
        return pb.DraftCommand(extend=extend_to_proto(command))
    if isinstance(command, ports.Open):
        return pb.DraftCommand(open=open_to_proto(command))
    return pb.DraftCommand(release=release_to_proto(command))


def draft_commands_from_proto(message: pb.DraftCommands) -> tuple[ports.DraftCommand, ...]:
    """One message to a draft; ``ProtocolError`` for a command nobody knows."""
    readers: Readers = {"open": open_from_proto, "extend": extend_from_proto, "release": release_from_proto}
    return tuple(read_one_of(command, "command", readers) for command in message.commands)


def target_commands_to_proto(commands: Iterable[ports.TargetCommand]) -> pb.TargetCommands:
    """One message to a target; ``ProtocolError`` when a value does not fit its field."""
    with out_of_range_breaks_the_contract():
        return pb.TargetCommands(commands=map(_target_command_to_proto, commands))


def _target_command_to_proto(command: ports.TargetCommand) -> pb.TargetCommand:
    if isinstance(command, ports.Score):
        return pb.TargetCommand(score=score_to_proto(command))
    if isinstance(command, ports.Open):
        return pb.TargetCommand(open=open_to_proto(command))
    return pb.TargetCommand(release=release_to_proto(command))


def target_commands_from_proto(message: pb.TargetCommands) -> tuple[ports.TargetCommand, ...]:
    """One message to a target; ``ProtocolError`` for a command nobody knows."""
    readers: Readers = {"open": open_from_proto, "score": score_from_proto, "release": release_from_proto}
    return tuple(read_one_of(command, "command", readers) for command in message.commands)
