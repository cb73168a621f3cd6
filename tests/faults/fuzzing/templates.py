"""Honest messages to begin with: public requests, and what a coordinator sends on a link."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeVar

from google.protobuf.message import Message

from outrider.transport.convert.arrays import token_ids_to_bytes
from outrider.v1 import generation_pb2, link_pb2, sampling_pb2

CommandT = TypeVar("CommandT", bound=Message)

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
    link_pb2.JUDGING_RULE_DENSE_REJECTION,
)
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

    def ask(session: int, generation: int) -> link_pb2.TargetCommand:
        drafts = _token_ids(rng, rng.choice((0, 0, 1, 4)))
        score = link_pb2.Score(
            session=session,
            generation=generation,
            token_ids=token_ids_to_bytes(_token_ids(rng, rng.choice((1, 5, 40)))),
            draft_token_ids=drafts,
        )
        if drafts and rng.random() < 0.5:
            score.support_counts = (2).to_bytes(4, "little") * len(drafts)
            score.support_token_ids = b"".join(id_.to_bytes(4, "little") + b"\x01\0\0\0" for id_ in drafts)
        return link_pb2.TargetCommand(score=score)

    batches = _script(rng, link_pb2.TargetCommand, ask)
    for batch in batches[1:-1]:
        newest = batch[0].score.generation
        prepare = link_pb2.Prepare(
            session=0, generation=rng.choice((newest, 1)), num_steps=rng.choice((0, 1, 8, 1 << 20))
        )
        batch.append(link_pb2.TargetCommand(prepare=prepare))
    return [link_pb2.TargetCommands(commands=batch) for batch in batches]


def draft_script(rng: random.Random) -> list[Message]:
    """Messages of one link to a draft: sessions that are opened, asked for proposals, and released."""

    def ask(session: int, generation: int) -> link_pb2.DraftCommand:
        extend = link_pb2.Extend(
            session=session,
            generation=generation,
            token_ids=token_ids_to_bytes(_token_ids(rng, rng.choice((1, 5, 40)))),
            draft_length=rng.choice((0, 1, 4)),
        )
        return link_pb2.DraftCommand(extend=extend)

    return [link_pb2.DraftCommands(commands=one) for one in _script(rng, link_pb2.DraftCommand, ask)]


def _script(
    rng: random.Random, command: Callable[..., CommandT], ask: Callable[[int, int], CommandT]
) -> list[list[CommandT]]:
    """Commands, message by message; every question brings its whole text again."""
    sessions = range(rng.choice((1, 1, 2)))
    batches = [[command(open=_open(rng, session)) for session in sessions]]
    for generation in range(2, 2 + rng.randint(1, 4)):
        batches.append([ask(session, generation) for session in sessions])
    batches.append([command(release=link_pb2.Release(session=session, generation=99)) for session in sessions])
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


def _token_ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(_NUM_TOKEN_IDS) for _ in range(count)]
