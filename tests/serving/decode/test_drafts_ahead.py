"""Chains of a draft: what it pushes is what it would propose for the text that it names."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from outrider.batched import U4, U8
from outrider.item_batch import command_batch
from outrider.model_executor.model_runner import ModelRunner
from outrider.ports import Release
from outrider.prefix_hash import EMPTY_PREFIX, prefix_hash
from outrider.proposal_channel.pushes import ChainStart, Pushes, text_hash
from outrider.proposal_channel.verdicts import UNKNOWN, Verdicts
from outrider.serving.decode.drafts_ahead import DraftsAhead
from outrider.serving.session import Session
from outrider.serving.stats import ServiceStats
from outrider.types import AcceptanceMethod, SamplingParams
from outrider_draft.proposers.draft_model import ModelProposer
from outrider_draft.service import build_model_core
from tests.serving.lookahead.device import CountingExecutor, Runner
from tests.support.core_driver import Driver, extend_item, open_session
from tests.support.tiny_models import cached_tiny_model

VOCABULARY, NUM_PAGES, NUM_SESSIONS, PROMPT, LENGTH, K, CHANNEL = 200, 400, 3, 9, 200, 3, 5
GREEDY, SAMPLED = SamplingParams(temperature=0.0), SamplingParams(temperature=0.8)


def new_driver(num_pages: int = NUM_PAGES) -> Driver:
    runner = ModelRunner.load(
        cached_tiny_model("llama", seed=1), dtype="float32", page_size=4, num_pages=num_pages, max_model_len=LENGTH
    )
    return Driver(build_model_core(ModelProposer(runner)))


@dataclass
class Text:
    """One session, as its coordinator knows it."""

    number: int
    tokens: list[int]
    drafts: list[int] = field(default_factory=list)
    generation: int = 1
    pushed: tuple[int, list[int]] = (0, [])
    hashed: int = 0
    """Hash of the text that the push continues."""


class Chains:
    """A draft, and what it pushes."""

    def __init__(self, sampling: SamplingParams, num_pages: int = NUM_PAGES) -> None:
        self.driver, self.sampling = new_driver(num_pages), sampling
        self.texts = [Text(number, [20 + number] * PROMPT) for number in range(NUM_SESSIONS)]
        for text in self.texts:
            self.driver.send(self.opening(text.number, text.number))
            self.ask([text], held=0)
        self.ask(self.texts)

    def opening(self, number: int, seed: int) -> Any:
        return open_session(
            number, prompt_length=PROMPT, max_length=LENGTH, num_token_ids=VOCABULARY, seed=seed,
            sampling=self.sampling, acceptance_method=AcceptanceMethod.COUPLED,
        )  # fmt: skip

    def ask(self, texts: Sequence[Text], held: int | None = None) -> None:
        """Ask for proposals, and take them."""
        items = []
        for text in texts:
            text.generation += 1
            kept = len(text.tokens) - 1 if held is None else held
            items.append(extend_item(text.number, text.generation, text.tokens, K, num_kept_tokens=kept))
        if held is None:
            self.driver.core.handle(0, (command_batch(items),))
            events = self.driver.run()
        else:
            events = self.driver.run(*items)
        for event in events:
            self.texts[event.session].drafts = list(event.token_ids)

    def start(self, texts: Sequence[Text]) -> None:
        """Go on from proposals, as if all were accepted."""
        rows = [(text.number, text.generation + 1, len(text.tokens), K, text.drafts[-1], UNKNOWN) for text in texts]
        self.driver.core.begin(0, ChainStart(verdicts_of(rows), CHANNEL))
        self._take_pushes()

    def judge(self, rows: Sequence[tuple[Text, int, int]], *, begins: bool = True) -> None:
        """Verdicts: accepted draft tokens of each text, and the token after them. ``begins``: the loops that follow
        begin before anything else comes.
        """
        told = []
        for text, accepted, following in rows:
            last = text.drafts[accepted - 1] if accepted else 0
            told.append((text.number, text.generation + 1, len(text.tokens), accepted, last, following))
            text.tokens += [*text.drafts[:accepted], following]
            base, ids = text.pushed
            is_hit = base == len(text.tokens) - 1 and ids[:1] == [following]
            text.drafts = ids[1:] if is_hit else []
        self.driver.core.begin(0, verdicts_of(told))
        if begins:
            self._take_pushes()

    def _take_pushes(self) -> None:
        while self.driver.core.has_work:
            messages = self.driver.core.step()
            self.driver.core.post_step()
            for _, batch in messages:
                assert not batch.events
                for batched in batch.batched:
                    assert isinstance(batched, Pushes) and batched.channel == CHANNEL
                    for number, base, hashed, ids in batched.rows():
                        self.texts[number].pushed, self.texts[number].hashed = (base, ids), hashed

    def check(self, text: Text) -> None:
        """A push is what a draft proposes that knows nothing but the text before it."""
        base, ids = text.pushed
        before = [*text.tokens, *text.drafts]
        assert base == len(before) and text.hashed == text_hash(prefix_hash(before)[1], len(text.tokens))
        alone = new_driver()
        alone.send(self.opening(0, text.number))
        (event,) = alone.run(extend_item(0, 7, before, K + 1))
        assert list(event.token_ids) == ids


def verdicts_of(rows: Sequence[tuple[int, ...]]) -> Verdicts:
    batched = list(zip(*rows, strict=True))
    return Verdicts(*[np.array(column, dtype=U8 if place < 2 else U4) for place, column in enumerate(batched)])


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "coupled"])
@pytest.mark.parametrize("seed", range(2))
def test_what_is_pushed_is_what_would_be_proposed(sampling: SamplingParams, seed: int) -> None:
    chains, chance = Chains(sampling), random.Random(seed)
    chains.start(chains.texts)
    num_hits = 0
    for _ in range(8):
        for text in chains.texts:
            chains.check(text)
        rows = []
        for text in chains.texts:
            accepted = chance.choice((len(text.drafts), chance.randint(0, len(text.drafts))))
            guess = text.pushed[1][0]
            following = guess if chance.random() < 0.6 else (guess + 1) % VOCABULARY
            num_hits += accepted == len(text.drafts) and following == guess
            rows.append((text, accepted, following))
        chains.judge(rows)
    assert num_hits > 3
    assert chains.driver.core.stats.num_lookahead_used == num_hits
    chains.driver.run(*[Release(text.number, text.generation + 2) for text in chains.texts])
    assert chains.driver.core.num_pages_free == NUM_PAGES


@pytest.mark.parametrize("num_accepted", [0, 1, K])
def test_a_verdict_that_comes_before_the_loop_of_the_one_before_goes_on_from_its_text(num_accepted: int) -> None:
    """A wrong guess that the draft holds is not taken for the text."""
    chains = Chains(GREEDY)
    chains.start(chains.texts)
    chains.judge([(text, num_accepted, (text.pushed[1][0] + 1) % VOCABULARY) for text in chains.texts], begins=False)
    chains.judge([(text, 0, 3) for text in chains.texts])
    for text in chains.texts:
        chains.check(text)
        chains.ask([text])
        assert len(text.drafts) == K, "the session is not lost"


def test_a_guess_after_another_text_of_its_length_is_no_hit() -> None:
    """The last draft token is wrong, and the plain step after it brings just the token that was guessed after it."""
    chains = Chains(GREEDY)
    chains.start(chains.texts)
    guesses = [text.pushed[1][0] for text in chains.texts]
    wrong = [(text, K - 1, (text.drafts[-1] + 1) % VOCABULARY) for text in chains.texts]
    for text in chains.texts:
        text.pushed = (-1, [])
    chains.judge(wrong, begins=False)
    chains.judge([(text, 0, guess) for text, guess in zip(chains.texts, guesses, strict=True)])
    for text in chains.texts:
        chains.check(text)


def test_a_chain_without_pages_ends() -> None:
    """Later verdicts are on a text that the draft does not hold."""
    chains = Chains(GREEDY, num_pages := 20)
    text, other, last = chains.texts
    chains.driver.run(Release(last.number, last.generation + 2))
    chains.start([text])
    chains.judge([(text, 1, (text.drafts[1] + 1) % VOCABULARY)], begins=False)
    before = text.pushed
    chains.driver.core.step()  # a request is due for what follows; then another session takes all pages
    num_left = num_pages - sum(-(-len(each.tokens) // 4) for each in (text, other))
    held = len(other.tokens)
    other.tokens += [7] * (4 * num_left + 1)
    chains.ask([other], held=held)
    assert chains.driver.core.num_pages_free == 0
    chains.driver.run(Release(other.number, other.generation + 2))
    for _ in range(3):
        chains.judge([(text, 0, 3)])
    assert text.pushed == before, "nothing is pushed after it"
    chains.ask([text], held=PROMPT)
    assert len(text.drafts) == K, "the session is not lost"


def test_a_command_ends_a_chain() -> None:
    chains = Chains(GREEDY)
    chains.start(chains.texts)
    before = [text.pushed for text in chains.texts]
    for text in chains.texts:
        text.tokens.append(7)
        chains.ask([text], held=len(text.tokens) - 1)
    assert all(len(text.drafts) == K for text in chains.texts)
    chains.judge([(text, 1, 3) for text in chains.texts])
    assert [text.pushed for text in chains.texts] == before, "nothing is pushed after it"


def test_a_verdict_on_another_text_ends_a_chain() -> None:
    chains = Chains(GREEDY)
    chains.start(chains.texts)
    text, others = chains.texts[0], chains.texts[1:]
    before = text.pushed
    told = [(text.number, text.generation + 1, len(text.tokens) + 2, 1, 1, 1)]
    chains.driver.core.begin(0, verdicts_of(told))
    chains.judge([(each, 0, 3) for each in others])
    assert text.pushed == before
    for each in others:
        chains.check(each)


@pytest.mark.parametrize(("newer", "longer"), [(-1, 0), (1, 0), (0, -1), (0, 1)])
def test_proposals_of_another_item_or_length_start_no_chain(newer: int, longer: int) -> None:
    """The session was asked for something else since they were sent."""
    chains = Chains(GREEDY)
    rows = [
        (t.number, t.generation + 1 + newer, len(t.tokens) + longer, K, t.drafts[-1], UNKNOWN) for t in chains.texts
    ]
    chains.driver.core.begin(0, ChainStart(verdicts_of(rows), CHANNEL))
    assert not chains.driver.core.has_work


def test_chains_end_with_their_link() -> None:
    chains = Chains(GREEDY)
    chains.start(chains.texts)
    chains.driver.core.drop_link(0)
    assert chains.driver.core.num_pages_free == NUM_PAGES
    chains.judge([(text, 1, 3) for text in chains.texts], begins=False)
    assert not chains.driver.core.has_work


def test_what_is_asked_for_does_not_wait_for_chains() -> None:
    chains = Chains(GREEDY)
    text, others = chains.texts[0], chains.texts[1:]
    chains.start(others)
    item = extend_item(text.number, text.generation + 1, [*text.tokens, 7], K, num_kept_tokens=len(text.tokens))
    chains.driver.core.handle(0, (item,))
    events: list[Any] = []
    for step in range(20):
        told = [(each.number, each.generation + 1, len(each.tokens) + step, 0, 0, 3) for each in others]
        chains.driver.core.begin(0, verdicts_of(told))
        events += [event for _, batch in chains.driver.core.step() for event in batch.events]
        chains.driver.core.post_step()
    assert [event.session for event in events] == [text.number]


class LoopingExecutor(CountingExecutor):
    """An executor that takes every loop."""

    def follows_verdicts(self, session: Any) -> bool:
        return True

    def is_decoding(self, session: Any) -> bool:
        return True

    def takes_batch(self, step: Any) -> bool:
        return True


def chains_of(sequence: Any, num_sessions: int, executor: Any) -> DraftsAhead:
    """Chains of sessions that all hold as much as one sequence."""
    ignored: Any = SimpleNamespace(lookahead=SimpleNamespace())
    sessions = {
        number: Session(0, open_session(number, prompt_length=1, max_length=99, num_token_ids=9), sequence, 99, 1)
        for number in range(num_sessions)
    }
    table: Any = SimpleNamespace(get=lambda _, number: sessions[number], prefix_hash=lambda *_: EMPTY_PREFIX)
    return DraftsAhead(table, executor, ignored, ignored, ServiceStats())


@pytest.mark.parametrize("reads_states", [False, True])
def test_a_draft_that_reads_states_begins_no_chain(*, reads_states: bool) -> None:
    executor: Any = LoopingExecutor(Runner(100))  # type: ignore[arg-type]
    executor.reads_states = reads_states
    chains = chains_of(SimpleNamespace(length=PROMPT + K - 1), 1, executor)
    start = ChainStart(verdicts_of([(0, 2, PROMPT, K, 5, UNKNOWN)]), CHANNEL)
    assert bool(list(chains.start(0, start))) is not reads_states
    assert chains.is_due is not reads_states


def test_targets_take_turns() -> None:
    sequence: Any = SimpleNamespace(length=PROMPT + K - 1)
    chains = chains_of(sequence, num_sessions := 6, LoopingExecutor(Runner(100)))  # type: ignore[arg-type]

    def verdict(number: int, base: int) -> Verdicts:
        return verdicts_of([(number, 2, base, K, 5, UNKNOWN)])

    for number in range(num_sessions):
        assert list(chains.start(0, ChainStart(verdict(number, PROMPT), CHANNEL + number % 3)))
    served: list[int] = []
    for turn in range(9):
        step = chains.next_step(turn)
        assert step is not None and len(step) == 2
        served.append(step.batched.channel)
        sequence.length += 50
        for session in step.sessions:  # it is due again at once
            chains.take(0, verdict(session.open.session, PROMPT + (turn // 3) * (K + 1)))
    assert served == [CHANNEL, CHANNEL + 1, CHANNEL + 2] * 3
