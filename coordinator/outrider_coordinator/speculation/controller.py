"""The draft length controller: draft lengths of the sessions on one target, by goodput.

Takes events with their times and answers queries; reads no clock and sends nothing. Knows no tokens: a length depends
on counts and times alone, never on what was drawn, or discarding drafts would bias the output.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.limits import MAX_DRAFT_LENGTH
from outrider.ports import DraftEvent, EventBatch, ForwardReport, Proposal
from outrider_coordinator.speculation.acceptance import Acceptance
from outrider_coordinator.speculation.comparison import Comparison
from outrider_coordinator.speculation.draft_prefill import DraftPrefill
from outrider_coordinator.speculation.expectation import Expectation
from outrider_coordinator.speculation.probe import Probe
from outrider_coordinator.speculation.rounds import Round, RoundLearner, seconds_of
from outrider_coordinator.speculation.sessions import ControlledSession, Mode, Population, SessionVerdict
from outrider_coordinator.speculation.step_costs import StepCosts, bucket_of

_MAX_INTERVAL_S = 0.25
"""Longest time between two messages of a target that is busy: a longer one is idle time."""
_ROUNDS_BETWEEN_CHOICES = {Mode.PLAIN: 16, Mode.SPECULATIVE: 4}
"""Rounds after which lengths are chosen again; an estimate takes a good part of a short plain round."""
LONGEST_PROMPT_AT_ONCE = 512
"""Most tokens of text that drafts take in beside prompts, or before a choice: more would delay first tokens where both
share a device."""


class DraftLengthController:
    """Draft lengths of the sessions of one target; the events of each message come between ``begin`` and ``end``."""

    def __init__(self, costs: StepCosts | None = None) -> None:
        self.costs = costs or StepCosts()
        self.acceptance, self.probe = Acceptance(MAX_DRAFT_LENGTH), Probe()
        self._rounds, self._draft_prefill = RoundLearner(self.costs), DraftPrefill()
        self.sessions = Population()
        self.expectation = Expectation(self.sessions, self.costs, self.acceptance, self._rounds)
        self.comparison = Comparison(self.sessions, self.expectation)
        self._rounds_since_choice = self._num_at_choice = 0
        self._chosen_mode = Mode.PLAIN
        """Mode after the last choice between messages."""
        self._busy_s = 0.0
        """Time of service."""
        self._has_prompt_ended = self._has_text_come = self._is_fresh = self._is_ahead = False
        self._is_choice_awaited = False
        """Drafts of new sessions lack much text, which the choice that is due may spare them."""
        self._verdicts: list[SessionVerdict] = []
        """Verdicts that are not learned yet, since commands leave first."""
        self._ended: list[ForwardReport | None] = []
        """Report of the last message, likewise; empty: it is learned."""

    # Queries.

    @property
    def mode(self) -> Mode:
        """Mode of the sessions, probes aside."""
        return self.comparison.mode

    @property
    def is_speculating(self) -> bool:
        """True if all sessions are to draft."""
        return self.mode is Mode.SPECULATIVE

    @property
    def has_just_chosen(self) -> bool:
        """True if nothing was judged since the last choice."""
        return not self._rounds_since_choice

    @property
    def first_length(self) -> int:
        """Draft length with which a session begins, if its request allows it."""
        return self.expectation.length if self.is_speculating else 0

    @property
    def is_measured(self) -> bool:
        """True if speculation was measured with about as many sessions, rather than expected from the profile."""
        return self.costs.num_speculative_rounds(self.expectation.num_rows) > 0

    def length(self, session: ControlledSession) -> int:
        """Draft length of the session's next step; 0 while prompts are computed, which longer steps would hold up."""
        return 0 if self._is_held_back else session.length

    def lengths(self, sessions: Sequence[ControlledSession]) -> list[int]:
        """``length`` of each session."""
        return [0] * len(sessions) if self._is_held_back else [session.length for session in sessions]

    def are_plain(self, sessions: Sequence[ControlledSession]) -> list[bool]:
        """True if each session's next step is plain, and its draft computes no text meanwhile."""
        if self._is_held_back and not self._prefills_drafts:
            return [True] * len(sessions)
        return [not session.length for session in sessions]

    def is_to_draft(self, session: ControlledSession) -> bool:
        """True if the session drafts now, or will once prompts are computed and its draft has the text."""
        return session.limit > 0 and (self.is_speculating or session.length > 0)

    def is_prefilling_drafts(self, session: ControlledSession) -> bool:
        """True if the session's draft is to compute its text, so that the session can draft later."""
        return self._prefills_drafts and session.length > 0

    def will_draft(self, num_tokens: int) -> bool:
        """True if a session with such a prompt that has just entered will draft soon after it, so that its draft
        computes the prompt too.
        """
        fits_beside = num_tokens <= LONGEST_PROMPT_AT_ONCE and self.sessions.num_prompts <= 1
        return self.is_speculating and fits_beside

    @property
    def _prefills_drafts(self) -> bool:
        return self._draft_prefill.is_active and not self.sessions.has_prompts and not self._is_choice_awaited

    @property
    def _is_held_back(self) -> bool:
        return self.sessions.has_prompts or self._is_choice_awaited or self._draft_prefill.is_active

    # Events.

    def enter(self, session: ControlledSession) -> None:
        """A session comes to live on the target, which computes its prompt first."""
        if session in self.sessions:
            return
        is_first = not self.sessions.may_draft
        self.sessions.add(session)
        if session.limit and (is_first or bucket_of(len(self.sessions)) != bucket_of(self._num_at_choice)):
            self._choose_at_arrival()
        session.enter(self.first_length)

    def leave(self, session: ControlledSession) -> None:
        """A session leaves the target."""
        if session not in self.sessions:
            return
        self._learn_verdicts()
        self.sessions.remove(session)
        self.probe.leave(session)
        if session.began_s is not None and session.limit and session.num_rounds > 1:
            self.expectation.request_s.note(self._busy_s - session.began_s)

    def begin(self, now: float) -> None:
        """A message of the target has come; ``now`` is in seconds."""
        self.learn()
        if self.sessions.may_draft:
            self._busy_s += min(now - self._rounds.current.now, _MAX_INTERVAL_S)
        self._rounds.current = Round(now)

    def add_verdict(self, verdict: SessionVerdict) -> None:
        """A step was judged. It is learned later, unless it ends a prompt: other sessions wait for that."""
        self._verdicts.append(verdict)
        if not verdict[0].has_begun:
            self._learn_verdicts()

    def add_end(self, report: ForwardReport | None) -> None:
        """The message has ended. It is learned later."""
        self._ended = [report]

    def _learn_verdicts(self) -> None:
        verdicts, self._verdicts = self._verdicts, []
        for verdict in verdicts:
            self._learn_verdict(*verdict)

    def learn(self) -> None:
        """Learn all verdicts, and the last message."""
        self._learn_verdicts()
        ended, self._ended = self._ended, []
        for report in ended:
            self._learn_end(report)

    def _learn_verdict(
        self, session: ControlledSession, num_drafted: int, num_accepted: int, num_uncomputed: int
    ) -> None:
        if session not in self.sessions:
            return
        self._is_ahead |= session.is_ahead
        began = session.note_verdict(self._rounds.current.now, num_drafted, num_accepted, num_uncomputed)
        self._rounds.current.note(began, num_drafted)
        if not session.has_begun:
            self._note_begun(session)
        if num_drafted:
            self.acceptance.note(num_drafted, num_accepted)
            self.probe.note_step(session)

    def _note_begun(self, session: ControlledSession) -> None:
        """The session's prompt has been computed."""
        session.has_begun, session.began_s = True, self._busy_s
        self.sessions.num_prompts -= 1
        self._has_prompt_ended = True
        if not self.sessions.has_prompts:
            self._is_fresh = True
            self._is_choice_awaited = self.sessions.num_uncomputed > LONGEST_PROMPT_AT_ONCE
            self._update_draft_prefill()

    def note_text_taken(self, session: ControlledSession, num_uncomputed: int) -> None:
        """The draft has prefilled text and lacks ``num_uncomputed`` committed tokens; earlier verdicts name more."""
        self._learn_verdicts()
        if session in self.sessions and session.has_begun:
            session.num_uncomputed = num_uncomputed

    def note_proposals(self, batch: EventBatch[DraftEvent]) -> None:
        """Learn the duration of a draft's message, which may hold proposals or tell only of text that was taken in."""
        if batch.report is None:
            return
        lengths = [len(event.token_ids) for event in batch.events if isinstance(event, Proposal)]
        for batched in batch.batched:
            lengths += batched.counts.tolist()
        if any(lengths):
            num_rows = max(batch.report.batch_size, sum(length > 0 for length in lengths))
            self.note_draft(num_rows, max(lengths), seconds_of(batch.report))
        elif lengths:
            self.note_draft_text()

    def note_draft(self, num_rows: int, draft_length: int, seconds: float) -> None:
        """Proposals were drawn together: their number, the longest one's length, their time."""
        if not self._has_text_come:
            self._rounds.note_draft(num_rows, draft_length, self.sessions.context, seconds)

    def note_draft_text(self) -> None:
        """The draft had a forward that only took in text."""
        self._has_text_come = True
        if self._draft_prefill.is_active:
            self._update_draft_prefill()

    def _learn_end(self, report: ForwardReport | None) -> None:
        self.acceptance.fold()
        if not self._rounds.current.num_rows:
            return
        self._rounds_since_choice += 1
        context = self.sessions.context
        if report is not None:
            self._rounds.note_forward(report, context)
        has_speculated = self._rounds.note_round(
            report, context, is_speculating=self.is_speculating, is_disturbed=self._is_disturbed
        )
        if has_speculated or (self.is_speculating and self._is_ahead):  # which is not timed
            self.comparison.speculated_s = self._busy_s
        self._update_draft_prefill()
        self._end_prompts()
        self._has_text_come = self._is_ahead = False

    def _end_prompts(self) -> None:
        """Rounds beside prompts, and those that end with them, are not timed."""
        if self.sessions.has_prompts or self._has_prompt_ended:
            self.sessions.interrupt()
        self._has_prompt_ended = False

    @property
    def _is_disturbed(self) -> bool:
        """True if prompts or drafts' text were computed during the round, or targets began it by themselves."""
        beside = self._has_text_come or self._draft_prefill.is_active or self._is_ahead
        return self.sessions.has_prompts or self._has_prompt_ended or beside

    def _update_draft_prefill(self) -> None:
        drafting = self.sessions if self.is_speculating else self.probe.sessions
        self._draft_prefill.update(self._busy_s, drafting, is_wanted=not self.sessions.has_prompts)

    # Choosing.

    def choose(self) -> bool:
        """Choose anew, if it is time to; to be called between messages. Returns whether the mode is another than after
        the choice before.
        """
        if not self._is_due:
            return False
        is_fresh, self._is_fresh, self._is_choice_awaited = self._is_fresh, False, False
        self._rounds_since_choice = 0
        if not self._take_better(is_fresh=is_fresh):
            self._take(Mode.PLAIN)
        elif self.mode is Mode.PLAIN:
            self._probe_if_due()
        self._update_draft_prefill()
        before, self._chosen_mode = self._chosen_mode, self.mode
        return self.mode is not before

    @property
    def _is_due(self) -> bool:
        if not self.sessions or self.sessions.has_prompts:
            return False
        has_changed = bucket_of(len(self.sessions)) != bucket_of(self._num_at_choice)
        return self._is_fresh or has_changed or self._rounds_since_choice >= _ROUNDS_BETWEEN_CHOICES[self.mode]

    def _choose_at_arrival(self) -> None:
        """Choose the mode of a burst as it arrives: while no session has drafted, a switch costs only drafts' text."""
        if not self.sessions.has_ever_drafted:
            self._take_better(is_fresh=True)

    def _take_better(self, *, is_fresh: bool) -> bool:
        """Compare both modes and take the better one; returns False, taking none, where no session may draft."""
        self._num_at_choice = len(self.sessions)
        if not self.expectation.estimate():
            return False
        is_to_switch = self.comparison.is_to_switch(self._busy_s, is_fresh=is_fresh)
        self._take(self.mode.other if is_to_switch else self.mode)
        return True

    def _take(self, mode: Mode) -> None:
        """Set the mode, and the lengths."""
        if self.comparison.take(mode, self._busy_s):
            self.probe.end(self._busy_s)
        if mode is Mode.SPECULATIVE:
            self.sessions.set_length(min(self.expectation.length, self._longest_ahead))
        elif not self.probe.sessions:
            self.sessions.set_length(0)

    @property
    def _longest_ahead(self) -> int:
        """Draft length whose loop, the guess of the bonus token included, ends before the target's forward does, where
        drafts go on meanwhile.
        """
        if not any(session.is_ahead for session in self.sessions):
            return MAX_DRAFT_LENGTH
        return self.costs.longest_within_forward(self.expectation.num_rows, self.sessions.context)

    def _probe_if_due(self) -> None:
        if self.probe.is_due(self._busy_s):
            plain_s = self.expectation.plain_round_s
            self.probe.begin(self._busy_s, tuple(self.sessions), plain_s, self.expectation.text_seconds(1.0))
