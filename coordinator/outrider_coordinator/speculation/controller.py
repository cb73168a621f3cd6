"""The draft length controller: draft lengths of the sessions that live on one target, by expected throughput.

Owns what a coordinator tells and asks, and when a choice is due. The choice itself is ``mode_choice``'s. Everything
comes as an event, times included: no clock is read, nothing is sent. Knows no tokens: a length depends on counts and
times alone, never on what was drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from outrider_coordinator.speculation.catch_up import LONGEST_INLINE_FEED, CatchUp
from outrider_coordinator.speculation.estimates.foreign_sessions import Forward
from outrider_coordinator.speculation.estimates.round_timer import VerdictBatch
from outrider_coordinator.speculation.estimates.text_load import TextLoad
from outrider_coordinator.speculation.mode_choice import Load, ModeChoice, are_few
from outrider_coordinator.speculation.mode_selector import Mode
from outrider_coordinator.speculation.session_state import ControlledSession, SessionVerdict

_LONGEST_INTERVAL_S = 0.25
"""Longest interval between two messages of a target that is busy."""
_ROUNDS_BETWEEN_CHOICES = {Mode.PLAIN: 16, Mode.SPECULATIVE: 4}
LONGEST_PROMPT_AT_ONCE = 512
"""Longest prompt that a draft computes beside the target: a longer one would hold up first tokens where both share a
device.
"""
_FEWER = 0.75
"""Sessions are as many as before down to this share of a power of two: users who always have a request, but for the
moment between two, are a load of all of them.
"""
_DRAFTED = 0.25
"""Share of a burst's sessions that have drafted, above which its drafts' text is paid for: the first session may come
some steps before the others.
"""
_NEWEST_REQUEST = 0.1
"""Weight of the request that ended last in the seconds that requests usually take."""
_ROUNDS_UNTIL_DRAFTS = 4
"""Rounds after prompts in which little is drafted: drafts are brought the text of the new sessions."""
_MOST_BESIDE_TEXT = 16
"""Rounds in a row beside which drafts take in text that say nothing of speculation: text has a price of its own. Where
more come in a row, as prompts follow each other, no others can be waited for.
"""
_SETTLED = 0.8
"""Share of the sessions that are to draft, above which rounds are those of all."""


class DraftLengthController:
    """Draft lengths of the sessions of one target; the events of each message come between ``begin`` and ``end``."""

    def __init__(self, max_length: int) -> None:
        self._choice = ModeChoice(max_length)
        self._catch_up = CatchUp()
        self._text_load = TextLoad()
        self._sessions: dict[ControlledSession, None] = {}
        self._num_prompts = 0
        self._batch = VerdictBatch(0.0)
        self._rounds_since_choice = self._magnitude = 0
        self._rounds_since_prompts = _ROUNDS_UNTIL_DRAFTS
        self._rounds_beside_text = 0
        """In a row, up to now."""
        self._has_text_come = False
        """Since the last message of the target a draft took in text."""
        self._has_prompt_ended = False
        """With the message under way."""
        self._has_catch_up_begun = False
        """A catch-up has begun, and ``take_begun_catch_up`` was not asked since."""
        self._has_prompts_ended = False
        """Since the last choice: sessions that waited for others' prompts go on, so the next choice is due."""
        self._is_choice_awaited = False
        """Many new sessions decode plainly until that choice: it may spare all of their drafts their text."""
        self._request_s = self._request_tokens = math.inf
        """Of requests, usually: seconds, and tokens that they get."""
        self._busy_s = self._steady_since = 0.0
        """Seconds of service, by which exploration is budgeted, and their reading when the load last changed much."""

    # Queries.

    @property
    def mode(self) -> Mode:
        """Mode of most steps now, without trials and probes; where both are compared, the one in effect."""
        return self._choice.selector.mode

    @property
    def is_speculating(self) -> bool:
        """Whether all sessions are to draft, for good or for a trial."""
        return self._choice.is_speculating

    @property
    def rates(self) -> dict[Mode, float]:
        """Tokens a second that each mode is expected to give, by the last choice."""
        return self._choice.rates

    @property
    def expected_length(self) -> int:
        """Longest draft length of the speculation that ``rates`` are of; 0 before the first choice."""
        return self._choice.expected_length

    @property
    def doubt(self) -> float:
        """So many times slower than expected speculation may turn out, as it was timed with fewer sessions only;
        infinity where it never was.
        """
        return self._choice.doubt

    @property
    def is_comparing(self) -> bool:
        """Whether both modes are in effect in turn, to be compared by what users get."""
        return self._choice.comparison.is_active and not self._choice.comparison.is_pausing

    @property
    def is_compared(self) -> bool:
        """Whether the mode is the better one of such a comparison, and ``rates`` are what was measured."""
        return self._choice.comparison.is_active and self._choice.comparison.is_pausing

    @property
    def may_draft(self) -> bool:
        """Whether any session's request allows drafts."""
        return any(session.limit for session in self._sessions)

    @property
    def num_switches(self) -> int:
        """Number of changes of the mode."""
        return self._choice.selector.num_switches

    @property
    def num_probes(self) -> int:
        """Acceptance probes so far."""
        return self._choice.probe.num_probes

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
        """Accepted of judged tokens, lately."""
        return self._choice.acceptance.mean

    @property
    def mean_length(self) -> float:
        """Mean draft length of the sessions' next steps."""
        return sum(session.length for session in self._sessions) / max(len(self._sessions), 1)

    @property
    def has_just_chosen(self) -> bool:
        """Whether nothing was judged since the last choice."""
        return not self._rounds_since_choice

    def estimates(self) -> dict[str, object]:
        """What a choice goes by now, for a log."""
        request_s = None if math.isinf(self._request_s) else round(self._request_s, 3)
        return {
            "service_s": round(self._busy_s, 3),
            "request_s": request_s,
            "has_prompts": self.has_prompts,
            "is_catching_up": self._catch_up.is_active,
            "lacked_tokens": sum(session.draft_lag for session in self._sessions),
            **self._choice.estimates(len(self._sessions)),
        }

    @property
    def first_length(self) -> int:
        """Draft length with which a session begins, if its request allows it."""
        return self._choice.lengths.base_length if self.mode is Mode.SPECULATIVE else 0

    def length(self, session: ControlledSession) -> int:
        """Draft length of the session's next step; 0 while prompts are computed, which longer steps would hold up."""
        return 0 if self._is_held_back else session.length

    def lengths(self, sessions: Sequence[ControlledSession]) -> list[int]:
        """``length`` of each session."""
        if self._is_held_back:
            return [0] * len(sessions)
        return [session.length for session in sessions]

    def are_plain(self, sessions: Sequence[ControlledSession]) -> list[bool]:
        """Whether each session's next step is plain, and its draft is not brought text meanwhile."""
        if self._is_held_back and not self._is_bringing_text:
            return [True] * len(sessions)
        return [not session.length for session in sessions]

    def is_to_draft(self, session: ControlledSession) -> bool:
        """Whether the session drafts now, or will once prompts are computed and its draft has the text."""
        if self._choice.is_trying_plain:
            return False
        return session.limit > 0 and (self._choice.is_speculating or session.length > 0)

    def is_catching_up(self, session: ControlledSession) -> bool:
        """Whether the session's draft is to be brought its text, so that the session can draft later."""
        return self._is_bringing_text and session.length > 0

    @property
    def _is_bringing_text(self) -> bool:
        return self._catch_up.is_active and not self._num_prompts and not self._is_choice_awaited

    @property
    def _is_held_back(self) -> bool:
        is_early = self._num_prompts > 0 or self._is_choice_awaited
        return is_early or self._choice.is_trying_plain or self._catch_up.is_active

    # Events.

    def enter(self, session: ControlledSession) -> None:
        """A session comes to live on the target, which computes its prompt first."""
        if session not in self._sessions:
            self._sessions[session] = None
            self._num_prompts += 1
            session.enter(self.first_length)

    def leave(self, session: ControlledSession) -> None:
        """A session leaves the target."""
        if session in self._sessions:
            del self._sessions[session]
            self._note_request(session)
            self._num_prompts -= not session.has_begun
            self._choice.note_end(session)

    def _note_request(self, session: ControlledSession) -> None:
        """A request has ended. Those without drafts take no seconds of service, and those of a single token make no
        step that could have drafts: counted as requests that end at once, neither would be worth any draft's text.
        """
        if session.began_s is not None and session.limit and session.num_rounds > 1:
            self._request_s = _follow(self._request_s, self._busy_s - session.began_s)
            self._request_tokens = _follow(self._request_tokens, session.max_tokens - session.num_left)

    def begin(self, now: float) -> None:
        """A message of the target has come; ``now`` is in seconds."""
        if self.may_draft:  # others' time is not to pay for exploration
            seconds = min(now - self._batch.now, _LONGEST_INTERVAL_S)
            self._busy_s += seconds
            self._choice.comparison.note_time(self._busy_s, self.mode, len(self._sessions))
            self._text_load.note_time(seconds, may_draft=self._rounds_since_prompts >= _ROUNDS_UNTIL_DRAFTS)
        self._batch = VerdictBatch(now)

    def note_verdicts(self, verdicts: Iterable[SessionVerdict]) -> None:
        """Steps of sessions were judged. Of plain ones there are as many as sessions in every message, so they are
        added up.
        """
        sessions, now = self._sessions, self._batch.now
        num_rows = num_timed = 0
        sum_seconds = 0.0
        for session, num_drafted, num_accepted, draft_lag in verdicts:
            if num_drafted or not session.has_begun:
                self.note_verdict(session, num_drafted, num_accepted, draft_lag=draft_lag)
            elif session in sessions:
                num_rows += 1
                self._note_text(session, draft_lag)
                if (began := session.note_verdict(now, 0, 0, draft_lag)) is not None:
                    num_timed += 1
                    sum_seconds += now - began
        self._batch.add_plain(num_rows, num_timed, sum_seconds)

    def _note_text(self, session: ControlledSession, draft_lag: int) -> None:
        """Of a session whose draft lacks so many tokens now."""
        if (num_brought := session.draft_lag - draft_lag) > LONGEST_INLINE_FEED:
            self._text_load.note_brought(num_brought)

    def note_verdict(self, session: ControlledSession, num_drafted: int, num_accepted: int, *, draft_lag: int) -> None:
        """A step of the session was judged; ``draft_lag``: committed tokens that its draft lacks."""
        if session not in self._sessions:
            return
        self._note_text(session, draft_lag)
        began = session.note_verdict(self._batch.now, num_drafted, num_accepted, draft_lag)
        self._batch.note(began, num_drafted, num_accepted)
        if not session.has_begun:
            session.has_begun, session.began_s = True, self._busy_s
            is_new = self._is_new
            if session.limit:
                self._text_load.note_begun(draft_lag, is_beside_others=not is_new)
            self._num_prompts -= 1
            self._has_prompt_ended = True
            if not self._num_prompts:
                self._has_prompts_ended = True
                self._update_catch_up()  # at once: else those whose drafts have their text would draft beside it
                self._is_choice_awaited = is_new and not are_few(len(self._sessions))
        if num_drafted:
            self._choice.note_drafts()
            session.acceptance.note(num_drafted, num_accepted, self._choice.acceptance.mean)
            self._choice.acceptance.note(num_drafted, num_accepted, session.expected)
            self._choice.probe.note_verdict(session, num_drafted, num_accepted)

    def end(self, *, rows: int = 0, tokens: int = 0, seconds: float = 0.0, ended_ns: int = 0) -> None:
        """The message has ended; its forward had so many rows and tokens, took so long, and ended at ``ended_ns`` by
        the target's clock.
        """
        self._choice.acceptance.fold()
        batch = self._batch
        if not batch.num_rows:
            return
        is_beside_text = self._end_text() and batch.drafting.num_rows > 0
        self._rounds_since_choice += 1
        num_begun = len(self._sessions) - self._num_prompts
        if self._num_prompts:
            self._choice.timer.foreign.pass_over(ended_ns)
        elif rows or ended_ns:
            forward = Forward(rows, tokens - rows, batch.num_rows, batch.num_drafted, ended_ns)
            self._choice.timer.foreign.note(forward, usual_length=self._choice.lengths.base_length)
        # In a probe's rounds a few sessions draft beside the others: they say nothing of speculation by all.
        is_settled = batch.drafting.num_rows > 0 and self._choice.is_speculating and self._is_settled
        timer = self._choice.timer
        if batch.drafting.num_rows and not is_beside_text:
            self._choice.note_drafting_round(num_begun)
        if is_beside_text:
            timer.interrupt()
        elif batch.drafting.num_rows and self._is_probe_of_many:
            timer.note_probe(batch, num_begun, seconds)
        elif timer.note(batch, num_begun, rows=rows, tokens=tokens, seconds=seconds, is_settled=is_settled):
            self._choice.lengths.note_round()
        share = batch.num_rows / max(num_begun, 1)
        self._choice.note_round(batch, self._busy_s, share, is_beside_text=is_beside_text)
        self._update_catch_up()
        if self._num_prompts or self._choice.probe.is_active or self._catch_up.is_active:
            self._choice.timer.interrupt()
        if self.may_draft:  # as the time is
            self._choice.comparison.note_tokens(self._busy_s, self.mode, batch.num_tokens)
        self._end_prompts()

    def _end_prompts(self) -> None:
        """Of a round: those that are computed now, or ended with it."""
        is_beside = self._num_prompts > 0 or self._has_prompt_ended
        self._rounds_since_prompts = 0 if is_beside else self._rounds_since_prompts + 1
        self._has_prompt_ended = False
        if self._num_prompts:
            for session in self._sessions:
                session.round_began = None
        if self._num_prompts or self._has_prompts_ended:
            self._choice.selector.pause(self._busy_s)

    def _end_text(self) -> bool:
        """Whether the round that ends says nothing of speculation, since drafts took in text beside it."""
        self._rounds_beside_text = self._rounds_beside_text + 1 if self._has_text_come else 0
        self._has_text_come = False
        return 0 < self._rounds_beside_text <= _MOST_BESIDE_TEXT

    def note_draft(self, draft_length: int, tokens: int, seconds: float, *, share: float = 1.0) -> None:
        """Proposals that were drawn together: the longest one's length, the draft tokens of all, their time. ``share``:
        of these sessions in the forward, where there are foreign sessions.
        """
        foreign = self._choice.timer.foreign
        if foreign.num_sessions:
            tokens = round(tokens / share)
            draft_length = draft_length if self._choice.lengths.is_starting else foreign.longest(draft_length)
        if self._is_probe_of_many:
            self._choice.timer.note_proposals(draft_length, tokens, seconds)
        elif draft_length and seconds > 0.0 and not (self._is_cold or self._has_text_come or self._knows_drafts_better):
            self._choice.note_drafts()
            self._choice.timer.times.note_draft(draft_length, tokens, seconds)

    @property
    def _knows_drafts_better(self) -> bool:
        """Whether these are proposals of a probe, and rounds of speculation told what drafts take. Beside the others'
        forward a few proposals may take longer, which would be taken for the price of their few tokens. Where foreign
        sessions probe too, all news counts.
        """
        timer = self._choice.timer
        return not (self._choice.is_speculating or timer.is_young or timer.foreign.num_sessions)

    @property
    def _is_cold(self) -> bool:
        """Whether speculation by many sessions begins, whose first rounds are not counted."""
        return self._choice.timer.is_cold(len(self._sessions) - self._num_prompts)

    @property
    def _is_probe_of_many(self) -> bool:
        """Whether drafts now are those of a probe, from which it is guessed what speculation by many would take."""
        num_begun = len(self._sessions) - self._num_prompts
        return not self._choice.is_speculating and self._choice.learns_from_probes(num_begun)

    def note_text_taken(self, session: ControlledSession, draft_lag: int) -> None:
        """The session's draft has taken in text, and lacks so many committed tokens now."""
        if session in self._sessions and session.has_begun:
            self._note_text(session, draft_lag)
            session.draft_lag = draft_lag

    def note_draft_text(self, num_tokens: int, seconds: float) -> None:
        """A forward of the draft that only took in text, and its time. It may have been the last of a catch-up: then
        sessions draft after the verdict that comes next.
        """
        self._has_text_come = True
        self._choice.switch_price.note_text(num_tokens, seconds)
        self._text_load.note_computed(num_tokens)
        if self._catch_up.is_active:
            self._update_catch_up()

    @property
    def _is_settled(self) -> bool:
        """Whether nearly all sessions that are to draft do."""
        wanting = [session.has_drafted for session in self._sessions if session.length]
        return sum(wanting) >= _SETTLED * len(wanting) > 0

    def _update_catch_up(self) -> None:
        was_active = self._catch_up.is_active
        drafting = self._sessions if self._choice.is_speculating else self._choice.probe.sessions
        self._catch_up.update(self._busy_s, drafting, is_wanted=not self._num_prompts)
        self._has_catch_up_begun = self._catch_up.is_active and (self._has_catch_up_begun or not was_active)

    def take_begun_catch_up(self) -> bool:
        """Whether a catch-up has begun since this was asked last, and goes on."""
        has_begun, self._has_catch_up_begun = self._has_catch_up_begun, False
        return has_begun

    # Choosing.

    def choose(self) -> bool:
        """Choose anew, if it is time to; to be called between messages. Whether the mode has changed."""
        if not self._sessions or self._choice.is_trying_plain:
            return False
        if self._compare():
            return True
        if not self._is_due:
            return False
        self._rounds_since_choice, self._has_prompts_ended, self._is_choice_awaited = 0, False, False
        if self._has_load_changed:
            self._magnitude, self._steady_since = len(self._sessions).bit_length(), self._busy_s
            self._choice.cancel_trials(self._busy_s)
        has_changed = self._choice.choose(self._load())
        self._update_catch_up()
        return has_changed

    def _compare(self) -> bool:
        """Set the mode where it is chosen by what users get; whether it has changed. Sessions that never draft say
        nothing of either.
        """
        if not self.may_draft or not self._choice.compare(
            self._sessions,
            self._busy_s,
            drafting_share=self._text_load.drafting_share,
            request_s=self._request_s,
            request_tokens=self._request_tokens,
        ):
            return False
        self._is_choice_awaited = False
        self._update_catch_up()
        return True

    def _load(self) -> Load:
        drafted = [session for session in self._sessions if session.has_ever_drafted]
        num_new = sum(session.is_new for session in drafted)
        left = [session.num_left for session in self._sessions if session.limit]
        is_shared = self._choice.timer.foreign.num_sessions > 0
        return Load(
            tuple(self._sessions),
            max(len(self._sessions), self._least_usual),
            self._busy_s,
            self._busy_s - self._steady_since,
            has_prompts=self._num_prompts > 0,
            is_new=self._is_new,
            has_drafted=bool(drafted) if is_shared else num_new > _DRAFTED * len(left),
            joins_drafting=not is_shared and num_new < len(drafted),
            request_s=self._request_s,
            usual_text=self._text_load.num_tokens,
            computed_share=self._text_load.computed_share,
            drafting_s=self._text_load.drafting_seconds(self._request_s),
            ahead_s=self._ahead_s,
            tokens_left=sum(left) / max(len(left), 1),
        )

    @property
    def _ahead_s(self) -> float:
        """For how long the sessions will usually be served; 0 before any request has ended."""
        served = [self._busy_s - session.began_s for session in self._sessions if session.began_s is not None]
        if math.isinf(self._request_s) or not served:
            return 0.0
        return max(self._request_s - sum(served) / len(served), 0.0)

    @property
    def _is_new(self) -> bool:
        """Whether most sessions have nearly all of their output before them."""
        return 2 * sum(session.is_new for session in self._sessions) > len(self._sessions)

    @property
    def _is_due(self) -> bool:
        if self._num_prompts:  # nothing is drafted until they are computed, and they are not to wait for a choice
            return self.mode is Mode.SPECULATIVE and self._has_grown
        is_starting = self._choice.is_speculating and self._choice.lengths.is_starting
        if is_starting or self._choice.has_tried or self._has_prompts_ended:
            return self._rounds_since_choice > 0
        return self._has_load_changed or self._rounds_since_choice > _ROUNDS_BETWEEN_CHOICES[self.mode]

    @property
    def _has_load_changed(self) -> bool:
        """Whether there are many more sessions than at the last change, or many fewer."""
        return self._has_grown or len(self._sessions) < _FEWER * self._least_usual

    @property
    def _least_usual(self) -> int:
        """The least number of sessions of the magnitude at the last change, a power of two."""
        return 1 << self._magnitude >> 1

    @property
    def _has_grown(self) -> bool:
        return len(self._sessions).bit_length() > self._magnitude

    def will_draft(self, num_tokens: int) -> bool:
        """Whether a session with a prompt of so many tokens that has just entered will draft soon after it, so that its
        draft is to compute the prompt too: under a load that speculates already, and while no other prompt waits, whose
        first token would come later.
        """
        is_known = self.mode is Mode.SPECULATIVE and not self._choice.lengths.is_starting and not self._has_grown
        return is_known and num_tokens <= LONGEST_PROMPT_AT_ONCE and self._num_prompts <= 1


def _follow(known: float, newest: float) -> float:
    """What requests usually take, with the one that ended last; ``known`` is infinite before any has."""
    return newest if math.isinf(known) else known + _NEWEST_REQUEST * (newest - known)
