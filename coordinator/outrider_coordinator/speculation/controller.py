"""The draft length controller: draft lengths of the sessions on one target, by goodput.

Takes events with their times and answers queries; reads no clock and sends nothing. Knows no tokens: a length depends
on counts and times alone, never on what was drawn, or discarding drafts would bias the output.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from outrider_coordinator.speculation.acceptance import Acceptance
from outrider_coordinator.speculation.catch_up import CatchUp
from outrider_coordinator.speculation.goodput import Choice, best_choice, usefulness
from outrider_coordinator.speculation.mode import Mode, ModeSwitch, TextPrice
from outrider_coordinator.speculation.probe import Probe
from outrider_coordinator.speculation.session_state import ControlledSession, SessionVerdict
from outrider_coordinator.speculation.step_costs import Average, StepCosts, bucket_of

_MAX_INTERVAL_S = 0.25
"""Longest time between two messages of a target that is busy: a longer one is idle time."""
_ROUNDS_BETWEEN_CHOICES = {Mode.PLAIN: 16, Mode.SPECULATIVE: 4}
LONGEST_PROMPT_AT_ONCE = 512
"""Longest prompt in tokens that a draft computes beside the target: a longer one would delay first tokens where both
share a device."""
_AWAITED_TEXT = 512
"""Tokens that drafts of new sessions lack together, above which they are not brought before a choice."""
_ROUNDS_NOT_AHEAD = 3
"""Plain rounds after others before the target computes ahead, so that rounds are as short as they get."""
_COLD_ROUNDS = 12
"""First rounds of each mode that are not timed: a process's first forwards take several times as long."""
_GROWTH = 2
"""Factor by which sessions may have become more since a choice for it to hold."""
_RENEWAL_S = 30.0
"""Seconds of plain decoding after which speculation is hoped for as if it had never been measured."""
_APART = 0.85
"""Factor to the rate of the mode that other coordinators' sessions are not in: they wait for each other."""
_ALL = 0.8
"""Share of the sessions in a message that draft, from which on its round is one of speculation by all."""
_OPTIMISM = 0.15
"""Share by which speculation may be faster than expected where it was not measured with about so many sessions."""
_TRIAL_TEXT = 0.05
"""Share of the time left that the text of drafts may take for a trial of speculation."""
_ENOUGH_ROUNDS = 24
"""Speculative rounds after which nothing more is hoped for."""
_ENOUGH_TOKENS = 12.0
"""Judged tokens before which nothing is hoped for: the acceptance is hardly known either."""
_TAIL_A_DOUBLING, _MAX_TAIL = 0.016, 0.08
"""Share of the rate that speculation loses with each doubling of the sessions: they end at different times."""
_DRAFTED = 0.25
"""Share of the new sessions that have drafted, above which the text of their drafts is paid for."""
_SIGMA = 2.0
"""Standard errors of the acceptance by which the modes differ where a switch is made before its price is lost."""
_REQUEST_S = 1.0
"""Seconds that a request is assumed to take before any has ended."""
_HOPE = 1.6
"""Factor by which speculation may be slower than plain decoding for probes still to be made: acceptance may rise."""


@dataclass(slots=True)
class _Round:
    """What the verdicts of one message say."""

    now: float
    num_rows: int = 0
    num_drafting: int = 0
    num_drafted: int = 0
    longest: int = 0
    num_timed: int = 0
    sum_s: float = 0.0

    def note(self, began: float | None, num_drafted: int) -> None:
        """One verdict, and when its round began."""
        self.num_rows += 1
        if num_drafted:
            self.num_drafting += 1
            self.num_drafted += num_drafted
            self.longest = max(self.longest, num_drafted)
        if began is not None:
            self.num_timed += 1
            self.sum_s += self.now - began

    @property
    def seconds(self) -> float:
        """Mean duration of the sessions' rounds; 0 where most cannot be timed."""
        return self.sum_s / self.num_timed if 2 * self.num_timed > self.num_rows else 0.0


class DraftLengthController:
    """Draft lengths of the sessions of one target; the events of each message come between ``begin`` and ``end``."""

    def __init__(self, max_length: int, costs: StepCosts | None = None) -> None:
        self.costs = costs or StepCosts()
        self.rates = {Mode.PLAIN: 0.0, Mode.SPECULATIVE: 0.0}
        """Expected tokens per second of each mode at the last choice."""
        self.expected: dict[Mode, tuple[float, float]] = dict.fromkeys(Mode, (0.0, 0.0))
        """Expected tokens and seconds of a round of each mode at the last choice."""
        self.expected_length = 0
        """Longest draft length of that speculation."""
        self._acceptance, self._probe, self._switch = Acceptance(max_length), Probe(), ModeSwitch()
        self._text, self._catch_up = TextPrice(), CatchUp()
        self._sessions: dict[ControlledSession, None] = {}
        self._num_prompts = 0
        self._round, self._had_drafts = _Round(0.0), False
        self._rounds_since_choice = self._num_plain_rounds = 0
        self._num_at_choice = 0
        self._num_rounds = dict.fromkeys(Mode, 0)
        self._speculated_s = 0.0
        self._has_prompt_ended = self._has_text_come = self._is_fresh = self._has_catch_up_begun = False
        self._is_choice_awaited = False
        """Drafts of new sessions lack much text, which the choice that is due may spare them."""
        self._busy_s = 0.0
        self._request_s, self._new_lag, self._free_share = Average(), Average(), Average(1.0)
        """Of requests: seconds, tokens that a new session's draft lacks; share of the time without prompts."""
        self._share = Average(1.0)
        """Share of the sessions in one forward while they draft: less than 1 where groups take turns."""
        self._other_rows, self._other_drafts = Average(), Average()
        """Sessions of other coordinators in a forward, and draft tokens of each."""

    # Queries.

    @property
    def mode(self) -> Mode:
        """Mode of the sessions, probes aside."""
        return self._switch.mode

    @property
    def is_speculating(self) -> bool:
        """Whether all sessions are to draft."""
        return self.mode is Mode.SPECULATIVE

    @property
    def may_draft(self) -> bool:
        """Whether any session's request allows drafts."""
        return any(session.limit for session in self._sessions)

    @property
    def num_switches(self) -> int:
        """Number of changes of the mode."""
        return self._switch.num_switches

    @property
    def num_probes(self) -> int:
        """Number of acceptance probes."""
        return self._probe.num_probes

    @property
    def has_prompts(self) -> bool:
        """Whether a session's prompt is being computed."""
        return self._num_prompts > 0

    @property
    def num_sessions(self) -> int:
        """Sessions that live on the target."""
        return len(self._sessions)

    @property
    def acceptance(self) -> float:
        """Accepted of judged tokens."""
        return self._acceptance.mean

    @property
    def mean_length(self) -> float:
        """Mean draft length of the sessions' next steps."""
        return sum(session.length for session in self._sessions) / max(len(self._sessions), 1)

    @property
    def has_just_chosen(self) -> bool:
        """Whether nothing was judged since the last choice."""
        return not self._rounds_since_choice

    @property
    def first_length(self) -> int:
        """Draft length with which a session begins, if its request allows it."""
        return self.expected_length if self.is_speculating else 0

    @property
    def is_measured(self) -> bool:
        """Whether speculation was measured with about as many sessions, rather than expected from the profile."""
        return self.costs.knows_speculation(self._num_all)

    def length(self, session: ControlledSession) -> int:
        """Draft length of the session's next step; 0 while prompts are computed, which longer steps would hold up."""
        return 0 if self._is_held_back else session.length

    def lengths(self, sessions: Sequence[ControlledSession]) -> list[int]:
        """``length`` of each session."""
        return [0] * len(sessions) if self._is_held_back else [session.length for session in sessions]

    def are_plain(self, sessions: Sequence[ControlledSession]) -> list[bool]:
        """Whether each session's next step is plain, and its draft is not brought text meanwhile."""
        if self._is_held_back and not self._is_bringing_text:
            return [True] * len(sessions)
        return [not session.length for session in sessions]

    def is_to_draft(self, session: ControlledSession) -> bool:
        """Whether the session drafts now, or will once prompts are computed and its draft has the text."""
        return session.limit > 0 and (self.is_speculating or session.length > 0)

    def is_catching_up(self, session: ControlledSession) -> bool:
        """Whether the session's draft is to be brought its text, so that the session can draft later."""
        return self._is_bringing_text and session.length > 0

    def will_draft(self, num_tokens: int) -> bool:
        """Whether a session with such a prompt that has just entered will draft soon after it, so that its draft
        computes the prompt too.
        """
        is_known = len(self._sessions) <= _GROWTH * max(self._num_at_choice, 1)
        return self.is_speculating and is_known and num_tokens <= LONGEST_PROMPT_AT_ONCE and self._num_prompts <= 1

    @property
    def _is_bringing_text(self) -> bool:
        return self._catch_up.is_active and not self._num_prompts and not self._is_choice_awaited

    @property
    def _is_held_back(self) -> bool:
        return self._num_prompts > 0 or self._is_choice_awaited or self._catch_up.is_active

    @property
    def _num_all(self) -> int:
        """Sessions in a forward, those of other coordinators included."""
        return len(self._sessions) + round(self._other_rows.value)

    # Events.

    def enter(self, session: ControlledSession) -> None:
        """A session comes to live on the target, which computes its prompt first."""
        if session in self._sessions:
            return
        is_first = session.limit > 0 and not self.may_draft
        self._sessions[session] = None
        self._num_prompts += 1
        if is_first:
            self._begin_alone()
        session.enter(self.first_length)

    def leave(self, session: ControlledSession) -> None:
        """A session leaves the target."""
        if session not in self._sessions:
            return
        del self._sessions[session]
        self._num_prompts -= not session.has_begun
        self._probe.leave(session)
        if session.began_s is not None and session.limit and session.num_rounds > 1:
            self._request_s.note(self._busy_s - session.began_s)

    def begin(self, now: float) -> None:
        """A message of the target has come; ``now`` is in seconds."""
        if self.may_draft:
            seconds = min(now - self._round.now, _MAX_INTERVAL_S)
            self._busy_s += seconds
            self._free_share.note(float(not self._num_prompts))
        self._round = _Round(now)

    def note_verdicts(self, verdicts: Iterable[SessionVerdict]) -> None:
        """Steps of sessions were judged."""
        for session, num_drafted, num_accepted, draft_lag in verdicts:
            self.note_verdict(session, num_drafted, num_accepted, draft_lag=draft_lag)

    def note_verdict(self, session: ControlledSession, num_drafted: int, num_accepted: int, *, draft_lag: int) -> None:
        """A step of the session was judged; ``draft_lag``: committed tokens that its draft lacks."""
        if session not in self._sessions:
            return
        began = session.note_verdict(self._round.now, num_drafted, num_accepted, draft_lag)
        self._round.note(began, num_drafted)
        if not session.has_begun:
            self._note_begun(session)
        if num_drafted:
            overall = self._acceptance.mean
            num_judged = self._acceptance.note(num_drafted, num_accepted)
            session.acceptance.note(num_judged, num_accepted, overall)
            self._probe.note_step(session)

    def _note_begun(self, session: ControlledSession) -> None:
        """The session's prompt has been computed."""
        session.has_begun, session.began_s = True, self._busy_s
        if session.limit:
            self._new_lag.note(max(session.draft_lag, 0))
        self._num_prompts -= 1
        self._has_prompt_ended = True
        if not self._num_prompts:
            self._is_fresh = self._is_new
            lacked = sum(each.draft_lag for each in self._sessions if each.limit)
            self._is_choice_awaited = self._is_fresh and lacked > _AWAITED_TEXT
            self._update_catch_up()

    def note_text_taken(self, session: ControlledSession, draft_lag: int) -> None:
        """The session's draft has taken in text, and lacks so many committed tokens now."""
        if session in self._sessions and session.has_begun:
            session.draft_lag = draft_lag

    def note_draft(self, num_rows: int, draft_length: int, seconds: float) -> None:
        """Proposals were drawn together: their number, the longest one's length, their time."""
        is_cold = self._num_rounds[Mode.SPECULATIVE] < _COLD_ROUNDS
        if draft_length and seconds > 0.0 and not (is_cold or self._has_text_come):
            self.costs.note_draft(num_rows, draft_length, self._context, seconds)

    def note_draft_text(self, num_tokens: int, seconds: float) -> None:
        """A forward of the draft that only took in text, and its time."""
        self._has_text_come = True
        self._text.note(num_tokens, seconds)
        if self._catch_up.is_active:
            self._update_catch_up()

    def end(
        self, *, rows: int = 0, tokens: int = 0, seconds: float = 0.0, other_rows: int = 0, other_drafts: int = 0
    ) -> None:
        """The message has ended; its forward had so many rows and tokens, and took so long. ``other_rows`` are sessions
        of other coordinators, ``other_drafts`` their draft tokens.
        """
        self._acceptance.fold()
        if not self._round.num_rows:
            return
        self._rounds_since_choice += 1
        if rows:
            self._other_rows.note(other_rows)
            if other_rows:
                self._other_drafts.note(other_drafts / other_rows)
        if rows < tokens <= rows * (1 + self._round.longest) and seconds > 0.0 and not self._is_cold:
            self.costs.note_scoring(rows, tokens / rows, self._context, seconds)
        self._learn(self._round.num_rows + other_rows, is_mixed=other_rows > 0, others_draft=other_drafts > 0)
        self._update_catch_up()
        self._end_prompts()
        self._has_text_come = False

    def _end_prompts(self) -> None:
        """Rounds beside prompts, and those that end with them, are not timed."""
        if self._num_prompts or self._has_prompt_ended:
            self._switch.pause(self._busy_s)
            for session in self._sessions:
                session.round_began = None
            self._num_plain_rounds = 0
        self._has_prompt_ended = False

    def _learn(self, rows: int, *, is_mixed: bool, others_draft: bool) -> None:
        """Compare the round with what was expected of it; ``rows`` are sessions of all coordinators. Rounds in which
        other coordinators are in the other mode say nothing of either.
        """
        found, drafts = self._round, self._round.num_drafting > 0
        had_drafts, self._had_drafts = self._had_drafts, drafts
        self._num_plain_rounds = 0 if drafts or self._is_disturbed else self._num_plain_rounds + 1
        if self._is_disturbed or (is_mixed and others_draft is not drafts):
            return
        self._num_rounds[Mode.SPECULATIVE if drafts else Mode.PLAIN] += 1
        if not found.seconds or self._is_cold:
            return
        if not drafts and self._num_plain_rounds > _ROUNDS_NOT_AHEAD:
            self.costs.note_plain_round(rows, self._context, found.seconds)
        elif had_drafts and found.num_drafting >= _ALL * found.num_rows:
            self._share.note(min(found.num_rows / max(len(self._sessions), 1), 1.0))
            drafted = found.num_drafted / found.num_rows
            self.costs.note_speculative_round(rows, drafted, found.longest, self._context, found.seconds)
            self._speculated_s = self._busy_s

    @property
    def _is_disturbed(self) -> bool:
        """Whether prompts or drafts' text were computed during the round."""
        return self._num_prompts > 0 or self._has_prompt_ended or self._has_text_come or self._catch_up.is_active

    @property
    def _is_cold(self) -> bool:
        """Whether the round under way is among the first ones of its mode."""
        mode = Mode.SPECULATIVE if self._round.num_drafting else Mode.PLAIN
        return self._num_rounds[mode] <= _COLD_ROUNDS

    @property
    def _context(self) -> float:
        """Mean number of tokens in the sessions' KV caches."""
        return sum(session.context for session in self._sessions) / max(len(self._sessions), 1)

    @property
    def _is_new(self) -> bool:
        """Whether most sessions have nearly all of their output before them."""
        return 2 * sum(session.is_new for session in self._sessions) > len(self._sessions)

    def _update_catch_up(self) -> None:
        was_active = self._catch_up.is_active
        drafting = self._sessions if self.is_speculating else self._probe.sessions
        self._catch_up.update(self._busy_s, drafting, is_wanted=not self._num_prompts)
        self._has_catch_up_begun = self._catch_up.is_active and (self._has_catch_up_begun or not was_active)

    def take_begun_catch_up(self) -> bool:
        """Whether a catch-up has begun since this was asked last, and goes on."""
        has_begun, self._has_catch_up_begun = self._has_catch_up_begun, False
        return has_begun

    # Choosing.

    def choose(self) -> bool:
        """Choose anew, if it is time to; to be called between messages. Returns whether the mode has changed."""
        if not self._is_due:
            return False
        is_fresh, self._is_fresh, self._is_choice_awaited = self._is_fresh, False, False
        self._rounds_since_choice, self._num_at_choice = 0, len(self._sessions)
        choice = self._estimate(tuple(self._sessions))
        if choice is None:
            return self._take(Mode.PLAIN, None)
        mode = self.mode.other if self._is_to_switch(is_fresh=is_fresh) else self.mode
        has_changed = self._take(mode, choice)
        if mode is Mode.PLAIN:
            self._probe_if_due()
        self._update_catch_up()
        return has_changed

    @property
    def _is_due(self) -> bool:
        if not self._sessions or self._num_prompts:
            return False
        has_changed = bucket_of(len(self._sessions)) != bucket_of(self._num_at_choice)
        return self._is_fresh or has_changed or self._rounds_since_choice >= _ROUNDS_BETWEEN_CHOICES[self.mode]

    def _begin_alone(self) -> None:
        """The first session that may draft enters: nothing was brought to any draft yet, so the better mode is free."""
        choice = self._estimate(tuple(self._sessions))
        if choice is not None:
            is_faster = self._hoped_rate > self.rates[Mode.PLAIN]
            self._take(Mode.SPECULATIVE if is_faster else Mode.PLAIN, choice)

    def _estimate(self, sessions: Sequence[ControlledSession]) -> Choice | None:
        """Set what is expected of both modes; returns the best speculation, None where no session may draft."""
        rows, context = self._num_all, self._context
        plain_s = self.costs.plain(rows, context)
        overall = self._acceptance.mean
        useful = usefulness(
            self._acceptance.by_position(),
            np.array([session.acceptance.relative(overall) for session in sessions]),
            np.array([session.limit for session in sessions]),
        )
        together = max(1, round(self._share.value * rows))
        near = self.expected_length
        choice = best_choice(useful, lambda longest: self.costs.speculative(together, context, longest), near)
        self.expected[Mode.PLAIN] = len(sessions), plain_s
        self.rates[Mode.PLAIN] = len(sessions) / plain_s
        if choice is not None:
            self.expected_length = choice.longest
            self.expected[Mode.SPECULATIVE] = choice.tokens, choice.seconds
            self.rates[Mode.SPECULATIVE] = choice.rate / (1.0 + self._tail(rows))
        return choice

    @staticmethod
    def _tail(rows: int) -> float:
        return min(_TAIL_A_DOUBLING * math.log2(max(rows, 1)), _MAX_TAIL)

    @property
    def _hoped_rate(self) -> float:
        """Rate of speculation, with a bonus where it was hardly measured: trying it corrects a wrong profile."""
        if self._acceptance.num_judged < _ENOUGH_TOKENS:
            return self.rates[Mode.SPECULATIVE]
        unknown = max(0.0, 1.0 - self.costs.num_speculative_rounds(self._num_all) / _ENOUGH_ROUNDS)
        renewed = 0.0 if self.is_speculating else (self._busy_s - self._speculated_s) / _RENEWAL_S
        return self.rates[Mode.SPECULATIVE] * (1.0 + _OPTIMISM * min(max(unknown, renewed), 1.0))

    def _is_to_switch(self, *, is_fresh: bool) -> bool:
        _, plain_s = self.expected[Mode.PLAIN]
        rates = {Mode.PLAIN: self.rates[Mode.PLAIN], Mode.SPECULATIVE: self._hoped_rate}
        apart = self._mode_apart
        drafting = [session for session in self._sessions if session.limit]
        lacked_s = self._text_seconds(sum(session.draft_lag for session in drafting), plain_s)
        is_untouched = is_fresh and sum(each.has_ever_drafted for each in drafting) <= _DRAFTED * len(drafting)
        left_s = self._left_s(drafting, plain_s)
        if not self.is_speculating or is_untouched:
            may_try = lacked_s <= _TRIAL_TEXT * left_s
            rates[Mode.SPECULATIVE] = self._hoped_rate if may_try else self.rates[Mode.SPECULATIVE]
        if apart is not None:
            rates[apart] *= _APART
        if is_untouched:  # going on with speculation has the price of the text too
            rates[Mode.SPECULATIVE] /= 1.0 + lacked_s / max(left_s, plain_s)
            return rates[self.mode.other] > rates[self.mode]
        rates[Mode.SPECULATIVE] /= 1.0 + self._text_share(plain_s)
        gain = rates[self.mode.other] / rates[self.mode] - 1.0
        text_s = 0.0 if self.is_speculating else lacked_s
        if self._switch.observe(self._busy_s, gain, text_s, plain_s):
            return self.is_speculating or left_s * gain > text_s
        is_sure = gain > _SIGMA * self._acceptance.error
        return is_sure and self._switch.is_worth(gain, text_s, plain_s, left_s)

    @property
    def _mode_apart(self) -> Mode | None:
        """The mode that other coordinators' sessions are not in; None where there are none."""
        if self._other_rows.value < 0.5:
            return None
        do_draft = self._other_drafts.value > 0.5 * self.expected_length
        return Mode.PLAIN if do_draft else Mode.SPECULATIVE

    def _left_s(self, sessions: Sequence[ControlledSession], plain_s: float) -> float:
        """Time for which the sessions will be served: as requests take usually; before any has ended, as long again
        as so far.
        """
        left_s = plain_s * sum(session.num_left for session in sessions) / max(len(sessions), 1)
        served = [self._busy_s - session.began_s for session in sessions if session.began_s is not None]
        if not served:
            return left_s
        served_s = sum(served) / len(served)
        if self._request_s.num_samples:
            return min(left_s, max(self._request_s.value - served_s, 0.0))
        return min(left_s, served_s if served_s and not self.is_speculating else _REQUEST_S)

    def _text_seconds(self, num_tokens: float, plain_s: float) -> float:
        """Time in which drafts take in text; those that read hidden states have the target compute it again."""
        reads_states = any(session.reads_states for session in self._sessions)
        again_s = self.costs.scored_token_seconds * num_tokens if reads_states else 0.0
        return again_s + self._text.seconds(num_tokens, plain_s)

    def _text_share(self, plain_s: float) -> float:
        """Time that the text of sessions to come takes, as a share of the time in which sessions may draft."""
        if not self._request_s.num_samples:
            return 0.0
        seconds = self._text_seconds(self._new_lag.value * len(self._sessions), plain_s)
        return seconds / max(self._request_s.value * self._free_share.value, plain_s)

    def _take(self, mode: Mode, choice: Choice | None) -> bool:
        """Set the mode, and the lengths."""
        has_changed = self._switch.take(mode)
        if has_changed:
            self._probe.end(self._busy_s)
            self._speculated_s = self._busy_s
            if mode is Mode.PLAIN:
                self._acceptance.lighten()
        if mode is Mode.SPECULATIVE and choice is not None:
            for session, length in zip(self._sessions, choice.lengths, strict=True):
                session.length = length
        elif not self._probe.sessions:
            for session in self._sessions:
                session.length = 0
        return has_changed

    def _probe_if_due(self) -> None:
        if self._probe.is_due(self._busy_s) and _HOPE * self.rates[Mode.SPECULATIVE] > self.rates[Mode.PLAIN]:
            _, plain_s = self.expected[Mode.PLAIN]
            self._probe.begin(self._busy_s, tuple(self._sessions), plain_s, self._text_seconds(1.0, plain_s))

    # Explaining.

    def estimates(self) -> dict[str, object]:
        """What the last choice went by, for a log; times in milliseconds."""
        found: dict[str, object] = {}
        for mode, (tokens, seconds) in self.expected.items():
            found |= {f"{mode}_tokens": round(tokens, 2), f"{mode}_ms": round(1e3 * seconds, 2)}
        return found | {"speculation_is_measured": self.is_measured, "has_profile": self.costs.has_profile}

    @property
    def reason(self) -> str:
        """Expected tokens and milliseconds of a round of both modes, and which estimate decided."""
        if not self.rates[Mode.PLAIN] or not self.rates[Mode.SPECULATIVE]:
            return f"drafting has not been considered yet with {_sessions(self.num_sessions)}"
        verdict = "drafting pays" if self.is_speculating else "drafting does not pay"
        plain, speculative = (_round_of(*self.expected[mode]) for mode in (Mode.PLAIN, Mode.SPECULATIVE))
        ratio = self.rates[Mode.SPECULATIVE] / self.rates[Mode.PLAIN]
        return (
            f"{verdict}: expected {ratio:.2f} of plain at K={self.expected_length} with {_sessions(self.num_sessions)}"
            f" ({speculative}; plain {plain}), by {self._source}"
        )

    @property
    def _source(self) -> str:
        """Where the estimate of speculation comes from."""
        if self.is_measured:
            return "rounds that were measured"
        return "the services' step costs" if self.costs.has_profile else "usual step costs: the services measured none"


def _sessions(count: int) -> str:
    return f"{count} session" + "s" * (count != 1)


def _round_of(tokens: float, seconds: float) -> str:
    return f"{tokens:.1f} tokens in {1e3 * seconds:.1f} ms"
