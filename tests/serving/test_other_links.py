"""Reports of forwards that serve several links: rows and draft tokens of the others."""

from __future__ import annotations

import pytest

from outrider.ports import ForwardReport, Scores
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
