"""A draft that serves several targets: a burst of one costs the others little, counted in forwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.model_executor.model_runner import ModelRunner
from outrider.ports import Extend, Open, Opened, Preempted, Proposal, Refused, Release
from outrider.prefix_hash import EMPTY_PREFIX
from outrider.serving.engine_core import EngineCore
from outrider.serving.executor import Executor, ExecutorOutput
from outrider.serving.session import Limits, Session
from outrider.serving.session_registry import SessionRegistry
from outrider.serving.token_budget import TokenBudget
from outrider.types import JudgingRule, SamplingParams
from outrider_draft.proposers.draft_model import ModelProposer
from outrider_draft.service import build_model_core
from outrider_draft.texts import PlainSequence, PlainSequences
from tests.support.core_driver import extend_item, open_session
from tests.support.tiny_models import cached_tiny_model

BUDGET, BESIDE, LENGTH = 512, 128, 2000
BURST, OTHER = 1, 2
NUM_BURST = 64


class Job:
    num_last = 1

    def __init__(self, link_id: int, item: Extend) -> None:
        self.link_id, self.item, self.num_left = link_id, item, len(item.token_ids)


class Noting(Executor[PlainSequence, Extend, Job, Proposal]):
    """Tokens of each link in each forward."""

    def __init__(self) -> None:
        self.forwards: list[dict[int, int]] = []

    def begin(self, session: Session[PlainSequence], item: Extend) -> Job:
        return Job(session.link_id, item)

    def execute(self, batch: Sequence[tuple[Job, int]]) -> ExecutorOutput[Proposal]:
        tokens: dict[int, int] = {}
        for job, share in batch:
            job.num_left -= share
            tokens[job.link_id] = tokens.get(job.link_id, 0) + share
        self.forwards.append(tokens)
        answers = [None if job.num_left else Proposal(job.item.session, job.item.generation, 0, ()) for job, _ in batch]
        return ExecutorOutput(answers, 0)


class Draft:
    """A core with two links, one of which has a burst of prompts."""

    def __init__(self) -> None:
        self.executor = Noting()
        limits = Limits(vocab_size=10, max_model_len=LENGTH + 1, trims=True)
        self.core = EngineCore(
            SessionRegistry(PlainSequences(), limits), self.executor, TokenBudget(BUDGET, BESIDE), clock=lambda: 0
        )
        self.answered: list[tuple[int, int, int]] = []
        """Link, session and generation of each proposal."""

    def ask(self, link_id: int, session: int, generation: int, num_tokens: int) -> None:
        if generation == 1:
            opened = Open(session, 0, SamplingParams(), 0, JudgingRule.REJECTION, num_tokens, LENGTH + 1, 10)
            self.core.handle(link_id, [opened])
        self.core.handle(link_id, [Extend(session, generation, 0, EMPTY_PREFIX, (3,) * num_tokens, 4)])

    def burst(self, num_tokens: int = 100) -> None:
        for session in range(NUM_BURST):
            self.ask(BURST, session, 1, num_tokens)

    def forwards_until(self, *wanted: int) -> int:
        """Forwards until an item is answered."""
        before = len(self.executor.forwards)
        while wanted not in self.answered:
            for link_id, batch in self.core.step():
                self.answered += [(link_id, e.session, e.generation) for e in batch.events if isinstance(e, Proposal)]
        return len(self.executor.forwards) - before


def test_a_prompt_is_not_behind_another_targets_burst() -> None:
    draft = Draft()
    draft.burst()
    draft.forwards_until(BURST, 0, 1)
    draft.ask(OTHER, 0, 1, 400)
    assert draft.forwards_until(OTHER, 0, 1) <= 2 + 400 // (BESIDE // 2)
    assert sum((BURST, session, 1) in draft.answered for session in range(NUM_BURST)) < NUM_BURST // 2


def test_the_same_prompt_of_the_bursts_own_target_waits_for_shorter_ones() -> None:
    draft = Draft()
    draft.burst()
    draft.forwards_until(BURST, 0, 1)
    draft.ask(BURST, NUM_BURST, 1, 400)
    assert draft.forwards_until(BURST, NUM_BURST, 1) > 2 + 400 // (BESIDE // 2)


def test_a_running_session_is_in_every_forward_of_another_targets_burst() -> None:
    draft = Draft()
    draft.ask(OTHER, 0, 1, 3)
    draft.forwards_until(OTHER, 0, 1)
    draft.burst()
    for generation in range(2, 12):
        draft.ask(OTHER, 0, generation, 1)
        assert draft.forwards_until(OTHER, 0, generation) == 1
        assert draft.executor.forwards[-1][BURST] <= BESIDE


PAGE, NUM_PAGES, PROMPT, NUM_OTHERS = 4, 200, 20, 4


class PagedDraft:
    """A draft whose pages hold the prompts of about forty sessions, and what it says to each link."""

    def __init__(self) -> None:
        model = cached_tiny_model("llama", seed=1)
        runner = ModelRunner.load(model, dtype="float32", page_size=PAGE, num_pages=NUM_PAGES, max_model_len=200)
        self.core: Any = build_model_core(ModelProposer(runner))
        self.texts: dict[tuple[int, int], list[int]] = {}

    def begin(self, link_id: int, count: int, arrival_ns: int) -> list[Any]:
        """Open sessions with prompts of their own, and ask for proposals."""
        for session in range(count):
            self.texts[link_id, session] = [10 * link_id + session] * PROMPT
            opened = open_session(
                session, prompt_length=PROMPT, max_length=150, num_token_ids=200, arrival_ns=arrival_ns + session
            )
            self.core.handle(link_id, (opened, extend_item(session, 2, self.texts[link_id, session], 2)))
        return self.run(link_id)

    def go_on(self, link_id: int, generation: int, sessions: Sequence[int]) -> list[Any]:
        """Commit four tokens of each session, and ask for more."""
        for session in sessions:
            text = self.texts[link_id, session]
            kept = len(text)
            text += [7, 8, 9, session]
            self.core.handle(link_id, (extend_item(session, generation, text, 2, num_kept_tokens=kept),))
        return self.run(link_id)

    def run(self, link_id: int) -> list[Any]:
        """Events of a link until nothing is due."""
        found = []
        while self.core.has_work:
            for link, batch in self.core.step():
                found += [event for event, _ in batch.timed() if link == link_id and not isinstance(event, Opened)]
            self.core.post_step()
        return found


def test_a_burst_takes_no_pages_from_another_targets_sessions() -> None:
    draft = PagedDraft()
    proposed = [event.session for event in draft.begin(BURST, NUM_BURST, 0) if isinstance(event, Proposal)]
    assert 20 < len(proposed) < NUM_BURST, "the burst fills the pages"
    assert {type(event) for event in draft.begin(OTHER, NUM_OTHERS, 10_000)} == {Proposal}
    open_yet = sorted(proposed)
    for generation in range(4, 20):
        told = draft.go_on(BURST, generation, open_yet)
        open_yet = [session for session in open_yet if draft.core.sessions.get(BURST, session) is not None]
        assert not any(isinstance(event, Refused) for event in told)
        assert [type(event) for event in draft.go_on(OTHER, generation, range(NUM_OTHERS))] == [Proposal] * NUM_OTHERS
    assert open_yet[0] == 0 and len(open_yet) < len(proposed) // 2, "the youngest of the burst went, its oldest stays"
    for link_id, sessions in ((BURST, open_yet), (OTHER, range(NUM_OTHERS))):
        draft.core.handle(link_id, [Release(session, 90) for session in sessions])
    assert draft.core.num_pages_free == NUM_PAGES


def test_of_one_target_the_oldest_keep_their_pages() -> None:
    draft = PagedDraft()
    proposed = [event.session for event in draft.begin(BURST, NUM_BURST, 0) if isinstance(event, Proposal)]
    assert proposed == list(range(len(proposed)))
    told = draft.go_on(BURST, 4, proposed)
    gone = [event.session for event in told if isinstance(event, Preempted)]
    assert gone and min(gone) == len(proposed) - len(gone)
