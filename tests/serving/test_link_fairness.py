"""A draft that serves several targets: a burst of one costs the others little, counted in forwards."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.ports import Extend, Open, Proposal
from outrider.prefix_hash import EMPTY_PREFIX
from outrider.serving.engine_core import EngineCore
from outrider.serving.executor import Executor, ExecutorOutput
from outrider.serving.session import Limits, Session
from outrider.serving.session_table import SessionTable
from outrider.serving.token_budget import TokenBudget
from outrider.types import JudgingRule, SamplingParams
from outrider_draft.texts import PlainSequence, PlainSequences

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
            SessionTable(PlainSequences(), limits), self.executor, TokenBudget(BUDGET, BESIDE), clock=lambda: 0
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
