"""Plain batches: what follows from a batch by arrays is what a batch made of the sessions anew holds."""

from __future__ import annotations

import random
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from outrider.columns import AnswerColumns, token_scores
from outrider.ports import ItemTiming, Score
from outrider_coordinator.acceptance import NextToken, Verdict
from outrider_coordinator.session import actions, steady
from outrider_coordinator.session.loop import SessionLoop
from outrider_coordinator.session.plain_batch import PlainBatch
from outrider_coordinator.session.service_state import DraftFacts
from outrider_coordinator.speculation import DraftLengthPolicy
from tests.coordinator.driving import make_plan

VOCAB, NUM_SESSIONS = 12, 6
TIMING = ItemTiming(1, 2, 3, 4, 10)


def commands_of(loop: SessionLoop) -> list[Any]:
    return [action.command for action in loop.take_actions() if isinstance(action, actions.ToDraft | actions.ToTarget)]


def new_loop(number: int, lengths: tuple[int, int], policy: DraftLengthPolicy, limit: int) -> SessionLoop:
    plan = make_plan(
        vocab_size=VOCAB, prompt=(1,) * lengths[0], max_tokens=lengths[1], temperature=0.0,
        stop_token_ids=(5,) * (number % 2), num_speculative_tokens=number % 3 and limit, prefix_hash_key=b"key",
    )  # fmt: skip
    loop = SessionLoop(plan, policy, draft=DraftFacts(max_length=300))
    policy.enter(loop.speculation, "target")
    loop.start(number)
    return loop


def state_of(loop: SessionLoop) -> Any:
    sides = [[(field.name, repr(getattr(side, field.name))) for field in fields(side) if field.name != "states"]
             for side in (loop.draft, loop.target)]  # fmt: skip
    speculation = {name: repr(getattr(loop.speculation, name)) for name in ("length", "draft_lag")}
    return (
        loop.status, loop.step, loop.no_draft_reason, loop.proposal, loop.tokens.output, loop.output.num_remaining,
        loop.commands.next_generation, sides, speculation,
    )  # fmt: skip


def fields_of(batch: PlainBatch) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in vars(batch).items()}


def answers_to(asked: list[Score], tokens: list[int]) -> AnswerColumns[Any]:
    return AnswerColumns(
        np.array([one.session for one in asked]),
        np.array([one.generation for one in asked]),
        np.array([one.num_kept_tokens + len(one.token_ids) for one in asked]),
        np.ones(len(asked), dtype=np.int64),
        np.array(tokens),
        (),
        token_scores,
    )


class Twins:
    """Sessions of which one takes the short form of each step, and one the long form."""

    def __init__(self, chance: random.Random, *, is_controlled: bool) -> None:
        limit = 4 if is_controlled else 0
        lengths = [(chance.choice((2, 240, 253, 500)), chance.randrange(12, 90)) for _ in range(NUM_SESSIONS)]
        self.policies = [DraftLengthPolicy(limit, is_controlled=is_controlled) for _ in range(2)]
        self.short, self.long = (
            [new_loop(number, own, policy, limit) for number, own in enumerate(lengths)] for policy in self.policies
        )
        self.asked: dict[int, Score] = {}
        for short, long in zip(self.short, self.long, strict=True):
            self.note(short, commands_of(short), commands_of(long))

    def note(self, short: SessionLoop, said: list[Any], expected: list[Any]) -> None:
        """What a session says, which is what the other does."""
        assert repr(said) == repr(expected)
        scores = [command for command in expected if isinstance(command, Score)]
        self.asked.pop(short.commands.session, None)
        self.asked |= {short.commands.session: scores[-1]} if scores else {}

    def step(self, number: int, token: int) -> None:
        """A step the long way for both."""
        asked = self.asked[number]
        event = token_scores(number, asked.generation, asked.num_kept_tokens + len(asked.token_ids), (token,))
        for loop in (self.short[number], self.long[number]):
            loop.on_target_event(event, Verdict(0, token, NextToken.BONUS), TIMING)
        self.note(self.short[number], commands_of(self.short[number]), commands_of(self.long[number]))


@pytest.mark.parametrize("is_controlled", [False, True])
def test_what_follows_is_what_a_new_batch_holds(is_controlled: bool) -> None:
    num_steps = num_followed = num_prepared = 0
    for seed in range(20):
        chance = random.Random(seed)
        twins = Twins(chance, is_controlled=is_controlled)
        batch: PlainBatch | None = None
        for _ in range(120):
            held = [] if batch is None else [session.commands.session for session in batch.sessions]
            for number in set(twins.asked) - set(held):  # the others, of which some become steady meanwhile
                if chance.random() < 0.5:
                    twins.step(number, chance.randrange(VOCAB))
            if batch is None or chance.random() < 0.2:
                new = [loop for loop in twins.short
                       if loop.commands.session not in held and PlainBatch.may_hold(loop)]  # fmt: skip
                if new:
                    own = PlainBatch(new)
                    batch = own if batch is None else batch.joined(own)
            if batch is None:
                continue
            assert fields_of(batch) == fields_of(PlainBatch(list(batch.sessions)))
            batch, taken, prepared = take(chance, twins, batch)
            num_steps, num_followed, num_prepared = num_steps + taken, num_followed + 1, num_prepared + prepared
    assert num_steps > 1000 and num_followed > 500 and num_prepared > 10


def take(chance: random.Random, twins: Twins, batch: PlainBatch) -> tuple[PlainBatch | None, int, int]:
    """A step of all of a batch, or of some: those that cannot be taken, or do not end alike, go the long way."""
    numbers = [session.commands.session for session in batch.sessions]
    is_whole = chance.random() < 0.7
    rows = list(range(len(numbers))) if is_whole else sorted(chance.sample(range(len(numbers)), len(numbers) // 2 + 1))
    asked = [twins.asked[numbers[row]] for row in rows]
    tokens = [chance.randrange(VOCAB) for _ in rows]
    places, own = (slice(None), slice(None)) if is_whole else (np.arange(len(rows)), np.array(rows))
    found = batch.take(places, own, answers_to(asked, tokens), twins.policies[0])
    if found is None:
        for one, token in zip(asked, tokens, strict=True):
            twins.step(one.session, token)
        return None, 0, 0
    prepared = 0
    sent: list[Any] = list(found.commands.items())
    for command, token in zip(sent, found.next_token_ids.tolist(), strict=True):
        number, before = command.session, twins.asked[command.session]
        short, long = twins.short[number], twins.long[number]
        reason = long.no_draft_reason
        assert steady.take_plain(short, before.generation, token, command.generation) is reason
        ended, expected = steady.take_verdict(long, before.generation, Verdict(0, token, NextToken.BONUS), TIMING) or (
            None,
            None,
        )
        assert ended is not None and ended.no_draft_reason is reason and ended.token_ids == (token,)
        assert repr(command) == repr(expected)
        more = commands_of(short)
        prepared += len(more)
        twins.note(short, [command, *more], [expected, *commands_of(long)])
        assert state_of(short) == state_of(long)
    for place, one in enumerate(asked):
        if place not in found.places:
            twins.step(one.session, tokens[place])
    tokens_taken = found.commands.token_ids
    is_all = len(found.rows) == len(numbers)
    follows = slice(None) if is_all and chance.random() < 0.7 else np.array(found.rows)
    return batch.following(follows, tokens_taken), len(found.rows), prepared


def test_what_is_out_of_the_ordinary_is_left_alone() -> None:
    policy = DraftLengthPolicy(0)

    def waiting() -> tuple[SessionLoop, Score]:
        loop = new_loop(1, (3, 4), policy, 0)
        command = next(one for one in commands_of(loop) if isinstance(one, Score))
        loop.on_target_event(token_scores(1, command.generation, 3, (1,)), Verdict(0, 1, NextToken.BONUS), TIMING)
        return loop, next(one for one in commands_of(loop) if isinstance(one, Score))

    loop, asked = waiting()
    before, following = state_of(loop), asked.generation + 1
    assert steady.take_plain(loop, asked.generation - 1, 1, following) is None  # an older answer
    assert steady.take_plain(loop, asked.generation, 1, following + 1) is None  # another command was sent
    assert steady.take_plain(loop, asked.generation, 5, following) is None  # the generation ends
    loop.is_paused = True
    assert steady.take_plain(loop, asked.generation, 1, following) is None
    loop.is_paused = False
    assert state_of(loop) == before
    assert steady.take_plain(loop, asked.generation, 1, following) is not None
    assert steady.take_plain(loop, following, 1, following + 1) is not None
    assert steady.take_plain(loop, following + 1, 1, following + 2) is None  # the last token
