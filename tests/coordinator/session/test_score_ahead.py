"""Scores ahead: a target that has the proposals already is asked what the state machines would ask; any other is asked
again, by a newer generation.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from outrider.columns import AnswerColumns, token_scores
from outrider.ports import Extend, Proposal, Score, Scores
from outrider_coordinator.session import steady
from outrider_coordinator.session.drafting_batch import DraftingBatch
from outrider_coordinator.session.drafting_row import DraftingRow
from outrider_coordinator.session.loop import SessionLoop
from outrider_coordinator.session.scoring_batch import ScoringBatch
from outrider_coordinator.session.scoring_row import ScoringRow
from outrider_coordinator.session.service_state import DraftFacts
from outrider_coordinator.session.target_events import scored_draft
from outrider_coordinator.speculation import DraftLengthPolicy
from tests.coordinator.driving import make_plan
from tests.coordinator.session.test_steady_batches import (
    VOCAB,
    answer,
    columns_of,
    commands_of,
    with_text_brought,
)

CHANNEL, LENGTH = 7, 4
EVERY = slice(None), slice(None)


class Sound(random.Random):
    """Answers by it are what was asked for."""

    def random(self) -> float:
        return 0.99

    def getrandbits(self, k: int, /) -> int:
        return super().getrandbits(k)


@dataclass
class Crowd:
    """Sessions whose drafts are asked for proposals, and what was asked."""

    loops: list[SessionLoop]
    asked: list[Any]
    policy: DraftLengthPolicy
    chance: Sound
    is_sampled: bool
    plane: int

    @property
    def generations(self) -> list[int]:
        """That come next."""
        return [loop.commands.next_generation for loop in self.loops]

    def batch(self) -> Any:
        return (DraftingBatch if len(self.loops) > 1 else DraftingRow)(self.loops)

    def scoring(self) -> Any:
        return (ScoringBatch if len(self.loops) > 1 else ScoringRow)(self.loops)

    def answers(self, *, channel: int = CHANNEL) -> tuple[list[Any], AnswerColumns[Any]]:
        """Proposals as asked for, and as columns."""
        events = [answer(self.chance, command, is_sampled=self.is_sampled) for command in self.asked]
        return events, replace(columns_of(events, Proposal), channel=channel)

    def scores(self) -> tuple[list[Any], AnswerColumns[Any]]:
        """Scores as asked for, and as columns, of the draft tokens that they say."""
        events: list[Any] = []
        for command in self.asked:
            scores = answer(self.chance, command, is_sampled=self.is_sampled)
            events.append(replace(scores, draft_token_ids=command.draft_token_ids))
        drafts = np.array([token_id for event in events for token_id in event.draft_token_ids], dtype="<u4")
        return events, replace(columns_of(events, token_scores), draft_token_ids=drafts)

    def take_directly(self) -> None:
        """All proposals come as they were asked for, here and to the target."""
        batch, generations = self.batch(), self.generations
        batch.ahead(CHANNEL, self.plane)
        events, columns = self.answers()
        assert batch.take(*EVERY, columns, self.policy, plane=self.plane, channel=CHANNEL).is_direct
        pairs = zip(self.loops, events, generations, strict=True)
        self.asked = [steady.take_proposal(loop, event, generation) for loop, event, generation in pairs]
        assert all(isinstance(command, Score) for command in self.asked)


def crowd(num_sessions: int, *, temperature: float = 0.0, layers: tuple[int, ...] = ()) -> Crowd:
    policy, chance = DraftLengthPolicy(LENGTH), Sound(num_sessions)
    found = Crowd([], [], policy, chance, temperature > 0, 3 * bool(layers))
    for number in range(num_sessions):
        plan = make_plan(vocab_size=VOCAB, prompt=(1,) * 300, max_tokens=200, temperature=temperature, seed=number)
        loop = SessionLoop(plan, policy, draft=DraftFacts(hidden_state_layers=layers))
        loop.start(number)
        waiting: Any = next(one for one in with_text_brought(loop, commands_of(loop)) if isinstance(one, Score))
        while not isinstance(waiting, Extend) or not DraftingBatch.may_hold(loop):
            event = answer(chance, waiting, is_sampled=found.is_sampled)
            loop.on_draft_event(event) if isinstance(event, Proposal) else loop.on_target_event(event)
            said = with_text_brought(loop, commands_of(loop))
            waiting = [one for one in said if isinstance(one, Extend | Score)][-1]
        found.loops.append(loop)
        found.asked.append(waiting)
    return found


KINDS = [
    pytest.param({"num_sessions": 3}, id="greedy"),
    pytest.param({"num_sessions": 3, "temperature": 1.0}, id="sampled"),
    pytest.param({"num_sessions": 3, "layers": (1, 3)}, id="states"),
    pytest.param({"num_sessions": 1}, id="one greedy"),
    pytest.param({"num_sessions": 1, "temperature": 1.0}, id="one sampled"),
    pytest.param({"num_sessions": 1, "layers": (1, 3)}, id="one with states"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_asked_ahead_is_what_the_state_machines_ask(kind: dict[str, Any]) -> None:
    asked = crowd(**kind)
    batch, generations = asked.batch(), asked.generations
    assert not any(batch.is_ahead(row, generation) for row, generation in enumerate(generations))
    ahead = batch.ahead(CHANNEL, asked.plane)
    assert ahead.channel == CHANNEL
    assert ahead.proposals.tolist() == [command.generation for command in asked.asked]
    assert ahead.columns.generations.tolist() == generations
    assert ahead.columns.draft_lengths.tolist() == [LENGTH] * len(generations)
    assert not ahead.columns.draft_token_ids.size and ahead.columns.support_counts is None
    assert asked.generations == [generation + 1 for generation in generations]
    for row, generation in enumerate(generations):
        found = [each for each in (generation - 1, generation, generation + 1) if batch.is_ahead(row, each)]
        assert found == [generation]

    events, columns = asked.answers()
    assert columns.channel_key == ahead.channel_key
    taken = batch.take(*EVERY, columns, asked.policy, plane=asked.plane, channel=CHANNEL)
    assert taken.is_direct and taken.rows == taken.places == list(range(len(generations)))
    supports = None if columns.supports is None else (columns.supports.counts, columns.supports.token_ids)
    direct = ahead.with_proposals(columns.token_ids, supports)
    assert direct.is_direct and not taken.commands.is_direct
    assert repr(replace(direct, is_direct=False)) == repr(taken.commands)
    for loop, event, command in zip(asked.loops, events, taken.commands.items(), strict=True):
        own = steady.take_proposal(loop, event, command.generation)
        assert repr(own) == repr(replace(command, plane=0))
        assert loop.target.asked == command.generation < loop.commands.next_generation
        assert not commands_of(loop)


def fewer(asked: Crowd, events: list[Any]) -> AnswerColumns[Any]:
    """The columns of proposals of which one has a token less, in ``events`` too."""
    event = events[0]
    evidence = event.evidence
    if evidence is not None:
        num_ids = int(evidence.counts[:-1].sum())
        evidence = type(evidence)(evidence.counts[:-1], evidence.token_ids[:num_ids], evidence.probs[:num_ids])
    events[0] = replace(event, token_ids=event.token_ids[:-1], evidence=evidence)
    return replace(columns_of(events, Proposal), channel=CHANNEL)


CASES = ["fewer tokens", "another channel now", "no channel now", "sent by another", "sent by none", "another for both",
         "no ahead"]  # fmt: skip
OF_MANY, OF_STATES = [KINDS[i] for i in (0, 1, 2)], [KINDS[i] for i in (2, 5)]


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        pytest.param(*kind.values, case, id=f"{kind.id}, {case}")
        for kinds, cases in ((KINDS, CASES), (OF_MANY, ["a part"]), (OF_STATES, ["another plane"]))
        for kind in kinds
        for case in cases
    ],
)
def test_what_is_not_as_it_was_asked_ahead_is_asked_by_a_newer_generation(kind: dict[str, Any], case: str) -> None:
    asked = crowd(**kind)
    batch, generations = asked.batch(), asked.generations
    if case != "no ahead":
        batch.ahead(CHANNEL, asked.plane)
        generations = [generation + 1 for generation in generations]
    events, columns = asked.answers()
    which: Any = EVERY
    more = {"plane": asked.plane, "channel": CHANNEL}
    if case == "fewer tokens":
        columns = fewer(asked, events)
    elif case == "another channel now":
        more["channel"] = CHANNEL + 1
    elif case == "no channel now":
        more["channel"] = 0
    elif case == "sent by another":
        columns = replace(columns, channel=CHANNEL + 1)
    elif case == "another for both":
        columns, more["channel"] = replace(columns, channel=CHANNEL + 1), CHANNEL + 1
    elif case == "sent by none":
        columns = replace(columns, channel=0)
    elif case == "another plane":
        more["plane"] = asked.plane + 1
    elif case == "a part":
        which = np.array([0, 2]), np.array([0, 2])
    taken = batch.take(*which, columns, asked.policy, **more)
    assert not taken.is_direct
    assert len(taken.rows) == (2 if case == "a part" else len(asked.loops))
    for row, command in zip(taken.rows, taken.commands.items(), strict=True):
        assert command.generation == generations[row]
        asked.loops[row].on_draft_event(events[row])
        sent = [one for one in commands_of(asked.loops[row]) if isinstance(one, Score)]
        assert repr(sent) == repr([replace(command, plane=0)])


def test_a_session_that_was_asked_for_something_else_since_has_no_direct_proposal() -> None:
    asked = crowd(1)
    (loop,), (generation,), batch = asked.loops, asked.generations, asked.batch()
    batch.ahead(CHANNEL, 0)
    loop.commands.skip_generation()
    (event,), _ = asked.answers()
    assert steady.take_proposal(loop, event, generation) is None


def test_a_step_without_its_proposal_is_newer_than_what_was_asked_ahead() -> None:
    asked = crowd(1)
    (loop,) = asked.loops
    ahead = asked.batch().ahead(CHANNEL, 0)
    loop.draft_timed_out(loop.step)
    (plain,) = [one for one in commands_of(loop) if isinstance(one, Score)]
    assert plain.generation > ahead.columns.generations.item() and not plain.draft_token_ids
    late = token_scores(loop.commands.session, ahead.columns.generations.item(), loop.tokens.length, (1,) * 5)
    loop.on_target_event(late)
    assert loop.target.asked == plain.generation and not commands_of(loop)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_the_proposals_that_came_here_are_taken(kind: dict[str, Any]) -> None:
    asked = crowd(**kind)
    asked.take_directly()
    _, columns = asked.scores()
    taken = asked.scoring().take(*EVERY, columns, asked.policy, channel=CHANNEL)
    assert taken.rows == list(range(len(asked.loops)))
    assert taken.commands.channel == CHANNEL
    if len(asked.loops) > 1:
        some = np.array([0, 2])
        assert asked.scoring().take(some, some, columns, asked.policy).rows == [0, 2]


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_other_proposals_are_not_taken(kind: dict[str, Any], place: int) -> None:
    asked = crowd(**kind)
    asked.take_directly()
    _, columns = asked.scores()
    assert columns.draft_token_ids is not None
    columns.draft_token_ids[place] = (columns.draft_token_ids[place] + 1) % VOCAB
    assert asked.scoring().take(*EVERY, columns, asked.policy, channel=CHANNEL) is None
    if len(asked.loops) > 1:
        others = np.array([1, 2] if place == 0 else [0, 1])
        assert asked.scoring().take(others, others, columns, asked.policy).rows == others.tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_state_machine_asks_again_for_scores_of_other_proposals(temperature: float) -> None:
    asked = crowd(1, temperature=temperature)
    asked.take_directly()
    (loop,), (command,), length = asked.loops, asked.asked, asked.loops[0].tokens.length
    (event,), _ = asked.scores()
    other = replace(event, draft_token_ids=(*command.draft_token_ids[:-1], (command.draft_token_ids[-1] + 1) % VOCAB))
    for wrong in (other, replace(event, draft_token_ids=command.draft_token_ids[:-1])):
        assert scored_draft(loop, wrong) is None
    assert scored_draft(loop, event) is not None
    loop.on_target_event(other)
    (again,) = commands_of(loop)
    assert isinstance(again, Score) and again.generation > command.generation
    assert (again.draft_token_ids, repr(again.support)) == (command.draft_token_ids, repr(command.support))
    assert (loop.tokens.length, loop.spec_stats.num_bad_evidence) == (length, 1)
    loop.on_target_event(event)
    assert not commands_of(loop) and loop.tokens.length == length, "those were of the earlier generation"
    scores = answer(asked.chance, again, is_sampled=temperature > 0)
    assert isinstance(scores, Scores)
    loop.on_target_event(scores)
    assert loop.tokens.length > length
    assert any(isinstance(one, Extend) for one in commands_of(loop))
