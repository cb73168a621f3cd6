"""``link.proto``: ``Open``."""

from __future__ import annotations

from outrider import ports
from outrider.errors import ProtocolError
from outrider.limits import ANY_MODEL, ModelLimits
from outrider.transport.convert.bounds import check_open
from outrider.transport.convert.sampling import (
    mode_from_proto,
    mode_to_proto,
    sampling_from_proto,
    sampling_to_proto,
)
from outrider.types import JudgingRule
from outrider.v1 import link_pb2 as pb

_RULES: dict[JudgingRule, pb.JudgingRule] = {
    JudgingRule.GREEDY: pb.JUDGING_RULE_GREEDY,
    JudgingRule.COUPLED: pb.JUDGING_RULE_COUPLED,
    JudgingRule.REJECTION: pb.JUDGING_RULE_REJECTION,
    JudgingRule.TYPICAL: pb.JUDGING_RULE_TYPICAL,
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
        in_turn=command.in_turn,
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
        in_turn=message.in_turn,
    )
