"""Steps that a target begins by itself: they save time, and their scores are those of the text that is asked for."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from outrider.batched import U4, U8, ScoreBatch
from outrider.item_batch import command_batch
from outrider.model_executor.model_runner import ModelRunner
from outrider.ports import Release, Scores, SessionLost
from outrider.prefix_hash import prefix_hash
from outrider.proposal_channel.pushes import Pushes, text_hash
from outrider.serving.decode import steps_ahead
from outrider.serving.decode.steps_ahead import StepsAhead
from outrider.serving.engine_core import EngineCore
from outrider.serving.session import Session
from outrider.serving.stats import ServiceStats
from outrider.types import AcceptanceMethod, Grammar, GrammarKind, SamplingParams
from outrider_target.service import build_core
from tests.proposal_channel.test_verdicts import scores
from tests.serving.decode.test_traced import Records, parent
from tests.serving.lookahead.device import CountingExecutor, Runner
from tests.support.core_driver import Driver, open_session, score_item
from tests.support.tiny_models import cached_tiny_model

Core = EngineCore[Any, Any, Any, Any]
VOCABULARY, NUM_PAGES, NUM_SESSIONS, PROMPT, LENGTH, CHANNEL = 200, 400, 4, 9, 90, 3
GREEDY, SAMPLED = SamplingParams(temperature=0.0), SamplingParams(temperature=0.8)


def new_core(family: str = "llama") -> Core:
    runner = ModelRunner.load(
        cached_tiny_model(family, seed=1), dtype="float32", page_size=4, num_pages=NUM_PAGES, max_model_len=LENGTH
    )
    return build_core(runner)


@dataclass
class Text:
    """One session, as its coordinator knows it."""

    number: int
    tokens: list[int]
    generation: int = 1
    goes_on: bool = False
    base: int = 0
    """Tokens on which the last scores build."""


class Sessions:
    """A coordinator of one target."""

    def __init__(self, seed: int, sampling: SamplingParams, family: str = "llama") -> None:
        self.driver, self.chance = Driver(new_core(family)), random.Random(seed)
        self.sampling, self.num_with_drafts = sampling, 0
        """Steps that were begun with what had been pushed."""
        self.driver.core.recorder = self.records = Records()
        self.traced: list[tuple[int, int]] = []
        """Session and generation of each claim that is traced."""
        self.texts = [Text(number, [20 + number] * PROMPT) for number in range(NUM_SESSIONS)]
        self.open(self.texts)

    def open(self, texts: Sequence[Text]) -> None:
        """Open sessions, anew if they have ended."""
        for text in texts:
            text.generation += 1
            self.driver.send(open_session(
                text.number, generation=text.generation, prompt_length=PROMPT, max_length=LENGTH,
                num_token_ids=VOCABULARY, seed=text.number, sampling=self.sampling,
                acceptance_method=AcceptanceMethod.COUPLED,
            ))  # fmt: skip
            text.generation += 1
            self.take(self.driver.run(score_item(text.number, text.generation, text.tokens)))

    def take(self, events: Sequence[Any], drafts: dict[int, tuple[int, ...]] | None = None) -> None:
        """Commit what the scores say."""
        for event in events:
            text = self.texts[event.session]
            if isinstance(event, SessionLost):
                self.open([text])
                continue
            assert isinstance(event, Scores)
            assert (event.generation, event.base_length) == (text.generation, len(text.tokens))
            own, scored = event.form.token_ids, event.draft_token_ids  # type: ignore[union-attr]
            assert drafts is None or scored == drafts[text.number]
            self.num_with_drafts += drafts is None and bool(scored)
            accepted = next((at for at, each in enumerate(scored) if own[at] != each), len(scored))
            text.tokens += own[: accepted + 1]
            text.goes_on, text.base = event.goes_on, event.base_length

    def score_directly(self, texts: Sequence[Text], drafts: Sequence[Sequence[int]]) -> None:
        """Score proposals that came by the channel of a draft that pushes."""
        items = []
        for text, own in zip(texts, drafts, strict=True):
            text.generation += 1
            items.append(
                score_item(text.number, text.generation, text.tokens, own, num_kept_tokens=len(text.tokens) - 1)
            )
        batched = command_batch(items)
        assert isinstance(batched, ScoreBatch)
        self.driver.core.handle(0, (replace(batched, channel=CHANNEL, begins_next=True),))
        self.take(self.until_idle(), {text.number: tuple(own) for text, own in zip(texts, drafts, strict=True)})

    def begin_chains(self, texts: Sequence[Text]) -> None:
        """Step until the target goes on with all of these by itself."""
        for _ in range(3):
            if not all(text.goes_on for text in texts):
                self.score_directly(texts, [[1, 1]] * len(texts))
        assert all(text.goes_on for text in texts)

    def until_idle(self, most: int = 1000) -> list[Any]:
        """Step until nothing is to be done but to wait for pushes."""
        events: list[Any] = []
        while self.driver.core.has_work and (pause_s := self.driver.core.pause_s) < 1 and most:
            if pause_s:  # for sessions that are away
                time.sleep(pause_s)
            else:
                events += self.driver.step()
                most -= 1
        return events

    def push(
        self,
        rows: Sequence[tuple[int, int, Sequence[int]]],
        *,
        other_texts: bool = False,
        steps: Sequence[int] | None = None,
    ) -> None:
        """Session, length of the text before the guess, and the guess with what follows it. ``other_texts``: the draft
        has gone on from texts that end otherwise. ``steps``: tokens on which the steps build beside which the pushes
        were drawn, if these are not the last ones.
        """
        texts = [self.texts[number] for number, _, _ in rows]
        hashes = [
            text_hash(prefix_hash(text.tokens[:length])[1] ^ other_texts, step)
            for text, (_, length, _), step in zip(texts, rows, steps or [text.base for text in texts], strict=True)
        ]
        self.driver.core.begin(0, Pushes(
            np.array([row[0] for row in rows], dtype=U8), np.array([row[1] for row in rows], dtype=np.int64),
            np.array(hashes, dtype=U8),
            np.array([len(row[2]) for row in rows], dtype=U4),
            np.array([token for row in rows for token in row[2]], dtype=U4), CHANNEL,
        ))  # fmt: skip

    def claim(self, texts: Sequence[Text]) -> None:
        """Ask for the steps that were begun, or would have been; those of odd sessions are traced."""
        items = []
        for text in texts:
            text.generation += 1
            item = score_item(text.number, text.generation, text.tokens, num_kept_tokens=len(text.tokens) - 1)
            if text.number % 2:
                item = replace(item, trace_parent=parent(text.number))
                self.traced.append((text.number, text.generation))
            items.append(item)
        self.driver.core.handle(0, (command_batch(items),))

    @property
    def used(self) -> tuple[int, int]:
        stats = self.driver.core.stats
        return stats.num_lookahead_used, stats.num_lookahead_unused


def expected_texts(sampling: SamplingParams, length: int, family: str = "llama") -> list[list[int]]:
    """Texts of the target alone."""
    sessions = Sessions(0, sampling, family)
    while min(len(text.tokens) for text in sessions.texts) < length:
        for text in sessions.texts:
            text.generation += 1
            item = score_item(text.number, text.generation, text.tokens, num_kept_tokens=len(text.tokens) - 1)
            sessions.take(sessions.driver.run(item))
    return [text.tokens for text in sessions.texts]


def guess(chance: random.Random, text: Text, known: Sequence[int], lag: int = 0) -> tuple[int, int, list[int]]:
    """Push after the next verdict on a text, mostly right; with a lag after one before it."""
    base = len(text.tokens) - 1 - lag
    right = list(known[base : base + 4])
    for at in range(1, len(right)):
        right[at] = right[at] if chance.random() < 0.8 else chance.randrange(VOCABULARY)
    if chance.random() < 0.2:
        right[0] = (right[0] + 1) % VOCABULARY
    return text.number, base, right


SAMPLINGS = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "coupled"])


def play(
    sampling: SamplingParams, seed: int, monkeypatch: pytest.MonkeyPatch, family: str = "llama"
) -> tuple[Sessions, list[list[int]]]:
    """Claims of most steps that were begun, some late, with and without pushes; and the texts of the target alone."""
    expected = expected_texts(sampling, LENGTH - 4, family)
    sessions, chance = Sessions(seed, sampling, family), random.Random(seed)
    while texts := [text for text in sessions.texts if len(text.tokens) < LENGTH - 14]:
        claimed = [text for text in texts if text.goes_on and chance.random() < 0.9]
        others = [text for text in texts if text not in claimed]
        is_awaited = chance.random() < 0.8
        monkeypatch.setattr(steps_ahead, "PATIENCE_NS", 10**15 if is_awaited else 0)
        if claimed and chance.random() < 0.3:
            assert not sessions.until_idle(), "nothing that was not asked for is answered"
        if claimed:
            sessions.claim(claimed)
            sessions.take(sessions.until_idle())
        if others:
            sessions.score_directly(others, [expected[text.number][len(text.tokens) :][:3] for text in others])
        due = [text for text in sessions.texts if text.goes_on]
        if due and is_awaited:
            late = [guess(chance, text, expected[text.number], 1) for text in due if chance.random() < 0.2]
            sessions.push([*late, *(guess(chance, text, expected[text.number]) for text in due)])
    return sessions, expected


@SAMPLINGS
@pytest.mark.parametrize(("seed", "family"), [*((seed, "llama") for seed in range(3)), (0, "qwen3_5")])
def test_texts_are_those_of_the_target_alone(
    sampling: SamplingParams, seed: int, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``qwen3_5`` has recurrent layers, whose states go back where draft tokens are not accepted."""
    sessions, expected = play(sampling, seed, monkeypatch, family)
    for text, own in zip(sessions.texts, expected, strict=True):
        assert text.tokens[: LENGTH - 14] == own[: LENGTH - 14]
    assert sessions.used[0] > 10 and sessions.num_with_drafts > 5
    assert sorted((item.session, item.generation) for item in sessions.records.items) == sorted(sessions.traced)
    assert len(sessions.traced) > 10
    sessions.driver.run(*[Release(text.number, text.generation + 2) for text in sessions.texts])
    assert sessions.driver.core.num_pages_free == NUM_PAGES
    executor: Any = sessions.driver.core.executor
    executor.runner.sequences.check_integrity()


def test_another_text_is_scored_as_if_nothing_had_been_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps_ahead, "PATIENCE_NS", 0)
    for change in range(1, 5):
        sessions = Sessions(1, GREEDY)
        text = sessions.texts[0]
        sessions.begin_chains([text])
        assert not sessions.until_idle()
        text.tokens[-1] = (text.tokens[-1] + 40 * change) % VOCABULARY
        changed = list(text.tokens)
        sessions.claim([text])
        sessions.take(sessions.until_idle())
        assert sessions.used == (0, 1) and not text.goes_on
        alone = Sessions(1, GREEDY).driver.one(score_item(0, 9, changed))
        assert text.tokens == [*changed, *alone.form.token_ids]


def test_claims_are_answered_where_their_step_cannot_be_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = Sessions(1, GREEDY)
    monkeypatch.setattr(steps_ahead, "PATIENCE_NS", 10**15)
    sessions.begin_chains(sessions.texts)
    before = [len(text.tokens) for text in sessions.texts]
    monkeypatch.setattr(sessions.driver.core.executor, "takes_batch", lambda _: False)
    sessions.claim(sessions.texts)
    sessions.push([(text.number, len(text.tokens) - 1, [1]) for text in sessions.texts])
    sessions.take(sessions.until_idle())
    assert [len(text.tokens) for text in sessions.texts] == [length + 1 for length in before]
    assert not any(text.goes_on for text in sessions.texts)


def awaiting_a_push(monkeypatch: pytest.MonkeyPatch) -> tuple[Sessions, Text, list[int]]:
    """Sessions of which one waits for its push, with its text and the one that is expected."""
    sessions = Sessions(1, GREEDY)
    text = sessions.texts[0]
    monkeypatch.setattr(steps_ahead, "PATIENCE_NS", 10**15)
    sessions.begin_chains([text])
    sessions.claim([text])
    return sessions, text, expected_texts(GREEDY, LENGTH - 4)[0]


def test_a_push_for_an_earlier_text_is_not_taken_for_the_one_that_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions, text, known = awaiting_a_push(monkeypatch)
    base = len(text.tokens) - 1
    sessions.push([(0, base - 1, known[base - 1 : base + 3])])
    assert not sessions.until_idle()
    sessions.push([(0, base, known[base : base + 4])])
    sessions.take(sessions.until_idle())
    assert sessions.num_with_drafts == 1 and len(text.tokens) == base + 5


def test_a_draft_that_went_on_from_tokens_that_were_rejected_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(steps_ahead, "PATIENCE_NS", 10**15)
    sessions = Sessions(1, GREEDY)
    text = sessions.texts[0]
    sessions.begin_chains([text])
    sessions.claim([text])
    assert not sessions.until_idle()
    sessions.push([(text.number, len(text.tokens) + 1, [1, 1])])
    (answer,) = sessions.until_idle()
    assert not answer.draft_token_ids


@pytest.mark.parametrize("other_texts", [False, True])
def test_a_push_that_continues_another_text_of_this_length_is_not_scored(
    other_texts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions, text, known = awaiting_a_push(monkeypatch)
    base = len(text.tokens) - 1
    sessions.push([(0, base, known[base : base + 4])], other_texts=other_texts)
    sessions.take(sessions.until_idle())
    assert sessions.num_with_drafts == (not other_texts)


def test_a_push_whose_guess_is_wrong_is_not_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft goes on from a token that the text does not have."""
    sessions, text, known = awaiting_a_push(monkeypatch)
    base = len(text.tokens) - 1
    sessions.push([(0, base, [known[base] ^ 1, *known[base + 1 : base + 4]])])
    sessions.take(sessions.until_idle())
    assert not sessions.num_with_drafts and len(text.tokens) == base + 2


def test_a_push_that_was_drawn_beside_an_earlier_step_is_not_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that has followed verdicts since then may hold these tokens no longer, though the text is theirs."""
    sessions, text, known = awaiting_a_push(monkeypatch)
    base = len(text.tokens) - 1
    sessions.push([(0, base, known[base : base + 4])], steps=[text.base - 1])
    sessions.take(sessions.until_idle())
    assert not sessions.num_with_drafts


def test_what_was_pushed_before_proposals_is_not_used_after_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft holds the new proposals by then, and not what it had pushed."""
    sessions = Sessions(1, GREEDY)
    text, known = sessions.texts[0], expected_texts(GREEDY, LENGTH - 4)[0]
    monkeypatch.setattr(steps_ahead, "PATIENCE_NS", 0)
    sessions.score_directly([text], [[1, 1]])  # arrays are a step from the second on
    base = len(text.tokens)
    assert not text.goes_on
    sessions.push([(0, base, known[base : base + 4])], steps=[base])
    wrong = (known[base] + 1) % VOCABULARY
    sessions.score_directly([text], [[wrong, wrong]])
    assert text.goes_on and len(text.tokens) == base + 1
    sessions.claim([text])
    sessions.take(sessions.until_idle())
    assert not sessions.num_with_drafts


def test_a_session_that_is_released_takes_with_it_what_was_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = Sessions(1, GREEDY)
    monkeypatch.setattr(steps_ahead, "PATIENCE_NS", 0)
    sessions.begin_chains(sessions.texts)
    assert not sessions.until_idle()
    sessions.driver.run(*[Release(text.number, text.generation + 1) for text in sessions.texts])
    assert sessions.driver.core.num_pages_free == NUM_PAGES
    assert sessions.used == (0, NUM_SESSIONS)


@pytest.mark.parametrize("is_late", [False, True], ids=["claimed before", "claimed after"])
def test_claims_of_a_step_that_fails_for_one_session_are_answered(
    is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions, expected = Sessions(1, GREEDY), expected_texts(GREEDY, LENGTH - 4)
    monkeypatch.setattr(steps_ahead, "PATIENCE_NS", 10**15)
    sessions.begin_chains(sessions.texts)
    lengths = [len(text.tokens) for text in sessions.texts]
    if not is_late:
        sessions.claim(sessions.texts)
    sessions.push([(text.number, len(text.tokens) - 1, [1]) for text in sessions.texts])
    forward = ModelRunner.forward_batch

    def failing(*args: Any, **kwargs: Any) -> Any:
        logits, states = forward(*args, **kwargs)
        return torch.cat([torch.full_like(logits[:1], torch.nan), logits[1:]]), states

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "forward_batch", failing)
        events = sessions.driver.step()
    if is_late:
        sessions.claim(sessions.texts)
    sessions.take([*events, *sessions.until_idle()])
    for text, own in zip(sessions.texts, expected, strict=True):
        assert text.tokens == own[: len(text.tokens)] and len(text.tokens) == lengths[text.number] + 1


def test_no_more_draft_tokens_are_scored_than_may_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps_ahead, "PATIENCE_NS", 10**15)
    monkeypatch.setattr(steps_ahead, "MAX_DRAFT_LENGTH", 8)
    sessions = Sessions(1, GREEDY)
    text = sessions.texts[0]
    sessions.begin_chains([text])
    sessions.push([(text.number, len(text.tokens) - 1, [text.tokens[-1], *[1] * 9])])
    sessions.claim([text])
    (scores,) = sessions.until_idle()
    assert len(scores.draft_token_ids) == 8


def test_no_more_draft_tokens_are_scored_than_the_text_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps_ahead, "PATIENCE_NS", 10**15)
    sessions = Sessions(1, GREEDY)
    text = sessions.texts[0]
    sessions.begin_chains([text])
    while len(text.tokens) < LENGTH - 3:
        sessions.score_directly([text], [[1]])
    assert text.goes_on
    room = LENGTH - len(text.tokens)
    sessions.push([(text.number, len(text.tokens) - 1, [text.tokens[-1], *[1] * 9])])
    sessions.claim([text])
    (answer,) = sessions.until_idle()
    assert len(answer.draft_token_ids) == room


@pytest.mark.parametrize(
    ("opened", "goes_on"),
    [
        ({}, True),
        ({"max_length": 24}, True),
        ({"max_length": 23}, False),
        ({"eos_token_ids": (7,)}, False),
        ({"eos_token_ids": (5,)}, False),
        ({"eos_token_ids": (6, 8)}, True),
        ({"in_turn": True}, False),
        ({"sampling": replace(GREEDY, grammar=Grammar(GrammarKind.REGEX, "a+"))}, False),
    ],
)
def test_only_sessions_whose_next_step_is_known_go_on(opened: dict[str, Any], *, goes_on: bool) -> None:
    """Text of 20 tokens, after which 5 is accepted, and 7 follows in place of 6."""
    own = open_session(**{"prompt_length": PROMPT, "max_length": LENGTH, "num_token_ids": VOCABULARY, **opened})
    session = Session(0, own, SimpleNamespace(), LENGTH, 1)
    table, ignored = SimpleNamespace(get=lambda *_: session), SimpleNamespace()
    executor: Any = CountingExecutor(Runner(1))  # type: ignore[arg-type]
    parts: list[Any] = [table, executor, ignored, ignored]
    steps = StepsAhead(*parts, stats=ServiceStats(), clock=lambda: 0)
    answers = steps.go_on(0, scores([[5, 7, 8]], [[5, 6]]), CHANNEL)
    assert answers.goes_on is not None and answers.goes_on.tolist() == [goes_on]
    assert steps.is_due is goes_on


def test_two_claims_of_a_step_that_has_ended_are_answered_by_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps_ahead, "PATIENCE_NS", 0)
    sessions, known = Sessions(1, GREEDY), expected_texts(GREEDY, LENGTH - 4)[0]
    text = sessions.texts[0]
    sessions.begin_chains([text])
    assert not sessions.until_idle()
    items = [
        score_item(text.number, generation, text.tokens, num_kept_tokens=len(text.tokens) - 1)
        for generation in (text.generation + 1, text.generation + 2)
    ]
    sessions.driver.core.handle(0, tuple(items))
    text.generation += 2
    sessions.take([event for event in sessions.until_idle() if event.generation == text.generation])
    assert text.tokens == known[: len(text.tokens)] and not text.goes_on
    assert sessions.used[0] == 1


def test_an_overtaken_command_claims_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps_ahead, "PATIENCE_NS", 0)
    sessions = Sessions(1, GREEDY)
    text = sessions.texts[0]
    sessions.begin_chains([text])
    late = score_item(text.number, text.generation - 1, text.tokens, num_kept_tokens=len(text.tokens) - 1)
    sessions.driver.core.handle(0, (late,))
    assert not sessions.until_idle(), "it is answered by nobody"
    sessions.claim([text])
    sessions.take(sessions.until_idle())
    assert text.tokens == expected_texts(GREEDY, LENGTH - 4)[0][: len(text.tokens)]


@pytest.mark.parametrize("is_ended", [False, True])
def test_what_was_pushed_goes_with_its_session(is_ended: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another session of its number and text is not scored with it."""
    monkeypatch.setattr(steps_ahead, "PATIENCE_NS", 10**15)
    sessions, known = Sessions(1, GREEDY), expected_texts(GREEDY, LENGTH - 4)[0]
    text = sessions.texts[0]

    def go_on() -> int:
        sessions.score_directly([text], [[1, 1]])  # arrays are a step from the second on
        base = len(text.tokens)
        sessions.score_directly([text], [known[base : base + 2]])
        assert text.goes_on
        return base + 2

    base = go_on()
    sessions.push([(0, base, known[base : base + 4])])
    if is_ended:
        sessions.driver.core.handle(0, (Release(0, text.generation + 1),))
        text.tokens, text.generation = [20] * PROMPT, text.generation + 1
        sessions.open([text])
        go_on()
        monkeypatch.setattr(steps_ahead, "PATIENCE_NS", 0)
    sessions.claim([text])
    sessions.take(sessions.until_idle())
    assert sessions.num_with_drafts == (not is_ended)


@pytest.mark.parametrize("pushes", [False, True])
def test_a_draft_that_was_too_late_is_waited_for_once_it_pushes_again(
    pushes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps_ahead, "PATIENCE_NS", 0)
    sessions = Sessions(1, GREEDY)
    text = sessions.texts[0]
    sessions.begin_chains([text])
    assert not sessions.until_idle(), "it was begun without draft tokens"
    monkeypatch.setattr(steps_ahead, "PATIENCE_NS", 10**15)
    if pushes:
        sessions.push([(0, len(text.tokens) - 1, [1])])
    sessions.claim([text])
    sessions.take(sessions.until_idle())
    assert text.goes_on
    assert bool(sessions.driver.core.decode.ahead.pause_ns()) is pushes


@pytest.mark.parametrize("patience_ns", [0, 10**15], ids=["computed", "due"])
def test_a_link_that_ends_takes_with_it_what_was_begun(patience_ns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps_ahead, "PATIENCE_NS", patience_ns)
    sessions = Sessions(1, GREEDY)
    sessions.begin_chains(sessions.texts)
    assert not sessions.until_idle()
    core = sessions.driver.core
    assert core.decode.ahead.has_any
    core.drop_link(0)
    assert not core.has_work and not core.decode.ahead.has_any
    assert core.num_pages_free == NUM_PAGES
