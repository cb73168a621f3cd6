"""``link.proto``: messages to draft and target.

A message is a list of commands in order. Those of a step are arrays, the others are items of one session or of none.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from outrider import ports
from outrider.batched import CommandBatch, ExtendBatch, ScoreAhead, ScoreBatch
from outrider.errors import ProtocolError
from outrider.item_batch import batch_of_commands
from outrider.limits import ANY_MODEL, LINK_COMMANDS, ModelLimits
from outrider.transport.convert.bounds import check_prepare
from outrider.transport.convert.channels import (
    channel_close_from_proto,
    channel_close_to_proto,
    channel_offer_from_proto,
    channel_offer_to_proto,
    channel_request_from_proto,
    channel_request_to_proto,
    score_ahead_from_proto,
    write_score_ahead,
)
from outrider.transport.convert.opening import open_from_proto, open_to_proto
from outrider.transport.convert.order import in_runs
from outrider.transport.convert.packed_arrays import num_rows
from outrider.transport.convert.reading import Readers, command_within, out_of_range_breaks_the_contract, read_one_of
from outrider.transport.convert.step_commands import extends_from_proto, scores_from_proto, write_step_commands
from outrider.transport.convert.tensors import (
    close_from_proto,
    close_to_proto,
    offer_from_proto,
    offer_to_proto,
    request_from_proto,
    request_to_proto,
)
from outrider.v1 import link_pb2 as pb


def release_to_proto(command: ports.Release) -> pb.Release:
    """Convert ``Release``."""
    return pb.Release(session=command.session, generation=command.generation)


def release_from_proto(message: pb.Release) -> ports.Release:
    """Convert ``Release``."""
    return ports.Release(message.session, message.generation)


def prepare_to_proto(command: ports.Prepare) -> pb.Prepare:
    """Convert ``Prepare``."""
    return pb.Prepare(session=command.session, generation=command.generation, num_steps=command.num_steps)


def prepare_from_proto(message: pb.Prepare) -> ports.Prepare:
    """Convert ``Prepare``; ``InvalidRequestError`` for too many steps."""
    check_prepare(message)
    return ports.Prepare(message.session, message.generation, message.num_steps)


def draft_commands_to_proto(commands: Sequence[Any]) -> pb.DraftCommands:
    """One message to a draft; ``ProtocolError`` if a value does not fit its field, or a draft has no such command."""
    message = pb.DraftCommands()
    with out_of_range_breaks_the_contract():
        _write_commands(message, commands, "draft", ExtendBatch)
    return message


def target_commands_to_proto(commands: Sequence[Any]) -> pb.TargetCommands:
    """One message to a target; ``ProtocolError`` if a value does not fit its field, or a target has no such command."""
    message = pb.TargetCommands()
    with out_of_range_breaks_the_contract():
        _write_commands(message, commands, "target", ScoreBatch)
    return message


def _write_commands(message: Any, commands: Sequence[Any], role: str, steps: type[Any]) -> None:  # noqa: ANN401
    add, writers = message.commands.add, _WRITERS[role]

    if len(commands) == 1 and isinstance(commands[0], steps):  # mostly
        write_step_commands(add().steps, commands[0])
        return

    def write_item(command: Any) -> None:  # noqa: ANN401
        if type(command) not in writers:
            raise ProtocolError(f"{type(command).__name__} is no command to a {role}")
        writers[type(command)](add(), command)

    for before, run, after in in_runs(commands, _STEPS):
        for command in before:
            write_item(command)
        for batched in _batch_of(run):
            if not isinstance(batched, steps):
                raise ProtocolError(f"{type(batched).__name__} are no commands to a {role}")
            write_step_commands(add().steps, batched)
        for command in after:
            write_item(command)


def _batch_of(run: Sequence[Any]) -> list[CommandBatch]:
    """Batches of a run: those that it has, then the single commands."""
    batched = [command for command in run if isinstance(command, CommandBatch)]
    items = [command for command in run if not isinstance(command, CommandBatch)]
    return [*batched, *batch_of_commands(items)] if items else batched


def draft_commands_from_proto(message: pb.DraftCommands, model: ModelLimits = ANY_MODEL) -> tuple[Any, ...]:
    """One message to a draft: values of ``ports``, ``Rejected`` among them, and arrays; ``ProtocolError`` for an
    unknown command or malformed arrays, ``InvalidRequestError`` for too many commands.

    ``model`` limits the sizes of a session's fields.
    """
    return _read_commands(message, model, extends_from_proto, _DRAFT_READERS)


def target_commands_from_proto(message: pb.TargetCommands, model: ModelLimits = ANY_MODEL) -> tuple[Any, ...]:
    """One message to a target, as ``draft_commands_from_proto``."""
    return _read_commands(message, model, scores_from_proto, _TARGET_READERS)


def _read_commands(message: Any, model: ModelLimits, read_steps: Any, readers: Readers) -> tuple[Any, ...]:  # noqa: ANN401
    commands = message.commands
    num_commands, found = len(commands), []
    LINK_COMMANDS.check("commands", num_commands)
    for command in commands:
        if command.HasField("steps"):
            steps = command.steps
            num_commands += num_rows(steps) - 1
            LINK_COMMANDS.check("commands", num_commands)
            found.append(read_steps(steps))
        elif command.HasField("open"):
            found.append(command_within(partial(open_from_proto, model=model), command.open))
        else:
            found.append(read_one_of(command, "command", readers))
    return tuple(found)


_STEPS = (ports.Extend, ports.Score, ExtendBatch, ScoreBatch)
_COMMON_WRITERS: dict[type, Any] = {
    ports.Open: lambda message, command: message.open.CopyFrom(open_to_proto(command)),
    ports.Release: lambda message, command: message.release.CopyFrom(release_to_proto(command)),
    ports.ClosePlane: lambda message, command: message.plane_close.CopyFrom(close_to_proto(command)),
    ports.CloseChannel: lambda message, command: message.channel_close.CopyFrom(channel_close_to_proto(command)),
}
_DRAFT_WRITERS: dict[type, Any] = {
    **_COMMON_WRITERS,
    ports.OfferPlane: lambda message, command: message.plane_offer.CopyFrom(offer_to_proto(command)),
    ports.OfferChannel: lambda message, command: message.channel_offer.CopyFrom(channel_offer_to_proto(command)),
}
_TARGET_WRITERS: dict[type, Any] = {
    **_COMMON_WRITERS,
    ports.Prepare: lambda message, command: message.prepare.CopyFrom(prepare_to_proto(command)),
    ports.RequestPlane: lambda message, command: message.plane_request.CopyFrom(request_to_proto(command)),
    ports.RequestChannel: lambda message, command: message.channel_request.CopyFrom(channel_request_to_proto(command)),
    ScoreAhead: lambda message, command: write_score_ahead(message.score_ahead, command),
}
_WRITERS = {"draft": _DRAFT_WRITERS, "target": _TARGET_WRITERS}
_COMMON_READERS: Readers = {
    "release": release_from_proto,
    "plane_close": close_from_proto,
    "channel_close": channel_close_from_proto,
}
_DRAFT_READERS: Readers = {
    **_COMMON_READERS,
    "plane_offer": offer_from_proto,
    "channel_offer": channel_offer_from_proto,
}
_TARGET_READERS: Readers = {
    **_COMMON_READERS,
    "prepare": partial(command_within, prepare_from_proto),
    "plane_request": request_from_proto,
    "channel_request": channel_request_from_proto,
    "score_ahead": score_ahead_from_proto,
}
