"""Progress of an engine core as its watchdog sees it: that of the device, not of the thread that asks the device."""

from __future__ import annotations

import pytest

from tests.serving.lookahead.test_queued_chunks import CHUNK, Rig

PROMPT = [1, 2, 3]


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def test_steps_are_no_progress_while_the_device_computes(rig: Rig) -> None:
    rig.ask(1, PROMPT)
    rig.step()
    began = rig.core.progress
    assert began[0]
    for _ in range(50):
        rig.driver.step()
    rig.ask(2, PROMPT)  # what comes meanwhile is none either
    rig.release(2)
    for _ in range(50):
        rig.driver.step()
    assert rig.core.progress == began
    rig.end_forward()
    assert rig.core.progress != began


def test_the_end_of_each_forward_is_progress_while_others_are_in_flight(rig: Rig) -> None:
    rig.ask(1, list(range(1, 1 + 4)) * CHUNK)
    seen = []
    rig.step()
    while rig.core.has_work:
        seen.append(rig.core.progress)
        rig.end_forward()
    assert len(seen) > 2
    assert all(is_computing for is_computing, _ in seen)
    assert len(set(seen)) == len(seen)
    assert not rig.core.progress[0]


def test_a_forward_may_take_longer_where_larger_ones_are_known_to(rig: Rig) -> None:
    assert rig.core.longest_forward_s == 0.0  # none is in flight
    rig.ask(1, PROMPT)
    rig.step()
    unknown_s = rig.core.longest_forward_s
    assert unknown_s > 10.0  # it may compile kernels
    rig.now_ms += 2000
    rig.finish()
    rig.ask(2, PROMPT)
    rig.step()
    assert rig.core.longest_forward_s == pytest.approx(2.0, rel=0.6)
