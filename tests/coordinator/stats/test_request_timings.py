"""Times of one request: what came up to the first token is told apart."""

import pytest

from outrider.generation import StageTimes
from outrider.ports import ItemTiming
from outrider_coordinator.stats.request_timings import RequestTimings


def test_prefill_is_what_came_up_to_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestTimings, "now", staticmethod(lambda: 100.0))
    timings = RequestTimings()
    timings.note_admitted()
    assert timings.summary().prefill == StageTimes()
    timings.step_ended(103.0, 103.25, ItemTiming(0, 0, 0, 0, 2_000_000_000))
    timings.note_output(103.25)
    timings.draft_wait_ended(104.25, 104.25, None)
    timings.step_ended(105.0, 105.0, None)
    timings.note_output(105.0)
    found = timings.summary()
    assert found.prefill == StageTimes(draft=0.0, target=2.0, accept=0.25, wire=1.0)
    assert (found.draft, found.target, found.accept, found.wire) == (1.0, 2.75, 0.25, 1.0)
