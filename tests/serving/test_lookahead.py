"""Lookahead: steps computed before they are asked for answer the matching request, and change nothing for others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest

from outrider.errors import InvalidRequestError, NonFiniteLogitsError, OutriderError
from outrider.ports import EventBatch, Open, Opened, Prepare, Release, Score, Scores, SessionFailed, SessionLost
from outrider.prefix_hash import EMPTY_PREFIX, prefix_hash
from outrider.serving.decode.lookahead_step import LookaheadStep
from outrider.serving.engine_core import EngineCore
from outrider.serving.executor import Executor, ExecutorOutput, InFlightForward, QueuedForward
from outrider.serving.session import Limits, Session
from outrider.serving.session_registry import SessionRegistry
from outrider.serving.token_budget import TokenBudget
from outrider.types import JudgingRule, SamplingParams, TokenScores
from outrider_draft.texts import PlainSequence, PlainSequences

ONE, OTHER = 1, 2
LENGTH, BAD_TOKEN, CREDIT = 100, 999, 64
MILLISECOND = 1_000_000


class _Job:
    def __init__(self, text: PlainSequence, item: Score) -> None:
        self.text, self.item = text, item
        self.num_left = len(item.token_ids) + len(item.draft_token_ids)
        self.num_last = len(item.draft_token_ids) + 1


@dataclass
class _Forward:
    executor: _Executor
    jobs: list[_Job]
    texts: list[list[int] | None]
    """Texts as they were; None: of no use any more."""

    def is_done(self) -> bool:
        return self.executor.is_done

    def finish(self) -> ExecutorOutput[Scores]:
        for job, text in zip(self.jobs, self.texts, strict=True):
            assert text is None or list(job.text.token_ids)[: len(text)] == text, "a text was cut under way"
        self.executor.now_ms += self.executor.forward_ms
        self.executor.num_ended += 1
        answers = [self.executor.answer(job) for job in self.jobs]
        return ExecutorOutput(answers, self.executor.now_ms * MILLISECOND, pushed=self.executor.pushed)


class _Executor(Executor[PlainSequence, Score, _Job, Scores]):
    """Says that after each token comes the next number; on a device that goes on by itself."""

    is_asynchronous = True
    is_done = True
    forward_ms = 5

    def __init__(self) -> None:
        self.now_ms = 0
        self.forwards: list[list[int]] = []
        """The sessions of each, as they were started."""
        self.num_ended = self.num_prepared = 0
        self.fails = False
        self.pushed: list[tuple[int, Scores]] = []
        self.follows = self.is_wrong = False
        """True if steps start before the one before has ended, and if they run over other tokens than its own."""

    def check(self, session: Session[PlainSequence], item: Score) -> Scores | None:
        if item.token_ids[-1] == BAD_TOKEN:
            raise InvalidRequestError("token_ids", "no such token")
        return None

    def begin(self, session: Session[PlainSequence], item: Score) -> _Job:
        return _Job(session.sequence, item)

    def execute(self, batch: Sequence[tuple[_Job, int]]) -> ExecutorOutput[Scores]:
        return self.start(batch).finish()

    def start(self, batch: Sequence[tuple[_Job, int]]) -> _Forward:
        jobs = [job for job, _ in batch]
        self.forwards.append([job.item.session for job in jobs])
        for job in jobs:
            job.text.extend((*job.item.token_ids, *job.item.draft_token_ids))
        return _Forward(self, jobs, [list(job.text.token_ids) for job in jobs])

    def answer(self, job: _Job) -> Scores | OutriderError:
        if self.fails:
            return NonFiniteLogitsError("not finite")
        item, base = job.item, job.item.num_kept_tokens + len(job.item.token_ids)
        ids = tuple(token + 1 for token in (item.token_ids[-1], *item.draft_token_ids))
        return Scores(item.session, item.generation, base, TokenScores(ids))

    def next_step(self, session: Session[PlainSequence], answer: Scores) -> Score | None:
        base, form = answer.base_length, answer.form
        if not isinstance(form, TokenScores) or len(form.token_ids) > 1:
            return None
        kept = prefix_hash(session.sequence.token_ids)
        self.num_prepared += 1
        return Score(answer.session, answer.generation, base, kept, form.token_ids)

    def queue(
        self, forward: InFlightForward[Scores], step: LookaheadStep | None = None
    ) -> QueuedForward[_Job, Scores] | None:
        """Queue over the tokens that are right, or over others."""
        if not self.follows or not isinstance(forward, _Forward):
            return None
        jobs = []
        for job in forward.jobs:
            base, token_id = len(job.text.token_ids), job.item.token_ids[-1] + 1 + self.is_wrong
            item = Score(job.item.session, 0, base, prefix_hash(job.text.token_ids), (token_id,))
            jobs.append(_Job(job.text, item))
        self.num_prepared += len(jobs)
        return QueuedForward(self.start([(job, 1) for job in jobs]), jobs, range(len(jobs)))

    def resolve(
        self, queued: QueuedForward[_Job, Scores], index: int, session: Session[PlainSequence], answer: Scores
    ) -> Score | None:
        item = queued.jobs[index].item
        assert session.sequence.token_ids[-1] == item.token_ids[0]
        if answer.form == TokenScores(item.token_ids):
            return item
        queued.forward.texts[index] = None  # type: ignore[attr-defined]
        PlainSequences().truncate(session.sequence, answer.base_length)
        return None

    def matches(self, item: Score, prepared: Score) -> bool:
        return replace(prepared, generation=item.generation, trace_parent=item.trace_parent) == item


class _Rig:
    def __init__(self, *, lookahead: bool = True, max_batched_tokens: int = 512) -> None:
        self.executor, self.texts = _Executor(), PlainSequences()
        self.core = EngineCore(
            SessionRegistry(self.texts, Limits(vocab_size=1000, max_model_len=LENGTH, trims=False)),
            self.executor,
            TokenBudget(max_batched_tokens),
            lookahead=lookahead,
            clock=lambda: self.executor.now_ms * MILLISECOND,
        )
        self.generation = 0
        self.num_plain: dict[int, int] = {}
        self.told: dict[int, list[int]] = {ONE: [], OTHER: []}
        """Each session's tokens."""

    def open(self, *sessions: int) -> None:
        for session in sessions:
            self.generation += 1
            opening = Open(
                session,
                self.generation,
                SamplingParams(temperature=0.0),
                0,
                JudgingRule.GREEDY,
                1,
                LENGTH,
                1000,
            )
            self.core.handle(1, [opening])
            self.told[session] = [100 * session]

    def ask(self, session: int, drafts: Sequence[int] = (), *, other_token: int | None = None) -> int:
        """Ask about all that was told, with credit for more from the second plain step on; returns the item's
        generation.
        """
        self.generation += 1
        tokens = self.told[session]
        if other_token is not None:
            tokens[-1] = other_token
        kept = prefix_hash(tokens[:-1])
        item = Score(session, self.generation, len(tokens) - 1, kept, (tokens[-1],), tuple(drafts))
        self.num_plain[session] = 0 if drafts else self.num_plain.get(session, 0) + 1
        goes_on = self.num_plain[session] >= 2
        self.core.handle(1, [item, *([Prepare(session, self.generation, CREDIT)] if goes_on else [])])
        return self.generation

    def step(self) -> list[Scores | SessionFailed]:
        """Step until a forward has ended, or something is told that needed none; what is told is kept."""
        events: list[Scores | SessionFailed] = []
        batches: list[tuple[int, EventBatch[object]]] = []
        num_ended = self.executor.num_ended
        while self.core.has_work and not batches and self.executor.num_ended == num_ended:
            if self.core.pause_s:
                self.executor.is_done = True  # time passes
            batches = self.core.step()
        for _, batch in batches:
            for event, timing in batch.timed():
                if isinstance(event, Opened):
                    continue
                assert isinstance(event, Scores | SessionFailed)
                assert timing is not None
                stages = (timing.queue_ns, timing.forward_ns, timing.sample_ns, timing.wait_ns)
                assert min(stages) >= 0
                assert sum(stages) == timing.total_ns
                if isinstance(event, Scores) and isinstance(event.form, TokenScores):
                    self.told[event.session].append(event.form.token_ids[0])
                events.append(event)
        return events

    def drain(self, session: int) -> list[Scores | SessionFailed | SessionLost]:
        """All that is told one of them before nothing is left to do; the other's tokens are kept."""
        events: list[Scores | SessionFailed | SessionLost] = []
        while self.core.has_work:
            for _, batch in self.core.step():
                for event in batch.events:
                    if isinstance(event, Opened):
                        continue
                    assert isinstance(event, Scores | SessionFailed | SessionLost)
                    if event.session == session:
                        events.append(event)
                    if event.session == OTHER:
                        assert isinstance(event, Scores)
                        assert isinstance(event.form, TokenScores)
                        self.told[OTHER].append(event.form.token_ids[0])
        return events

    def run_plain(self, *sessions: int, num_steps: int = 3) -> None:
        """Run until it is known that they do not speculate, and what they will ask next is under way."""
        for _ in range(num_steps):
            for session in sessions:
                self.ask(session)
            while not self.step():
                pass

    def run_out(self) -> None:
        """All that can be done before anybody asks; nothing is told."""
        while self.core.has_work:
            assert self.step() == []

    @property
    def used(self) -> tuple[int, int]:
        return self.core.stats.num_lookahead_used, self.core.stats.num_lookahead_unused


def test_who_asks_for_what_is_under_way_is_answered_by_it() -> None:
    rig = _Rig()
    rig.open(ONE)
    rig.run_plain(ONE, num_steps=2)
    assert len(rig.executor.forwards) == 3
    generation = rig.ask(ONE)
    (event,) = rig.step()
    assert (event.generation, rig.told[ONE]) == (generation, [100, 101, 102, 103])
    assert rig.used == (1, 0)
    assert len(rig.executor.forwards) == 4


@pytest.mark.parametrize("follows", [False, True])
def test_who_asks_later_finds_two_steps_computed_and_no_third_runs_ahead_of_them(follows: bool) -> None:
    rig = _Rig()
    rig.executor.follows = follows
    rig.open(ONE)
    rig.run_plain(ONE, num_steps=2)
    rig.run_out()
    assert len(rig.executor.forwards) == 4
    rig.executor.now_ms += 50
    for token_id in (103, 104):
        generation = rig.ask(ONE)
        ((_, batch),) = rig.core.step()
        assert batch.events[0].generation == generation
        assert batch.timings[0].total_ns == 0
        assert isinstance(batch.events[0], Scores)
        assert batch.events[0].form == TokenScores((token_id,))
        rig.told[ONE].append(token_id)
    rig.run_out()
    assert len(rig.executor.forwards) == 6
    assert rig.used == (2, 0)


@pytest.mark.parametrize("follows", [False, True])
def test_answers_that_leave_apart_tell_whether_they_are_of_one_forward(follows: bool) -> None:
    rig = _Rig()
    rig.executor.follows = follows
    rig.open(ONE, OTHER)
    rig.run_plain(ONE, OTHER)
    rig.run_out()
    assert rig.executor.forwards[-2:] == [[ONE, OTHER]] * 2
    ends: dict[int, list[int]] = {ONE: [], OTHER: []}
    for session in (ONE, ONE, OTHER, OTHER):
        rig.ask(session)
        ((_, batch),) = rig.core.step()
        (event,) = batch.events
        assert isinstance(event, Scores) and isinstance(event.form, TokenScores) and batch.report is not None
        rig.told[session].append(event.form.token_ids[0])
        ends[session].append(batch.report.ended_ns)
    assert ends[ONE] == ends[OTHER]
    assert 0 < ends[ONE][0] < ends[ONE][1] <= rig.executor.now_ms * MILLISECOND


@pytest.mark.parametrize("follows", [False, True])
def test_messages_that_come_all_the_time_keep_no_forward_from_its_end(follows: bool) -> None:
    rig = _Rig()
    rig.executor.follows = follows
    rig.open(ONE)
    rig.run_plain(ONE, num_steps=2)
    rig.ask(ONE)
    steps = 0
    while not (told := rig.core.step()):
        rig.core.handle(1, [Release(OTHER, 1000)])
        steps += 1
        assert steps < 4
    assert [event.session for _, batch in told for event in batch.events] == [ONE]


@pytest.mark.parametrize("is_under_way", [False, True])
def test_questions_that_need_no_forward_keep_nobody_from_theirs(is_under_way: bool) -> None:
    rig = _Rig()
    rig.open(ONE)
    rig.ask(ONE)
    if is_under_way:
        rig.core.step()
    answered: set[int] = set()
    steps = 0
    while ONE not in answered:
        rig.core.handle(1, [Score(OTHER, 1, 0, EMPTY_PREFIX, (1,))])
        answered |= {event.session for _, batch in rig.core.step() for event in batch.events}
        steps += 1
        assert steps < 200


def test_who_has_asked_is_served_before_who_will() -> None:
    rig = _Rig(max_batched_tokens=1)
    rig.open(ONE, OTHER)
    rig.run_plain(ONE)
    while rig.executor.num_ended < 4:
        rig.core.step()
    rig.core.step()
    rig.ask(ONE)  # for the first of two: one more is due
    rig.ask(OTHER)
    while not any(event.session == OTHER for event in rig.step()):
        pass
    assert rig.executor.forwards[4:6] == [[ONE], [OTHER]]


def test_a_forward_under_way_is_looked_at_again_and_again_until_it_is_done() -> None:
    rig = _Rig()
    rig.open(ONE)
    rig.run_plain(ONE, num_steps=2)
    rig.executor.is_done = False
    rig.core.step()  # that would have queued another behind it
    assert 0 < rig.core.pause_s < 1e-3
    rig.executor.is_done = True
    assert rig.core.pause_s == 0


def test_what_arrives_while_a_forward_is_under_way_is_taken_in_before_it_has_ended() -> None:
    rig = _Rig()
    rig.open(ONE, OTHER)
    rig.ask(ONE)
    rig.executor.is_done = False
    assert [rig.core.step(), rig.core.step()] == [[], []]
    assert rig.executor.forwards == [[ONE]]
    assert rig.core.pause_s > 0
    rig.ask(OTHER, drafts=(7, 8))
    assert [event.session for event in rig.step()] == [ONE]
    assert [event.session for event in rig.step()] == [OTHER]


def test_who_asks_for_something_else_is_served_once_the_forward_has_ended() -> None:
    rig = _Rig()
    rig.open(ONE, OTHER)
    rig.run_plain(ONE, OTHER)
    rig.ask(OTHER)
    generation = rig.ask(ONE, other_token=500)
    (event,) = rig.step()
    assert event.session == OTHER
    events = {event.session: event for event in rig.step()}
    assert events[ONE].generation == generation
    assert rig.told[ONE][-2:] == [500, 501]
    assert rig.used[1] == 1


def test_nothing_is_computed_ahead_while_anybody_speculates() -> None:
    rig = _Rig()
    rig.open(ONE, OTHER)
    rig.run_plain(ONE)
    rig.ask(ONE)
    rig.ask(OTHER, drafts=(7, 8))
    while rig.core.has_work:
        rig.step()
    num_forwards = len(rig.executor.forwards)
    rig.ask(ONE)
    rig.step()
    assert not rig.core.has_work
    assert len(rig.executor.forwards) == num_forwards + 1
    rig.core.handle(1, [Release(OTHER, 1000)])
    rig.ask(ONE)
    rig.step()
    assert rig.core.has_work


def test_who_speculated_and_could_not_be_opened_anew_keeps_nobody_back() -> None:
    rig = _Rig()
    rig.open(ONE, OTHER)
    rig.ask(ONE)
    rig.ask(OTHER, drafts=(7, 8))
    rig.step()
    too_long = Open(OTHER, 1000, SamplingParams(), 0, JudgingRule.REJECTION, 1, LENGTH + 1, 1000)
    rig.core.handle(1, [too_long])
    assert [type(event) for _, batch in rig.core.step() for event in batch.events] == [SessionFailed]
    rig.ask(ONE)
    rig.step()
    assert rig.core.has_work


def test_what_followed_for_nothing_is_counted() -> None:
    rig = _Rig()
    rig.executor.follows = True
    rig.open(ONE)
    rig.run_plain(ONE, num_steps=2)
    rig.ask(ONE)
    rig.core.step()
    assert len(rig.executor.forwards) == 4
    rig.core.handle(1, [Release(ONE, 1000)])
    rig.run_out()
    assert rig.used == (1, 1)


def test_what_was_computed_ahead_for_nothing_is_counted() -> None:
    rig = _Rig()
    rig.open(ONE)
    rig.run_plain(ONE, num_steps=2)
    rig.run_out()
    rig.core.handle(1, [Release(ONE, 1000)])
    assert rig.used == (0, 2)


def test_a_single_plain_step_between_drafts_is_not_taken_for_the_first_of_many() -> None:
    rig = _Rig()
    rig.open(ONE)
    rig.ask(ONE)
    rig.step()
    assert not rig.core.has_work
    rig.told[ONE] = rig.told[ONE][:2]
    rig.ask(ONE, drafts=(102,))
    rig.step()
    rig.told[ONE] = rig.told[ONE][:2]
    rig.ask(ONE)
    rig.step()
    assert not rig.core.has_work


def test_sessions_that_end_under_way_leave_nothing() -> None:
    rig = _Rig()
    rig.open(ONE, OTHER)
    rig.run_plain(ONE, OTHER)
    rig.core.handle(1, [Release(ONE, 1000)])
    rig.ask(OTHER)
    assert [event.session for event in rig.step()] == [OTHER]
    rig.core.drop_link(1)
    while rig.core.has_work:
        assert rig.step() == []
    assert rig.core.num_sessions == 0
    assert rig.used == (sum(rig.used) - 2, 2)


def test_a_session_opened_anew_under_way_is_another() -> None:
    rig = _Rig()
    rig.open(ONE)
    rig.run_plain(ONE)
    rig.open(ONE)
    generation = rig.ask(ONE)
    events = [*rig.step(), *rig.step()]
    assert [event.generation for event in events] == [generation]
    assert rig.told[ONE] == [100, 101]


def test_of_an_error_nothing_is_said_until_somebody_asks() -> None:
    rig = _Rig()
    rig.open(ONE)
    rig.run_plain(ONE)
    rig.executor.fails = True
    rig.run_out()
    rig.executor.fails = False
    rig.ask(ONE)
    assert [type(event) for event in rig.step()] == [Scores]
    rig.run_out()
    rig.executor.fails = True
    rig.ask(ONE, other_token=300)
    assert [type(event) for event in rig.step()] == [SessionFailed]


def test_it_can_be_switched_off() -> None:
    rig = _Rig(lookahead=False)
    rig.open(ONE)
    rig.run_plain(ONE)
    assert not rig.core.has_work
    assert rig.used == (0, 0)


def test_steps_follow_each_other_without_a_pause_before_they_are_asked_for() -> None:
    rig = _Rig()
    rig.executor.follows = True
    rig.open(ONE, OTHER)
    rig.run_plain(ONE, OTHER, num_steps=2)
    num_forwards = len(rig.executor.forwards)
    rig.core.step()
    assert len(rig.executor.forwards) == num_forwards + 1
    rig.core.step()
    rig.core.step()
    assert len(rig.executor.forwards) == num_forwards + 1  # that would be a third
    rig.ask(ONE)
    rig.ask(OTHER)
    assert len(rig.step()) == 2
    rig.run_plain(ONE, OTHER, num_steps=20)
    rig.run_out()
    assert rig.told[ONE][-1] == 100 + len(rig.told[ONE]) - 1
    assert rig.told[OTHER][-1] == 200 + len(rig.told[OTHER]) - 1
    assert rig.used == (2 * 21, 0)
    assert rig.executor.forwards[1:] == [[ONE, OTHER]] * 24


def test_a_step_that_followed_over_the_wrong_token_is_as_if_it_had_not_been() -> None:
    rig = _Rig()
    rig.executor.follows = rig.executor.is_wrong = True
    rig.open(ONE)
    rig.run_plain(ONE, num_steps=2)
    rig.run_plain(ONE, num_steps=9)
    assert rig.told[ONE] == [100 + i for i in range(12)]
    assert rig.used[1] >= 9


def test_who_ends_or_asks_for_something_else_while_a_step_follows_leaves_the_others_alone() -> None:
    rig = _Rig()
    rig.executor.follows = True
    rig.open(ONE, OTHER)
    rig.run_plain(ONE, OTHER, num_steps=2)
    rig.ask(ONE)
    rig.ask(OTHER)
    rig.core.handle(1, [Release(ONE, 1000)])
    assert [event.session for event in rig.step()] == [OTHER]
    generation = rig.ask(OTHER, other_token=500)
    events = [*rig.step(), *rig.step(), *rig.step()]
    assert [event.generation for event in events] == [generation]
    assert rig.told[OTHER][-2:] == [500, 501]


def test_nobody_is_followed_past_somebody_who_waits() -> None:
    rig = _Rig()
    rig.executor.follows = True
    rig.open(ONE, OTHER)
    rig.run_plain(ONE, num_steps=2)
    num_forwards = len(rig.executor.forwards)
    rig.ask(OTHER)
    rig.ask(ONE)
    assert len(rig.executor.forwards) == num_forwards
    rig.step()
    assert sorted(rig.executor.forwards[-1]) == [ONE, OTHER]


def _waits(rig: _Rig) -> None:
    rig.run_plain(ONE, OTHER, num_steps=1)
    rig.ask(OTHER)
    rig.core.step()
    rig.ask(ONE)


def _is_under_way(rig: _Rig) -> None:
    rig.run_plain(ONE, OTHER, num_steps=1)
    rig.ask(ONE)
    rig.ask(OTHER)
    rig.core.step()


def _is_foreseen(rig: _Rig) -> None:
    rig.run_plain(ONE, OTHER, num_steps=2)


def _is_followed(rig: _Rig) -> None:
    rig.executor.follows = True
    rig.run_plain(ONE, OTHER, num_steps=2)
    rig.core.step()
    assert rig.executor.forwards[-2:] == [[ONE, OTHER]] * 2


def _is_found_once(rig: _Rig) -> None:
    rig.run_plain(ONE, OTHER, num_steps=2)
    assert rig.step() == []


def _is_found_once_and_followed(rig: _Rig) -> None:
    _is_followed(rig)
    assert rig.step() == []


def _is_found_twice(rig: _Rig) -> None:
    rig.run_plain(ONE, OTHER, num_steps=2)
    rig.run_out()


def _is_asked_for_and_followed(rig: _Rig) -> None:
    _is_followed(rig)
    rig.ask(ONE)


def _releases(rig: _Rig) -> int | None:
    rig.core.handle(1, [Release(ONE, 1000)])
    return None


def _opens_anew(rig: _Rig) -> int | None:
    rig.open(ONE)
    return rig.ask(ONE)


def _opens_anew_twice(rig: _Rig) -> int | None:
    rig.open(ONE)
    rig.ask(ONE)
    return _opens_anew(rig)


def _asks_for_something_bad(rig: _Rig) -> int | None:
    return rig.ask(ONE, other_token=BAD_TOKEN)


def _asks_about_another_text(rig: _Rig) -> int | None:
    rig.told[ONE][0] += 1
    return rig.ask(ONE)


def _asks_for_something_else(rig: _Rig) -> int | None:
    return rig.ask(ONE, other_token=500)


def _asks_for_something_else_and_then_with_drafts(rig: _Rig) -> int | None:
    rig.ask(ONE, other_token=500)
    return rig.ask(ONE, drafts=(501, 502), other_token=500)


def _asks_for_something_else_and_then_as_foreseen(rig: _Rig) -> int | None:
    foreseen = rig.told[ONE][-1]
    rig.ask(ONE, other_token=500)
    return rig.ask(ONE, other_token=foreseen)


def _asks_for_something_else_and_releases(rig: _Rig) -> int | None:
    rig.ask(ONE, other_token=500)
    return _releases(rig)


STATES = (
    _waits, _is_under_way, _is_foreseen, _is_followed, _is_found_once, _is_found_once_and_followed, _is_found_twice,
    _is_asked_for_and_followed,
)  # fmt: skip
TURNS = (
    _releases, _opens_anew, _opens_anew_twice, _asks_for_something_bad, _asks_about_another_text,
    _asks_for_something_else, _asks_for_something_else_and_then_with_drafts,
    _asks_for_something_else_and_then_as_foreseen, _asks_for_something_else_and_releases,
)  # fmt: skip


CANNOT_BE_CUT_SHORT = {_is_under_way, _is_asked_for_and_followed}
"""Requests during which the first request is under way."""
ENDS = {_releases, _opens_anew, _opens_anew_twice, _asks_for_something_else_and_releases}


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("state", STATES)
def test_in_whatever_state_a_session_changes_its_mind_it_has_what_it_asked_for_last(
    state: Callable[[_Rig], None], turn: Callable[[_Rig], int | None]
) -> None:
    rig = _Rig()
    rig.open(ONE, OTHER)
    state(rig)
    generation = turn(rig)
    asked = list(rig.told[ONE])
    events = rig.drain(ONE)
    newest = [event for event in events if event.generation == generation]
    assert len(newest) == (generation is not None)
    assert len(events) - len(newest) <= (state in CANNOT_BE_CUT_SHORT and turn not in ENDS)
    if turn is _asks_for_something_bad:
        assert isinstance(newest[0], SessionFailed)
    elif turn is _asks_about_another_text:
        assert isinstance(newest[0], SessionLost)
    elif newest:
        assert isinstance(newest[0], Scores)
        assert newest[0].base_length == len(asked)
        assert isinstance(newest[0].form, TokenScores)
        assert newest[0].form.token_ids[0] == asked[-1] + 1
    rig.core.handle(1, [Release(ONE, 1000)])
    for _ in range(4):
        rig.ask(OTHER)
        rig.drain(OTHER)
    assert len(rig.told[OTHER]) > 5
    assert rig.told[OTHER] == [200 + i for i in range(len(rig.told[OTHER]))]
    rig.core.drop_link(1)
    rig.run_out()
    assert sum(rig.used) == rig.executor.num_prepared
    assert rig.core.num_sessions == 0
    assert rig.core.scheduler.queue.is_empty


def test_who_is_to_be_served_with_something_else_is_not_followed() -> None:
    rig = _Rig()
    rig.executor.follows = True
    rig.open(ONE)
    rig.run_plain(ONE, num_steps=2)
    num_forwards = len(rig.executor.forwards)
    rig.ask(ONE, other_token=500)
    assert rig.core.step() == []
    assert len(rig.executor.forwards) == num_forwards


def test_a_step_is_queued_once_somebody_has_asked_for_one_that_is_found() -> None:
    rig = _Rig()
    rig.executor.follows = True
    rig.open(ONE)
    _is_found_once_and_followed_alone(rig)
    num_forwards, num_ended = len(rig.executor.forwards), rig.executor.num_ended
    rig.ask(ONE)
    assert len(rig.step()) == 1
    assert len(rig.executor.forwards) == num_forwards
    rig.core.step()
    assert (len(rig.executor.forwards), rig.executor.num_ended) == (num_forwards + 1, num_ended)


def _is_found_once_and_followed_alone(rig: _Rig) -> None:
    rig.run_plain(ONE, num_steps=2)
    rig.core.step()
    rig.executor.is_done = False
    assert rig.step() == []
    rig.core.step()  # two are ahead: no third is queued


def test_what_has_come_for_a_link_that_was_dropped_since_is_forgotten() -> None:
    rig = _Rig()
    rig.open(ONE)
    rig.run_plain(ONE, num_steps=2)
    rig.ask(ONE, other_token=500)
    rig.core.drop_link(1)
    rig.run_out()
    assert rig.core.stats.num_lost == 0


def _ask_with_credit(rig: _Rig, session: int, num_steps: int, *, follows: int = 0) -> None:
    """The next plain step, and credit for more after it; ``follows``: so much older than the item is what it names."""
    rig.num_plain[session] = 0
    generation = rig.ask(session)
    rig.core.handle(1, [Prepare(session, generation - follows, num_steps)])


def _run_until_answered(rig: _Rig) -> None:
    while not rig.step():
        pass


def test_nothing_is_computed_before_it_is_asked_for_without_credit() -> None:
    rig = _Rig()
    rig.open(ONE)
    for _ in range(4):
        rig.num_plain.clear()
        rig.ask(ONE)
        _run_until_answered(rig)
        assert not rig.core.has_work
    assert rig.used == (0, 0)


@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_so_many_steps_as_there_is_credit_for_are_computed_and_no_more(num_steps: int, follows: bool) -> None:
    rig = _Rig()
    rig.executor.follows = follows
    rig.open(ONE)
    _ask_with_credit(rig, ONE, num_steps)
    _run_until_answered(rig)
    rig.run_out()
    for _ in range(num_steps):
        assert len(rig.executor.forwards) > len(rig.told[ONE]) - 1  # it was computed before it is asked for
        rig.num_plain.clear()
        rig.ask(ONE)
        _run_until_answered(rig)
        rig.run_out()
    assert rig.used == (num_steps, 0)
    assert len(rig.executor.forwards) == 1 + num_steps
    assert rig.told[ONE] == [100 + i for i in range(num_steps + 2)]


@pytest.mark.parametrize("follows", [1, -1])
def test_credit_that_follows_another_item_than_the_newest_is_ignored(follows: int) -> None:
    rig = _Rig()
    rig.open(ONE)
    _ask_with_credit(rig, ONE, 5, follows=follows)
    _run_until_answered(rig)
    assert not rig.core.has_work


def test_credit_for_a_session_that_is_not_open_is_ignored() -> None:
    rig = _Rig()
    rig.core.handle(1, [Prepare(ONE, 1, 5)])
    assert not rig.core.has_work


def test_a_step_that_does_not_continue_what_was_prepared_ends_the_credit() -> None:
    rig = _Rig()
    rig.open(ONE)
    _ask_with_credit(rig, ONE, 50)
    _run_until_answered(rig)
    rig.run_out()
    rig.num_plain.clear()
    rig.ask(ONE, other_token=500)
    _run_until_answered(rig)
    assert rig.told[ONE][-2:] == [500, 501]
    assert not rig.core.has_work
    assert rig.used == (0, 2)


def test_a_step_with_drafts_ends_the_credit() -> None:
    rig = _Rig()
    rig.open(ONE)
    _ask_with_credit(rig, ONE, 50)
    _run_until_answered(rig)
    rig.ask(ONE, drafts=(102,))
    _run_until_answered(rig)
    assert not rig.core.has_work
    del rig.told[ONE][3:]
    rig.num_plain.clear()
    rig.ask(ONE)
    _run_until_answered(rig)
    assert not rig.core.has_work


def test_new_credit_counts_from_the_newest_item_whatever_was_computed_already() -> None:
    rig = _Rig()
    rig.open(ONE)
    _ask_with_credit(rig, ONE, 2)
    _run_until_answered(rig)
    rig.run_out()
    assert len(rig.executor.forwards) == 3
    _ask_with_credit(rig, ONE, 2)  # one of the two is computed, and one more is
    _run_until_answered(rig)
    rig.run_out()
    assert len(rig.executor.forwards) == 4


def test_a_prompt_may_be_followed_by_credit_and_an_opened_session_has_none() -> None:
    rig = _Rig()
    rig.open(ONE)
    rig.core.handle(1, [Score(ONE, 2, 0, EMPTY_PREFIX, (100, 101, 102)), Prepare(ONE, 2, 1)])
    rig.generation = 2
    rig.told[ONE] = [100, 101, 102]
    _run_until_answered(rig)
    rig.run_out()
    assert rig.executor.forwards == [[ONE], [ONE]]
    rig.open(ONE)
    rig.num_plain.clear()
    rig.ask(ONE)
    _run_until_answered(rig)
    assert not rig.core.has_work


def test_events_that_answer_no_item_leave_with_the_next_message() -> None:
    rig = _Rig()
    pushed = Scores(OTHER, 7, 3, TokenScores((9,)))
    rig.executor.pushed = [(1, pushed)]
    rig.open(ONE)
    rig.ask(ONE)
    messages: list[tuple[int, tuple[object, ...]]] = []
    while rig.core.has_work:
        messages += [(link_id, batch.events) for link_id, batch in rig.core.step()]
    events = [event for _, events in messages for event in events if not isinstance(event, Opened)]
    assert [type(event) for event in events] == [Scores, Scores]
    assert events[1] is pushed
    assert messages[-1][0] == 1
