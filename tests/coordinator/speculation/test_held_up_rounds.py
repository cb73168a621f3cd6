"""Speculation that something else held up for a while comes back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from outrider_coordinator.speculation import Mode
from tests.coordinator.speculation.measured_pairs import MeasuredH100
from tests.coordinator.speculation.simulated_load import Controlled, DisturbedLoad, Load


class HeldUpLoad(DisturbedLoad):
    """Drafted rounds alone are disturbed."""

    def round_ms(self, rows: int, lengths: Sequence[int]) -> tuple[float, float, float]:
        return super().round_ms(rows, lengths) if max(lengths) else Load.round_ms(self, rows, lengths)


@pytest.mark.parametrize("num_users", [8, 32])
@pytest.mark.parametrize("seconds", [3.0, 5.0])
def test_a_steady_load_speculates_again_after_its_rounds_were_held_up(num_users: int, seconds: float) -> None:
    load = HeldUpLoad(MeasuredH100(), lambda now, number: 0.81, seed=1)
    controlled = Controlled(load)
    controlled.run(num_users, 20.0)
    controller = controlled.controller
    assert controller.mode is Mode.SPECULATIVE
    load.slow_until = load.now + seconds
    controlled.run(num_users, seconds + 60.0)
    assert controller.mode is Mode.SPECULATIVE
    assert load.rate(since=load.now - 10.0) > 0.95 * load.rate(since=5.0, until=20.0)


class ProbesBesideForwards(Load):
    """A few sessions' proposals wait for the forward of the others, on the same device."""

    waits_ms = 1.3

    def round_ms(self, rows: int, lengths: Sequence[int]) -> tuple[float, float, float]:
        draft, target, whole = super().round_ms(rows, lengths)
        waits_ms = self.waits_ms if 0 < 2 * sum(length > 0 for length in lengths) < rows else 0.0
        return draft + waits_ms, target, whole + waits_ms


@pytest.mark.parametrize("num_users", [16, 32])
def test_proposals_of_a_probe_do_not_make_those_of_all_sessions_seem_dear(num_users: int) -> None:
    """One user's rounds told what drafts take: as many tokens as steps, so any price of a token fitted them."""
    load = ProbesBesideForwards(MeasuredH100(), lambda now, number: 0.85 if now < 2.0 else 0.2, seed=1)
    controlled = Controlled(load)
    controlled.run(1, 3.0)
    times = controlled.controller._choice.timer.times
    before = times.longest_forward(0, 4, 4 * num_users)
    controlled.run(num_users, 10.0)
    assert controlled.controller.num_probes > 1
    assert times.longest_forward(0, 4, 4 * num_users) == pytest.approx(before, rel=0.1)
