"""Guessed steps: what an ``Extend`` claims after a right guess is what it would be answered without one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from outrider.batched import U4, U8
from outrider.item_batch import command_batch
from outrider.model_executor.model_runner import ModelRunner
from outrider.ports import Proposal, Release
from outrider.proposal_channel.pushes import ChainStart
from outrider.proposal_channel.verdicts import UNKNOWN, Verdicts
from outrider.types import AcceptanceMethod, Grammar, GrammarKind, SamplingParams, SparseEvidence, SparseScores, Support
from outrider_draft.proposers.draft_model import ModelProposer
from outrider_draft.service import build_model_core
from outrider_target.service import build_core
from tests.support.core_driver import Driver, extend_item, open_session, score_item
from tests.support.draft_loops import LoopedRunner
from tests.support.tiny_models import cached_tiny_model

VOCABULARY, NUM_PAGES, PROMPT, LENGTH, K, CHANNEL = 200, 400, 9, 200, 3, 5
SAMPLING = SamplingParams(temperature=0.9)


def new_runner(kind: type[ModelRunner]) -> ModelRunner:
    return kind.load(
        cached_tiny_model("llama", seed=1), dtype="float32", page_size=4, num_pages=NUM_PAGES, max_model_len=LENGTH
    )


def new_draft() -> Driver:
    return Driver(build_model_core(ModelProposer(new_runner(LoopedRunner))))


def opening(number: int) -> Any:
    return open_session(
        number, prompt_length=PROMPT, max_length=LENGTH, num_token_ids=VOCABULARY, seed=70 + number, sampling=SAMPLING
    )


class Drafting:
    """A draft and texts whose proposals it goes on from."""

    def __init__(self, num_sessions: int = 3) -> None:
        self.driver = new_draft()
        self.texts = [[20 + number] * PROMPT for number in range(num_sessions)]
        self.generation = 1
        self.proposals: list[Proposal] = []
        for number, text in enumerate(self.texts):
            self.driver.run(opening(number), extend_item(number, 2, text, 0))
        self.generation = 2
        self.ask([PROMPT - 1] * num_sessions)

    def ask(self, kept: list[int], length: int = K) -> list[Any]:
        """Ask for proposals after all texts, of which the draft holds so much, as arrays."""
        self.generation += 2
        rows = enumerate(zip(self.texts, kept, strict=True))
        items = [extend_item(n, self.generation, text, length, num_kept_tokens=held) for n, (text, held) in rows]
        self.driver.core.handle(0, (command_batch(items),))
        self.proposals = sorted(self.driver.run(), key=lambda event: event.session)
        return self.proposals

    def go_on(self, *, newer: int = 0, longer: int = 0, begins: bool = True) -> None:
        """The proposals were sent to a target; ``newer`` and ``longer``: those of other items, or of other texts."""
        generation, lengths = self.generation + 1 + newer, [len(text) + longer for text in self.texts]
        rows = [
            (number, generation, lengths[number], len(each.token_ids), each.token_ids[-1], UNKNOWN)
            for number, each in enumerate(self.proposals)
        ]
        batched = [np.array(each, dtype=U8 if place < 2 else U4) for place, each in enumerate(zip(*rows, strict=True))]
        self.driver.core.begin(0, ChainStart(Verdicts(*batched), CHANNEL))
        if begins:
            assert self.driver.run() == [], "what nobody asked for is told to nobody"

    def counts(self) -> tuple[int, int]:
        stats = self.driver.core.stats
        return stats.num_lookahead_used, stats.num_lookahead_unused


def bonus_tokens(drafting: Drafting) -> list[int]:
    """Tokens that a target of the same weights draws after the proposals."""
    target = Driver(build_core(new_runner(ModelRunner)))
    found = []
    for number, (text, proposal) in enumerate(zip(drafting.texts, drafting.proposals, strict=True)):
        evidence = proposal.evidence
        assert isinstance(evidence, SparseEvidence)
        support = Support(evidence.counts, evidence.token_ids)
        target.send(opening(number))
        scores = target.one(score_item(number, 2, text, proposal.token_ids, support=support))
        assert isinstance(scores.form, SparseScores)
        found.append(int(scores.form.outside_token_ids[-1]))
    return found


def check_same(found: list[Any], texts: list[list[int]], length: int = K) -> None:
    """Proposals of a draft that knows nothing but the texts: tokens and what they were drawn from."""
    alone = new_draft()
    for number, (event, text) in enumerate(zip(found, texts, strict=True)):
        expected = alone.run(opening(number), extend_item(number, 9, text, length))[-1]
        assert event.base_length == len(text)
        assert event.token_ids == expected.token_ids
        assert event.evidence.counts.tolist() == expected.evidence.counts.tolist()
        assert event.evidence.token_ids.tolist() == expected.evidence.token_ids.tolist()
        np.testing.assert_allclose(event.evidence.probs, expected.evidence.probs, rtol=1e-5)


@pytest.mark.parametrize("num_sessions", [1, 2])
def test_a_right_guess_is_claimed_and_is_what_would_be_proposed(num_sessions: int) -> None:
    drafting = Drafting(num_sessions)
    for step in range(1, 4):
        drafting.go_on()
        kept = [len(text) + K - 1 for text in drafting.texts]
        for text, event, token_id in zip(drafting.texts, drafting.proposals, bonus_tokens(drafting), strict=True):
            text += [*event.token_ids, token_id]
        check_same(drafting.ask(kept), drafting.texts)
        assert drafting.counts() == (step * num_sessions, 0)
    last = [Release(number, drafting.generation + 2) for number in range(num_sessions)]
    drafting.driver.run(*last)
    assert drafting.driver.core.num_pages_free == NUM_PAGES


@pytest.mark.parametrize("num_accepted", [1, K])
def test_other_verdicts_are_served_as_if_nothing_had_been_begun(num_accepted: int) -> None:
    drafting = Drafting(2)
    drafting.go_on()
    kept, bonus = [], bonus_tokens(drafting)
    for number, (text, event) in enumerate(zip(drafting.texts, drafting.proposals, strict=True)):
        accepted = (num_accepted, K)[number]
        following = ((bonus[0] + 1) % VOCABULARY, bonus[1])[number]
        kept.append(len(text) + min(accepted, K - 1))
        text += [*event.token_ids[:accepted], following]
    check_same(drafting.ask(kept), drafting.texts)
    assert drafting.counts() == (0, 2), "one is right, and would leave the batch of the others"
    drafting.go_on()
    for text, event, token_id in zip(drafting.texts, drafting.proposals, bonus_tokens(drafting), strict=True):
        text += [*event.token_ids, token_id]
    check_same(drafting.ask([len(text) - 2 for text in drafting.texts]), drafting.texts)
    assert drafting.counts() == (2, 2)


def test_other_lengths_get_as_much_as_was_begun() -> None:
    """Lengths are decided by what knows nothing of the tokens that were drawn."""
    drafting = Drafting(2)
    for step, (asked, answered) in enumerate([(K - 1, K - 1), (K + 2, K - 1), (K + 2, K + 2), (1, 1)], 1):
        drafting.go_on()
        kept = [len(text) + len(event.token_ids) - 1
                for text, event in zip(drafting.texts, drafting.proposals, strict=True)]  # fmt: skip
        for text, event, token_id in zip(drafting.texts, drafting.proposals, bonus_tokens(drafting), strict=True):
            text += [*event.token_ids, token_id]
        check_same(drafting.ask(kept, asked), drafting.texts, answered)
        assert drafting.counts() == (2 * step, 0)
    last = [Release(number, drafting.generation + 2) for number in range(2)]
    drafting.driver.run(*last)
    assert drafting.driver.core.num_pages_free == NUM_PAGES


def test_a_link_that_has_sent_no_arrays_may_claim_with_its_first() -> None:
    drafting = Drafting(1)
    drafting.driver = new_draft()
    drafting.driver.run(opening(0))
    drafting.proposals = drafting.driver.run(extend_item(0, drafting.generation, drafting.texts[0], K))
    for step in (1, 2):
        drafting.go_on()
        drafting.texts[0] += [*drafting.proposals[0].token_ids, *bonus_tokens(drafting)]
        check_same(drafting.ask([len(drafting.texts[0]) - 2]), drafting.texts)
        assert drafting.counts() == (step, 0)
    drafting.driver.run(Release(0, drafting.generation + 2))
    assert drafting.driver.core.num_pages_free == NUM_PAGES


@pytest.mark.parametrize(("newer", "longer"), [(-1, 0), (1, 0), (0, -1), (0, 1)])
def test_proposals_of_another_item_or_text_are_not_gone_on_from(newer: int, longer: int) -> None:
    drafting = Drafting(1)
    drafting.go_on(newer=newer, longer=longer)
    drafting.driver.run(Release(0, drafting.generation + 2))
    assert drafting.counts() == (0, 0)


def test_what_is_asked_for_comes_before_a_guess() -> None:
    drafting = Drafting(1)
    drafting.go_on()
    drafting.generation += 1
    begun = drafting.driver.core.decode.is_chain_due
    assert not begun
    drafting.texts[0].append(7)
    check_same(drafting.ask([PROMPT]), drafting.texts)
    drafting.driver.run(Release(0, drafting.generation + 2))
    assert drafting.driver.core.num_pages_free == NUM_PAGES


def test_arrays_that_come_before_a_guess_has_begun_leave_none() -> None:
    drafting = Drafting(2)
    drafting.go_on(begins=False)
    for text, event in zip(drafting.texts, drafting.proposals, strict=True):
        text += [event.token_ids[0], 7]
    check_same(drafting.ask([PROMPT + 1] * 2), drafting.texts)
    drafting.driver.run(*[Release(number, drafting.generation + 2) for number in range(2)])
    assert drafting.counts() == (0, 0)
    assert drafting.driver.core.num_pages_free == NUM_PAGES


@pytest.mark.parametrize("ends", ["a session", "the link"])
def test_nothing_is_begun_for_sessions_that_have_ended(ends: str) -> None:
    drafting = Drafting(1)
    drafting.go_on(begins=False)
    core = drafting.driver.core
    if ends == "the link":
        core.drop_link(0)
    else:
        core.handle(0, (Release(0, drafting.generation + 2),))
    assert not core.decode.is_chain_due
    assert drafting.driver.run() == [] and core.num_pages_free == NUM_PAGES


@pytest.mark.parametrize("num_sent", [1, 3])
def test_nothing_is_begun_beside_other_sessions(num_sent: int) -> None:
    drafting = Drafting(3)
    proposals = drafting.proposals
    drafting.proposals = proposals[:num_sent]
    drafting.go_on()
    drafting.proposals = proposals
    for text, event, token_id in zip(drafting.texts, proposals, bonus_tokens(drafting), strict=True):
        text += [*event.token_ids, token_id]
    check_same(drafting.ask([len(text) - 2 for text in drafting.texts]), drafting.texts)
    assert drafting.counts() == (0, 0)


@pytest.mark.parametrize(
    ("sampling", "method", "begins"),
    [
        (SamplingParams(temperature=0.0), AcceptanceMethod.REJECTION, "verdicts"),
        (SAMPLING, AcceptanceMethod.COUPLED, "verdicts"),
        (SAMPLING, AcceptanceMethod.REJECTION, "guesses"),
    ],
)
def test_what_a_session_begins_follows_from_its_rule(
    sampling: SamplingParams, method: AcceptanceMethod, begins: str
) -> None:
    """Nothing, if it is to take turns or has a grammar."""
    driver = new_draft()
    opened = open_session(
        prompt_length=PROMPT, max_length=LENGTH, num_token_ids=VOCABULARY, sampling=sampling, acceptance_method=method
    )
    driver.run(opened, extend_item(0, 2, [20] * PROMPT, K))
    session: Any = driver.core.sessions.get(0, 0)
    executor = driver.core.executor
    assert (executor.follows_verdicts(session), executor.may_guess(session)) == (
        begins == "verdicts", begins == "guesses",
    )  # fmt: skip
    grammar = Grammar(GrammarKind.REGEX, "a+")
    for other in (replace(opened, in_turn=True), replace(opened, sampling=replace(sampling, grammar=grammar))):
        session.open = other
        assert not executor.follows_verdicts(session) and not executor.may_guess(session)
