"""Which mode is chosen by what users get, and when it is compared again."""

from __future__ import annotations

import itertools
import math

import pytest

from outrider_coordinator.speculation.exploration.mode_comparison import ModeComparison
from outrider_coordinator.speculation.mode_selector import Mode

PLAIN, SPECULATIVE = Mode.PLAIN, Mode.SPECULATIVE
EQUAL = {PLAIN: 1.0, SPECULATIVE: 1.0}
ROUND_S, REQUEST_S = 0.01, 0.1


class Load:
    """Sessions that get so many tokens a round in each mode, by the comparison's choice."""

    def __init__(self, tokens: dict[Mode, int], *, mode: Mode = SPECULATIVE, num_sessions: int = 8) -> None:
        self.tokens, self.mode, self.num_sessions = tokens, mode, num_sessions
        self.comparison = ModeComparison()
        self.now = 0.0
        self.modes: list[Mode] = []
        """Of each round."""

    def run(
        self,
        seconds: float,
        *,
        drafting_share: float = 0.2,
        request_tokens: float = 16.0,
        worth: dict[Mode, float] = EQUAL,
    ) -> None:
        for _ in range(round(seconds / ROUND_S)):
            self.now += ROUND_S
            self.comparison.note_time(self.now, self.mode, self.num_sessions)
            self.comparison.note_tokens(self.now, self.mode, self.tokens[self.mode] * self.num_sessions)
            self.mode = self.comparison.choose(
                self.now,
                self.mode,
                drafting_share=drafting_share,
                request_s=REQUEST_S,
                request_tokens=request_tokens,
                worth=worth,
            )
            self.modes.append(self.mode)

    @property
    def periods(self) -> list[tuple[Mode, float]]:
        """Modes and for how many seconds each was in effect."""
        return [(mode, len(list(rounds)) * ROUND_S) for mode, rounds in itertools.groupby(self.modes)]


@pytest.mark.parametrize("better", Mode)
def test_the_mode_that_gives_more_tokens_goes_on(better: Mode) -> None:
    load = Load({better: 3, better.other: 2})
    load.run(20.0)
    assert load.mode is better
    assert load.comparison.is_active
    assert load.comparison.rates == pytest.approx({better: 300.0, better.other: 200.0}, rel=0.02)
    modes = [mode for mode, _ in load.periods]
    assert modes == ([SPECULATIVE, PLAIN, SPECULATIVE] if better is SPECULATIVE else [SPECULATIVE, PLAIN])
    _, seconds = load.periods[-2]
    assert seconds == pytest.approx(0.9, abs=0.03), "eight requests, after the one that it began in"


def test_it_is_compared_again_later_and_later_while_the_same_mode_is_better() -> None:
    load = Load({PLAIN: 2, SPECULATIVE: 3})
    load.run(400.0)
    pauses = [seconds for mode, seconds in load.periods[2:-1] if mode is SPECULATIVE]
    assert len(pauses) == 4
    assert all(later > 1.8 * earlier for earlier, later in itertools.pairwise(pauses))
    assert load.modes.count(PLAIN) < 0.012 * len(load.modes)


def test_a_mode_that_has_become_better_is_found() -> None:
    load = Load({PLAIN: 2, SPECULATIVE: 3})
    load.run(20.0)
    load.tokens = {PLAIN: 3, SPECULATIVE: 2}
    load.run(40.0)
    assert load.mode is PLAIN


@pytest.mark.parametrize("how", [{"request_tokens": 65.0}, {"drafting_share": 0.95}, {"request_tokens": math.inf}])
def test_nothing_is_compared_where_rounds_tell_enough(how: dict[str, float]) -> None:
    load = Load({PLAIN: 3, SPECULATIVE: 2})
    load.run(20.0, **how)  # type: ignore[arg-type]
    assert set(load.modes) == {SPECULATIVE}
    assert not load.comparison.is_active
    load.run(4.0)
    assert load.mode is PLAIN
    load.run(1.0, **how)  # type: ignore[arg-type]
    assert not load.comparison.is_active
    assert load.mode is PLAIN, "by the comparison: the choice by rounds goes on from there"
    assert not load.comparison.rates


def test_a_mode_that_was_only_tried_ends_with_the_comparison() -> None:
    load = Load({PLAIN: 2, SPECULATIVE: 3})
    while load.mode is SPECULATIVE:
        load.run(ROUND_S)
    load.run(0.2)
    assert load.mode is PLAIN
    load.run(ROUND_S, request_tokens=65.0)
    assert load.mode is SPECULATIVE
    assert load.comparison.num_changes == 0


def test_what_differs_clearly_is_found_soon_and_what_does_not_by_many_requests() -> None:
    """One session with requests of .1 s: eight requests, or 64."""
    for tokens, seconds in ((20, 0.9), (29, 6.5)):
        load = Load({PLAIN: tokens, SPECULATIVE: 30}, num_sessions=1)
        load.run(20.0)
        modes, lengths = zip(*load.periods[:2], strict=True)
        assert modes == (SPECULATIVE, PLAIN)
        assert lengths == pytest.approx((6.5, seconds), abs=0.03)
        assert load.mode is SPECULATIVE


def test_a_mode_in_which_foreign_sessions_are_not_has_to_be_better_by_more() -> None:
    for worth, expected in ((EQUAL, PLAIN), ({PLAIN: 0.9, SPECULATIVE: 1.0}, SPECULATIVE)):
        load = Load({PLAIN: 21, SPECULATIVE: 20})
        load.run(20.0, worth=worth)
        assert load.mode is expected


def test_plain_decoding_is_left_as_it_is() -> None:
    load = Load({PLAIN: 2, SPECULATIVE: 3}, mode=PLAIN)
    load.run(20.0)
    assert set(load.modes) == {PLAIN}
    assert not load.comparison.is_active


def test_a_load_that_is_changing_is_not_compared_yet() -> None:
    load = Load({PLAIN: 3, SPECULATIVE: 2})
    load.run(0.5, request_tokens=65.0)
    load.num_sessions = 16
    load.run(0.3)
    assert not load.comparison.is_active
    load.run(2.0)
    assert load.comparison.is_active


@pytest.mark.parametrize("num_sessions", [1, 32])
@pytest.mark.parametrize("before", Mode)
def test_another_load_is_compared_anew_in_either_mode(before: Mode, num_sessions: int) -> None:
    load = Load({before: 3, before.other: 2})
    load.run(4.0)
    assert load.mode is before
    load.num_sessions, load.tokens = num_sessions, {before: 2, before.other: 3}
    load.run(16.0)
    assert load.mode is before.other
    assert load.comparison.rates[before.other] == pytest.approx(300.0, rel=0.02)
