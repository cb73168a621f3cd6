"""Acceptance probes."""

from __future__ import annotations

from outrider_coordinator.speculation import ControlledSession
from outrider_coordinator.speculation.probe import Probe

PLAIN_S = 0.005


def sessions_of(count: int, *, num_left: int = 100) -> list[ControlledSession]:
    sessions = [ControlledSession(8, max_tokens=num_left) for _ in range(count)]
    for place, session in enumerate(sessions):
        session.num_uncomputed = place
    return sessions


def test_a_probe_takes_the_sessions_that_lack_least_text_for_two_steps() -> None:
    probe, sessions = Probe(), sessions_of(16)
    probe.begin(0.0, sessions, PLAIN_S, 1e-5)
    assert list(probe.sessions) == sessions[:4]
    assert [session.length for session in sessions[:5]] == [3, 3, 3, 3, 0]
    for _ in range(2):
        for session in sessions[:4]:
            probe.note_step(session)
    assert not probe.sessions
    assert {session.length for session in sessions} == {0}


def test_drafts_that_lack_much_text_are_probed_again_after_a_hundred_times_as_long() -> None:
    probe, sessions = Probe(), sessions_of(4)
    for session in sessions:
        session.num_uncomputed = 100_000
    probe.begin(0.0, sessions, PLAIN_S, 1e-5)
    probe.sessions.clear()
    assert not probe.is_due(200.0) and probe.is_due(205.0)


def test_probes_take_one_hundredth_of_the_time() -> None:
    probe, sessions = Probe(), sessions_of(4)
    now, num_probes = 0.0, 100
    for _ in range(num_probes):
        while not probe.is_due(now):
            now += 0.01
        probe.begin(now, sessions, PLAIN_S, 0.0)
        for session in sessions:
            probe.leave(session)
    assert probe.num_probes == num_probes
    assert now > num_probes * 2 * PLAIN_S / 0.01


def test_sessions_that_end_soon_are_not_probed() -> None:
    probe = Probe()
    probe.begin(0.0, sessions_of(4, num_left=5), PLAIN_S, 0.0)
    assert not probe.sessions and not probe.num_probes
