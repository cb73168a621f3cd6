"""``link.proto``: commands to draft and target.

Items occur once per running session and step, and are written field by field into the batch: separate messages would be
copied into it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from outrider import ports
from outrider.columns import CommandColumns, ScoreAhead
from outrider.errors import ProtocolError
from outrider.limits import (
    ANY_MODEL,
    LINK_COMMANDS,
    LINK_DRAFT_TOKEN_IDS,
    LINK_SUPPORT_IDS,
    LINK_TOKEN_IDS,
    ModelLimits,
)
from outrider.transport.convert.arrays import (
    ints_from_bytes,
    ints_to_bytes,
    token_ids_from_bytes,
    token_ids_to_bytes,
)
from outrider.transport.convert.bounds import check_extend, check_open, check_prepare, check_score
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
from outrider.transport.convert.column_bytes import num_rows
from outrider.transport.convert.command_columns import (
    extend_arrays,
    extends_from_columns,
    score_arrays,
    scores_from_command_columns,
    split_steady,
    write_column_arrays,
    write_command_columns,
)
from outrider.transport.convert.reading import Readers, command_within, out_of_range_breaks_the_contract, read_one_of
from outrider.transport.convert.sampling import (
    mode_from_proto,
    mode_to_proto,
    sampling_from_proto,
    sampling_to_proto,
)
from outrider.transport.convert.tensors import (
    close_from_proto,
    close_to_proto,
    hidden_states_from_proto,
    offer_from_proto,
    offer_to_proto,
    request_from_proto,
    request_to_proto,
    write_hidden_states,
)
from outrider.types import JudgingRule, Support
from outrider.v1 import link_pb2 as pb

_RULES: dict[JudgingRule, pb.JudgingRule] = {
    JudgingRule.GREEDY: pb.JUDGING_RULE_GREEDY,
    JudgingRule.COUPLED: pb.JUDGING_RULE_COUPLED,
    JudgingRule.REJECTION: pb.JUDGING_RULE_REJECTION,
    JudgingRule.TYPICAL: pb.JUDGING_RULE_TYPICAL,
    JudgingRule.DENSE_REJECTION: pb.JUDGING_RULE_DENSE_REJECTION,
    JudgingRule.DENSE_TYPICAL: pb.JUDGING_RULE_DENSE_TYPICAL,
}
_RULES_BACK: dict[int, JudgingRule] = {number: rule for rule, number in _RULES.items()}


def open_to_proto(command: ports.Open) -> pb.Open:
    """Convert ``Open``."""
    return pb.Open(
        session=command.session,
        generation=command.generation,
        sampling=sampling_to_proto(command.sampling),
        seed=command.seed,
        judging_rule=_RULES[command.judging_rule],
        prompt_length=command.prompt_length,
        max_length=command.max_length,
        eos_token_ids=command.eos_token_ids,
        num_token_ids=command.num_token_ids,
        num_logprobs=command.num_logprobs,
        num_prompt_logprobs=command.num_prompt_logprobs,
        logprobs_mode=mode_to_proto(command.logprobs_mode),
        banned_token_ids=command.banned_token_ids,
        request_id=command.request_id,
        trace_id=command.trace_id,
        prefix_hash_key=command.prefix_hash_key,
        cache_salt=command.cache_salt,
        arrival_ns=command.arrival_ns,
        hidden_state_layers=command.hidden_state_layers,
    )


def open_from_proto(message: pb.Open, model: ModelLimits = ANY_MODEL) -> ports.Open:
    """Convert ``Open``; ``ProtocolError`` for an unknown judging rule, ``InvalidRequestError`` for a field beyond its
    limit.
    """
    check_open(message, model)
    rule = _RULES_BACK.get(message.judging_rule)
    if rule is None:
        raise ProtocolError(f"judging_rule: {message.judging_rule} is not a known judging rule")
    return ports.Open(
        session=message.session,
        generation=message.generation,
        sampling=sampling_from_proto(message.sampling),
        seed=message.seed,
        judging_rule=rule,
        prompt_length=message.prompt_length,
        max_length=message.max_length,
        num_token_ids=message.num_token_ids,
        eos_token_ids=tuple(message.eos_token_ids),
        banned_token_ids=tuple(message.banned_token_ids),
        num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else None,
        num_prompt_logprobs=message.num_prompt_logprobs if message.HasField("num_prompt_logprobs") else None,
        logprobs_mode=mode_from_proto(message.logprobs_mode),
        request_id=message.request_id,
        trace_id=message.trace_id,
        prefix_hash_key=message.prefix_hash_key,
        cache_salt=message.cache_salt,
        arrival_ns=message.arrival_ns,
        hidden_state_layers=tuple(message.hidden_state_layers),
    )


def release_to_proto(command: ports.Release) -> pb.Release:
    """A release."""
    return pb.Release(session=command.session, generation=command.generation)


def release_from_proto(message: pb.Release) -> ports.Release:
    """A release."""
    return ports.Release(message.session, message.generation)


def write_extend(message: pb.Extend, command: ports.Extend) -> None:
    """Write an ``Extend`` into an empty message."""
    message.session, message.generation = command.session, command.generation
    message.num_kept_tokens = command.num_kept_tokens
    message.prefix_chain, message.prefix_rest = command.prefix_hash
    message.token_ids = token_ids_to_bytes(command.token_ids)
    message.draft_length = command.draft_length
    if command.trace_parent:
        message.trace_parent = command.trace_parent
    if command.hidden_states is not None:
        write_hidden_states(message.hidden_states, command.hidden_states)


def extend_from_proto(message: pb.Extend) -> ports.Extend:
    """Convert an ``Extend``; ``InvalidRequestError`` for a field beyond its limit."""
    check_extend(message)
    return ports.Extend(
        message.session,
        message.generation,
        message.num_kept_tokens,
        (message.prefix_chain, message.prefix_rest),
        token_ids_from_bytes("token_ids", message.token_ids, LINK_TOKEN_IDS),
        message.draft_length,
        message.trace_parent,
        hidden_states_from_proto(message.hidden_states) if message.HasField("hidden_states") else None,
    )


def write_score(message: pb.Score, command: ports.Score) -> None:
    """Write a ``Score`` into an empty message. An empty support is sent as none."""
    message.session, message.generation = command.session, command.generation
    message.num_kept_tokens = command.num_kept_tokens
    message.prefix_chain, message.prefix_rest = command.prefix_hash
    message.token_ids = token_ids_to_bytes(command.token_ids)
    if command.draft_token_ids:
        message.draft_token_ids.extend(command.draft_token_ids)
    if command.support is not None:
        message.support_counts = ints_to_bytes(command.support.counts)
        message.support_token_ids = ints_to_bytes(command.support.token_ids)
    if command.trace_parent:
        message.trace_parent = command.trace_parent
    if command.hidden_states_from is not None:
        message.hidden_states_from = command.hidden_states_from
        message.plane = command.plane


def score_from_proto(message: pb.Score) -> ports.Score:
    """Convert a ``Score``; ``InvalidRequestError`` for a field beyond its limit."""
    check_score(message)
    return ports.Score(
        message.session,
        message.generation,
        message.num_kept_tokens,
        (message.prefix_chain, message.prefix_rest),
        token_ids_from_bytes("token_ids", message.token_ids, LINK_TOKEN_IDS),
        tuple(message.draft_token_ids),
        _support_from_proto(message.support_counts, message.support_token_ids),
        message.trace_parent,
        message.hidden_states_from if message.HasField("hidden_states_from") else None,
        message.plane,
    )


def prepare_to_proto(command: ports.Prepare) -> pb.Prepare:
    """A credit for plain steps."""
    return pb.Prepare(session=command.session, generation=command.generation, num_steps=command.num_steps)


def prepare_from_proto(message: pb.Prepare) -> ports.Prepare:
    """A credit for plain steps; ``InvalidRequestError`` for too many."""
    check_prepare(message)
    return ports.Prepare(message.session, message.generation, message.num_steps)


def _support_from_proto(counts: bytes, token_ids: bytes) -> Support | None:
    if not counts and not token_ids:
        return None
    return Support(
        ints_from_bytes("support_counts", counts, LINK_DRAFT_TOKEN_IDS),
        ints_from_bytes("support_token_ids", token_ids, LINK_SUPPORT_IDS),
    )


def _write_columns(message: pb.DraftCommands | pb.TargetCommands, commands: Sequence[Any]) -> Sequence[Any]:
    """Write what are columns and the groups that go as such; returns the commands that are left, to go one by one."""
    singles = []
    for command in commands:
        if isinstance(command, CommandColumns):
            write_column_arrays(message.columns.add(), command)
        else:
            singles.append(command)
    groups, left = split_steady(singles)
    for group in groups:
        write_command_columns(message.columns.add(), group)
    return left


def draft_commands_to_proto(
    commands: Sequence[ports.DraftCommand | ports.PlaneCommand], *, columns: bool = False
) -> pb.DraftCommands:
    """One message to a draft; ``ProtocolError`` if a value does not fit its field.

    ``columns``: the draft reads commands of many sessions as columns.
    """
    message = pb.DraftCommands()
    add = message.commands.add
    with out_of_range_breaks_the_contract():
        for command in _write_columns(message, commands) if columns else commands:
            if isinstance(command, ports.Extend):
                write_extend(add().extend, command)
            elif isinstance(command, ports.Open):
                add().open.CopyFrom(open_to_proto(command))
            elif isinstance(command, ports.Release):
                add().release.CopyFrom(release_to_proto(command))
            elif isinstance(command, ports.OfferPlane):
                add().plane_offer.CopyFrom(offer_to_proto(command))
            elif isinstance(command, ports.ClosePlane):
                add().plane_close.CopyFrom(close_to_proto(command))
            elif isinstance(command, ports.OfferChannel):
                add().channel_offer.CopyFrom(channel_offer_to_proto(command))
            elif isinstance(command, ports.CloseChannel):
                add().channel_close.CopyFrom(channel_close_to_proto(command))
            else:
                raise ProtocolError(f"{type(command).__name__} is no command to a draft")
    return message


def draft_commands_from_proto(
    message: pb.DraftCommands, model: ModelLimits = ANY_MODEL, *, keeps_columns: bool = False
) -> tuple[Any, ...]:
    """One message to a draft: values of ``ports``, ``Rejected`` among them; ``ProtocolError`` for an unknown command,
    ``InvalidRequestError`` for too many.

    ``model`` limits the sizes of a session's fields. ``keeps_columns``: commands that came as columns stay columns.
    """
    LINK_COMMANDS.check("commands", len(message.commands) + num_rows(message.columns))
    commands: list[Any] = [_draft_command_from_proto(command, model) for command in message.commands]
    for group in message.columns:
        if keeps_columns and (columns := extend_arrays(group)) is not None:
            commands.append(columns)
        else:
            commands += extends_from_columns(group)
    return tuple(commands)


def _draft_command_from_proto(
    message: pb.DraftCommand, model: ModelLimits
) -> ports.DraftCommand | ports.PlaneCommand | ports.Rejected:
    if message.HasField("extend"):  # nearly always
        return command_within(extend_from_proto, message.extend)
    if message.HasField("open"):
        return command_within(partial(open_from_proto, model=model), message.open)
    command: ports.DraftCommand | ports.PlaneCommand = read_one_of(message, "command", _DRAFT_READERS)
    return command


def target_commands_to_proto(
    commands: Sequence[ports.TargetCommand | ports.PlaneCommand], *, columns: bool = False
) -> pb.TargetCommands:
    """One message to a target; ``ProtocolError`` if a value does not fit its field.

    ``columns``: the target reads commands of many sessions as columns.
    """
    message = pb.TargetCommands()
    add = message.commands.add
    with out_of_range_breaks_the_contract():
        for command in _write_columns(message, commands) if columns else commands:
            if isinstance(command, ports.Score):
                write_score(add().score, command)
            elif isinstance(command, ports.Open):
                add().open.CopyFrom(open_to_proto(command))
            elif isinstance(command, ports.Prepare):
                add().prepare.CopyFrom(prepare_to_proto(command))
            elif isinstance(command, ports.Release):
                add().release.CopyFrom(release_to_proto(command))
            elif isinstance(command, ports.RequestPlane):
                add().plane_request.CopyFrom(request_to_proto(command))
            elif isinstance(command, ScoreAhead):
                write_score_ahead(add().score_ahead, command)
            elif isinstance(command, ports.ClosePlane):
                add().plane_close.CopyFrom(close_to_proto(command))
            elif isinstance(command, ports.RequestChannel):
                add().channel_request.CopyFrom(channel_request_to_proto(command))
            elif isinstance(command, ports.CloseChannel):
                add().channel_close.CopyFrom(channel_close_to_proto(command))
            else:
                raise ProtocolError(f"{type(command).__name__} is no command to a target")
    return message


def target_commands_from_proto(
    message: pb.TargetCommands, model: ModelLimits = ANY_MODEL, *, keeps_columns: bool = False
) -> tuple[Any, ...]:
    """One message to a target: values of ``ports``, ``Rejected`` among them; ``ProtocolError`` for an unknown command,
    ``InvalidRequestError`` for too many.

    ``model`` limits the sizes of a session's fields. ``keeps_columns``: commands that came as columns stay columns.
    """
    LINK_COMMANDS.check("commands", len(message.commands) + num_rows(message.columns))
    commands: list[Any] = [_target_command_from_proto(command, model) for command in message.commands]
    for group in message.columns:
        if keeps_columns and (columns := score_arrays(group)) is not None:
            commands.append(columns)
        else:
            commands += scores_from_command_columns(group)
    return tuple(commands)


def _target_command_from_proto(
    message: pb.TargetCommand, model: ModelLimits
) -> ports.TargetCommand | ports.PlaneCommand | ports.Rejected:
    if message.HasField("score"):  # nearly always
        return command_within(score_from_proto, message.score)
    if message.HasField("open"):
        return command_within(partial(open_from_proto, model=model), message.open)
    command: ports.TargetCommand | ports.PlaneCommand | ports.Rejected = read_one_of(
        message, "command", _TARGET_READERS
    )
    return command


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
