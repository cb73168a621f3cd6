"""The draft lengths of the sessions that live on one target, by expected throughput.

Owns the choice between plain decoding, which is all sessions' or no session's, and speculation, and in that the length
of each session. Everything comes as an event, times included: no clock is read, nothing is sent. Refuses to know
tokens: a length depends on counts and times alone, never on what was drawn.

A target computes plain steps before they are asked for as long as no session speculates, so one session that drafts
costs all of them time. Therefore speculation as a whole has to be worth more than plain decoding. While decoding is
plain, a few sessions draft a step now and then to see whether that still holds (a *probe*); a probe's price in time is
measured, and the next one waits until that is one percent of the time passed.
"""

from __future__ import annotations

import enum
import logging
from dataclasses import dataclass, field

import numpy as np

from outrider_coordinator.speculation.acceptance_estimate import HIGHEST, PRIOR, AcceptanceEstimate, SessionAcceptance
from outrider_coordinator.speculation.draft_length import Choice, best_choice, choice_of, longest_of, usefulness
from outrider_coordinator.speculation.step_times import StepTimes

_log = logging.getLogger(__name__)

START_LENGTHS = (4, 4, 2, 2, 4, 1, 3, 5, 2, 4, 1, 3)
"""Of the first speculative rounds: they differ, so that prices can be told apart."""
_LEAVE, _ENTER = 1.01, 1.03
"""Plain decoding has to be so many times as fast as speculation before that is left, and the other way round."""
_CAUTION, _MAX_CAUTION, _LONG_ROUNDS = 0.03, 0.12, 512
_CLEAR = 1.1
"""So many times as fast a mode takes over at once."""
_LONGER = 1.02
"""Another longest length has to be so many times as fast."""
_ROUNDS_BETWEEN_CHOICES = 4
_SURE_ROUNDS = 6
"""Rounds of a mode that is tried."""
_ROUNDS_BETWEEN_VARIATIONS = 24
"""One speculative round in so many has another length than the best: prices stay known."""
_KNOWN_ROUNDS = len(START_LENGTHS)
"""Speculative rounds of about so many rows after which their price is known."""
_KNOWN_PLAIN = 4
_ROUNDS_NOT_AHEAD = 2
"""Plain rounds in a row after which the target begins to compute ahead."""
_HOPE, _HOPE_OF_OLD = 0.25, 0.03
"""A mode that was never seen with about so many sessions, or not for long, may be faster than expected by this share:
then it is tried."""
_OLD_ROUNDS = 4096
_DWELL_ROUNDS, _MAX_DWELL_ROUNDS = 16, 512
"""Rounds that a mode lasts at least."""
_PROBE_LENGTH = 2
_PROBE_STEPS = 2
_MAX_PROBERS = 4
_MAX_FOLLOW_UPS = 6
"""Probes in a row where more is accepted than was expected."""
_SURPRISE = 0.1
_PROBE_PRICE = 0.01
"""Time that probes may cost, as a share of all."""
_LONGEST_PROBE_PAUSE_S = 20.0
_LONGEST_PROBE_S = 2.0


class Mode(enum.StrEnum):
    """How the sessions of a target decode."""

    PLAIN = "plain"
    SPECULATIVE = "speculative"


class ControlledSession:
    """What the controller keeps of one session."""

    __slots__ = (
        "acceptance",
        "draft_lag",
        "expected",
        "has_begun",
        "has_drafted",
        "length",
        "limit",
        "num_probes",
        "probe_steps",
        "round_began",
    )

    def __init__(self, limit: int) -> None:
        """``limit``: most tokens that may be drafted in a step."""
        self.limit = limit
        self.length = 0
        """Tokens to be drafted in the next step."""
        self.acceptance = SessionAcceptance()
        self.expected = PRIOR
        """The acceptance that it is known for, at the last choice."""
        self.has_begun = False
        """Its prompt has been taken in."""
        self.has_drafted = False
        """In its last step."""
        self.round_began: float | None = None
        """When its last verdict was reached, if the round since then can be measured."""
        self.draft_lag = 0
        """Committed tokens that the draft lacks."""
        self.num_probes = 0
        """Probes that it has begun."""
        self.probe_steps = 0
        """Steps that are left of one."""


@dataclass(slots=True)
class _Group:
    """Verdicts of sessions that drafted, or of those that did not."""

    num_rows: int = 0
    num_timed: int = 0
    sum_seconds: float = 0.0

    def note(self, began: float | None, now: float) -> None:
        """One verdict; ``began``: of the round, if that can be measured."""
        self.num_rows += 1
        if began is not None:
            self.num_timed += 1
            self.sum_seconds += now - began

    @property
    def seconds(self) -> float | None:
        """Mean duration of a round; None where too few could be measured."""
        return self.sum_seconds / self.num_timed if 2 * self.num_timed > self.num_rows else None


@dataclass(slots=True)
class _Round:
    """The verdicts of one message."""

    now: float
    plain: _Group = field(default_factory=_Group)
    drafting: _Group = field(default_factory=_Group)
    num_drafted: int = 0
    draft_length: int = 0
    num_tokens: int = 0

    @property
    def num_rows(self) -> int:
        """Verdicts."""
        return self.plain.num_rows + self.drafting.num_rows


@dataclass(slots=True)
class _Probe:
    began: float
    num_rounds: int = 0
    num_tokens: int = 0
    num_left: int = 0
    """Sessions that have not made their steps."""
    num_rounds_after: int = 0
    num_judged: int = 0
    num_accepted: int = 0
    expected: float = 0.0
    """Acceptance that was expected."""

    @property
    def is_surprising(self) -> bool:
        """Whether clearly more was accepted than expected."""
        return self.num_accepted > (self.expected + _SURPRISE) * self.num_judged


class DraftLengthController:
    """Draft lengths of the sessions of one target; the events of each message come between ``begin`` and ``end``."""

    def __init__(self, max_length: int) -> None:
        self.mode = Mode.SPECULATIVE
        self.num_switches = self.num_probes = 0
        self.plain_rate = self.speculative_rate = 0.0
        """Tokens a second that each mode is expected to give, by the last choice."""
        self._times = StepTimes()
        self._acceptance = AcceptanceEstimate(max_length)
        self._max_length = max_length
        self._sessions: dict[ControlledSession, None] = {}
        self._num_prompts = 0
        self._round = _Round(0.0)
        self._base_length = min(START_LENGTHS[0], max_length)
        self._num_speculative = self._num_plain = 0
        self._rounds_in_mode = self._rounds_since_choice = self._rounds_since_variation = 0
        self._dwell_rounds = 4
        self._caution = 0.0
        """Speculation has to be better by this share more, since it was left soon after it was begun."""
        self._magnitude = 0
        self._share = 1.0
        self._is_varied = False
        self._num_variations = 0
        self._is_trial = False
        self._probe: _Probe | None = None
        self._next_probe: float | None = None
        self._probe_price, self._num_follow_ups = 0.0, 0

    # What is asked.

    def length(self, session: ControlledSession) -> int:
        """Tokens to be drafted in the session's next step; 0 while prompts are taken in, which steps would hold up."""
        return 0 if self._num_prompts else session.length

    @property
    def has_prompts(self) -> bool:
        """Whether a session's prompt is being taken in."""
        return self._num_prompts > 0

    @property
    def num_sessions(self) -> int:
        """Sessions that live on the target."""
        return len(self._sessions)

    @property
    def acceptance(self) -> float:
        """Accepted of judged tokens, lately."""
        return self._acceptance.mean

    @property
    def mean_length(self) -> float:
        """Mean over the sessions of what they would draft next."""
        return sum(session.length for session in self._sessions) / max(len(self._sessions), 1)

    # Events.

    def enter(self, session: ControlledSession) -> None:
        """A session comes to live on the target; its text is to be taken in."""
        if session not in self._sessions:
            self._sessions[session] = None
            session.has_begun, session.round_began = False, None
            session.length = min(self._base_length, session.limit) if self.mode is Mode.SPECULATIVE else 0
            self._num_prompts += 1

    def leave(self, session: ControlledSession) -> None:
        """It does not live there any more."""
        if session in self._sessions:
            del self._sessions[session]
            self._num_prompts -= not session.has_begun
            self._end_probe_of(session)

    def begin(self, now: float) -> None:
        """A message of the target has come; ``now`` is in seconds."""
        self._round = _Round(now)

    def note_verdict(self, session: ControlledSession, num_drafted: int, num_accepted: int, *, draft_lag: int) -> None:
        """A step of the session was judged; ``draft_lag``: committed tokens that its draft lacks."""
        if session not in self._sessions:
            return
        found = self._round
        session.draft_lag = draft_lag
        found.num_tokens += num_accepted + 1
        # A round in which a session begins to draft may have waited for text that its draft lacked.
        began = None if num_drafted and not session.has_drafted else session.round_began
        session.round_began, session.has_drafted = found.now, num_drafted > 0
        if not session.has_begun:
            session.has_begun = True
            self._num_prompts -= 1
        if num_drafted:
            found.drafting.note(began, found.now)
            found.num_drafted += num_drafted
            found.draft_length = max(found.draft_length, num_drafted)
            session.acceptance.note(num_drafted, num_accepted, self._acceptance.mean)
            self._acceptance.note(num_drafted, num_accepted, session.expected)
            if session.probe_steps and self._probe is not None:
                self._probe.num_judged += num_accepted + (num_accepted < num_drafted)
                self._probe.num_accepted += num_accepted
            if session.probe_steps > 1:
                session.probe_steps -= 1
            else:
                self._end_probe_of(session)
        else:
            found.plain.note(began, found.now)

    def end(self, *, rows: int = 0, tokens: int = 0, seconds: float = 0.0) -> None:
        """All of the message was heard; its forward had so many rows and tokens, and took so long."""
        found = self._round
        self._acceptance.fold()
        if not found.num_rows:
            return
        self._note_round(found, rows, tokens, seconds)
        self._note_probe(found)
        if self._num_prompts:
            for session in self._sessions:
                session.round_began = None

    def note_draft(self, draft_length: int, tokens: int, seconds: float) -> None:
        """Proposals that were drawn together: the longest one's length, the drafted tokens of all, their time."""
        if draft_length and seconds > 0.0:
            self._times.note_draft(draft_length, tokens, seconds)

    def choose(self) -> bool:
        """Choose anew, if it is time to; to be called between messages. Whether the mode has changed."""
        is_start = self._is_trial or self._num_speculative < _KNOWN_ROUNDS
        if not self._num_begun or self._rounds_since_choice < (1 if is_start else _ROUNDS_BETWEEN_CHOICES):
            return False
        self._rounds_since_choice = 0
        return self._choose()

    # Measuring.

    def _note_round(self, found: _Round, rows: int, tokens: int, seconds: float) -> None:
        self._rounds_since_choice += 1
        self._rounds_in_mode += 1
        if found.drafting.num_rows:
            self._num_plain = 0
            if rows == found.num_rows and tokens == rows + found.num_drafted and seconds > 0.0:
                self._times.note_target(rows, tokens, seconds)
            if self.mode is Mode.SPECULATIVE and found.drafting.seconds:
                self._num_speculative += 1
                self._rounds_since_variation += 1
                self._note_share(found.num_rows)
                self._times.note_speculative(
                    found.num_rows, found.draft_length, found.num_drafted, found.drafting.seconds
                )
        elif self.mode is Mode.PLAIN and found.plain.seconds and self._probe is None:
            self._num_plain += 1
            if self._num_plain > _ROUNDS_NOT_AHEAD:
                self._note_share(found.num_rows)
                self._times.note_plain(found.num_rows, found.plain.seconds)

    def _note_share(self, num_rows: int) -> None:
        share = min(1.0, num_rows / max(self._num_begun, 1))
        self._share += 0.2 * (share - self._share)

    @property
    def _num_begun(self) -> int:
        return len(self._sessions) - self._num_prompts

    # Choosing.

    def _choose(self) -> bool:
        sessions = [session for session in self._sessions if session.has_begun]
        useful = self._usefulness(sessions)
        best = best_choice(useful, self._times, self._share)
        if best is None:
            return False
        rows = len(sessions)
        if rows.bit_length() != self._magnitude:
            self._magnitude, self._caution = rows.bit_length(), 0.0
        plain_seconds = self._times.plain(self._share * rows)
        self.plain_rate = rows / plain_seconds if plain_seconds > 0.0 else 0.0
        self.speculative_rate = best.rate
        hoped_plain = self.plain_rate * self._hope_of_plain(rows)
        hoped = best.rate * self._hope_of_speculation(rows)
        if self.mode is Mode.PLAIN:
            if self._prefers(hoped, hoped_plain):
                self._enter(Mode.SPECULATIVE, is_trial=best.rate <= self.plain_rate)
                self._take(sessions, best)
                return True
            self._probe_if_due(sessions)
        else:
            if self._prefers(hoped_plain, hoped):
                self._enter(Mode.PLAIN, is_trial=best.rate >= self.plain_rate)
                self._take_none()
                return True
            self._set_lengths(sessions, useful, best)
        return False

    def _set_lengths(self, sessions: list[ControlledSession], useful: np.ndarray, best: Choice) -> None:
        num_known = self._times.num_speculative(self._share * len(sessions))
        if num_known < _KNOWN_ROUNDS:
            self._vary(sessions, num_known)
        else:
            self._adjust(sessions, useful, best)

    def _prefers(self, other: float, current: float) -> bool:
        """Whether the mode with the rate ``other`` is to take over; rates of modes that are little known are hoped to
        be better, so that they become known.
        """
        margin = _ENTER + self._caution if self.mode is Mode.PLAIN else _LEAVE
        is_clear = self._is_trial or other > _CLEAR * current
        dwell_rounds = _SURE_ROUNDS if is_clear else self._dwell_rounds
        return other > margin * current and self._rounds_in_mode >= dwell_rounds

    def _vary(self, sessions: list[ControlledSession], num_known: int) -> None:
        """Lengths that tell prices apart."""
        for session in sessions:
            session.length = min(START_LENGTHS[num_known % len(START_LENGTHS)], session.limit)

    def _hope_of_plain(self, rows: int) -> float:
        """How many times faster than expected plain rounds may turn out."""
        unknown = max(0.0, 1.0 - self._times.num_plain(self._share * rows) / _KNOWN_PLAIN)
        is_old = self.mode is Mode.SPECULATIVE and self._rounds_in_mode > _OLD_ROUNDS
        return 1.0 + max(_HOPE * unknown, _HOPE_OF_OLD * is_old)

    def _hope_of_speculation(self, rows: int) -> float:
        """How many times faster than expected speculative rounds may turn out."""
        return 1.0 + _HOPE * max(0.0, 1.0 - self._times.num_speculative(self._share * rows) / _KNOWN_ROUNDS)

    def _adjust(self, sessions: list[ControlledSession], useful: np.ndarray, best: Choice) -> None:
        """The lengths of speculating sessions."""
        longest = longest_of(useful)
        current = choice_of(useful, min(self._base_length, longest), self._times, self._share)
        chosen = best if best.rate > _LONGER * current.rate else current
        self._base_length = chosen.draft_length
        if self._rounds_since_variation >= _ROUNDS_BETWEEN_VARIATIONS:
            self._rounds_since_variation = 0
            self._num_variations += 1
            other = chosen.draft_length + (1, -1, 2, -2)[self._num_variations % 4]
            chosen = choice_of(useful, min(max(other, 1), longest), self._times, self._share)
            self._take(sessions, chosen)
            for session in sessions:  # those that draft nothing are looked at too
                session.length = max(session.length, min(1, session.limit))
            return
        self._take(sessions, chosen)

    def _take(self, sessions: list[ControlledSession], choice: Choice) -> None:
        for session, length in zip(sessions, choice.lengths, strict=True):
            session.length = length

    def _take_none(self) -> None:
        for session in self._sessions:
            session.length = 0

    def _enter(self, mode: Mode, *, is_trial: bool = False) -> None:
        """The more often the mode changes in little time, the longer it stays; a trial is no change."""
        if mode is Mode.PLAIN and not is_trial:
            did_last = self._rounds_in_mode > _LONG_ROUNDS
            self._caution = 0.0 if did_last else min(self._caution + _CAUTION, _MAX_CAUTION)
        if not is_trial:
            is_soon = self._rounds_in_mode < 4 * self._dwell_rounds
            self._dwell_rounds = min(2 * self._dwell_rounds, _MAX_DWELL_ROUNDS) if is_soon else _DWELL_ROUNDS
            self.num_switches += 1
        self.mode, self._is_trial = mode, is_trial
        if mode is Mode.PLAIN and not is_trial:
            self._acceptance.lighten()
        self._rounds_in_mode = self._num_plain = 0
        self._cancel_probe()
        self._next_probe = None
        self._probe_price, self._num_follow_ups = 0.0, 0

    def _usefulness(self, sessions: list[ControlledSession]) -> np.ndarray:  # -> [B, K]
        mean = self._acceptance.mean
        for session in sessions:
            session.expected = min(mean * session.acceptance.relative(mean), HIGHEST)
        acceptance = np.array([session.expected for session in sessions])
        limits = np.array([session.limit for session in sessions])
        by_position = self._acceptance.by_position()[: limits.max()]
        return usefulness(by_position, acceptance, limits, highest=HIGHEST)

    # Probing.

    def _probe_if_due(self, sessions: list[ControlledSession]) -> None:
        now = self._round.now
        if self._probe is not None:
            if now - self._probe.began > _LONGEST_PROBE_S:
                self._cancel_probe()
            return
        if self._next_probe is None:
            self._next_probe = now + 0.25
        if now < self._next_probe:
            return
        probers = _probers(sessions)
        if not probers:
            return
        self.num_probes += 1
        self._probe = _Probe(now, num_left=len(probers), expected=self._acceptance.mean)
        for session in probers:
            session.num_probes += 1
            session.probe_steps, session.length = _PROBE_STEPS, min(_PROBE_LENGTH, session.limit)

    def _end_probe_of(self, session: ControlledSession) -> None:
        if session.probe_steps:
            session.probe_steps, session.length = 0, 0
            if self._probe is not None:
                self._probe.num_left -= 1

    def _note_probe(self, found: _Round) -> None:
        probe = self._probe
        if probe is None or found.now <= probe.began:
            return
        probe.num_tokens += found.num_tokens
        probe.num_rounds += 1
        if probe.num_left > 0:
            return
        probe.num_rounds_after += 1
        if probe.num_rounds_after <= _ROUNDS_NOT_AHEAD:  # they are slower, since nothing was computed ahead
            return
        self._probe = None
        expected = probe.num_tokens / self.plain_rate if self.plain_rate > 0.0 else 0.0
        self._probe_price += max(found.now - probe.began - expected, 0.0)
        self._num_follow_ups += 1
        if probe.is_surprising and self._num_follow_ups < _MAX_FOLLOW_UPS:
            self._next_probe = found.now
            return
        pause = max(self._probe_price / _PROBE_PRICE, 4.0 * expected)
        self._next_probe = found.now + min(pause, _LONGEST_PROBE_PAUSE_S)
        self._probe_price, self._num_follow_ups = 0.0, 0

    def _cancel_probe(self) -> None:
        self._probe = None
        for session in self._sessions:
            if session.probe_steps:
                session.probe_steps, session.length = 0, 0


def _probers(sessions: list[ControlledSession]) -> list[ControlledSession]:
    """Those whose drafts lack least text, and one that was seldom chosen before: bringing text takes time too."""
    able = sorted((session for session in sessions if session.limit), key=lambda session: session.draft_lag)
    if len(able) < 2:
        return able
    count = min(_MAX_PROBERS, (len(able) + 1) // 2)
    other = min(able[count - 1 :], key=lambda session: session.num_probes)
    return [*able[: count - 1], other]
