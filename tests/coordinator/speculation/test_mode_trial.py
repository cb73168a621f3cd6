"""When the choice against a mode is checked."""

from __future__ import annotations

import itertools

import pytest

from outrider_coordinator.speculation.exploration.trials import ModeTrial
from outrider_coordinator.speculation.mode_selector import Mode


def check_times(trial: ModeTrial, first_s: float, seconds: float) -> list[float]:
    """When checks begin in bursts of two seconds, each of which begins with speculation and gives it up."""
    found = []
    for burst in range(round(seconds / 2.0)):
        now = first_s + 2.0 * burst
        trial.give_up(now)
        if trial.may_check(now + 0.6, 32, is_young=False):
            assert trial.begin_if_due(
                now + 0.6, 0.0, 32, {Mode.PLAIN: 2.0, Mode.SPECULATIVE: 1.0}, is_known=True, is_below_known=True,
                is_check=True, is_young=False, num_rounds=5, loss_s=0.0, ahead_s=0.0,
            )  # fmt: skip
            trial.end(now + 0.6)  # it costs nothing, so that it is paid for
            found.append(now)
    return found


def test_a_mode_that_each_burst_gives_up_is_checked_less_and_less_often() -> None:
    times = check_times(ModeTrial(Mode.SPECULATIVE), 0.0, 300.0)
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert pauses[:4] == pytest.approx([20.0, 40.0, 40.0, 40.0], abs=2.0)


def test_checks_are_as_often_as_at_first_once_the_mode_is_back() -> None:
    trial = ModeTrial(Mode.SPECULATIVE)
    check_times(trial, 0.0, 200.0)
    trial.note_return(2)  # at a burst's end, which says nothing of 32 sessions
    times = check_times(trial, 300.0, 100.0)
    assert times[1] - times[0] == pytest.approx(40.0, abs=2.0)
    trial.note_return(32)
    times = check_times(trial, 500.0, 60.0)
    assert times[1] - times[0] == pytest.approx(20.0, abs=2.0)
