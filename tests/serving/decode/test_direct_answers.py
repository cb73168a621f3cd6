"""Answers of decode batches that have to do with proposal channels: proposals name the one by which they are to go,
and scores what they are of, also where their batch is split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from outrider.batched import AnswerBatch
from outrider.benchmarks.step.stand_in import VOCAB_SIZE
from outrider.ports import EventBatch, Extend, ItemTiming, Proposal, Release, Score, Scores
from outrider.prefix_hash import prefix_hash
from outrider.serving.decode.step import joined
from outrider.transport.convert.commands import (
    draft_commands_from_proto,
    draft_commands_to_proto,
    target_commands_from_proto,
    target_commands_to_proto,
)
from outrider.types import AcceptanceMethod, SamplingParams, Support
from tests.serving.decode.test_twins import NUM_TOKEN_IDS, draft_core, target_core
from tests.serving.decode.twins import Switch
from tests.support.core_driver import open_session

NUM_SESSIONS, PROMPT_LENGTH, NUM_DRAFTS, CHANNEL = 4, 9, 3, 7


class Caller:
    """Sessions of one service that are all asked the same, as arrays."""

    def __init__(self, role: str, *, temperature: float = 0.0, takes_batch: bool = True) -> None:
        self.role, self.switch, self._temperature = role, Switch(), temperature
        if role == "draft":
            self.core, self.executor = draft_core(self.switch, takes_batch=takes_batch)
        else:
            self.core, self.executor = target_core(self.switch, takes_batch=takes_batch, num_pages=600)
        self.batches: list[EventBatch[Any]] = []
        self._generation = 0
        self._texts = [[(7 * n + i) % 250 + 1 for i in range(PROMPT_LENGTH)] for n in range(NUM_SESSIONS)]
        self._held = [0] * NUM_SESSIONS
        self._link_id = 0
        self.send(*(self._open(n) for n in range(NUM_SESSIONS)))

    def _open(self, n: int) -> Any:
        return open_session(
            n, prompt_length=PROMPT_LENGTH, max_length=300, generation=self.next_generation(), seed=n,
            num_token_ids=VOCAB_SIZE if self.role == "draft" else NUM_TOKEN_IDS,
            sampling=SamplingParams(temperature=self._temperature), acceptance_method=AcceptanceMethod.REJECTION,
        )  # fmt: skip

    def next_generation(self) -> int:
        self._generation += 1
        return self._generation

    def items(self) -> list[Any]:
        """Next item of each session."""
        found = []
        for n, (text, held) in enumerate(zip(self._texts, self._held, strict=True)):
            kept = min(held, len(text) - 1)
            head: Any = n, self.next_generation(), kept, prefix_hash(text[:kept]), tuple(text[kept:])
            make: Any = Extend
            found.append(make(*head, NUM_DRAFTS) if self.role == "draft" else self._score(head))
        return found

    def _score(self, head: tuple[Any, ...]) -> Any:
        make: Any = Score
        drafts = tuple((head[1] + i) % 250 for i in range(NUM_DRAFTS))
        if not self._temperature:
            return make(*head, drafts)
        ids = np.array([each for token_id in drafts for each in (token_id, token_id + 1)], dtype=np.int32)
        return make(*head, drafts, Support(np.full(NUM_DRAFTS, 2, dtype=np.int32), ids))

    def batched(self, items: Sequence[Any]) -> Any:
        """The items as they are read from a message."""
        if self.role == "draft":
            (found,) = draft_commands_from_proto(draft_commands_to_proto(items))
        else:
            (found,) = target_commands_from_proto(target_commands_to_proto(items))
        return found

    def send(self, *commands: Any) -> None:
        self.core.handle(self._link_id, commands)

    def step(self) -> None:
        self.switch.now_ns += 1_000_000
        for _, batch in self.core.step():
            self.batches.append(batch)
        self.core.post_step()

    def run(self) -> None:
        """Run until all is answered."""
        self.batches.clear()
        while self.core.has_work:
            self.step()

    def take(self) -> None:
        """Go on from the answers: one draft token is kept, and one follows."""
        for batch in self.batches:
            events = [*batch.events, *(event for each in batch.batched for event in each.events(range(NUM_SESSIONS)))]
            for event in events:
                if isinstance(event, Proposal | Scores):
                    self._held[event.session] = len(self._texts[event.session])
                    self._texts[event.session].append(5)

    def postprocess(self) -> None:
        """Two rounds, after which the sessions are steady."""
        for _ in range(2):
            self.send(self.batched(self.items()))
            self.run()
            self.take()

    def answered(self) -> tuple[list[AnswerBatch[Any]], list[Any]]:
        """Columns, and events one by one."""
        events = [event for batch in self.batches for event in batch.events if isinstance(event, Proposal | Scores)]
        return [batched for batch in self.batches for batched in batch.batched], events

    def num_whole(self) -> int:
        """Steps of arrays that were begun."""
        found: int = type(self.executor).num_columns
        return found

    def run_released(self, *commands: Any) -> None:
        """The first session is released while the step of all runs."""
        num_whole = self.num_whole()
        self.send(*commands)
        self.switch.is_on = False
        self.step()
        assert self.num_whole() == num_whole + 1
        self.send(Release(0, self.next_generation()))
        self.switch.is_on = True
        self.run()


def of_channel(caller: Caller) -> tuple[list[Any], Any]:
    """Next items, and the same as arrays whose proposals go by the channel."""
    items = caller.items()
    return items, replace(caller.batched(items), channel=CHANNEL)


def check_proposals(answers: AnswerBatch[Any], items: Sequence[Any]) -> None:
    """Proposals answer these items, and each is timed."""
    assert answers.channel == CHANNEL
    heads = list(zip(answers.sessions.tolist(), answers.generations.tolist(), strict=True))
    assert heads == [(item.session, item.generation) for item in items]
    events = list(answers.events(range(len(items))))
    for event, item in zip(events, items, strict=True):
        assert isinstance(event, Proposal) and len(event.token_ids) == NUM_DRAFTS
        assert event.base_length == item.num_kept_tokens + len(item.token_ids)
    assert all(isinstance(timing, ItemTiming) for timing in answers.timings(range(len(items))))


def test_proposals_of_a_whole_step_go_by_the_channel_of_what_asked_for_them() -> None:
    caller = Caller("draft")
    caller.postprocess()
    num_whole, (items, batched) = caller.num_whole(), of_channel(caller)
    caller.send(batched)
    caller.run()
    assert caller.num_whole() == num_whole + 1
    (answers,), events = caller.answered()
    check_proposals(answers, items)
    assert not events
    caller.take()
    caller.send(caller.batched(caller.items()))
    caller.run()
    (answers,), _ = caller.answered()
    assert answers.channel == 0


@pytest.mark.parametrize("takes_batch", [True, False])
def test_proposals_of_sessions_that_are_not_steady_go_by_it_too(*, takes_batch: bool) -> None:
    caller = Caller("draft", takes_batch=takes_batch)
    num_whole, (items, batched) = caller.num_whole(), of_channel(caller)
    caller.send(batched)
    caller.run()
    assert caller.num_whole() == num_whole
    (answers,), events = caller.answered()
    check_proposals(answers, items)
    assert not events


def test_proposals_of_a_step_that_was_split_go_by_it_too() -> None:
    caller = Caller("draft")
    caller.postprocess()
    items, batched = of_channel(caller)
    caller.run_released(batched)
    (answers,), events = caller.answered()
    check_proposals(answers, items[1:])
    assert not events


def test_proposals_that_go_by_different_channels_go_by_none() -> None:
    caller = Caller("draft")
    caller.postprocess()
    num_whole, items = caller.num_whole(), caller.items()
    parts = [replace(caller.batched(part), channel=each) for part, each in ((items[:2], 7), (items[2:], 8))]
    caller.send(*parts)
    caller.run()
    assert caller.num_whole() == num_whole + 1
    (answers,), _ = caller.answered()
    assert answers.channel == 0 and answers.sessions.tolist() == [0, 1, 2, 3]


def test_proposals_of_items_that_go_by_different_channels_go_by_none() -> None:
    caller = Caller("draft", takes_batch=False)
    items = caller.items()
    caller.send(*(replace(caller.batched(part), channel=each) for part, each in ((items[:2], 7), (items[2:], 8))))
    caller.run()
    answers, events = caller.answered()
    assert not answers and sorted(event.session for event in events) == [0, 1, 2, 3]


@pytest.mark.parametrize("is_first", [True, False])
def test_proposals_beside_one_that_goes_by_none_go_by_none(*, is_first: bool) -> None:
    caller = Caller("draft")
    caller.postprocess()
    items = caller.items()
    place = 0 if is_first else 3
    single = replace(items.pop(place), trace_parent="00-" + "1" * 32 + "-" + "2" * 16 + "-01")
    rest = replace(caller.batched(items), channel=CHANNEL)
    caller.send(*([single, rest] if is_first else [rest, single]))
    caller.run()
    answers, events = caller.answered()
    assert not any(each.channel for each in answers)
    assert sorted(event.session for event in events) == [0, 1, 2, 3]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_scores_of_a_whole_step_say_which_drafts_came_directly(temperature: float) -> None:
    caller = Caller("target", temperature=temperature)
    caller.postprocess()
    for is_direct in (True, False):
        num_whole, items = caller.num_whole(), caller.items()
        caller.send(replace(caller.batched(items), channel=int(is_direct)))
        caller.run()
        assert caller.num_whole() == num_whole + 1
        (answers,), events = caller.answered()
        assert not events
        found = {event.session: event.draft_token_ids for event in answers.events(range(NUM_SESSIONS))}
        assert found == {item.session: item.draft_token_ids if is_direct else () for item in items}
        caller.take()


@pytest.mark.parametrize("is_direct", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_scores_of_a_step_that_was_split_say_it_each(temperature: float, *, is_direct: bool) -> None:
    caller = Caller("target", temperature=temperature)
    caller.postprocess()
    items = caller.items()
    caller.run_released(replace(caller.batched(items), channel=int(is_direct)))
    answers, events = caller.answered()
    assert not answers
    found = {event.session: event.draft_token_ids for event in events}
    assert found == {item.session: item.draft_token_ids if is_direct else () for item in items[1:]}


@pytest.mark.parametrize("is_direct", [True, False])
@pytest.mark.parametrize("takes_batch", [True, False])
def test_scores_of_sessions_that_are_not_steady_say_it_each(*, takes_batch: bool, is_direct: bool) -> None:
    caller = Caller("target", takes_batch=takes_batch)
    items = caller.items()
    caller.send(replace(caller.batched(items), channel=int(is_direct)))
    caller.run()
    _, events = caller.answered()
    found = {event.session: event.draft_token_ids for event in events}
    assert found == {item.session: item.draft_token_ids if is_direct else () for item in items}


def test_columns_of_different_channels_are_joined_without_one() -> None:
    caller = Caller("draft")
    items = caller.items()
    first, second = caller.batched(items[:2]), caller.batched(items[2:])
    for channels, expected in (((7, 7), 7), ((7, 8), 0), ((7, 0), 0), ((0, 7), 0), ((0, 0), 0)):
        parts = [replace(part, channel=channel) for part, channel in zip((first, second), channels, strict=True)]
        both = joined(parts)
        assert both is not None and both.sessions.tolist() == [0, 1, 2, 3]
        assert getattr(both, "channel") == expected  # noqa: B009 - of one kind of arrays


def test_scores_that_came_directly_are_joined_with_no_others() -> None:
    caller = Caller("target")
    items = caller.items()
    first, second = caller.batched(items[:2]), caller.batched(items[2:])
    direct: Any = replace(first, channel=1)
    assert id(joined([direct])) == id(direct)
    for others in ([second], [replace(second, channel=1)]):
        assert joined([direct, *others]) is None
        assert joined([*others, direct]) is None
    assert joined([first, second]) is not None
