"""A prompt's chunk while running sessions are away for a moment: small, and not before they are back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from outrider.ports import Extend, Open, Proposal, Release
from outrider.prefix_hash import EMPTY_PREFIX
from outrider.serving.engine_core import EngineCore
from outrider.serving.executor import Executor, ExecutorOutput
from outrider.serving.session import Limits, Session
from outrider.serving.session_registry import SessionRegistry
from outrider.serving.token_budget import TokenBudget
from outrider.types import JudgingRule, SamplingParams
from outrider_draft.texts import PlainSequence, PlainSequences

ALONE, BESIDE, LENGTH = 500, 100, 2000
RUNS, PROMPT = 1, 2
MILLISECOND = 1_000_000


class _Job:
    num_last = 1

    def __init__(self, item: Extend) -> None:
        self.item, self.num_left = item, len(item.token_ids)


class _Executor(Executor[PlainSequence, Extend, _Job, Proposal]):
    """Notes how many tokens each forward has."""

    def __init__(self) -> None:
        self.shares: list[list[int]] = []
        self.on_forward: Callable[[], None] = lambda: None
        self.on_job: Callable[[_Job, int], None] = lambda job, share: None

    def begin(self, session: Session[PlainSequence], item: Extend) -> _Job:
        return _Job(item)

    def execute(self, batch: Sequence[tuple[_Job, int]]) -> ExecutorOutput[Proposal]:
        self.shares.append([share for _, share in batch])
        self.on_forward()
        for job, share in batch:
            job.num_left -= share
            self.on_job(job, share)
        answers = [None if job.num_left else Proposal(job.item.session, job.item.generation, 0, ()) for job, _ in batch]
        return ExecutorOutput(answers, 0)


class _Rig:
    """A core whose clock stands in milliseconds and goes on by forwards, or when a test says so."""

    def __init__(self, *, forward_ms: int, adapts_chunks: bool = False) -> None:
        self.now_ms = 0
        self.executor = _Executor()
        self.forward_ms = forward_ms
        limits = Limits(vocab_size=10, max_model_len=LENGTH + 1, trims=True)
        self.core = EngineCore(
            SessionRegistry(PlainSequences(), limits),
            self.executor,
            TokenBudget(ALONE, BESIDE, adapts_chunks=adapts_chunks),
            clock=lambda: self.now_ms * MILLISECOND,
        )

    def open(self, session: int, length: int) -> None:
        self.core.handle(1, [Open(session, 1, SamplingParams(), 0, JudgingRule.REJECTION, length, LENGTH + 1, 10)])
        self.ask(session, 2, length)

    def ask(self, session: int, generation: int, length: int = 1, draft_length: int = 1) -> None:
        self.core.handle(1, [Extend(session, generation, 0, EMPTY_PREFIX, (3,) * length, draft_length)])

    def step(self) -> list[int]:
        """Tokens of each request in the forward, fewest first."""
        self.executor.on_forward = self._take_time
        self.core.step()
        return sorted(self.executor.shares[-1])

    def _take_time(self) -> None:
        self.now_ms += self.forward_ms


def test_a_chunk_is_small_while_running_sessions_will_soon_be_back_and_large_again_when_they_are_not() -> None:
    rig = _Rig(forward_ms=0)
    rig.open(RUNS, 1)
    rig.open(PROMPT, LENGTH)
    assert rig.step() == [1, BESIDE]
    rig.now_ms = 10
    assert rig.step() == [BESIDE]
    rig.now_ms = 200
    assert rig.step() == [ALONE]


def test_a_prompt_is_taken_in_large_chunks_once_the_running_sessions_have_ended() -> None:
    """One request after the other: nobody waits for the second prompt, however soon it comes."""
    rig = _Rig(forward_ms=1)
    rig.open(RUNS, 1)
    rig.step()
    rig.ask(RUNS, 3)
    rig.step()
    rig.core.handle(1, [Release(RUNS, 4)])
    rig.open(PROMPT, LENGTH)
    assert rig.step() == [ALONE]


def test_a_session_that_was_only_brought_text_is_not_waited_for() -> None:
    """No proposal is asked for, so what is asked next is not waited for: texts come in large chunks, in order."""
    rig = _Rig(forward_ms=8)
    rig.open(RUNS, 1)
    rig.step()
    rig.now_ms += 2
    rig.ask(RUNS, 3)  # it is known how long a session is away
    rig.step()
    rig.core.handle(1, [Release(RUNS, 4)])
    rig.open(3, 1)
    rig.ask(3, 3, length=20, draft_length=0)
    assert rig.step() == [20]
    rig.open(PROMPT, LENGTH)
    assert rig.core.pause_s == 0
    assert rig.step() == [ALONE]


def test_a_link_that_ends_leaves_no_running_sessions() -> None:
    rig = _Rig(forward_ms=1)
    rig.open(RUNS, 1)
    rig.step()
    rig.core.drop_link(1)
    rig.open(PROMPT, LENGTH)
    assert rig.step() == [ALONE]


def test_a_chunk_pauses_for_running_sessions_until_they_are_back_late_or_over() -> None:
    rig = _Rig(forward_ms=8)
    rig.open(RUNS, 1)
    rig.open(PROMPT, LENGTH)
    assert rig.step() == [1, BESIDE]
    assert rig.core.pause_s == 0  # nothing is known yet
    rig.now_ms += 2
    rig.ask(RUNS, 3)
    assert rig.step() == [1, BESIDE]
    assert rig.core.pause_s == pytest.approx(0.003)
    rig.now_ms += 2
    rig.ask(RUNS, 4)
    assert rig.core.pause_s == 0
    assert rig.step() == [1, BESIDE]
    assert rig.core.has_work
    rig.now_ms += 3
    assert rig.core.pause_s == 0
    assert rig.step() == [BESIDE]
    rig.ask(RUNS, 5)
    rig.step()
    assert rig.core.pause_s > 0
    rig.core.handle(1, [Release(RUNS, 6)])
    assert rig.core.pause_s == 0


def test_chunks_get_smaller_where_running_sessions_would_wait_too_long_and_large_again_for_the_next_prompt() -> None:
    rig = _Rig(forward_ms=4, adapts_chunks=True)
    rig.open(RUNS, 1)
    assert rig.step() == [1]
    rig.open(PROMPT, LENGTH)
    for generation, forward_ms, served in ((3, 12, [1, BESIDE]), (4, 12, [1, 32]), (5, 4, [1, 25])):
        rig.forward_ms = forward_ms
        rig.ask(RUNS, generation)
        assert rig.step() == served
    rig.core.handle(1, [Release(PROMPT, 10)])
    rig.ask(RUNS, 6)
    assert rig.step() == [1]
    rig.core.handle(1, [Open(3, 1, SamplingParams(), 0, JudgingRule.REJECTION, LENGTH, LENGTH + 1, 10)])
    rig.core.handle(1, [Extend(3, 2, 0, EMPTY_PREFIX, (3,) * LENGTH, 1)])
    rig.ask(RUNS, 7)
    assert rig.step() == [1, BESIDE]


def test_sessions_and_prompts_that_were_lost_come_back_one_after_the_other_as_they_came() -> None:
    rig = _Rig(forward_ms=1)
    served: dict[int, list[int]] = {}
    rig.executor.on_job = lambda job, share: served.setdefault(job.item.session, []).append(share)
    for session, arrival_ns, prompt_length in ((1, 30, 10), (2, 40, 700), (3, 10, 10), (4, 20, 10), (5, 50, 700)):
        rig.now_ms += session == 5  # a new prompt, which comes after the rebuilds
        lengths = prompt_length, LENGTH + 1, 10
        begin = Open(session, 1, SamplingParams(), 0, JudgingRule.REJECTION, *lengths, arrival_ns=arrival_ns)
        rig.core.handle(1, [begin, Extend(session, 2, 0, EMPTY_PREFIX, (3,) * 700, 1)])
    while rig.core.has_work:
        rig.step()
    # 500 tokens a forward, of which the new prompt gets an eighth until the others are back.
    shares = {1: [438, 262], 2: [176, 438, 86], 3: [352, 348], 4: [90, 438, 172]}
    assert served == {**shares, 5: [62, 62, 62, 62, 62, 62, 328]}
