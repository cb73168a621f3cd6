"""Steady steps: the short form of a transition does just what the transition does, or leaves it to it."""

from __future__ import annotations

import random
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from outrider.ports import Extend, ItemTiming, Prepare, Proposal, Score, Scores, SessionLost
from outrider.types import SparseEvidence, SparseScores, TokenScores
from outrider_coordinator.acceptance import Verdict, check_proposals, judge
from outrider_coordinator.session import actions, steady
from outrider_coordinator.session.draft_events import proposed_draft
from outrider_coordinator.session.loop import SessionLoop
from outrider_coordinator.session.service_state import DraftFacts
from outrider_coordinator.session.state import SessionStatus
from outrider_coordinator.session.target_events import scored_draft
from outrider_coordinator.speculation import DraftLengthPolicy
from tests.coordinator.driving import make_plan

VOCAB = 12
EOS = 3
TIMING = ItemTiming(1, 2, 3, 4, 10)


class Side:
    """A session, its short forms taken or not, and all that it says."""

    def __init__(self, plan: Any, policy: DraftLengthPolicy, facts: DraftFacts, *, is_short: bool) -> None:
        self.loop = SessionLoop(plan, policy, draft=facts)
        self.is_short, self.num_short = is_short, 0
        self.loop.start(7)
        policy.enter(self.loop.speculation, "target")
        self.said: list[Any] = self.loop.take_actions()

    def take(self, event: Any) -> None:
        if isinstance(event, Proposal):
            case = proposed_draft(self.loop, event)
            fault = None if case is None else check_proposals([case])[0]
            command = steady.take_proposal(self.loop, event) if self.is_short and fault == "" else None
            if command is None:
                self.loop.on_draft_event(event, fault, TIMING)
            else:
                self._took(actions.DraftWaitEnded(TIMING), command)
        elif isinstance(event, Scores):
            self._take_scores(event)
        else:
            self.loop.on_target_event(event) if event.generation % 2 else self.loop.on_draft_event(event)
        self.said += self.loop.take_actions()

    def _take_scores(self, event: Scores) -> None:
        case = scored_draft(self.loop, event)
        verdict = None if case is None else judge([case])[0]
        taken = None
        if self.is_short and isinstance(verdict, Verdict):
            taken = steady.take_verdict(self.loop, event.generation, verdict, TIMING)
        if taken is None:
            self.loop.on_target_event(event, verdict, TIMING)
        else:
            self._took(*taken)

    def _took(self, report: Any, command: Any) -> None:
        self.num_short += 1
        self.said.append(report)
        if isinstance(command, Extend):
            self.said += [actions.DraftWaitBegan(self.loop.step), actions.ToDraft(command)]
        elif command is not None:
            self.said.append(actions.ToTarget(command))

    @property
    def state(self) -> Any:
        loop = self.loop
        sides = [[(field.name, repr(getattr(side, field.name))) for field in fields(side) if field.name != "states"]
                 for side in (loop.draft, loop.target)]  # fmt: skip
        return loop.status, loop.step, loop.no_draft_reason, loop.tokens.output, loop.output.num_remaining, sides


def asked(said: list[Any], kind: type) -> Any:
    """The newest command of a kind."""
    commands = [one.command for one in said if isinstance(one, actions.ToDraft | actions.ToTarget)]
    return next((command for command in reversed(commands) if isinstance(command, kind)), None)


def proposal(chance: random.Random, item: Extend, *, is_sampled: bool) -> Proposal:
    length = item.draft_length if chance.random() < 0.8 else chance.randrange(item.draft_length + 1)
    token_ids = tuple(chance.randrange(VOCAB) for _ in range(length))
    base = item.num_kept_tokens + len(item.token_ids) - (chance.random() < 0.03)
    counts = np.ones(length, dtype=np.int32)
    evidence = SparseEvidence(counts, np.array(token_ids, dtype=np.int32), counts.astype(np.float32))
    bad = (VOCAB,) * bool(length) + token_ids[1:]
    return Proposal(
        7, item.generation, base, bad if chance.random() < 0.03 else token_ids, evidence if is_sampled else None
    )


def scores(chance: random.Random, item: Score, *, is_sampled: bool) -> Scores:
    base, drafted = item.num_kept_tokens + len(item.token_ids), item.draft_token_ids
    own = [token if chance.random() < 0.8 else chance.randrange(VOCAB) for token in drafted]
    own = [*own, chance.randrange(VOCAB)]
    if not is_sampled:
        return Scores(7, item.generation, base, TokenScores(tuple(own)))
    inside = np.array([chance.random() for _ in drafted], dtype=np.float32)
    outside = np.append(1 - inside, 1).astype(np.float32)
    return Scores(7, item.generation, base, SparseScores(inside, outside, np.array(own, dtype=np.int32)))


def next_event(chance: random.Random, said: list[Any], done: set[int], *, is_sampled: bool) -> Any:
    item = max(filter(None, (asked(said, Extend), asked(said, Score))), key=lambda found: found.generation)
    if item.generation in done:
        item = asked(said, Score)
    done.add(item.generation)
    if chance.random() < 0.02:
        return SessionLost(7, item.generation, "pages")
    make: Any = proposal if isinstance(item, Extend) else scores
    return make(chance, item, is_sampled=is_sampled)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("length", "limit"), [(4, 0), (4, 60), (0, 0), (1, 0)])
@pytest.mark.parametrize("is_controlled", [False, True])
def test_both_forms_say_the_same(temperature: float, length: int, limit: int, is_controlled: bool) -> None:
    num_short = num_events = 0
    for seed in range(25):
        chance = random.Random(seed)
        more: dict[str, Any] = {"eos_token_ids": (EOS,)} if seed % 5 == 0 else {}
        more |= {"stop_token_ids": (5,)} if seed % 7 == 0 else {}
        plan = make_plan(vocab_size=VOCAB, prompt=(1, 2), max_tokens=90, temperature=temperature, seed=seed, **more)
        policies = [DraftLengthPolicy(length, is_controlled=is_controlled) for _ in range(2)]
        facts = DraftFacts(max_length=limit)
        short, whole = (Side(plan, policy, facts, is_short=policy is policies[0]) for policy in policies)
        done: set[int] = set()
        while not whole.loop.is_over and num_events < 20_000:
            num_events += 1
            event = next_event(chance, whole.said, done, is_sampled=temperature > 0)
            short.take(event)
            whole.take(event)
            assert list(map(repr, short.said)) == list(map(repr, whole.said))
            assert short.state == whole.state
            for side in (short, whole):
                side.said = [one for one in side.said if isinstance(one, actions.ToDraft | actions.ToTarget)][-4:]
        assert short.loop.is_over and not whole.num_short
        num_short += short.num_short
    assert num_short > num_events / 3


def test_credit_for_steps_ahead_is_renewed() -> None:
    """Plain steps that are computed ahead: the short form leaves a step that sends a ``Prepare`` to the long one."""
    plan = make_plan(vocab_size=VOCAB, prompt=(1, 2), max_tokens=200, temperature=0.0)
    side = Side(plan, DraftLengthPolicy(0), DraftFacts(), is_short=True)
    num_prepared = 0
    while not side.loop.is_over:
        item = asked(side.said, Score)
        num_prepared += sum(isinstance(one, actions.ToTarget) and isinstance(one.command, Prepare) for one in side.said)
        side.said = []
        base = item.num_kept_tokens + len(item.token_ids)
        side.take(Scores(7, item.generation, base, TokenScores((1,))))
    assert num_prepared == 5 and side.num_short > 180


@pytest.mark.parametrize("length", [0, 2])
def test_a_paused_session_begins_no_step(length: int) -> None:
    chance = random.Random(0)
    plan = make_plan(vocab_size=VOCAB, prompt=(1, 2), max_tokens=90, temperature=0.0)
    side = Side(plan, DraftLengthPolicy(length), DraftFacts(), is_short=True)
    done: set[int] = set()
    while side.num_short < 4:
        side.take(next_event(chance, side.said, done, is_sampled=False))
    side.loop.pause()
    while side.loop.status is not SessionStatus.PAUSED:
        side.take(next_event(chance, side.said, done, is_sampled=False))
        assert len(done) < 40
    assert side.loop.target.asked is None
