"""State of a request: what is counted of its steps."""

from __future__ import annotations

from outrider_coordinator.requests.request_manager import RequestManager
from outrider_coordinator.requests.request_state import RequestState
from outrider_coordinator.session.actions import DraftWaitEnded, StepEnded
from outrider_coordinator.session.loop import SessionLoop
from outrider_coordinator.speculation import DraftLengthPolicy
from outrider_coordinator.stats.latency_histograms import LatencyHistograms
from outrider_coordinator.stats.spec_decode_stats import WithoutDraft
from tests.coordinator.driving import make_plan

POLICY = DraftLengthPolicy(4)


def a_step(num_accepted: int) -> StepEnded:
    return StepEnded(1, 8, 4, num_accepted, [7] * (num_accepted + 1), WithoutDraft.NOTHING_PROPOSED)


def a_request() -> RequestState:
    return RequestState(SessionLoop(make_plan(vocab_size=64), POLICY))


def test_readings_include_the_steps_of_requests_that_run() -> None:
    manager, request = RequestManager(POLICY, max_running_per_target=1, max_queue=1), a_request()
    manager.submit(request)
    for num_accepted in (4, 1):
        request.note(a_step(num_accepted), 1.5, 2.0)
    found = manager.spec_stats()
    assert (found.num_steps, found.num_accepted_tokens, found.num_judged_tokens) == (2, 5, 6)
    assert manager.spec_stats() == found


def test_steps_before_a_pause_are_no_part_of_it() -> None:
    request = a_request()
    request.admit()
    now = request.request_timings.now()
    request.note(a_step(0), now + 1.5, now + 2.0)
    request.request_timings.note_paused()
    assert request.loop.spec_stats.num_steps == 1
    assert request.request_timings.summary().target > 1.0  # a pause that came first would have cut it short


def test_a_step_that_rebuilds_a_session_counts_as_prefill() -> None:
    histograms = LatencyHistograms()
    request = RequestState(SessionLoop(make_plan(vocab_size=64), POLICY), histograms)
    request.admit()
    for is_prefill in (True, False, True):
        request.note(a_step(0)._replace(is_prefill=is_prefill), 1.5, 2.0)
        request.note(DraftWaitEnded(None, is_prefill), 1.5, 2.0)
    for stage in ("score", "draft"):
        counts = [phase[stage].read().count for phase in (histograms.prefill, histograms.decode)]
        assert counts == [2, 1]
