"""Batch driver: which proposals a target is held to score already, and which scores wait for their proposals."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from outrider.batched import AnswerBatch, ExtendBatch, ScoreBatch, token_scores
from outrider.ports import EventBatch, Proposal
from outrider_coordinator.requests.batch_driver import BatchDriver
from tests.coordinator.session.test_score_ahead import CHANNEL, crowd
from tests.coordinator.session.test_transitions import answer, as_batch

NO_WAITS: Any = SimpleNamespace(note_response=lambda *_: None, begin=lambda *_: None, end=lambda *_: None)


class Service:
    """Replica that notes what it is sent."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.alone: list[Any] = []
        self.direct: list[Any] = []
        self.send_batch, self.send_alone, self.note_direct = self.asked.append, self.alone.append, self.direct.append

    @property
    def num_steps_open(self) -> int:
        """Steps of what it was asked last."""
        return len(self.asked[-1]) if self.asked else 0


class Request(SimpleNamespace):
    """Parts of a request that the driver reads."""

    trace = SimpleNamespace(notes=None)

    @property
    def is_over(self) -> bool:
        """End of its session."""
        return bool(self.loop.is_over)

    def note(self, *_: object) -> None:
        """Nothing is told a user."""


class Pair:
    """Sessions in step on a target and a draft, whose proposals go to the target directly."""

    def __init__(self) -> None:
        self.crowd, self.channel = crowd(3), CHANNEL
        self.target: Any = Service()
        self.draft: Any = Service()
        place = SimpleNamespace(target=self.target, draft=self.draft)
        requests = {number: Request(session=number, loop=loop, place=place) for number, loop in
                    enumerate(self.crowd.loops)}  # fmt: skip
        peers: Any = SimpleNamespace(channel=lambda *_: self.channel, plane=lambda *_: 0)
        find: Any = requests.get
        self.driver = BatchDriver(
            self.crowd.table, self.crowd.policy, NO_WAITS, peers,
            find=find, act_on=lambda _: self.crowd.loops[0].take_actions(), fail=lambda *_: pytest.fail("it failed"),
        )  # fmt: skip

    def answers(self, commands: ScoreBatch | ExtendBatch, *, channel: int = 0) -> AnswerBatch[Any]:
        """Answers to all of some commands, as asked for."""
        events = [answer(self.crowd.chance, command) for command in commands.items()]
        drafts = commands.draft_token_ids if isinstance(commands, ScoreBatch) else None
        make: Any = Proposal if drafts is None else token_scores
        return replace(as_batch(events, make), draft_token_ids=drafts, channel=channel)

    def announce(self) -> None:
        """Take a step, after which the target is told of what it will score."""
        _, proposals = self.crowd.answers(channel=0)
        self.driver.take_proposals(self.draft, EventBatch((), batched=(proposals,)), 0.0)
        self.driver.post_process()
        scores = self.answers(self.target.asked.pop())
        assert not self.driver.take_scores(self.target, EventBatch((), batched=(scores,)), 0.0).events
        self.driver.post_process()
        assert len(self.target.alone) == 1 and not self.target.asked

    def propose(self) -> None:
        """Bring the proposals that the draft says it has sent directly."""
        proposals = self.answers(self.draft.asked[-1], channel=CHANNEL)
        left = self.driver.take_proposals(self.draft, EventBatch((), batched=(proposals,)), 0.0)
        assert not left.events

    def early_scores(self) -> EventBatch[Any]:
        """Scores of the proposals that the target has and the coordinator has not."""
        asked = self.draft.asked[-1]
        proposals = self.answers(asked, channel=CHANNEL)
        return EventBatch((), batched=(self.answers(self.target.alone[0].with_proposals(proposals.token_ids, None)),))


@pytest.mark.parametrize(("channel", "is_direct"), [(CHANNEL, True), (0, False), (CHANNEL + 1, False)])
def test_only_proposals_by_the_channel_of_the_pair_are_scored_already(channel: int, is_direct: bool) -> None:
    """The channel may have ended, and another one begun, since they were asked for."""
    pair = Pair()
    pair.announce()
    pair.channel = channel
    pair.propose()
    assert (len(pair.target.direct), len(pair.target.asked)) == ((1, 0) if is_direct else (0, 1))


def test_scores_of_proposals_that_have_not_come_wait_until_the_draft_is_lost() -> None:
    pair = Pair()
    pair.announce()
    scores = pair.early_scores()
    assert pair.driver.hold_early(pair.target, scores) is None
    pair.driver.draft_lost(pair.draft)
    ((target, held),) = pair.driver.take_early()
    assert target is pair.target
    assert np.array_equal(held.batched[0].sessions, scores.batched[0].sessions)
    assert pair.driver.hold_early(target, held) is held
