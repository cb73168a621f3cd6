"""Reports of a target that serves several links: rows and draft tokens of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from outrider.ports import EventBatch, ForwardReport, Scores
from outrider.transport.convert.commands import target_commands_from_proto, target_commands_to_proto
from outrider.types import TokenScores
from outrider.v1 import link_pb2 as pb
from tests.serving.decode.test_twins import NUM_TOKEN_IDS, Core, target_core
from tests.serving.decode.twins import Switch
from tests.serving.lookahead.coordinating import core_of
from tests.serving.lookahead.device import VOCAB_SIZE, CountingExecutor, Runner
from tests.support.core_driver import Driver, open_session, score_item


@pytest.mark.parametrize(("num_mine", "num_theirs"), [(1, 3), (2, 0)])
def test_a_report_counts_the_rows_and_draft_tokens_of_other_links(num_mine: int, num_theirs: int) -> None:
    core = core_of(CountingExecutor(Runner(100)), lookahead=False, max_batched_tokens=64)  # type: ignore[arg-type]
    counts = {1: num_mine, 2: num_theirs}
    drivers = {link_id: Driver(core, link_id) for link_id in counts}
    text = [1, 2, 3]
    for link_id, driver in drivers.items():
        for number in range(counts[link_id]):
            driver.send(open_session(number, prompt_length=3, max_length=40, num_token_ids=VOCAB_SIZE - 1))
            driver.send(score_item(number, 2, text, drafts=[4, 5] if link_id == 2 else []))
    reports: dict[int, ForwardReport | None] = {}
    while len(reports) < sum(map(bool, counts.values())):
        for link_id, batch in core.step():
            if any(isinstance(event, Scores) for event in batch.events):
                reports[link_id] = batch.report
    mine = reports[1]
    assert mine is not None
    assert (mine.num_other_rows, mine.num_other_drafts) == (num_theirs, 2 * num_theirs)
    if num_theirs:
        theirs = reports[2]
        assert theirs is not None
        assert (theirs.num_other_rows, theirs.num_other_drafts) == (num_mine, 0)


@dataclass
class Caller:
    """Sessions of one link on a target, which all draft equally much and have no draft token accepted."""

    core: Core
    switch: Switch
    link_id: int
    num_sessions: int
    num_drafts: int
    num_rounds: int = 0
    texts: list[list[int]] = field(default_factory=list)

    def open(self) -> None:
        self.texts = [[7 * self.link_id + number + 1, 2, 3] for number in range(self.num_sessions)]
        self._send(
            [
                open_session(number, prompt_length=3, max_length=99, num_token_ids=NUM_TOKEN_IDS)
                for number in range(self.num_sessions)
            ]
        )

    def ask(self) -> None:
        self.num_rounds += 1
        is_prompt = self.num_rounds == 1
        drafts = [] if is_prompt else [250] * self.num_drafts
        self._send(
            [
                score_item(number, self.num_rounds + 1, text, drafts, num_kept_tokens=0 if is_prompt else len(text) - 1)
                for number, text in enumerate(self.texts)
            ]
        )

    def take(self, batch: EventBatch[Any]) -> tuple[int, int] | None:
        """Other sessions' numbers by the report of a message, if it brings scores."""
        scores = [event for event in batch.events if isinstance(event, Scores)]
        for batched in batch.batched:
            scores += batched.events(range(len(batched.sessions)))
        for score in scores:
            assert isinstance(score.form, TokenScores)
            self.texts[score.session].append(score.form.token_ids[0])
        report = batch.report
        return None if report is None or not scores else (report.num_other_rows, report.num_other_drafts)

    def _send(self, commands: Sequence[Any]) -> None:
        message = target_commands_to_proto(commands).SerializeToString()
        parsed = pb.TargetCommands.FromString(message)
        self.core.handle(self.link_id, target_commands_from_proto(parsed))


def rounds_of(callers: Sequence[Caller], *, take_turns: bool) -> list[tuple[int, int]]:
    """Other sessions' numbers by each caller's last of several reports."""
    core, switch = callers[0].core, callers[0].switch
    found = [(-1, -1)] * len(callers)
    for caller in callers:
        caller.open()
    for _ in range(4):
        for index, caller in enumerate(callers):
            caller.ask()
            while core.has_work and (take_turns or index == len(callers) - 1):
                switch.now_ns += 1_000_000
                for link_id, batch in core.step():
                    others = callers[link_id].take(batch)
                    found[link_id] = found[link_id] if others is None else others
                core.post_step()
    return found


@pytest.mark.parametrize("takes_batch", [True, False])
@pytest.mark.parametrize("take_turns", [True, False])
def test_reports_tell_of_others_alike_where_they_share_forwards_and_where_they_take_turns(
    take_turns: bool, takes_batch: bool
) -> None:
    switch = Switch()
    core, executor = target_core(switch, takes_batch=takes_batch, num_pages=600, max_batched_tokens=256)
    shapes = ((4, 2), (6, 3), (5, 0))
    callers = [Caller(core, switch, link_id, *shape) for link_id, shape in enumerate(shapes)]
    assert rounds_of(callers, take_turns=take_turns) == [(11, 18), (9, 8), (10, 26)]
    assert bool(executor.num_columns) is (takes_batch and take_turns)


def test_a_link_that_is_gone_is_told_of_no_more() -> None:
    switch = Switch()
    core, _ = target_core(switch, takes_batch=True, num_pages=600, max_batched_tokens=256)
    callers = [Caller(core, switch, link_id, 4, 2) for link_id in range(2)]
    assert rounds_of(callers, take_turns=False) == [(4, 8), (4, 8)]
    core.drop_link(1)
    assert rounds_of([Caller(core, switch, 0, 4, 2)], take_turns=False) == [(0, 0)]
