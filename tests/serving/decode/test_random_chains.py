"""Drafts that go on by themselves, among anything else: what is asked for is what a draft would propose that knows
nothing else, and so is what is pushed for a text.

Two coordinators number their sessions alike, and sessions of one link are of two targets. Verdicts are right, late,
forged, of another target's channel, or of sessions that there are not; there may be too few pages.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest

from outrider.batched import U4, U8
from outrider.item_batch import batch_of_commands
from outrider.model_executor.model_runner import ModelRunner
from outrider.ports import Extend, Open, Opened, Proposal, Release
from outrider.prefix_hash import prefix_hash
from outrider.proposal_channel.pushes import ChainStart, Pushes, text_hash
from outrider.proposal_channel.verdicts import UNKNOWN, Verdicts
from outrider.types import AcceptanceMethod, SamplingParams
from outrider_draft.proposers.draft_model import ModelProposer
from outrider_draft.service import build_model_core
from tests.support.core_driver import Driver, extend_item, open_session
from tests.support.draft_loops import LoopedRunner
from tests.support.tiny_models import cached_tiny_model

VOCABULARY, LENGTH, K, MOST_SESSIONS, NUM_ROUNDS = 200, 60, 3, 4, 100
SAMPLINGS = (SamplingParams(temperature=0.0), SamplingParams(temperature=0.8))


def new_runner(kind: type[ModelRunner], num_pages: int) -> ModelRunner:
    return kind.load(
        cached_tiny_model("llama", seed=1), dtype="float32", page_size=4, num_pages=num_pages, max_model_len=LENGTH
    )


@cache
def other_draft() -> Driver:
    return Driver(build_model_core(ModelProposer(new_runner(LoopedRunner, 100))))


def alone(opened: Open, tokens: Sequence[int], length: int = K) -> list[int]:
    """Proposal of a draft that knows nothing but the text."""
    driver = other_draft()
    driver.send(opened)
    event = driver.one(extend_item(opened.session, opened.generation + 1, tokens, length))
    driver.core.drop_link(driver.link_id)
    return list(event.token_ids)


@dataclass
class Known:
    """One session, as its coordinator knows it."""

    opened: Open
    tokens: list[int]
    held: int = 0
    asked: int = 0
    """Generation of the newest item, if it is not answered."""
    answered: int = 0
    drafts: list[int] = field(default_factory=list)
    """Draft tokens after these, as far as is known."""
    base: int = 0
    """Tokens on which the step builds that its target computes."""


class Coordinator:
    """One link, and the verdicts of its targets."""

    def __init__(self, rig: Rig, link_id: int) -> None:
        self.rig, self.link_id, self.chance = rig, link_id, rig.chance
        self.sessions: dict[int, Known] = {}
        self.generations = itertools.count(1)
        self.old: list[list[tuple[int, ...]]] = []

    def act(self) -> None:
        """One message of commands, or verdicts."""
        if len(self.sessions) < MOST_SESSIONS and self.chance.random() < 0.5:
            self.open()
        for number in [number for number in self.sessions if self.chance.random() < 0.02]:
            self.release(number)
        if self.chance.random() < 0.5:
            self.judge()
            return
        items = [self.item(number, known) for number, known in self.sessions.items() if not known.asked]
        if items:
            self.rig.core.handle(self.link_id, tuple(batch_of_commands(items)))

    def open(self) -> None:
        number = next(each for each in range(MOST_SESSIONS) if each not in self.sessions)
        prompt = [self.chance.randrange(VOCABULARY) for _ in range(self.chance.choice((2, 5, 9)))]
        opened = open_session(
            number, prompt_length=len(prompt), max_length=LENGTH, num_token_ids=VOCABULARY,
            generation=next(self.generations), sampling=self.chance.choice(SAMPLINGS),
            seed=self.chance.getrandbits(20), acceptance_method=AcceptanceMethod.COUPLED,
        )  # fmt: skip
        self.sessions[number] = Known(opened, prompt)
        self.rig.core.handle(self.link_id, (opened,))

    def release(self, number: int) -> None:
        del self.sessions[number]
        self.rig.core.handle(self.link_id, (Release(number, next(self.generations)),))

    def item(self, number: int, known: Known) -> Extend:
        if known.drafts and self.chance.random() < 0.5:  # a verdict that no channel brought
            self.commit(known, self.chance.randint(0, len(known.drafts)), self.chance.randrange(VOCABULARY))
        known.asked = next(self.generations)
        length = 0 if not known.held else K
        return extend_item(number, known.asked, known.tokens, length, num_kept_tokens=known.held)

    def commit(self, known: Known, accepted: int, following: int) -> None:
        known.base = len(known.tokens)
        if known.drafts:
            known.held = len(known.tokens) + min(accepted, len(known.drafts) - 1)
        known.tokens += [*known.drafts[:accepted], following]
        known.drafts = []

    def judge(self) -> None:
        """Verdicts of the targets of some sessions, of which one in three is not what it should be."""
        rows = [self.row(number, known) for number, known in self.sessions.items() if not known.asked and known.drafts]
        if self.chance.random() < 0.1:
            rows.append((9, 4, 20, 1, 1, 1))
        if self.old and self.chance.random() < 0.2:
            rows = self.chance.choice(self.old)
        if rows and len({row[0] for row in rows}) == len(rows):
            self.old = [*self.old[-6:], rows]
            self.rig.core.begin(self.link_id, verdicts_of(rows))

    def row(self, number: int, known: Known) -> tuple[int, ...]:
        accepted = self.chance.choice((len(known.drafts), self.chance.randint(0, len(known.drafts))))
        pushed = self.rig.pushed.get((self.link_id, number), [])
        following = pushed[0] if pushed and self.chance.random() < 0.7 else self.chance.randrange(VOCABULARY)
        last, base = (known.drafts[accepted - 1] if accepted else 0), len(known.tokens)
        wrong, generation = self.chance.randrange(20), known.answered + 1
        if wrong == 0:
            return number, generation, base, accepted, last, (following + 1) % VOCABULARY
        if wrong == 1:
            return number, generation, base, self.chance.choice((accepted + 1, 60_000)), last, following
        if wrong == 2:
            return number, generation, base + self.chance.choice((-1, 1, 9)), accepted, last, following
        if wrong == 3:
            return number, generation + self.chance.choice((-1, 3)), base, accepted, last, VOCABULARY + 7
        if wrong == 4:
            return number, generation, base, accepted, (last + 1) % VOCABULARY, UNKNOWN
        if wrong == 5:
            return (number + 1) % MOST_SESSIONS, generation, base, accepted, last, following
        drafts = pushed[1:] if pushed[:1] == [following] and accepted == len(known.drafts) else []
        self.commit(known, accepted, following)
        known.drafts = drafts
        return number, generation, base, accepted, last, following

    def take(self, event: Any) -> None:
        """Check an answer."""
        known = self.sessions.get(event.session)
        if known is None or isinstance(event, Opened) or event.generation < known.opened.generation:
            return
        if not isinstance(event, Proposal):
            self.rig.outcomes[type(event).__name__] += 1
            self.release(event.session)
            return
        if event.generation < known.asked:
            return
        assert event.generation == known.asked and event.base_length == len(known.tokens)
        known.asked, known.answered, known.held = 0, event.generation, len(known.tokens)
        known.drafts = list(event.token_ids)
        assert known.drafts == alone(known.opened, known.tokens)[: len(known.drafts)], known
        self.rig.outcomes["proposals"] += bool(known.drafts)
        known.base = len(known.tokens)
        if len(known.tokens) > LENGTH - 20:
            self.release(event.session)
        elif known.drafts and self.chance.random() < 0.8:
            row = (event.session, event.generation + 1, len(known.tokens), len(known.drafts), known.drafts[-1], UNKNOWN)
            self.rig.core.begin(self.link_id, ChainStart(verdicts_of([row]), self.link_id * 2 + event.session % 2 + 1))

    def take_pushes(self, pushes: Pushes) -> None:
        """Check those that are for the text that a target goes on from."""
        for number, base, hashed, token_ids in pushes.rows():
            self.rig.pushed[self.link_id, number] = token_ids
            known = self.sessions.get(number)
            assert known is None or pushes.channel == self.link_id * 2 + number % 2 + 1
            if known is None or known.asked:
                continue
            text = [*known.tokens, *known.drafts]
            if base == len(text) and hashed == text_hash(prefix_hash(text)[1], known.base):
                self.rig.outcomes["pushes"] += 1
                assert token_ids == alone(known.opened, text, K + 1)[: len(token_ids)]


class Rig:
    """One draft with two links."""

    def __init__(self, seed: int, num_pages: int, kind: type[ModelRunner]) -> None:
        self.chance, self.outcomes, self.num_pages = random.Random(seed), Counter[str](), num_pages
        self.pushed: dict[tuple[int, int], list[int]] = {}
        self.runner = new_runner(kind, num_pages)
        self.core = build_model_core(ModelProposer(self.runner))
        self.links = {link_id: Coordinator(self, link_id) for link_id in range(2)}

    def step(self) -> None:
        messages = self.core.step()
        self.core.post_step()
        for link_id, batch in messages:
            events = [*batch.events]
            for batched in batch.batched:
                if isinstance(batched, Pushes):
                    self.links[link_id].take_pushes(batched)
                else:
                    events += batched.events(range(len(batched.sessions)))
            for event in events:
                self.links[link_id].take(event)

    def run(self) -> None:
        for _ in range(NUM_ROUNDS):
            link_id = self.chance.randrange(2)
            self.links[link_id].act()
            while self.core.has_work and self.chance.random() < 0.8:
                self.step()
            self.runner.sequences.check_integrity()
            if self.chance.random() < 0.01:
                self.core.drop_link(link_id)
                self.links[link_id].sessions.clear()
        self.settle()
        for link_id, link in self.links.items():
            assert not any(known.asked for known in link.sessions.values())
            self.core.drop_link(link_id)
            link.sessions.clear()
        self.settle()

    def settle(self) -> None:
        for _ in range(200):
            if not self.core.has_work:
                break
            self.step()
        assert not self.core.has_work


def verdicts_of(rows: Sequence[tuple[int, ...]]) -> Verdicts:
    columns = list(zip(*rows, strict=True))
    return Verdicts(*[np.array(column, dtype=U8 if place < 2 else U4) for place, column in enumerate(columns)])


@pytest.mark.parametrize(
    ("seed", "num_pages", "kind"), [(0, 400, ModelRunner), (1, 400, LoopedRunner), (1, 40, LoopedRunner)]
)
def test_what_is_asked_for_is_what_a_draft_alone_proposes(seed: int, num_pages: int, kind: type[ModelRunner]) -> None:
    """``ModelRunner`` draws for requests, ``LoopedRunner`` in loops."""
    rig = Rig(seed, num_pages, kind)
    rig.run()
    assert rig.core.num_pages_free == num_pages and not rig.core.num_sessions
    assert rig.outcomes["proposals"] > 60 and rig.outcomes["pushes"] > 20
