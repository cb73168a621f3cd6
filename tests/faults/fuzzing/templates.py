"""Honest messages to begin with: public requests, and what a coordinator sends on a link."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
from google.protobuf.message import Message

from outrider import ports
from outrider.prefix_hash import EMPTY_PREFIX
from outrider.transport.convert.commands import draft_commands_to_proto, target_commands_to_proto
from outrider.types import Support
from outrider.v1 import generation_pb2, link_pb2, sampling_pb2
from outrider.v1.channel_pb2 import ChannelBytes

_NUM_TOKEN_IDS = 2048
_METHODS = (
    sampling_pb2.ACCEPTANCE_METHOD_UNSPECIFIED,
    sampling_pb2.ACCEPTANCE_METHOD_REJECTION,
    sampling_pb2.ACCEPTANCE_METHOD_COUPLED,
    sampling_pb2.ACCEPTANCE_METHOD_TYPICAL,
)
_SAMPLED_RULES = (
    link_pb2.JUDGING_RULE_COUPLED,
    link_pb2.JUDGING_RULE_REJECTION,
    link_pb2.JUDGING_RULE_TYPICAL,
)
_TRACES = ("", "", "", "00-" + "a" * 32 + "-" + "b" * 16 + "-01")
_PROMPT = "def read_lines(path):\n"


def public_request(rng: random.Random) -> generation_pb2.GenerateRequest:
    """A short generation with some parameters set."""
    request = generation_pb2.GenerateRequest(
        prompt_text=_PROMPT,
        max_tokens=rng.choice((1, 2, 4)),
        sampling=sampling(rng),
        seed=rng.getrandbits(64),
        acceptance_method=rng.choice(_METHODS),
    )
    if rng.random() < 0.3:
        request.stop.append("\n\n")
        request.bad_words.append("self")
        request.stop_token_ids.append(5)
    if rng.random() < 0.3:
        request.logprobs = 2
        request.prompt_logprobs = 1
    if rng.random() < 0.3:
        request.prompt_token_ids.token_ids.extend(rng.randrange(_NUM_TOKEN_IDS) for _ in range(20))
    return request


def sampling(rng: random.Random) -> sampling_pb2.SamplingParams:
    """Parameters in their usual ranges, all set, as a link wants them."""
    params = sampling_pb2.SamplingParams(
        temperature=rng.choice((0.0, 0.8, 1.0)),
        top_p=rng.choice((1.0, 0.9)),
        top_k=rng.choice((0, 40)),
        min_p=0.0,
        repetition_penalty=rng.choice((1.0, 1.1)),
        frequency_penalty=0.0,
        presence_penalty=rng.choice((0.0, 0.3)),
        min_tokens=rng.choice((0, 3)),
    )
    if rng.random() < 0.2:
        params.logit_bias.add(token_id=7, bias=1.5)
        params.bad_words.add(token_ids=[9, 10])
    if rng.random() < 0.1:
        params.allowed_token_ids.extend((5, 6, 7, 8))
    return params


def target_script(rng: random.Random) -> list[Message]:
    """Messages of one link to a target: sessions that are opened, asked for scores, and released."""

    def ask(session: int, generation: int) -> ports.Score:
        drafts, support = _token_ids(rng, rng.choice((0, 0, 1, 4))), None
        if drafts and rng.random() < 0.5:
            ids = np.array([each for token_id in drafts for each in (token_id, 1)], dtype=np.int32)
            support = Support(np.full(len(drafts), 2, dtype=np.int32), ids)
        text = _token_ids(rng, rng.choice((1, 5, 40)))
        return ports.Score(session, generation, 0, EMPTY_PREFIX, text, drafts, support, rng.choice(_TRACES))

    found = [target_commands_to_proto(commands) for commands in _script(rng, ask)]
    for message in found[1:-1]:
        newest = int.from_bytes(message.commands[0].steps.generations[:8], "little")
        message.commands.add().prepare.CopyFrom(
            link_pb2.Prepare(session=0, generation=rng.choice((newest, 1)), num_steps=rng.choice((0, 1, 8, 1 << 20)))
        )
    return _with_opens(rng, found)


def channel_script(rng: random.Random) -> list[Message]:
    """Messages of a stranger's proposal channel to a target, whose pass no caller can know."""
    return [ChannelBytes(content=rng.randbytes(rng.choice((0, 1, 32, 200, 1 << 17)))) for _ in range(rng.randint(1, 4))]


def draft_script(rng: random.Random) -> list[Message]:
    """Messages of one link to a draft: sessions that are opened, asked for proposals, and released."""

    def ask(session: int, generation: int) -> ports.Extend:
        text, length = _token_ids(rng, rng.choice((1, 5, 40))), rng.choice((0, 1, 4))
        return ports.Extend(session, generation, 0, EMPTY_PREFIX, text, length, rng.choice(_TRACES))

    return _with_opens(rng, [draft_commands_to_proto(commands) for commands in _script(rng, ask)])


def _with_opens(rng: random.Random, messages: list[Any]) -> list[Message]:
    """The messages, the first of which opens what the last releases."""
    for released in messages[-1].commands:
        messages[0].commands.add().open.CopyFrom(_open(rng, released.release.session))
    return messages


def _script(rng: random.Random, ask: Callable[[int, int], Any]) -> list[list[Any]]:
    """Commands, message by message, the first of which is empty; every question brings its whole text again."""
    sessions = range(rng.choice((1, 1, 2)))
    batches: list[list[Any]] = [[]]
    for generation in range(2, 2 + rng.randint(1, 4)):
        batches.append([ask(session, generation) for session in sessions])
    batches.append([ports.Release(session, 99) for session in sessions])
    return batches


def _open(rng: random.Random, session: int) -> link_pb2.Open:
    params = sampling(rng)
    return link_pb2.Open(
        session=session,
        generation=1,
        sampling=params,
        seed=rng.getrandbits(64),
        judging_rule=rng.choice(_SAMPLED_RULES) if params.temperature else link_pb2.JUDGING_RULE_GREEDY,
        prompt_length=rng.choice((1, 5)),
        max_length=100,
        eos_token_ids=[1],
        num_token_ids=_NUM_TOKEN_IDS,
    )


def _token_ids(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple([rng.randrange(_NUM_TOKEN_IDS) for _ in range(count)])
