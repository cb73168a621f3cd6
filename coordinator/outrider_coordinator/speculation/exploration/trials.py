"""Trials of the mode that is not in effect: all sessions speculate, or decode plainly, for a few rounds.

Estimates of a mode that is not in effect grow old, or were never measured with about so many sessions. A trial of plain
decoding is cheap, since drafts lack no more afterwards than a step can bring. A trial of speculation brings all drafts
their text, so it is made only where speculation may well be better.
"""

from __future__ import annotations

import math

from outrider_coordinator.speculation.estimates.round_timer import ROUNDS_NOT_AHEAD
from outrider_coordinator.speculation.exploration.budget import Excursion, ExplorationBudget
from outrider_coordinator.speculation.exploration.trial_allowance import TrialAllowance
from outrider_coordinator.speculation.mode_selector import Mode

_NUM_ROUNDS = {Mode.PLAIN: ROUNDS_NOT_AHEAD + 4, Mode.SPECULATIVE: 5}
"""Of a trial, besides those that are not counted."""
_OVERRUN = 2.0
"""A trial that has cost so many times its expected loss ends without a result."""
_LONGEST_S = 3.0
"""So much longer than a trial's expected loss it takes at most."""
_HOPE_OF_PLAIN = {False: 1.3, True: 1.1}
"""So many times faster than expected plain decoding may turn out: unknown with about so many sessions, and known."""
_HOPE_OF_SPECULATION, _STEADY_S = 1.1, 30.0
"""The same for speculation that is known, once there have been about so many sessions for so long. Where it is not, it
has to be expected to be better: with more sessions than before it is rather overestimated. With fewer than before it is
rather underestimated.
"""
_PAID_OF_CHECK = 0.2
"""Share of a check's expected loss that has to be paid for beforehand: there is one, and its loss is overrated."""
_PAID_OF_LIKELY = 0.5
"""The same of a trial that probes promise to gain by, with all that may be wrong counted against it: few are lost."""
_CHECK_AFTER_S = 0.5
"""A mode that was given up is checked so much later, when what slowed its rounds may be over ..."""
_BETWEEN_CHECKS_S, _MOST_BETWEEN_CHECKS_S = 10.0, 40.0
"""... and no sooner than so long after the check before. The pause after one of about so many sessions doubles, up to
the last, with each that does not bring the mode back.
"""
_SHORTEST_PAUSE_S = {Mode.PLAIN: 4.0, Mode.SPECULATIVE: 30.0}
_LONGEST_PAUSE_S = 60.0


class CheckPauses:
    """Pauses after checks, which grow by the magnitude of the number of sessions that were checked."""

    def __init__(self) -> None:
        self._began_s: dict[int, float] = {}
        self._pauses_s: dict[int, float] = {}

    def begin(self, now: float, num_sessions: int, *, grows: bool) -> None:
        """A check of so many sessions begins; ``grows``: the pause after it is twice that before it."""
        magnitude = num_sessions.bit_length()
        pause_s = self._pauses_s.get(magnitude, _BETWEEN_CHECKS_S)
        self._pauses_s[magnitude] = min(2.0 * pause_s, _MOST_BETWEEN_CHECKS_S) if grows else pause_s
        self._began_s[magnitude] = now

    def reset(self, num_sessions: int) -> None:
        """Checks of about so many sessions were of use."""
        self._pauses_s.pop(num_sessions.bit_length(), None)

    def end_s(self, num_sessions: int) -> float:
        """When so many sessions may be checked again: no sooner than after the shortest pause, whoever was checked."""
        magnitude = num_sessions.bit_length()
        own_s = self._began_s.get(magnitude, -math.inf) + self._pauses_s.get(magnitude, _BETWEEN_CHECKS_S)
        return max(own_s, max(self._began_s.values(), default=-math.inf) + _BETWEEN_CHECKS_S)


class ModeTrial:
    """Trials of one mode, one after the other."""

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self.allowance = TrialAllowance()
        """For trials of speculation; those of plain decoding cost next to nothing."""
        self._check_from_s = 0.0 if mode is Mode.SPECULATIVE else math.inf
        """When the choice against the mode may be checked."""
        self._check_while_young = True
        """Whether the first rounds of a process led to the choice: devices that wake take many times as long. Those of
        a check may too, so it is repeated while little is known.
        """
        self._check_pauses = CheckPauses()
        self._num_rounds = self.num_rounds(0)
        self._budget = ExplorationBudget(shortest_pause_s=_SHORTEST_PAUSE_S[mode], longest_pause_s=_LONGEST_PAUSE_S)
        self._excursion: Excursion | None = None
        self._num_sessions = 0
        self._limit_s = 0.0
        self._tried: set[int] = set()
        """Magnitudes of the number of sessions for which it was tried."""

    def num_rounds(self, num_cold: int) -> int:
        """Rounds of a trial of which so many say nothing yet."""
        return _NUM_ROUNDS[self.mode] + (num_cold if self.mode is Mode.SPECULATIVE else 0)

    def give_up(self, now: float) -> None:
        """The mode was in effect and is not any more. If something else held up its rounds, decoding must not stay in
        the other mode for that, so the choice may be checked.
        """
        self._check_from_s, self._check_while_young = now + _CHECK_AFTER_S, False

    def note_return(self, num_sessions: int) -> None:
        """The mode is in effect again with about so many sessions, so checks are of use."""
        self._check_pauses.reset(num_sessions)

    def may_check(self, now: float, num_sessions: int, *, is_young: bool) -> bool:
        """Whether the choice against the mode may be checked now; ``is_young``: little is known of the mode."""
        is_due = now >= max(self._check_from_s, self._check_pauses.end_s(num_sessions))
        return is_due and (is_young or not self._check_while_young)

    @property
    def is_active(self) -> bool:
        """Whether a trial is under way."""
        return self._excursion is not None

    def begin_if_due(
        self,
        now: float,
        steady_s: float,
        num_sessions: int,
        rates: dict[Mode, float],
        *,
        is_known: bool,
        is_below_known: bool,
        is_check: bool,
        is_young: bool,
        num_rounds: int,
        loss_s: float,
        ahead_s: float,
        saved_share: float = 0.0,
    ) -> bool:
        """Begin a trial, if it is worth its price; ``steady_s``: for how long there have been about so many sessions;
        ``is_known``: the mode was timed with about so many; ``is_below_known``: speculation was timed with more;
        ``is_check``: whatever is expected of the mode may be wrong, and is checked; ``is_young``: little is known of
        it; ``loss_s``: what the trial, of ``num_rounds``, costs if the mode is not better;
        ``ahead_s``: for how long there will be these sessions once drafts have their text;
        ``saved_share``: of that time, what the mode will probably save.
        """
        is_first = not is_known and num_sessions.bit_length() not in self._tried
        hope = self._hope(steady_s, is_known=is_known, is_below_known=is_below_known)
        if not is_check and rates[self.mode] * hope < rates[self.mode.other]:
            return False
        if not is_check and not is_first and not self._budget.is_due(now):
            return False
        paid_s = loss_s * (_PAID_OF_CHECK if is_check else _PAID_OF_LIKELY if saved_share > 0.0 else 1.0)
        if self.mode is Mode.SPECULATIVE and paid_s > self.allowance.left_s(
            num_sessions, ahead_s=ahead_s, saved_share=saved_share
        ):
            return False
        self._tried.add(num_sessions.bit_length())
        if is_check:
            self._check_pauses.begin(now, num_sessions, grows=not is_young)
        self._excursion, self._num_sessions, self._num_rounds = Excursion(now), num_sessions, num_rounds
        self._limit_s = _OVERRUN * loss_s
        return True

    def _hope(self, steady_s: float, *, is_known: bool, is_below_known: bool) -> float:
        """So many times better than expected the mode may turn out."""
        if self.mode is Mode.PLAIN:
            return _HOPE_OF_PLAIN[is_known]
        if steady_s >= _STEADY_S or (is_below_known and not is_known):
            return _HOPE_OF_SPECULATION
        return 0.0 if is_known else 1.0

    def note_round(self, now: float, num_tokens: int, share: float, usual_rate: float, *, counts: bool) -> bool:
        """A message of this share of the sessions; returns whether the trial is over now.

        ``counts``: it was of the kind that is tried. ``usual_rate``: tokens a second of the mode in effect.
        """
        excursion = self._excursion
        if excursion is None:
            return False
        excursion.note(num_tokens, share if counts else 0.0)
        if excursion.num_rounds < self._num_rounds - 0.5 and not self._is_overrun(excursion, now, usual_rate):
            return False
        self.end(now, usual_rate)
        return True

    def end(self, now: float, usual_rate: float = 0.0) -> None:
        """End the trial, if one is under way; ``usual_rate`` is as for ``note_round``."""
        if self._excursion is not None:
            price_s = self._excursion.price(now, usual_rate)
            self._budget.spend(now, price_s)
            self.allowance.spend(self._num_sessions, price_s)
            self._excursion = None

    def _is_overrun(self, excursion: Excursion, now: float, usual_rate: float) -> bool:
        """Whether it takes too long, or costs much more than was expected."""
        is_dear = self.mode is Mode.SPECULATIVE and excursion.price(now, usual_rate) > self._limit_s
        return is_dear or now - excursion.began >= _LONGEST_S + self._limit_s
