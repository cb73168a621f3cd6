"""Scores ahead: a target that has the proposals already is asked what the state machines would ask; any other is asked
again, by a newer generation.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from outrider.batched import AnswerBatch, token_scores
from outrider.ports import Extend, Proposal, Score, Scores, SessionLost
from outrider.prefix_hash import BLOCK_TOKENS, PrefixHasher
from outrider.types import TokenScores
from outrider_coordinator.session import table_columns as col
from outrider_coordinator.session.draft_side import DraftFacts
from outrider_coordinator.session.loop import SessionLoop
from outrider_coordinator.session.prepared_proposals import announce
from outrider_coordinator.session.state import DRAFTING, SessionStatus
from outrider_coordinator.session.table import SessionTable
from outrider_coordinator.session.transitions import PROPOSALS, SCORES, answered, end_wait, prepare
from outrider_coordinator.speculation import DraftLengthPolicy
from tests.coordinator.driving import make_plan
from tests.coordinator.session.test_transitions import (
    VOCAB,
    answer,
    as_batch,
    commands_of,
    with_text_brought,
)

CHANNEL, LENGTH = 7, 4


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

    table: SessionTable

    @property
    def generations(self) -> list[int]:
        """Generations of the next items."""
        return [(loop.row.values.item(col.GENERATION) + 1) for loop in self.loops]

    @property
    def index(self) -> Any:
        """Rows of the sessions."""
        return np.array([loop.row.index for loop in self.loops])

    def batch(self) -> Any:
        """Answers that the sessions wait for."""
        return prepare(self.table, self.index)

    def ahead(self) -> tuple[Any, Any]:
        """Answers that they wait for, and the scores that the target is asked for ahead."""
        announce(self.table, self.index)
        batch = self.batch()
        return batch, batch.announcement(CHANNEL, self.plane)

    def commit(self, taken: Any) -> None:
        """Write the rows."""
        taken.commit()
        for loop in self.loops:
            end_wait(loop)

    def answers(self, *, channel: int = CHANNEL) -> tuple[list[Any], AnswerBatch[Any]]:
        """Proposals as asked for, and as columns."""
        events = [answer(self.chance, command, is_sampled=self.is_sampled) for command in self.asked]
        return events, replace(as_batch(events, Proposal), channel=channel)

    def scores(self) -> tuple[list[Any], AnswerBatch[Any]]:
        """Scores as asked for, and as columns, of the draft tokens that they say."""
        events: list[Any] = []
        for command in self.asked:
            scores = answer(self.chance, command, is_sampled=self.is_sampled)
            events.append(replace(scores, draft_token_ids=command.draft_token_ids))
        drafts = np.array([token_id for event in events for token_id in event.draft_token_ids], dtype="<u4")
        return events, replace(as_batch(events, token_scores), draft_token_ids=drafts)

    def take_directly(self) -> None:
        """All proposals come as they were asked for, here and to the target."""
        batch, ahead = self.ahead()
        _, batched = self.answers()
        taken = batch.take(batched, self.policy, plane=self.plane, is_direct=awaits(ahead, batched))
        assert taken.is_direct
        self.asked = list(taken.commands.items())
        self.commit(taken)


def crowd(
    num_sessions: int, *, temperature: float = 0.0, layers: tuple[int, ...] = (), prompt_length: int = 300
) -> Crowd:
    policy, chance = DraftLengthPolicy(LENGTH), Sound(num_sessions)
    found = Crowd([], [], policy, chance, temperature > 0, 3 * bool(layers), SessionTable())
    for number in range(num_sessions):
        plan = make_plan(
            vocab_size=VOCAB, prompt=(1,) * prompt_length, max_tokens=200, temperature=temperature, seed=number
        )
        loop = SessionLoop(plan, policy, draft=DraftFacts(hidden_state_layers=layers), table=found.table)
        loop.start(number)
        waiting: Any = next(one for one in with_text_brought(loop, commands_of(loop)) if isinstance(one, Score))
        while not isinstance(waiting, Extend) or loop.status is not SessionStatus.DRAFTING:
            event = answer(chance, waiting, is_sampled=found.is_sampled)
            loop.on_draft_event(event) if isinstance(event, Proposal) else loop.on_target_event(event)
            said = with_text_brought(loop, commands_of(loop))
            waiting = [one for one in said if isinstance(one, Extend | Score)][-1]
        found.loops.append(loop)
        found.asked.append(waiting)
    return found


def is_announced(table: SessionTable, session: int, generation: int) -> bool:
    (place,) = table.indices([session])
    return bool(table.values[place, col.ANNOUNCED] == generation and table.values[place, col.STATUS] == DRAFTING)


def awaits(ahead: Any, proposals: AnswerBatch[Any]) -> bool:
    """True if the target scores these proposals as soon as they are there."""
    return ahead.rows_for(proposals.channel_key, proposals.counts) is not None


KINDS = [
    pytest.param({"num_sessions": 3}, id="greedy"),
    pytest.param({"num_sessions": 3, "temperature": 1.0}, id="sampled"),
    pytest.param({"num_sessions": 3, "layers": (1, 3)}, id="states"),
    pytest.param({"num_sessions": 1}, id="one greedy"),
    pytest.param({"num_sessions": 1, "temperature": 1.0}, id="one sampled"),
    pytest.param({"num_sessions": 1, "layers": (1, 3)}, id="one with states"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_asked_ahead_is_what_follows_from_the_proposals(kind: dict[str, Any]) -> None:
    asked = crowd(**kind)
    generations = asked.generations
    numbers = [loop.commands.session for loop in asked.loops]
    assert not any(is_announced(asked.table, *one) for one in zip(numbers, generations, strict=True))
    assert asked.batch().announcement(CHANNEL, asked.plane) is None, "no generations are reserved"
    batch, ahead = asked.ahead()
    assert ahead.channel == CHANNEL
    assert ahead.proposals.tolist() == [command.generation for command in asked.asked]
    assert ahead.batched.generations.tolist() == generations
    assert ahead.batched.draft_lengths.tolist() == [LENGTH] * len(generations)
    assert not ahead.batched.draft_token_ids.size and ahead.batched.support_counts is None
    assert asked.generations == [generation + 1 for generation in generations]
    for number, generation in zip(numbers, generations, strict=True):
        around = (generation - 1, generation, generation + 1)
        assert [each for each in around if is_announced(asked.table, number, each)] == [generation]

    _, batched = asked.answers()
    assert batched.channel_key == ahead.channel_key
    taken = batch.take(batched, asked.policy, plane=asked.plane, is_direct=awaits(ahead, batched))
    assert taken.is_direct
    supports = None if batched.supports is None else (batched.supports.counts, batched.supports.token_ids)
    direct = ahead.with_proposals(batched.token_ids, supports)
    assert direct.is_direct and not taken.commands.is_direct
    assert repr(list(replace(direct, channel=0).items())) == repr(list(taken.commands.items()))
    asked.commit(taken)
    for loop, command in zip(asked.loops, taken.commands.items(), strict=True):
        assert loop.target.asked == command.generation < (loop.row.values.item(col.GENERATION) + 1)
        assert loop.proposal.token_ids == command.draft_token_ids
        assert not is_announced(asked.table, loop.commands.session, command.generation)
        assert not commands_of(loop)


def fewer(asked: Crowd, events: list[Any]) -> AnswerBatch[Any]:
    """The columns of proposals of which one has a token less, in ``events`` too."""
    event = events[0]
    evidence = event.evidence
    if evidence is not None:
        num_ids = int(evidence.counts[:-1].sum())
        evidence = type(evidence)(evidence.counts[:-1], evidence.token_ids[:num_ids], evidence.probs[:num_ids])
    events[0] = replace(event, token_ids=event.token_ids[:-1], evidence=evidence)
    return replace(as_batch(events, Proposal), channel=CHANNEL)


@pytest.mark.parametrize("case", ["fewer tokens", "another generation", "not sent", "not reserved"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_as_it_was_asked_ahead_is_asked_by_a_newer_generation(kind: dict[str, Any], case: str) -> None:
    asked = crowd(**kind)
    is_direct = case == "not reserved"
    ahead = None if is_direct else asked.ahead()[1]
    generations = asked.generations
    events, batched = asked.answers()
    if case == "fewer tokens":
        batched = fewer(asked, events)
        is_direct = awaits(ahead, batched)
    elif case == "another generation":
        is_direct = awaits(ahead, replace(batched, generations=batched.generations + 1))
    rows = asked.table.indices(batched.sessions.tolist())
    ((_, batch),) = answered(asked.table, rows, batched, PROPOSALS)
    taken: Any = batch.take(batched, asked.policy, plane=asked.plane, is_direct=is_direct)
    assert not taken.is_direct
    for row, command in enumerate(taken.commands.items()):
        assert command.generation == generations[row]
        asked.loops[row].on_draft_event(events[row])
        sent = [one for one in commands_of(asked.loops[row]) if isinstance(one, Score)]
        assert repr(sent) == repr([replace(command, plane=0)])


@pytest.mark.parametrize("kind", KINDS)
def test_scores_before_their_proposals_are_asked_for_again_with_these(kind: dict[str, Any]) -> None:
    asked = crowd(**kind)
    _, ahead = asked.ahead()
    announced = ahead.batched.generations.tolist()
    for loop, generation in zip(asked.loops, announced, strict=True):
        loop.on_target_event(Scores(loop.commands.session, generation, loop.tokens.length, TokenScores((1,))))
        assert loop.status is SessionStatus.DRAFTING and loop.spec_stats.num_stale_target_replies == 1
    _, batched = asked.answers()
    ((indices, batch),) = answered(asked.table, asked.table.indices(batched.sessions.tolist()), batched, PROPOSALS)
    assert len(indices) == len(asked.loops)
    taken: Any = batch.take(batched, asked.policy, plane=asked.plane, is_direct=awaits(ahead, batched))
    assert not taken.is_direct
    assert [command.generation for command in taken.commands.items()] == [each + 1 for each in announced]


@pytest.mark.parametrize("kind", KINDS[:3])
def test_some_of_the_proposals_are_direct_without_the_others(kind: dict[str, Any]) -> None:
    asked = crowd(**kind)
    _, ahead = asked.ahead()
    _, batched = asked.answers()
    for indices in ([2, 0], [1]):
        some = batched.selected(np.array(indices))
        waiting = ahead.rows_for(some.channel_key, some.counts)
        assert waiting is not None
        supports = None if some.supports is None else (some.supports.counts, some.supports.token_ids)
        scored = ahead.selected(waiting).with_proposals(some.token_ids, supports)
        ((_, batch),) = answered(asked.table, asked.table.indices(some.sessions.tolist()), some, PROPOSALS)
        taken: Any = batch.take(some, asked.policy, plane=asked.plane, is_direct=True)
        assert taken.is_direct
        assert repr(list(taken.commands.items())) == repr(list(replace(scored, channel=0).items()))
        taken.commit()
        ahead = ahead.without(waiting)
    assert ahead is None


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_awaited_holds_while_the_rows_have_not_changed(kind: dict[str, Any]) -> None:
    asked = crowd(**kind)
    batch = asked.batch()
    _, batched = asked.answers()
    assert batch.is_of(batched)
    loop = asked.loops[-1]
    changes: tuple[Callable[[], object], ...] = (loop.pause, loop.resume, loop.commands.release)
    for change in changes:
        change()
        assert not batch.is_of(batched)
        batch = asked.batch()
        assert batch.is_of(batched)
    late = replace(batched, generations=batched.generations - 1)
    assert not asked.batch().is_of(late)
    assert not asked.batch().is_of(replace(batched, base_lengths=batched.base_lengths + 1))
    batch = asked.batch()
    asked.table.leave(loop)
    assert not batch.is_of(batched)  # the row is free, and may be another session's


@pytest.mark.parametrize("field", ["generations", "base_lengths"])
def test_answers_to_another_text_or_command_are_left_to_their_session(field: str) -> None:
    asked = crowd(3)
    _, batched = asked.answers()
    rows = asked.index.tolist()
    (indices, _), *_ = answered(asked.table, rows, batched, PROPOSALS)
    assert indices.tolist() == [0, 1, 2]
    spoilt = getattr(batched, field).copy()
    spoilt[1] += 1
    (indices, _), *_ = answered(asked.table, rows, replace(batched, **{field: spoilt}), PROPOSALS)
    assert indices.tolist() == [0, 2]


def test_a_proposal_of_more_tokens_than_were_asked_for_is_left_to_its_session() -> None:
    asked = crowd(1)
    _, batched = asked.answers()
    longer = replace(batched, counts=batched.counts + 1, token_ids=np.append(batched.token_ids, batched.token_ids[:1]))
    assert not asked.batch().is_of(longer)
    assert asked.batch().is_of(batched)
    assert not list(answered(asked.table, asked.index.tolist(), longer, PROPOSALS))


def test_a_session_that_was_asked_for_something_else_since_has_no_direct_proposal() -> None:
    asked = crowd(1)
    _, ahead = asked.ahead()
    asked.loops[0].commands.release()
    _, batched = asked.answers()
    taken = asked.batch().take(batched, asked.policy, is_direct=awaits(ahead, batched))
    assert not taken.is_direct and taken.commands.generations.item() > ahead.batched.generations.item()


@pytest.mark.parametrize("kind", KINDS)
def test_a_target_that_says_it_lost_what_was_asked_ahead_is_sent_the_proposals(kind: dict[str, Any]) -> None:
    """Refusal before the proposals came: the target waits for nothing."""
    asked = crowd(**kind)
    before, ahead = asked.ahead()
    generation = ahead.batched.generations.tolist()[0]
    asked.loops[0].on_target_event(SessionLost(asked.loops[0].commands.session, generation, "not of the vocabulary"))
    _, batched = asked.answers()
    assert not before.is_of(batched)
    taken = asked.batch().take(batched, asked.policy, plane=asked.plane, is_direct=awaits(ahead, batched))
    assert not taken.is_direct and taken.commands.generations.tolist()[0] > generation


def test_a_step_without_its_proposal_is_newer_than_what_was_asked_ahead() -> None:
    asked = crowd(1)
    (loop,) = asked.loops
    _, ahead = asked.ahead()
    announced = loop.commands.session, ahead.batched.generations.item()
    assert is_announced(asked.table, *announced)
    loop.draft_timed_out(loop.step)
    assert not is_announced(asked.table, *announced), "scores without a proposal to come would be held for ever"
    (plain,) = [one for one in commands_of(loop) if isinstance(one, Score)]
    assert plain.generation > ahead.batched.generations.item() and not plain.draft_token_ids
    late = token_scores(loop.commands.session, ahead.batched.generations.item(), loop.tokens.length, (1,) * 5)
    loop.on_target_event(late)
    assert loop.target.asked == plain.generation and not commands_of(loop)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_the_proposals_that_came_here_are_taken(kind: dict[str, Any]) -> None:
    asked = crowd(**kind)
    asked.take_directly()
    _, batched = asked.scores()
    taken = asked.batch().take(batched, asked.policy, channel=CHANNEL)
    assert list(taken.indices) == list(range(len(asked.loops)))
    assert taken.commands.channel == CHANNEL
    if len(asked.loops) > 1:
        some = batched.selected(np.array([0, 2]))
        ((indices, found),) = answered(asked.table, asked.table.indices(some.sessions.tolist()), some, SCORES)
        some_taken: Any = found.take(some, asked.policy)
        assert indices.tolist() == [0, 1] and len(some_taken.indices) == 2


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_other_proposals_are_not_taken(kind: dict[str, Any], place: int) -> None:
    asked = crowd(**kind)
    asked.take_directly()
    _, batched = asked.scores()
    assert batched.draft_token_ids is not None
    batched.draft_token_ids[place] = (batched.draft_token_ids[place] + 1) % VOCAB
    assert asked.batch().take(batched, asked.policy, channel=CHANNEL) is None


@pytest.mark.parametrize("is_shorter", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_scores_of_other_proposals_are_asked_for_again(temperature: float, is_shorter: bool) -> None:
    asked = crowd(1, temperature=temperature)
    asked.take_directly()
    (loop,), (command,), length = asked.loops, asked.asked, asked.loops[0].tokens.length
    (event,), _ = asked.scores()
    other = replace(event, draft_token_ids=(*command.draft_token_ids[:-1], (command.draft_token_ids[-1] + 1) % VOCAB))
    shorter = replace(event, draft_token_ids=command.draft_token_ids[:-1])
    loop.on_target_event(shorter if is_shorter else other)
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


@pytest.mark.parametrize("prompt_length", range(BLOCK_TOKENS - LENGTH - 1, BLOCK_TOKENS + 1))
def test_hashes_of_kept_tokens_are_those_of_the_text_at_the_end_of_a_block(prompt_length: int) -> None:
    found = crowd(2, prompt_length=prompt_length)
    found.take_directly()
    events: list[Any] = []
    for number, command in enumerate(found.asked):
        token_ids = (*command.draft_token_ids[: LENGTH - number], VOCAB - 1, 0)[: LENGTH + 1]  # all, and all but one
        base = command.num_kept_tokens + len(command.token_ids)
        events.append(Scores(command.session, command.generation, base, TokenScores(token_ids)))
    taken = found.batch().take(as_batch(events, token_scores), found.policy)
    taken.commit()
    for loop, command in zip(found.loops, taken.commands.items(), strict=True):
        kept = loop.tokens.ids[: command.num_kept_tokens]
        assert command.prefix_hash == PrefixHasher(loop.engine_request.prefix_hash_key).at(kept, len(kept))
