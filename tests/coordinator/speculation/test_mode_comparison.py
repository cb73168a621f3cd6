"""Which mode is chosen by what users get, and when it is compared again."""

from __future__ import annotations

import itertools

import pytest

from outrider_coordinator.speculation.exploration.mode_comparison import ModeComparison
from outrider_coordinator.speculation.mode_selector import Mode

PLAIN, SPECULATIVE = Mode.PLAIN, Mode.SPECULATIVE
ROUND_S = 0.01


class Load:
    """Sessions that get so many tokens a round in each mode, by the comparison's choice."""

    def __init__(self, tokens: dict[Mode, int], *, mode: Mode = SPECULATIVE, num_sessions: int = 8) -> None:
        self.tokens, self.mode, self.num_sessions = tokens, mode, num_sessions
        self.comparison = ModeComparison()
        self.now = 0.0
        self.modes: list[Mode] = []
        """Of each round."""

    def run(
        self, seconds: float, *, drafting_share: float = 0.2, request_s: float = 0.1, may_draft: bool = True
    ) -> None:
        for _ in range(round(seconds / ROUND_S)):
            self.now += ROUND_S
            self.comparison.note_time(self.now, self.mode, self.num_sessions)
            self.comparison.note_tokens(self.now, self.mode, self.tokens[self.mode] * self.num_sessions)
            self.mode = self.comparison.choose(
                self.now, self.mode, drafting_share=drafting_share, request_s=request_s, may_draft=may_draft
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


@pytest.mark.parametrize(
    "how",
    [{"request_s": 0.6}, {"drafting_share": 0.95}, {"may_draft": False}, {"request_s": float("inf")}],
    ids=lambda how: next(iter(how)),
)
def test_nothing_is_compared_where_rounds_tell_enough(how: dict[str, float]) -> None:
    load = Load({PLAIN: 3, SPECULATIVE: 2})
    load.run(20.0, **how)  # type: ignore[arg-type]
    assert set(load.modes) == {SPECULATIVE}
    assert not load.comparison.is_active
    load.run(4.0)
    assert load.mode is PLAIN
    load.run(1.0, **how)  # type: ignore[arg-type]
    assert not load.comparison.is_active
    assert load.mode is PLAIN, "what comes next is another's choice"
    assert not load.comparison.rates


def test_plain_decoding_is_left_as_it_is() -> None:
    load = Load({PLAIN: 2, SPECULATIVE: 3}, mode=PLAIN)
    load.run(20.0)
    assert set(load.modes) == {PLAIN}
    assert not load.comparison.is_active


def test_another_load_is_compared_anew() -> None:
    load = Load({PLAIN: 2, SPECULATIVE: 3})
    load.run(4.0)
    assert load.mode is SPECULATIVE
    load.num_sessions, load.tokens = 32, {PLAIN: 3, SPECULATIVE: 2}
    load.run(6.0)
    assert load.mode is PLAIN
