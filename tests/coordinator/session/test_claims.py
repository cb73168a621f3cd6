"""Claims of begun steps: commands and rows are those of the transitions of one session."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from outrider.batched import AnswerBatch, token_scores
from outrider.ports import Extend, Proposal, Score, Scores
from outrider_coordinator.session import table_columns as col
from outrider_coordinator.session.prepared_claims import PreparedClaims, waits_for_claimed
from outrider_coordinator.session.state import DRAFTING, SCORING
from outrider_coordinator.session.steps import MAX_SILENT_STEPS, may_claim
from outrider_coordinator.session.transitions import SCORES, answered
from tests.coordinator.session.test_transitions import VOCAB, Twins, answer, as_batch

LENGTH = 4


class Claiming(Twins):
    """Sessions whose target begins steps by itself."""

    def found_for(self, batched: AnswerBatch[Any]) -> Iterator[tuple[Any, AnswerBatch[Any]]]:
        if batched.goes_on is None:
            yield from super().found_for(batched)
            return
        rows = self.table.indices(batched.sessions.tolist())
        for indices, found in answered(self.table, rows, batched, SCORES):
            yield found, batched.selected(indices)


def pushed(chance: random.Random, command: Score) -> Scores:
    """Scores of a step that was begun by itself, of whatever draft tokens had been pushed; now and then wrong ones."""
    highest = VOCAB + (chance.random() < 0.03)
    drafts = command.draft_token_ids
    if not drafts and command.num_kept_tokens and chance.random() < 0.6:
        drafts = tuple(chance.randrange(VOCAB) for _ in range(chance.choice((LENGTH, LENGTH, 2, 1))))
    elif drafts and chance.random() < 0.03:
        drafts = (*drafts[:-1], (drafts[-1] + 1) % VOCAB)
    own = [token if chance.random() < 0.8 else chance.randrange(highest) for token in drafts]
    base = command.num_kept_tokens + len(command.token_ids) - (chance.random() < 0.03)
    generation = command.generation - (chance.random() < 0.03)
    scores = token_scores(command.session, generation, base, (*own, chance.randrange(highest)))
    return replace(scores, draft_token_ids=drafts, goes_on=chance.random() < 0.9)


def as_one_batch(events: list[Any]) -> AnswerBatch[Any]:
    batched = as_batch(events, token_scores)
    drafts = [token_id for event in events for token_id in event.draft_token_ids]
    goes_on = np.array([event.goes_on for event in events], dtype="u1")
    return replace(
        batched,
        draft_token_ids=np.array(drafts, dtype="<u4") if drafts else None,
        goes_on=goes_on if goes_on.any() else None,
    )


@pytest.mark.parametrize("is_controlled", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_claims_of_many_are_those_of_each_alone(seed: int, *, is_controlled: bool) -> None:
    chance = random.Random(seed)
    num_taken = sum(play(chance, is_controlled=is_controlled) for _ in range(8))
    assert num_taken > 20 or is_controlled


def play(chance: random.Random, *, is_controlled: bool) -> int:
    """A random load: how many scores were taken together."""
    twins = Claiming(chance, chance.randint(1, 7), LENGTH, num_more=60, is_controlled=is_controlled)
    num_taken = 0
    for _ in range(400):
        asked = [command for command in twins.waiting.values() if chance.random() < 0.7]
        proposals: list[Any] = [answer(chance, each) for each in asked if isinstance(each, Extend)]
        scores: list[Any] = [pushed(chance, each) for each in asked if isinstance(each, Score)]
        for events, batched in (
            (proposals, as_batch(proposals, Proposal) if proposals else None),
            (scores, as_one_batch(scores) if scores else None),
        ):
            taken = set() if batched is None else twins.step_together(events, batched)
            num_taken += len(taken) if events is scores else 0
            for event in events:
                if event.session not in taken:
                    twins.step_alone(event)
        if not twins.waiting:
            break
    return num_taken


def test_a_draft_that_pushes_nothing_is_asked_after_some_steps() -> None:
    chance = random.Random(1)
    twins = Claiming(chance, 1, LENGTH, num_more=60)
    num_claimed = 0
    while isinstance(command := twins.waiting[0], Score) or not command.draft_length or not num_claimed:
        if isinstance(command, Extend):
            base = command.num_kept_tokens + len(command.token_ids)
            twins.step_alone(Proposal(0, command.generation, base, (1,) * command.draft_length))
            continue
        base = command.num_kept_tokens + len(command.token_ids)
        scores = token_scores(0, command.generation, base, (*command.draft_token_ids, 1))
        event = replace(scores, draft_token_ids=command.draft_token_ids, goes_on=True)
        if not twins.step_together([event], as_one_batch([event])):
            twins.step_alone(event)
        num_claimed += not command.draft_token_ids
    assert num_claimed == MAX_SILENT_STEPS


def test_claims_are_not_taken_of_a_session_that_samples_in_the_coordinator() -> None:
    chance = random.Random(2)
    twins = Claiming(chance, 2, LENGTH, temperature=1.0)
    asked = [each for each in twins.waiting.values() if isinstance(each, Score)]
    batched = replace(as_batch([answer(chance, each, is_sampled=True) for each in asked], token_scores),
                      goes_on=np.ones(len(asked), dtype="u1"))  # fmt: skip
    assert not list(twins.found_for(batched))


def test_the_comparison_finds_a_claim_of_another_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control: a table that commits other tokens is not what sessions alone say."""
    take = PreparedClaims.take

    def wrong(self: Any, answers: Any, *rest: Any, **more: Any) -> Any:
        return take(self, replace(answers, token_ids=answers.token_ids ^ 1), *rest, **more)

    monkeypatch.setattr(PreparedClaims, "take", wrong)
    with pytest.raises((AssertionError, IndexError)):
        for seed in range(3):
            test_claims_of_many_are_those_of_each_alone(seed, is_controlled=False)


def test_steps_are_claimed_of_as_many_tokens_as_are_wanted_or_none() -> None:
    """None of a session whose tokens the coordinator draws or checks, or whose draft reads states."""
    session = Claiming(random.Random(1), 1, LENGTH, num_more=60).loops[0]
    found = [may_claim(session, num_pushed) for num_pushed in range(LENGTH + 2)]
    assert found == [num_pushed in (0, LENGTH) for num_pushed in range(LENGTH + 2)]
    flags = session.row.values.item(col.FLAGS)
    for flag in (col.IS_SPARSE, col.READS_STATES, col.HAS_GRAMMAR):
        session.row.values[col.FLAGS] = flags | flag
        assert not may_claim(session, 0)
    session.row.values[col.FLAGS] = flags
    session.target.num_plain_steps = MAX_SILENT_STEPS
    assert not may_claim(session, 0)


CLAIMED = {
    col.STATUS: SCORING, col.FLAGS: col.CLAIMS, col.LENGTH: 20, col.TARGET_HELD: 19, col.REMAINING: 5,
    col.DRAFT_OPENED: 3, col.PROPOSAL_OPENED: 2,
}  # fmt: skip
"""A row that has claimed a step."""
PROPOSED = {**CLAIMED, col.FLAGS: 0, col.NUM_DRAFTED: 2, col.PROPOSAL_OPENED: 3}
"""A row whose target scores the two draft tokens of its proposal."""


@pytest.mark.parametrize(
    ("row", "waits"),
    [
        (CLAIMED, True),
        (PROPOSED, True),
        *[(PROPOSED | {col.FLAGS: flag}, False) for flag in (
            col.PAUSED, col.HAS_PART, col.IS_SLOW, col.IS_LATE, col.IS_SPARSE, col.READS_STATES, col.HAS_GRAMMAR,
            1 << col.DRAFT_READINESS,
        )],
        (PROPOSED | {col.STATUS: DRAFTING}, False),
        (PROPOSED | {col.TARGET_HELD: 18}, False),
        (PROPOSED | {col.LENGTH: 1, col.TARGET_HELD: 0}, False),
        (PROPOSED | {col.DRAFT_ASKED: 9}, False),
        (PROPOSED | {col.NUM_PLAIN: MAX_SILENT_STEPS}, False),
        (PROPOSED | {col.REMAINING: 4}, False),
        (PROPOSED | {col.NUM_DRAFTED: 3}, False),
        (PROPOSED | {col.PROPOSAL_OPENED: 2}, False),
        (CLAIMED | {col.FLAGS: 0}, False),
    ],
)  # fmt: skip
def test_rows_wait_for_scores_after_which_they_may_claim(row: dict[int, int], *, waits: bool) -> None:
    """Two draft tokens each. A draft that was opened anew since does not hold its proposal."""
    rows = np.zeros((1, col.NUM_COLUMNS), dtype=np.int64)
    for column, value in row.items():
        rows[0, column] = value
    assert waits_for_claimed(rows, np.array([2])).tolist() == [waits]
