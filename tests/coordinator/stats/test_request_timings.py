"""Times of one request: what came up to the first token is told apart."""

import pytest

from outrider.generation import StageTimes
from outrider.ports import ItemTiming
from outrider.readings import HistogramReading
from outrider_coordinator.stats.latency_histograms import LatencyHistograms
from outrider_coordinator.stats.request_timings import RequestTimings


def test_prefill_is_what_came_up_to_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestTimings, "now", staticmethod(lambda: 100.0))
    timings = RequestTimings()
    timings.note_admitted()
    assert timings.summary().prefill == StageTimes()
    timings.step_ended(103.0, 103.25, ItemTiming(0, 0, 0, 0, 2_000_000_000), is_prefill=True)
    timings.note_output(103.25)
    timings.draft_wait_ended(104.25, 104.25, None, is_prefill=False)
    timings.step_ended(105.0, 105.0, None, is_prefill=False)
    timings.note_output(105.0)
    found = timings.summary()
    assert found.prefill == StageTimes(draft=0.0, target=2.0, accept=0.25, wire=1.0)
    assert (found.draft, found.target, found.accept, found.wire) == (1.0, 2.75, 0.25, 1.0)


def test_stages_are_counted_by_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestTimings, "now", staticmethod(lambda: 100.0))
    histograms = LatencyHistograms()
    timings = RequestTimings(histograms)
    timings.note_admitted()
    timings.draft_wait_ended(100.5, 100.5, None, is_prefill=False)  # up to the first token all is prefill
    timings.step_ended(103.0, 103.25, None, is_prefill=True)
    timings.note_output(103.25)
    timings.draft_wait_ended(104.25, 104.25, None, is_prefill=False)
    timings.step_ended(105.0, 105.0, None, is_prefill=False)
    timings.note_output(105.0)
    timings.step_ended(109.0, 109.0, None, is_prefill=True)  # the target was lost
    timings.note_output(109.0)
    found = {}
    for reading in histograms.readings():
        if reading.name == "outrider_step_stage_seconds" and isinstance(reading.value, HistogramReading):
            labels = dict(reading.labels)
            found[labels["phase"], labels["stage"]] = (reading.value.count, reading.value.total)
    assert found == {
        ("prefill", "draft"): (1, 0.5),
        ("prefill", "score"): (2, 2.5 + 4.0),
        ("prefill", "accept"): (2, 0.25),
        ("prefill", "wire"): (3, 0.0),
        ("decode", "draft"): (1, 1.0),
        ("decode", "score"): (1, 0.75),
        ("decode", "accept"): (1, 0.0),
        ("decode", "wire"): (2, 0.0),
    }


def test_proposals_that_never_waited_for_the_device_were_begun_ahead() -> None:
    histograms = LatencyHistograms()
    timings = RequestTimings(histograms)
    timings.note_admitted()
    for timing in (None, ItemTiming(5, 2, 0, 0, 7), ItemTiming(0, 2, 0, 0, 2), ItemTiming(0, 0, 0, 3, 3)):
        timings.draft_wait_ended(timings.now(), timings.now(), timing, is_prefill=False)
        timings.step_ended(timings.now(), timings.now(), ItemTiming(0, 1, 0, 0, 1), is_prefill=False)
    assert timings.summary().num_drafts_ahead == histograms.num_drafts_ahead == 2

    assert timings.summary().num_drafts_ahead == 2


def test_masks_of_both_services_are_summed_and_compiling_is_told() -> None:
    timings = RequestTimings()
    timings.note_grammar(None)
    timings.note_admitted()
    timings.note_grammar((1_000, 2_001_000))
    timings.draft_wait_ended(timings.now(), timings.now(), ItemTiming(0, 1, 0, 0, 1, 3_000_000), is_prefill=False)
    timings.step_ended(timings.now(), timings.now(), ItemTiming(0, 1, 0, 0, 1, 4_000_000), is_prefill=False)
    found = timings.summary()
    assert [found.grammar, found.mask] == pytest.approx([0.002, 0.007])
