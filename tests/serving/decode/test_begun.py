"""Proposals that are begun at a target's verdict: the same as those of a draft that waits for its coordinator."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from outrider.batched import U4, U8, AnswerBatch
from outrider.benchmarks.step.stand_in import StandInExecutor, follow, new_session_registry, propose
from outrider.errors import InvalidRequestError
from outrider.item_batch import command_batch
from outrider.model_executor.model_runner import ModelRunner
from outrider.ports import Extend, Proposal, Release, SessionLost
from outrider.proposal_channel.verdicts import Verdicts
from outrider.serving.decode import begun
from outrider.serving.decode.begun import ShortenedForward, asks_for_same
from outrider.serving.engine_core import EngineCore
from outrider.serving.executor import ExecutorOutput, References
from outrider.types import AcceptanceMethod, SamplingParams
from outrider_draft.proposers.draft_model import ModelProposer
from outrider_draft.service import build_model_core
from tests.serving.decode.test_twins import DrawnByForwards, drawn_by_forwards
from tests.support.core_driver import Driver, extend_item, open_session
from tests.support.tiny_models import cached_tiny_model

Core = EngineCore[Any, Any, Any, Any]
VOCABULARY, NUM_PAGES, NUM_SESSIONS, PROMPT, LENGTH, END = 200, 400, 5, 9, 120, 13


class Following(StandInExecutor[Any, Any]):
    """A draft whose steps are arrays, and which tells how many it has begun."""

    num_begun = 0

    def follows_verdicts(self, session: Any) -> bool:
        return True

    def matches(self, item: Extend, prepared: Extend) -> bool:
        return asks_for_same(item, prepared)

    def start_step(self, step: Any, batch: Any = ()) -> Any:
        self.num_begun += not step.is_asked
        return super().start_step(step, batch)


@dataclass(frozen=True)
class Running:
    """A forward that ends when it is waited for, unless nothing has asked for it."""

    forward: Any
    step: Any

    def is_done(self) -> bool:
        return bool(self.step.is_asked)

    def finish(self) -> Any:
        return self.forward.finish()


class Slow(Following):
    """A draft whose begun steps run until something comes."""

    def start_step(self, step: Any, batch: Any = ()) -> Any:
        return Running(super().start_step(step, batch), step)

    def answer_batch(self, step: Any) -> Any:
        """Answers of as many tokens as the step was begun for."""
        return super().answer_batch(
            replace(step, batched=replace(step.batched, draft_lengths=step.draft_lengths.astype(U4)))
        )


def stand_in_core(kind: type[Following] = Following, references: References | None = None) -> Core:
    executor = kind(functools.partial(propose, acceptance=0.7), busy_s=0.0, note=lambda _what, _items: None)
    return EngineCore(new_session_registry(), executor, references=references)


def slow_core() -> Core:
    return stand_in_core(Slow)


class SlowProposer(ModelProposer):
    """A draft model with loops whose begun steps run until something comes."""

    def start_step(self, step: Any, batch: Any = ()) -> Any:
        return Running(super().start_step(step, batch), step)


def slow_model_core() -> Core:
    core = model_core(kind=SlowProposer)
    executor: Any = core.executor
    runner, executor.can_loop, executor.max_rows = executor.runner, True, 8
    runner.draft = functools.partial(drawn_by_forwards, runner)
    runner.begin_draft = functools.partial(DrawnByForwards, runner)
    return core


RUNNING = pytest.mark.parametrize("new_core", [slow_core, slow_model_core], ids=["stand-in", "model"])


def model_core(family: str = "llama", kind: type[ModelProposer] = ModelProposer) -> Core:
    runner = ModelRunner.load(
        cached_tiny_model(family, seed=1), dtype="float32", page_size=4, num_pages=NUM_PAGES, max_model_len=LENGTH
    )
    return build_model_core(kind(runner))


CORES = pytest.mark.parametrize(
    "new_core",
    [stand_in_core, slow_core, model_core],
    ids=["arrays", "arrays that run", "single items"],
)


def verdicts(*rows: tuple[int, int, int, int, int, int]) -> Verdicts:
    batched = list(zip(*rows, strict=True))
    return Verdicts(*[np.array(column, dtype=U8 if place < 2 else U4) for place, column in enumerate(batched)])


@dataclass
class Text:
    """One session, as its coordinator knows it."""

    number: int
    tokens: list[int]
    proposal: list[int] = field(default_factory=list)
    held: int = 0
    generation: int = 1
    """Generation of the newest item."""


class Sessions:
    """A coordinator of one draft, which answers its proposals by chance."""

    def __init__(self, core: Core, seed: int, *, sampling: SamplingParams, ending: tuple[int, ...] = ()) -> None:
        self.driver, self.chance, self.length = Driver(core), random.Random(seed), 3
        self.sampling, self.ending = sampling, ending
        self.said: dict[tuple[int, int], list[int]] = {}
        """Proposals, by session and base."""
        self.num_lost = 0
        self.texts = [Text(number, [20 + number] * PROMPT) for number in range(NUM_SESSIONS)]
        self._open(self.texts)

    def ask(self, texts: list[Text]) -> None:
        """Ask for the next proposals, as arrays but for prompts, and take them."""
        items = []
        for text in texts:
            text.generation += 2
            items.append(extend_item(text.number, text.generation, text.tokens, self.length, num_kept_tokens=text.held))
        if texts[0].held:
            batched = command_batch(items)
            self.driver.core.handle(0, (batched,))
            events: list[Any] = []
            while self.driver.core.has_work:
                events += self.driver.step()
        else:
            events = self.driver.run(*items)
        lost = []
        for event in events:
            text = self.texts[event.session]
            if isinstance(event, SessionLost):
                lost.append(text)
                continue
            assert isinstance(event, Proposal) and event.generation == text.generation
            text.proposal = list(event.token_ids)
            self.said[event.session, event.base_length] = text.proposal
        if lost:
            self.num_lost += len(lost)
            self._open(lost)
            self.ask(lost)

    def _open(self, texts: list[Text]) -> None:
        """Open sessions, anew if they were lost."""
        method = AcceptanceMethod.COUPLED if self.sampling.temperature else AcceptanceMethod.REJECTION
        for text in texts:
            text.held, text.generation = 0, text.generation + 1
            opened = open_session(
                text.number, generation=text.generation, prompt_length=PROMPT, max_length=LENGTH,
                num_token_ids=VOCABULARY, seed=text.number, sampling=self.sampling, acceptance_method=method,
                eos_token_ids=self.ending,
            )  # fmt: skip
            self.driver.send(opened)

    def judge(self, text: Text) -> tuple[int, int, int, int, int, int]:
        """Commit some of a proposal and a token after it; the verdict."""
        base, drafts = len(text.tokens), text.proposal
        accepted = self.chance.choice((len(drafts), self.chance.randint(0, len(drafts))))
        after = (follow(text.tokens[-1], 1)[0] + self.chance.randrange(3)) % VOCABULARY
        text.tokens += [*drafts[:accepted], after]
        text.held = base + min(accepted, len(drafts) - 1)
        last = drafts[accepted - 1] if accepted else 0
        return text.number, text.generation + 1, base, accepted, last, after

    def judge_all(self, text: Text) -> tuple[int, int, int, int, int, int]:
        """Commit a whole proposal and a token after it; the verdict."""
        base, drafts, after = len(text.tokens), text.proposal, (text.tokens[-1] * 7 + 3) % VOCABULARY
        text.tokens += [*drafts, after]
        text.held = base + len(drafts) - 1
        return text.number, text.generation + 1, base, len(drafts), drafts[-1], after

    def begin(self, *rows: tuple[int, int, int, int, int, int]) -> None:
        self.driver.core.begin(0, verdicts(*rows))
        while self.driver.core.has_work and not self.driver.core.pause_s:
            assert not self.driver.step(), "nothing that was not asked for is answered"

    @property
    def used(self) -> tuple[int, int]:
        stats = self.driver.core.stats
        return stats.num_lookahead_used, stats.num_lookahead_unused

    def end(self) -> None:
        self.driver.run(*[Release(text.number, text.generation + 2) for text in self.texts])


def play(
    core: Core,
    seed: int,
    send: Callable[[Sessions, list[Any]], None],
    **options: Any,
) -> Sessions:
    """Some rounds, of which ``send`` brings verdicts to the draft."""
    sessions = Sessions(core, seed, **options)
    sessions.ask(sessions.texts)
    for _ in range(20):
        some = sessions.chance.sample(range(NUM_SESSIONS), sessions.chance.randint(1, NUM_SESSIONS))
        chosen = sessions.texts if sessions.chance.random() < 0.6 else [sessions.texts[place] for place in sorted(some)]
        rows = [sessions.judge(text) for text in chosen]
        send(sessions, rows)
        sessions.ask(chosen)
    return sessions


def nothing(sessions: Sessions, rows: list[Any]) -> None:
    """The coordinator alone says how it goes on."""


def everything(sessions: Sessions, rows: list[Any]) -> None:
    sessions.begin(*rows)


def faulty(seed: int) -> Callable[[Sessions, list[Any]], None]:
    """Verdicts of which some are lost, repeated, of the past, or forged."""
    chance, old = random.Random(seed), list[Any]()

    def send(sessions: Sessions, rows: list[Any]) -> None:
        sent = []
        for number, generation, base, accepted, last, after in rows:
            forged = chance.randrange(9)
            if forged == 0:
                continue
            changes = {
                1: (number, generation, base, accepted, last, after + 1),
                2: (number, generation, base, max(0, accepted - 1), last, after),
                3: (number, generation, base, accepted + 1, last, after),
                4: (number, generation, base + 1, accepted, last, after),
                5: (number + 100, generation, base, accepted, last, after),
                6: (number, generation, base, accepted, last, after + 1_000_000),
            }
            sent.append(changes.get(forged, (number, generation, base, accepted, last, after)))
        if old and chance.random() < 0.3:
            sessions.begin(*chance.choice(old))
        if sent:
            old.append(sent)
            for _ in range(chance.choice((1, 1, 2))):
                sessions.begin(*sent)

    return send


GREEDY, COUPLED = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)


@CORES
@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])
def test_what_is_begun_at_a_verdict_is_what_would_have_been_computed(
    new_core: Callable[[], Core], sampling: SamplingParams
) -> None:
    if new_core in (stand_in_core, slow_core) and sampling is COUPLED:
        pytest.skip("the stand-in gives sampled sessions evidence")
    expected = play(new_core(), 3, nothing, sampling=sampling)
    found = play(new_core(), 3, everything, sampling=sampling)
    assert found.said == expected.said
    num_used, num_unused = found.used
    assert num_used > 40 and not num_unused
    assert expected.used == (0, 0)
    found.end()
    assert found.driver.core.num_pages_free in (0, NUM_PAGES)


def test_a_step_of_arrays_is_begun_as_one() -> None:
    core = stand_in_core()
    play(core, 3, everything, sampling=GREEDY)
    executor: Any = core.executor
    assert executor.num_begun > 5


def with_a_step_that_runs(new_core: Callable[[], Core] = slow_core, *, begins: bool = True) -> Sessions:
    sessions = Sessions(new_core(), 1, sampling=GREEDY)
    sessions.ask(sessions.texts)
    for text in sessions.texts:
        sessions.judge(text)
    sessions.ask(sessions.texts)  # as arrays, so that the next step may be arrays
    rows = [sessions.judge(text) for text in sessions.texts]
    if begins:
        sessions.begin(*rows)
    return sessions


@RUNNING
def test_a_step_is_adopted_while_it_runs(new_core: Callable[[], Core]) -> None:
    sessions = with_a_step_that_runs(new_core)
    assert sessions.driver.core.pause_s > 0
    before = sessions.driver.num_steps
    sessions.ask(sessions.texts)
    assert sessions.used == (NUM_SESSIONS, 0)
    assert sessions.driver.num_steps == before + 1, "the step that answers is the one that was begun"


class ReadBatches:
    """References that note which arrays were read for good."""

    def __init__(self) -> None:
        self.read: list[Any] = []

    def fetch_all(self, commands: Any) -> Any:
        return commands

    def fetch_batch(self, batched: Any, *, are_kept: bool = False) -> Any:
        if not are_kept:
            self.read.append(batched)
        return batched

    def fetch(self, item: Any) -> Any:
        return item


def test_a_command_that_adopts_a_step_gives_places_of_states_back() -> None:
    references = ReadBatches()
    sessions = with_a_step_that_runs(functools.partial(stand_in_core, Slow, references))
    references.read.clear()
    sessions.ask(sessions.texts)
    assert sessions.used == (NUM_SESSIONS, 0)
    (read,) = references.read
    assert read.generations.tolist() == [text.generation for text in sessions.texts]


@RUNNING
@pytest.mark.parametrize("length", [1, 2, 4])
def test_a_step_that_runs_is_adopted_whatever_number_of_tokens_is_asked_for(
    new_core: Callable[[], Core], length: int
) -> None:
    sessions, expected = with_a_step_that_runs(new_core), with_a_step_that_runs(new_core, begins=False)
    for each in (sessions, expected):
        each.length = length
        each.ask(each.texts)
    assert sessions.used == (NUM_SESSIONS, 0)
    for text, own in zip(sessions.texts, expected.texts, strict=True):
        assert text.proposal == own.proposal[: min(length, 3)]
        own.proposal = text.proposal
    for turn in range(4):
        rows = list(map(sessions.judge_all, sessions.texts))
        for own in expected.texts:
            expected.judge_all(own)
        sessions.begin(*rows)
        for each in (sessions, expected):
            each.ask(each.texts)
        assert [text.proposal for text in sessions.texts] == [own.proposal for own in expected.texts], turn
        assert all(len(text.proposal) == length for text in sessions.texts)
    assert sessions.used == (5 * NUM_SESSIONS, 0)
    sessions.end()
    assert sessions.driver.core.num_pages_free in (0, NUM_PAGES)


@RUNNING
@pytest.mark.parametrize("ends", ["a session", "the link"])
@pytest.mark.parametrize("length", [2, 3, 4])
def test_sessions_of_an_adopted_step_may_end_before_it_does(
    new_core: Callable[[], Core], length: int, ends: str
) -> None:
    """Steps whose command asks for fewer tokens are included: the sequence to be truncated is gone."""
    sessions = with_a_step_that_runs(new_core)
    core, items = sessions.driver.core, list[Any]()
    for text in sessions.texts:
        text.generation += 2
        items.append(extend_item(text.number, text.generation, text.tokens, length - 1, num_kept_tokens=text.held))
    core.handle(0, (command_batch(items),))
    assert sessions.used == (NUM_SESSIONS, 0)
    if ends == "the link":
        core.drop_link(0)
    else:
        core.handle(0, (Release(sessions.texts[0].number, sessions.texts[0].generation + 1),))
    events: list[Any] = []
    while core.has_work:
        events += sessions.driver.step()
    answered = [] if ends == "the link" else sessions.texts[1:]
    assert [event.session for event in events] == [text.number for text in answered]
    assert all(len(event.token_ids) == min(length - 1, 3) for event in events)
    core.drop_link(0)
    assert core.num_pages_free in (0, NUM_PAGES)


@pytest.mark.parametrize("leaves", ["some", "one after the other"])
def test_other_questions_wait_for_the_step_that_runs(leaves: str) -> None:
    sessions = with_a_step_that_runs()
    first, rest = sessions.texts[:2], sessions.texts[2:]
    sessions.ask(first)
    assert not sessions.driver.core.pause_s
    if leaves == "some":
        sessions.driver.run(*[Release(text.number, text.generation + 2) for text in rest])
        assert sessions.used == (len(first), len(rest))
    else:
        sessions.ask(rest)
        assert sessions.used == (NUM_SESSIONS, 0)


def differences(new_core: Callable[[], Core], seed: int) -> tuple[list[Any], Sessions]:
    """Proposals that are others where verdicts go wrong."""
    found = play(new_core(), seed, faulty(seed), sampling=GREEDY)
    expected = play(new_core(), seed, nothing, sampling=GREEDY)
    return [key for key, answer in expected.said.items() if found.said.get(key) != answer], found


@CORES
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_wrong_late_lost_and_repeated_verdicts_change_no_proposal(new_core: Callable[[], Core], seed: int) -> None:
    changed, found = differences(new_core, seed)
    assert not changed
    assert min(found.used) > 5
    found.end()
    assert found.driver.core.num_pages_free in (0, NUM_PAGES)


@CORES
def test_the_comparison_finds_a_draft_that_does_not_check(
    new_core: Callable[[], Core], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(begun, "continues_text", lambda _item, _begun: True)
    monkeypatch.setattr(ModelProposer, "matches", lambda _self, _item, _begun: True)
    changed, _ = differences(new_core, 1)
    assert changed


@CORES
def test_a_session_that_ends_begins_nothing(new_core: Callable[[], Core]) -> None:
    sessions = Sessions(new_core(), 1, sampling=GREEDY, ending=(END,))
    sessions.ask(sessions.texts)
    rows = [sessions.judge(text) for text in sessions.texts]
    sessions.begin(*[(*row[:5], END) for row in rows])
    sessions.driver.run(*[Release(text.number, text.generation + 2) for text in sessions.texts])
    assert sessions.used == (0, 0)
    assert sessions.driver.core.num_pages_free in (0, NUM_PAGES)


@CORES
@pytest.mark.parametrize(("newer", "longer"), [(-1, 0), (0, -1), (0, 1)])
def test_a_verdict_on_another_item_or_text_begins_nothing(
    new_core: Callable[[], Core], newer: int, longer: int
) -> None:
    sessions = Sessions(new_core(), 1, sampling=GREEDY)
    sessions.ask(sessions.texts)
    rows = [sessions.judge(text) for text in sessions.texts]
    sessions.begin(*[(row[0], row[1] + newer, row[2] + longer, *row[3:]) for row in rows])
    sessions.end()
    assert sessions.used == (0, 0)


def test_a_text_as_long_as_it_may_get_begins_nothing() -> None:
    sessions = Sessions(model_core(), 1, sampling=GREEDY)
    text = sessions.texts[0]
    text.tokens += [7] * (LENGTH - 2 - len(text.tokens))
    sessions.ask([text])
    sessions.begin((0, text.generation + 1, LENGTH - 2, 2, text.proposal[-1], 9))
    sessions.end()
    assert sessions.used == (0, 0)
    assert sessions.driver.core.num_pages_free == NUM_PAGES


def test_a_draft_with_recurrent_layers_begins_nothing() -> None:
    sessions = Sessions(model_core("qwen3_5_text"), 1, sampling=GREEDY)
    sessions.ask(sessions.texts)
    sessions.begin(*[sessions.judge(text) for text in sessions.texts])
    sessions.ask(sessions.texts)
    assert sessions.used == (0, 0) and not sessions.num_lost


@CORES
def test_what_is_never_asked_for_goes_with_its_session(new_core: Callable[[], Core]) -> None:
    sessions = Sessions(new_core(), 1, sampling=GREEDY)
    sessions.ask(sessions.texts)
    sessions.begin(*[sessions.judge(text) for text in sessions.texts])
    sessions.end()
    assert sessions.used == (0, NUM_SESSIONS)
    assert sessions.driver.core.num_pages_free in (0, NUM_PAGES)


@CORES
def test_another_draft_length_is_computed_anew(new_core: Callable[[], Core]) -> None:
    sessions = Sessions(new_core(), 1, sampling=GREEDY)
    sessions.ask(sessions.texts)
    sessions.begin(*[sessions.judge(text) for text in sessions.texts])
    sessions.length = 2
    sessions.ask(sessions.texts)
    assert sessions.used == (0, NUM_SESSIONS)
    assert all(len(text.proposal) == 2 for text in sessions.texts)


@CORES
def test_a_link_that_ends_takes_with_it_what_was_begun(new_core: Callable[[], Core]) -> None:
    sessions = Sessions(new_core(), 1, sampling=GREEDY)
    sessions.ask(sessions.texts)
    sessions.begin(*[sessions.judge(text) for text in sessions.texts])
    core = sessions.driver.core
    core.drop_link(0)
    assert not core.has_work and not core.num_sessions
    assert core.num_pages_free in (0, NUM_PAGES)


@dataclass(frozen=True)
class Ended:
    """A forward that has ended."""

    output: ExecutorOutput[Any]

    def is_done(self) -> bool:
        return True

    def finish(self) -> ExecutorOutput[Any]:
        return self.output


def shortened(output: ExecutorOutput[Any], longest: list[int]) -> tuple[ExecutorOutput[Any], list[int]]:
    """Results of an output, and the lengths that the sequences are truncated to once it is settled."""
    held: list[int] = []
    found = ShortenedForward(Ended(output), np.array(longest, dtype=U4), held.extend).finish()
    if found.postprocess is not None:
        found.postprocess()
    return found, held


def test_answers_are_told_as_far_as_they_were_asked_for() -> None:
    settled: list[bool] = []
    answers: AnswerBatch[Any] = AnswerBatch(
        np.array([4, 2, 9], dtype=U8), np.array([7, 7, 7], dtype=U8), np.array([20, 30, 40], dtype=U4),
        np.array([3, 2, 1], dtype=U4), np.array([1, 2, 3, 4, 5, 6], dtype=U4), (), Proposal,
    )  # fmt: skip
    output: ExecutorOutput[Any] = ExecutorOutput((), 0, batched=answers, postprocess=lambda: settled.append(True))
    found, held = shortened(output, [1, 5, 1])
    assert found.batched is not None
    assert [event.token_ids for event in found.batched.events(range(3))] == [(1,), (4, 5), (6,)]
    assert settled == [True] and held == [20, 31, 40]


def test_answers_one_by_one_are_told_as_far_as_they_were_asked_for() -> None:
    error = InvalidRequestError("token_ids", "out of range")
    proposal = Proposal(4, 7, 20, (1, 2, 3))
    found, held = shortened(ExecutorOutput([proposal, error], 0), [2, 1])
    assert found.results == [replace(proposal, token_ids=(1, 2)), error]
    assert not held


def two_commands(**changes: Any) -> Any:
    items = [Extend(number, 5, 6, (b"", 60 + number), (7,), 4) for number in (1, 2)]
    return command_batch([items[0], replace(items[1], **changes)])


@pytest.mark.parametrize(
    ("changes", "is_same"),
    [
        ({"generation": 6}, True),
        ({"generation": 6, "draft_length": 2}, True),
        ({"generation": 4}, False),
        ({"generation": 5}, False),
        ({"generation": 6, "draft_length": 0}, False),
        ({"generation": 6, "num_kept_tokens": 7}, False),
        ({"generation": 6, "token_ids": (8,)}, False),
        ({"generation": 6, "prefix_hash": (b"", 61)}, False),
        ({"generation": 6, "trace_parent": "00-1"}, True),
    ],
)
def test_a_step_that_runs_is_adopted_by_newer_commands_for_its_texts(changes: dict[str, Any], *, is_same: bool) -> None:
    begun_batch = two_commands()
    batched = two_commands(**changes)
    batched = replace(batched, generations=np.maximum(batched.generations, [6, 0]).astype("<u8"))
    assert begun.continue_same(batched, begun_batch) is is_same
    items, own = list(batched.items()), list(begun_batch.items())
    assert begun.continues_text(items[1], own[1]) is (is_same or not items[1].draft_length)
