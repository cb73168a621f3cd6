"""Steps that a target begins by itself, among anything else: what is asked for is answered as by a target alone.

The device tells the next token from what lies in its pages, of which there may be too few. Two coordinators number
their sessions alike; what is pushed is right, late, forged, or of sessions that there are not.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from outrider.batched import U4, U8, ScoreBatch
from outrider.item_batch import batch_of_commands
from outrider.ports import Open, Opened, Release, Score, Scores
from outrider.prefix_hash import prefix_hash
from outrider.proposal_channel.pushes import Pushes, text_hash
from outrider.serving.engine_core import EngineCore
from outrider.serving.session import Limits
from outrider.serving.session_registry import SessionRegistry
from outrider.serving.token_budget import TokenBudget
from outrider.types import AcceptanceMethod, SamplingParams, TokenScores
from outrider_target.executor import TargetExecutor
from tests.serving.lookahead.device import MAX_LENGTH, PAGE_SIZE, VOCAB_SIZE, CountingExecutor, Drawing, Runner
from tests.support.core_driver import Driver, open_session, score_item

CHANNEL, NUM_LINKS, MOST_SESSIONS, NUM_ROUNDS, LATE_NS = 3, 2, 5, 300, 400_000
RULES: tuple[tuple[SamplingParams, dict[str, Any]], ...] = (
    (SamplingParams(temperature=0.0), {}),
    (SamplingParams(temperature=0.8), {}),
    (SamplingParams(temperature=0.0), {"eos_token_ids": (3, 17)}),
    (SamplingParams(temperature=0.0), {"in_turn": True}),
    (SamplingParams(temperature=0.7, repetition_penalty=1.3), {}),
)


def core_with(
    num_pages: int, clock: Any, executor: type[TargetExecutor]
) -> tuple[Runner, EngineCore[Any, Any, Any, Any]]:
    runner = Runner(num_pages)
    sessions = SessionRegistry(runner.sequences, Limits(VOCAB_SIZE, MAX_LENGTH, trims=False))
    own: Any = executor(runner)  # type: ignore[arg-type]
    return runner, EngineCore(sessions, own, TokenBudget(max_batched_tokens=64), lookahead=True, clock=clock)


@cache
def alone(opened: Open, tokens: tuple[int, ...], drafts: tuple[int, ...]) -> tuple[int, ...]:
    """Tokens of a target that knows nothing else; none for a text with which a session fails."""
    _, core = core_with(MAX_LENGTH // PAGE_SIZE, lambda: 0, TargetExecutor)
    driver = Driver(core)
    driver.send(opened)
    answer = driver.one(score_item(opened.session, opened.generation + 1, tokens, drafts))
    return answer.form.token_ids if isinstance(answer, Scores) else ()  # type: ignore[union-attr]


@dataclass
class Known:
    """One session, as its coordinator knows it."""

    opened: Open
    tokens: list[int]
    kept: int = 0
    """Tokens that the target holds for certain."""
    asked: int = 0
    """Generation of the newest item, if it is not answered."""
    is_claim: bool = False
    drafts: tuple[int, ...] = ()
    goes_on: bool = False
    base: int = 0
    """Tokens on which the last scores build."""


class Coordinator:
    """One link, and the pushes of its draft."""

    def __init__(self, rig: Rig, link_id: int) -> None:
        self.rig, self.link_id, self.chance = rig, link_id, rig.chance
        self.sessions: dict[int, Known] = {}
        self.generations = itertools.count(1)
        self.old: list[Pushes] = []

    def act(self) -> None:
        """One message of commands, and pushes before or after it."""
        if self.chance.random() < 0.4:
            self.push()
        if len(self.sessions) < MOST_SESSIONS and self.chance.random() < 0.4:
            self.open()
        for number in list(self.sessions):
            if self.chance.random() < 0.015:
                del self.sessions[number]
                self.rig.send(self.link_id, Release(number, next(self.generations)))
        claims, direct, plain = list[Score](), list[Score](), list[Score]()
        for number, known in self.sessions.items():
            if known.asked and self.chance.random() < 0.97:
                continue
            if known.goes_on and self.chance.random() < 0.85:
                claims.append(self.item(number, known, (), is_claim=True))
            elif known.kept and self.chance.random() < 0.85:
                direct.append(self.item(number, known, self.drafts_of(known)))
            else:
                plain.append(self.item(number, known, ()))
        if claims:
            self.rig.send(self.link_id, *batch_of_commands(claims))
        if direct:
            (batched,) = batch_of_commands(direct)
            assert isinstance(batched, ScoreBatch)
            self.rig.send(self.link_id, replace(batched, channel=CHANNEL, begins_next=True))
        if plain:
            self.rig.send(self.link_id, *plain)
        if self.chance.random() < 0.8:
            self.push()

    def open(self) -> None:
        sampling, more = self.chance.choice(RULES)
        number = next(each for each in range(MOST_SESSIONS) if each not in self.sessions)
        prompt = [self.chance.randrange(VOCAB_SIZE) for _ in range(self.chance.choice((2, 4, 9)))]
        opened = open_session(
            number, prompt_length=len(prompt), max_length=MAX_LENGTH, num_token_ids=VOCAB_SIZE,
            generation=next(self.generations), sampling=sampling, seed=self.chance.getrandbits(20),
            acceptance_method=AcceptanceMethod.COUPLED, **more,
        )  # fmt: skip
        self.sessions[number] = Known(opened, prompt)
        self.rig.send(self.link_id, opened)

    def item(self, number: int, known: Known, drafts: tuple[int, ...], *, is_claim: bool = False) -> Score:
        if known.kept and self.chance.random() < 0.02:  # the user's stop text, or an honest target that goes wrong
            known.tokens[-1] = self.chance.randrange(VOCAB_SIZE)
        if known.kept > 1 and self.chance.random() < 0.02:
            known.kept -= 1
        if known.kept > 1 and self.chance.random() < 0.01:  # a coordinator of another text
            known.tokens[known.kept - 1] ^= 1
        known.asked, known.drafts, known.is_claim, known.goes_on = next(self.generations), drafts, is_claim, False
        return score_item(number, known.asked, known.tokens, drafts, num_kept_tokens=known.kept)

    def drafts_of(self, known: Known) -> tuple[int, ...]:
        room = MAX_LENGTH - len(known.tokens) - 1
        return tuple(self.rig.after(known, min(room, self.chance.randint(1, 4))))

    def push(self) -> None:
        """Pushes for some sessions, of which one in three is not what it should be."""
        rows = [self.row(number, known) for number, known in self.sessions.items() if self.chance.random() < 0.8]
        if self.chance.random() < 0.1:
            rows.append((self.chance.choice((7, 1 << 60)), self.chance.randrange(99), 0, [1, 2]))
        if not rows:
            return
        self.chance.shuffle(rows)
        pushes = Pushes(
            np.array([row[0] for row in rows], dtype=U8),
            np.array([row[1] for row in rows], dtype=np.int64),
            np.array([row[2] for row in rows], dtype=U8),
            np.array([len(row[3]) for row in rows], dtype=U4),
            np.array([token for row in rows for token in row[3]], dtype=U4),
        )
        self.old = [*self.old[-5:], pushes]
        for each in (pushes, *([self.chance.choice(self.old)] if self.chance.random() < 0.3 else [])):
            self.rig.core.begin(self.link_id, each)

    def row(self, number: int, known: Known) -> tuple[int, int, int, list[int]]:
        """Session, length and hash of the text before the guess, and tokens."""
        length, step = max(1, len(known.tokens) - 1), known.base
        tokens = [known.tokens[-1], *self.rig.after(known, self.chance.randint(0, 4))]
        text, wrong = known.tokens[:length], self.chance.randrange(18)
        if wrong == 0:
            tokens[0] = (tokens[0] + 1) % VOCAB_SIZE
        elif wrong == 1:
            tokens += [VOCAB_SIZE + self.chance.randrange(9), (1 << 32) - 1]
        elif wrong == 2:
            tokens += [5] * 300
        elif wrong == 3:
            length += self.chance.choice((-1, 1, 4, 1 << 31))
        elif wrong == 4:
            step += self.chance.choice((-1, 1))
        elif wrong == 5:
            tokens = []
        hashed = text_hash(prefix_hash(text)[1], step)
        return number, max(0, length), hashed, tokens

    def take(self, event: Any) -> None:
        """Check an answer, and commit what it says."""
        known = self.sessions.get(event.session)
        if known is None or isinstance(event, Opened) or event.generation < known.opened.generation:
            return
        if not isinstance(event, Scores):
            self.rig.outcomes[type(event).__name__] += 1
            del self.sessions[event.session]
            self.rig.send(self.link_id, Release(event.session, next(self.generations)))
            return
        if event.generation < known.asked:
            return  # it was asked for something else since
        assert event.generation == known.asked, "nothing that was not asked for is answered"
        assert event.base_length == len(known.tokens) and isinstance(event.form, TokenScores)
        scored = known.drafts or event.draft_token_ids  # what is asked for without drafts is a claim if it can be
        assert event.draft_token_ids in ((), scored)
        own = event.form.token_ids
        assert own == alone(known.opened, tuple(known.tokens), scored), (known, scored)
        self.rig.outcomes[f"{'claims' if known.is_claim else 'others'} {'with' if scored else 'without'} drafts"] += 1
        accepted = next((at for at, each in enumerate(scored) if own[at] != each), len(scored))
        known.base, known.kept, known.asked = event.base_length, len(known.tokens) + accepted, 0
        known.tokens += own[: accepted + 1]
        known.goes_on = bool(event.goes_on)
        is_over = not set(known.opened.eos_token_ids).isdisjoint(own[: accepted + 1])
        assert not (known.goes_on and (is_over or known.opened.in_turn))
        if is_over or len(known.tokens) > MAX_LENGTH - 6:
            del self.sessions[event.session]
            self.rig.send(self.link_id, Release(event.session, next(self.generations)))


class Rig:
    """One target with two links."""

    def __init__(self, seed: int, num_pages: int) -> None:
        self.chance = Drawing.choose = random.Random(seed)
        self.now_ns = 0
        self.outcomes: Counter[str] = Counter()
        self.runner, self.core = core_with(num_pages, lambda: self.now_ns, CountingExecutor)
        self.links = {link_id: Coordinator(self, link_id) for link_id in range(NUM_LINKS)}

    def send(self, link_id: int, *commands: Any) -> None:
        self.core.handle(link_id, commands)

    def after(self, known: Known, count: int) -> list[int]:
        """Tokens after a text: those that follow, or others."""
        if self.chance.random() < 0.3:
            return [self.chance.randrange(VOCAB_SIZE) for _ in range(count)]
        tokens = tuple(known.tokens)
        for _ in range(count):
            tokens += alone(known.opened, tokens, ()) or (1,)
        return list(tokens[len(known.tokens) :])

    def step(self) -> None:
        self.now_ns += self.chance.choice((10_000, LATE_NS))
        messages = self.core.step()
        self.core.post_step()
        for link_id, batch in messages:
            events = [*batch.events]
            for batched in batch.batched:
                events += batched.events(range(len(batched.sessions)))
            for event in events:
                self.links[link_id].take(event)

    def run(self) -> None:
        for number in range(NUM_ROUNDS):
            self.links[self.chance.randrange(NUM_LINKS)].act()
            while self.chance.random() < 0.75:
                self.step()
            self.runner.sequences.check_integrity()
            if self.chance.random() < 0.003:
                link_id = self.chance.randrange(NUM_LINKS)
                self.core.drop_link(link_id)
                self.links[link_id].sessions.clear()
            if number % 50 == 49:
                self.settle()
        first, second = self.links.values()
        self.send(first.link_id, *[Release(number, next(first.generations)) for number in first.sessions])
        self.core.drop_link(second.link_id)
        for link in self.links.values():
            link.sessions.clear()
        self.settle()

    def settle(self) -> None:
        """End of a while in which all that was asked for is answered."""
        for _ in range(300):
            if not self.core.has_work:
                break
            self.step()
        assert not self.core.has_work
        for link in self.links.values():
            assert not any(known.asked for known in link.sessions.values())


@pytest.mark.parametrize(("seed", "num_pages"), [(1, 1000), (2, 40)])
def test_what_is_asked_for_is_answered_as_by_a_target_alone(seed: int, num_pages: int) -> None:
    rig = Rig(seed, num_pages)
    rig.run()
    assert rig.runner.sequences.pool.num_used == rig.core.num_sessions == 0
    assert not rig.core.decode.ahead.has_any and rig.core.scheduler.is_free
    assert rig.outcomes["claims without drafts"] > 20 and rig.outcomes["claims with drafts"] > 1
    assert rig.outcomes["SessionLost"] and rig.outcomes["SessionFailed"]
    assert bool(rig.core.stats.num_preempted) == (num_pages == 40)
