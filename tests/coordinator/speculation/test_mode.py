"""Switch of the mode, and acceptance probes."""

from __future__ import annotations

from outrider_coordinator.speculation import ControlledSession, Mode
from outrider_coordinator.speculation.comparison import ModeSwitch
from outrider_coordinator.speculation.probe import Probe

PLAIN_S = 0.005


def rounds_until_switch(gain: float, text_s: float = 0.0) -> int:
    """Rounds in which the other mode gains so much before the mode changes; 1,000: it does not."""
    switch = ModeSwitch()
    for count in range(1000):
        if switch.observe(count * PLAIN_S, gain, text_s, PLAIN_S):
            return count
    return 1000


def test_a_mode_changes_the_sooner_the_more_is_lost() -> None:
    assert rounds_until_switch(1.0) < rounds_until_switch(0.5) < rounds_until_switch(0.1) < 1000
    assert rounds_until_switch(0.0) == rounds_until_switch(-0.1) == 1000
    assert rounds_until_switch(0.5, text_s=0.5) > 10 * rounds_until_switch(0.5)


def test_time_in_which_no_mode_is_in_effect_does_not_count() -> None:
    switch = ModeSwitch()
    switch.observe(0.0, 0.5, 0.0, PLAIN_S)
    switch.pause(10.0)
    assert not switch.observe(10.0 + PLAIN_S, 0.5, 0.0, PLAIN_S)


def test_only_changes_of_the_mode_are_counted() -> None:
    switch = ModeSwitch()
    assert [switch.take(mode) for mode in (Mode.PLAIN, Mode.SPECULATIVE, Mode.SPECULATIVE)] == [False, True, False]
    assert switch.num_switches == 1


def sessions_of(count: int, *, num_left: int = 100) -> list[ControlledSession]:
    sessions = [ControlledSession(8, max_tokens=num_left) for _ in range(count)]
    for place, session in enumerate(sessions):
        session.draft_lag = place
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


def test_drafts_that_lack_much_text_are_probed_again_after_twenty_seconds() -> None:
    probe, sessions = Probe(), sessions_of(4)
    for session in sessions:
        session.draft_lag = 100_000
    probe.begin(0.0, sessions, PLAIN_S, 1e-5)
    probe.sessions.clear()
    assert not probe.is_due(19.9) and probe.is_due(20.1)


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
