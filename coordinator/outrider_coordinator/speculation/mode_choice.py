"""The choice of mode and draft lengths for the sessions of one target, from estimates of acceptance and time.

Plain decoding is all sessions' or no session's: a target computes plain steps before they are asked for as long as no
session speculates, so one session that drafts costs all of them time, and speculation as a whole has to be worth more.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from outrider_coordinator.speculation.draft_length import relative_error
from outrider_coordinator.speculation.estimates.acceptance_estimate import AcceptanceEstimate
from outrider_coordinator.speculation.estimates.round_timer import RoundTimer, VerdictBatch
from outrider_coordinator.speculation.expectation import Expectation, Expectations, imbalance
from outrider_coordinator.speculation.exploration.acceptance_probe import AcceptanceProbe
from outrider_coordinator.speculation.exploration.mode_comparison import ModeComparison
from outrider_coordinator.speculation.exploration.trial_allowance import expected_loss_s
from outrider_coordinator.speculation.exploration.trials import ModeTrial
from outrider_coordinator.speculation.length_planner import LengthPlanner
from outrider_coordinator.speculation.mode_selector import Mode, ModeSelector, SwitchPrice
from outrider_coordinator.speculation.session_state import ControlledSession

_STEADY_S = 0.3
_UNCERTAINTY = 1.2
"""So many times slower than expected speculation may turn out for each doubling of the sessions past those with which
it is known.
"""
_DOUBT = 1.1
"""The same where probes told what many sessions' speculation would take, or where new sessions join some that draft."""
_SHORTEST_REQUEST_S = 1e-3
_MOST_TEXT = 0.5
"""Share of the time that drafts' text may take where speculation is checked: with more it cannot pay."""
_MOST_OF_REST = 0.3
"""Share of the time left to sessions that bringing their drafts text may take: with more it hardly pays for itself."""
_LEAST_ACCEPTANCE = 0.3
"""Of a draft whose rounds are timed again and again, as something else may have held them up."""
_FEW_SESSIONS = 63
"""So many sessions' drafts take in their text so fast that nothing is doubted. With more, a server that knows nothing
of speculation begins plainly, and tries it later.
"""


@dataclass(frozen=True, slots=True)
class Load:
    """The sessions of a target at the moment of a choice."""

    sessions: tuple[ControlledSession, ...]
    usual_sessions: int
    """Sessions, or somewhat more: as many as there are when none is about to begin."""
    now: float
    """Seconds of service so far."""
    steady_s: float
    """Seconds since the number of sessions last changed much."""
    has_prompts: bool
    """Whether prompts are being computed."""
    is_new: bool
    """Whether most sessions have nearly all of their output before them."""
    has_drafted: bool
    """Whether more than a few new sessions have had draft tokens on this target; with foreign sessions, which stay in
    their mode, any session at all.
    """
    joins_drafting: bool
    """Whether, without foreign sessions, any that is not new has had some."""
    request_s: float
    """Seconds of service that requests take, the usual ones; infinity before any has ended."""
    usual_text: float
    """Tokens that the draft of a session lacks which comes while others are decoded, usually; those of bursts less."""
    computed_share: float
    """Of the text that drafts lack, the share that they compute when it is brought: they may have the rest cached."""
    drafting_s: float
    """Of ``request_s``, the seconds in which a session may draft."""
    ahead_s: float
    """For how long these sessions will be served, if they take as long as usual; 0 where that is unknown."""
    tokens_left: float
    """Mean tokens left of a session that may draft, at most; 0 where there is none."""

    @property
    def is_untouched(self) -> bool:
        """Whether most sessions are new, and nothing was drafted for any of those."""
        return self.is_new and not self.has_drafted

    @property
    def is_steady(self) -> bool:
        """Whether what is learned now will be of use."""
        return not self.has_prompts and (self.is_new or self.steady_s > _STEADY_S)


def _doublings_past_few(num_sessions: int) -> int:
    """How many times sessions have doubled since the few with which nothing is doubted; below 1: they are few."""
    return num_sessions.bit_length() - _FEW_SESSIONS.bit_length()


def are_few(num_sessions: int) -> bool:
    """Whether nothing is doubted with so many sessions."""
    return _doublings_past_few(num_sessions) <= 0


def _saved_share(rate: float, other: float) -> float:
    """Of the time, where decoding turns from one rate to the other."""
    return 1.0 - rate / other if other > rate else 0.0


class ModeChoice:
    """Mode, draft lengths, and the exploration that keeps both informed."""

    def __init__(self, max_length: int) -> None:
        self.rates = {Mode.PLAIN: 0.0, Mode.SPECULATIVE: 0.0}
        """Tokens a second that each mode is expected to give, by the last choice."""
        self.expected_length = 0
        """Longest draft length of what speculation is expected to give."""
        self.doubt = 1.0
        """So many times slower than expected it may turn out by the last choice; infinity: it was never timed."""
        self.selector = ModeSelector()
        self.timer = RoundTimer()
        self.acceptance = AcceptanceEstimate(max_length)
        self.lengths = LengthPlanner(max_length)
        self.probe = AcceptanceProbe()
        self.switch_price = SwitchPrice()
        self.comparison = ModeComparison()
        self._trials = {mode: ModeTrial(mode) for mode in Mode}
        self._expectations = Expectations(self.timer, self.acceptance)
        self._saved_share = 0.0
        """Of the time, what speculation would probably save by the last choice."""
        self._has_check_begun = False
        """What is known of speculation is forgotten with the check's first round: it may have none."""
        self.has_tried = False
        """A trial has ended since the last choice: the switch to the mode that was tried is free."""

    @property
    def is_trying_plain(self) -> bool:
        """Whether speculation pauses for a trial of plain decoding."""
        return self._trials[Mode.PLAIN].is_active

    @property
    def is_speculating(self) -> bool:
        """Whether all sessions are to draft, for good or for a trial."""
        return self.selector.mode is Mode.SPECULATIVE or self._trials[Mode.SPECULATIVE].is_active

    def note_round(self, batch: VerdictBatch, now: float, share: float, *, is_beside_text: bool = False) -> None:
        """A message of this share of the sessions; ``now``: seconds of service so far. ``is_beside_text``: it had
        drafts and says nothing of speculation.
        """
        self.probe.note_round(now, batch.num_tokens, share, self.rates[Mode.PLAIN])
        for mode, trial in self._trials.items():
            counts = (batch.drafting.num_rows > 0) is (mode is Mode.SPECULATIVE) and not is_beside_text
            if trial.note_round(now, batch.num_tokens, share, self.rates[mode.other], counts=counts):
                self.has_tried = True

    def note_drafting_round(self, num_sessions: int) -> None:
        """A round with drafts of so many sessions is about to be timed: it may be the first one of a check."""
        if self._has_check_begun and self._trials[Mode.SPECULATIVE].is_active:
            self._has_check_begun = False
            self.timer.forget_speculation(num_sessions)
            self.note_drafts()

    def note_drafts(self) -> None:
        """Something was learned of drafts: what they cost, or how many tokens were accepted."""
        self._expectations.forget()

    def note_end(self, session: ControlledSession) -> None:
        """The session takes no part any more."""
        self.probe.leave(session)
        self._expectations.spread.note_ended(session.acceptance)

    def cancel_trials(self, now: float) -> None:
        """End trials without a result: the load has changed."""
        for mode, trial in self._trials.items():
            trial.end(now, self.rates[mode.other])

    def compare(
        self,
        sessions: Collection[ControlledSession],
        now: float,
        *,
        drafting_share: float,
        request_s: float,
        request_tokens: float,
    ) -> bool:
        """Set the mode where it is chosen by what users get; returns whether it has changed. Arguments are as
        ``ModeComparison.choose`` has them.
        """
        num_changes = self.comparison.num_changes
        mode = self.comparison.choose(
            now,
            self.selector.mode,
            drafting_share=drafting_share,
            request_s=request_s,
            request_tokens=request_tokens,
            worth={mode: self.timer.foreign.worth(drafting=mode is Mode.SPECULATIVE) for mode in Mode},
        )
        has_changed = self.comparison.num_changes > num_changes  # to one that may be in effect already
        self.selector.num_switches += has_changed
        self._take_compared_rates(len(sessions))
        if mode is self.selector.mode:
            return has_changed
        self.selector.switch(is_counted=False)  # both are in effect in turn
        self.probe.cancel(now)
        self.cancel_trials(now)
        length = self.lengths.base_length if mode is Mode.SPECULATIVE else 0
        for session in sessions:
            session.length = min(length, session.limit)
        return True

    def _take_compared_rates(self, num_sessions: int) -> None:
        """What users got says more than what is expected."""
        self.rates |= {mode: num_sessions * rate for mode, rate in self.comparison.rates.items()}

    def choose(self, load: Load) -> bool:
        """Set mode and lengths; returns whether the mode has changed."""
        sessions = load.sessions
        if not self.probe.is_active and self.timer.end_probe():
            self.note_drafts()
        self._trials[Mode.SPECULATIVE].allowance.serve(load.now, len(sessions), self._saved_share)
        self._saved_share = 0.0
        self.doubt = self._doubt_of(load)
        if not self.comparison.is_active and self._begins_plainly:
            self._take_plain_mode(load.now)
            for session in sessions:
                session.length = 0
            return True
        plain_seconds = self.timer.plain_seconds(len(sessions))
        expected = self._expectations.of(sessions, plain_seconds, near=self.lengths.base_length)
        best = expected.best
        if best is None or plain_seconds <= 0.0:
            return False
        rate = best.rate / (1.0 + imbalance(self._num_all(len(sessions))))
        rate /= 1.0 + self._text_share(load, plain_seconds)
        self.rates = {Mode.PLAIN: len(sessions) / plain_seconds, Mode.SPECULATIVE: rate}
        self._take_compared_rates(len(sessions))
        self.expected_length = best.draft_length
        self._saved_share = self._saved_by_speculation(len(sessions), expected)
        has_changed = not self.comparison.is_active and self._select_mode(load, expected)
        if self.is_speculating:
            is_trial = self._trials[Mode.SPECULATIVE].is_active
            self.lengths.set_lengths(
                sessions, expected.useful, best, self.timer.times, expected.share, is_trial=is_trial
            )
        elif not self.probe.is_active:
            for session in sessions:
                session.length = 0
        if not (self.is_speculating or load.has_prompts or self.comparison.is_active):
            self._probe_if_due(load, is_hopeful=expected.hoped_rate > self.rates[Mode.PLAIN])
        return has_changed

    def estimates(self, num_sessions: int) -> dict[str, object]:
        """What a choice for so many sessions goes by now, times in milliseconds, for a log."""
        times, trial = self.timer.times, self._trials[Mode.SPECULATIVE]
        return {
            "acceptance_error": round(self.acceptance.error, 3),
            "plain_ms": round(1e3 * self.timer.plain_seconds(num_sessions), 2),
            "expected_draft_length": self.expected_length,
            "saved_share": round(self._saved_share, 3),
            "probes": self.probe.num_probes,
            "is_probing": self.probe.is_active,
            "is_told_by_probes": self.timer.knows_probed(num_sessions),
            "is_compared": self.comparison.is_active,
            "trial": next((mode.value for mode, each in self._trials.items() if each.is_active), ""),
            "allowed_s": round(trial.allowance.left_s(num_sessions), 3),
            "text_token_us": round(1e6 * self.switch_price.text_seconds(self.timer.plain_seconds(num_sessions), 1), 2),
            "foreign_sessions": round(self.timer.foreign.num_sessions, 1),
            **times.fitted_ms(),
        }

    def _probe_if_due(self, load: Load, *, is_hopeful: bool) -> None:
        """``is_hopeful``: speculation would pay if more was accepted. What a few sessions' first rounds took is no
        reason not to ask what those of many would.
        """
        num_sessions = len(load.sessions)
        if is_hopeful or self._is_first_probe(num_sessions):
            load_ratio = self.timer.foreign.load_ratio(num_sessions)
            acceptance, is_of_many = self.acceptance.mean, self.learns_from_probes(num_sessions)
            self.probe.begin_if_due(load.now, load.sessions, acceptance, load_ratio=load_ratio, is_of_many=is_of_many)

    def _num_all(self, num_sessions: int) -> int:
        """With those of other coordinators, about."""
        return round(self.timer.num_all(num_sessions))

    @property
    def _begins_plainly(self) -> bool:
        """Whether decoding is to turn plain since nothing is known and the price of learning grows with sessions."""
        return self.selector.mode is Mode.SPECULATIVE and math.isinf(self.doubt)

    def _take_plain_mode(self, now: float) -> None:
        self.selector.switch()
        self.selector.pause(now)
        self.probe.restart()

    def _doubt_of(self, load: Load) -> float:
        """``doubt`` of these sessions. Speculation that goes on is doubted less: its next rounds tell."""
        if _doublings_past_few(self._num_all(load.usual_sessions)) <= 0:
            return 1.0
        past_known = self.timer.doublings_past_known(len(load.sessions))
        if past_known is None:
            return math.inf
        goes_on = load.joins_drafting and self.selector.mode is Mode.SPECULATIVE
        return float((_DOUBT if goes_on else _UNCERTAINTY) ** max(past_known, 0))

    def _sure_rates(self) -> dict[Mode, float]:
        """The rates, speculation's less what may be wrong where it was timed with fewer sessions only, and that of a
        mode that foreign sessions are not in less what mixed forwards cost.
        """
        plain, speculative = (self.timer.foreign.worth(drafting=drafting) for drafting in (False, True))
        return {
            Mode.PLAIN: plain * self.rates[Mode.PLAIN],
            Mode.SPECULATIVE: speculative * self.rates[Mode.SPECULATIVE] / self.doubt,
        }

    def _select_mode(self, load: Load, expected: Expectation) -> bool:
        other, plain_seconds = self.selector.mode.other, expected.plain_seconds
        rates = self._sure_rates()
        if load.is_untouched:
            # Nothing was brought to the drafts of these sessions yet: going on with speculation has that price too.
            text_s = self._text_price_s(plain_seconds, load)
            rates[Mode.SPECULATIVE] /= 1.0 + text_s / max(load.request_s, _SHORTEST_REQUEST_S)
        price_s = self._switch_price_s(other, plain_seconds, load)
        is_worth = load.is_new and price_s < load.request_s * _saved_share(rates[self.selector.mode], rates[other])
        # What a new session's first few drafts came to is no reason to switch: too little was judged.
        is_free = (self.has_tried and self._is_sure(rates, expected)) or (
            is_worth and not (other is Mode.PLAIN and load.has_drafted)
        )
        self.has_tried = False
        if load.has_prompts:
            self.selector.pause(load.now)
        if self._trials[other].is_active or (load.has_prompts and other is Mode.SPECULATIVE):
            return False
        if other is Mode.SPECULATIVE and self._is_too_late(plain_seconds, load):
            self.selector.pause(load.now)
            return False
        if self.selector.observe(load.now, rates, price_s, is_free=is_free):
            self.probe.cancel(load.now)
            if other is Mode.PLAIN:
                self.acceptance.lighten()
                self.note_drafts()
                self.probe.restart()
                self._trials[Mode.SPECULATIVE].give_up(load.now)
            else:
                self._trials[Mode.SPECULATIVE].note_return(len(load.sessions))
            return True
        is_told_first = other is Mode.SPECULATIVE and self._is_first_probe(len(load.sessions))
        if load.is_steady and not (self.probe.is_active or is_told_first or self.timer.foreign.num_sessions):
            speculative_seconds = 0.0 if expected.best is None else expected.best.seconds
            self._begin_trial_if_due(
                load,
                self._trials[other],
                rates=self._hoped_rates(expected) if other is Mode.SPECULATIVE else self.rates,
                plain_seconds=plain_seconds,
                speculative_seconds=speculative_seconds,
                switch_s=price_s,
            )
        return False

    def _is_sure(self, rates: dict[Mode, float], expected: Expectation) -> bool:
        """Whether the modes differ by more than the acceptance is uncertain.

        Within that, the mode goes on until its loss exceeds the price of a switch; what is judged meanwhile tells more.
        """
        error = 0.0 if expected.best is None else relative_error(expected.useful, expected.best, self._acceptance_error)
        return abs(rates[Mode.PLAIN] - rates[Mode.SPECULATIVE]) > error * rates[Mode.SPECULATIVE]

    @property
    def _acceptance_error(self) -> float:
        return self.acceptance.error / self.acceptance.mean

    def _is_too_late(self, plain_seconds: float, load: Load) -> bool:
        """Whether the sessions that may draft end before the text that their drafts lack can pay for itself."""
        lacked = sum(session.draft_lag for session in load.sessions if session.limit)
        return self._text_seconds(plain_seconds, lacked, load) > _MOST_OF_REST * load.tokens_left * plain_seconds

    def _switch_price_s(self, mode: Mode, plain_seconds: float, load: Load) -> float:
        """Of a switch to ``mode``. What a draft lacks that reads hidden states is computed by the target too."""
        price_s = self.switch_price.seconds(mode, plain_seconds, 0)
        return price_s if mode is Mode.PLAIN else price_s + self._text_price_s(plain_seconds, load)

    def _text_price_s(self, plain_seconds: float, load: Load) -> float:
        """Of bringing the drafts the text that they lack."""
        return self._text_seconds(plain_seconds, sum(session.draft_lag for session in load.sessions), load)

    def _text_seconds(self, plain_seconds: float, num_tokens: float, load: Load) -> float:
        """Of bringing drafts so many tokens; those that read hidden states have the target compute them anew."""
        num_computed = round(num_tokens * load.computed_share)
        price_s = self.switch_price.text_seconds(plain_seconds, num_computed)
        return price_s + num_computed * self.timer.times.seconds_a_scored_token * load.sessions[0].reads_states

    def _text_share(self, load: Load, plain_seconds: float) -> float:
        """Seconds that the text of sessions to come takes, as a share of those in which sessions may draft: what is
        gained by some sessions has to pay for the text of those after them. Of untouched ones it is a price that is
        known, and counted where the mode is selected.
        """
        if load.is_untouched or not math.isfinite(load.request_s):
            return 0.0
        seconds = self._text_seconds(plain_seconds, load.usual_text * len(load.sessions), load)
        return seconds / max(load.drafting_s, _SHORTEST_REQUEST_S)

    def _begin_trial_if_due(
        self,
        load: Load,
        trial: ModeTrial,
        *,
        rates: dict[Mode, float],
        plain_seconds: float,
        speculative_seconds: float,
        switch_s: float,
    ) -> None:
        num_sessions = len(load.sessions)
        is_few = are_few(num_sessions)
        num_rounds = trial.num_rounds(self.timer.num_cold_rounds(num_sessions))
        may_pay = trial.mode is Mode.PLAIN or self._text_share(load, plain_seconds) < _MOST_TEXT
        is_young = self.timer.is_young
        may_check = trial.may_check(load.now, num_sessions, is_young=is_young)
        # However fast its rounds are, a draft that is hardly ever right cannot pay.
        is_check = is_few and may_pay and may_check and (is_young or self.acceptance.mean > _LEAST_ACCEPTANCE)
        has_begun = trial.begin_if_due(
            load.now,
            load.steady_s,
            num_sessions,
            rates,
            is_known=self.timer.knows(trial.mode, num_sessions),
            is_below_known=(self.timer.doublings_past_known(num_sessions) or 0) < 0,
            is_check=is_check,
            is_young=is_young,
            num_rounds=num_rounds,
            loss_s=expected_loss_s(plain_seconds, speculative_seconds, num_rounds=num_rounds, switch_s=switch_s),
            ahead_s=max(load.ahead_s - switch_s, 0.0),
            saved_share=self._saved_share,
        )
        if has_begun:
            self._has_check_begun = is_check

    def learns_from_probes(self, num_sessions: int) -> bool:
        """Whether probes are all that tells what speculation by these sessions, which are many, would bring."""
        return self.timer.learns_from_probes(num_sessions) and not are_few(num_sessions)

    def _is_first_probe(self, num_sessions: int) -> bool:
        """Whether none has told it yet."""
        return self.learns_from_probes(num_sessions) and not self.timer.knows_probed(num_sessions)

    def _saved_by_speculation(self, num_sessions: int, expected: Expectation) -> float:
        """Share of the time that speculation by all probably saves where probes told what to expect of it, or 0."""
        if self.is_speculating or expected.best is None or not self.timer.knows_probed(num_sessions):
            return 0.0
        error = relative_error(expected.useful, expected.best, self._acceptance_error)
        return _saved_share(self.rates[Mode.PLAIN], self.rates[Mode.SPECULATIVE] * (1.0 - error) / _DOUBT)

    def _hoped_rates(self, expected: Expectation) -> dict[Mode, float]:
        """The rates, speculation's as in groups that take turns if that is better and it is not known whether sessions
        stand in such, as where the draft has a device of its own: only a trial can tell.
        """
        num_sessions = len(expected.sessions)
        if self.timer.knows_share or num_sessions < 2:
            return self.rates
        in_groups = expected.rate_in_groups / (1.0 + imbalance(self._num_all(len(expected.sessions))))
        return {**self.rates, Mode.SPECULATIVE: max(self.rates[Mode.SPECULATIVE], in_groups)}
