"""The speculation loop of one session, as a state machine: events in, actions out.

Owns the order of things: prefill on both sides at once, then propose, score, judge, again and again; K = 0 wherever the
draft is missing, late, full or not wanted; the rebuild of a side that lost the session. Refuses to know clocks, links
and other sessions: it never waits, and time comes in as events.

One step::

    Extend -> Proposal -> Score -> Scores -> verdict -> emit

At most one command is unanswered on each side. What each side holds is kept in ``sides``; a command always brings what
its side lacks, so a rebuild, a late reply and the bonus-token hole are nothing special here.
"""

from __future__ import annotations

import enum

from outrider.errors import DeadlineError, LostTooOftenError, OutriderError, ProtocolError
from outrider.ports import (
    DraftEvent,
    Opened,
    Preempted,
    Proposal,
    Refused,
    Scores,
    SessionFailed,
    SessionLost,
    TargetEvent,
)
from outrider.tokenization import TextTokenizer
from outrider.types import FinishReason, JudgingRule, SparseEvidence, SparseScores, TokenLogprob
from outrider_coordinator.acceptance import EvidenceError, Verdict, check_proposal, judge
from outrider_coordinator.acceptance.vectorized import ProposalCase, ScoredCase
from outrider_coordinator.requests.engine_request import EngineRequest
from outrider_coordinator.session.actions import (
    Action,
    ClearDraftTimer,
    Fail,
    Finish,
    Park,
    RetryDraftAfter,
    SetDraftTimer,
    ToDraft,
    ToTarget,
)
from outrider_coordinator.session.commands import CommandBuilder
from outrider_coordinator.session.committed_tokens import CommittedTokens
from outrider_coordinator.session.failures import as_error
from outrider_coordinator.session.logprobs import emitted_logprobs, prompt_logprobs
from outrider_coordinator.session.output import Output
from outrider_coordinator.session.service_state import (
    MAX_LOSSES_ALONE,
    MAX_LOSSES_IN_A_ROW,
    NOTHING_DRAFTED,
    Asked,
    Drafted,
    DraftFacts,
    DraftSide,
    Readiness,
    TargetSide,
    WithoutDraft,
)
from outrider_coordinator.speculation import LONGEST_INLINE_FEED, DraftLengthPolicy
from outrider_coordinator.stats.spec_decode_stats import SpecDecodeStats

LOST_DRAFT_RETRY_MS = 1000


class Waiting(enum.Enum):
    """What a session waits for."""

    ADMISSION = "admission"
    DRAFT = "draft"
    TARGET = "target"
    NOTHING = "nothing"
    """It is over."""


class SessionLoop:
    """One session. Every method is an event; what it asks for is taken with ``take_actions``."""

    def __init__(
        self,
        plan: EngineRequest,
        policy: DraftLengthPolicy,
        *,
        draft: DraftFacts | None = None,
        tokenizer: TextTokenizer | None = None,
    ) -> None:
        """``draft`` is None while no draft can be reached. Output from before is taken in here, which takes a while
        for a long one; ``InvalidRequestError`` when it goes on past its end.
        """
        self.plan = plan
        self.waiting = Waiting.ADMISSION
        self.tokens = CommittedTokens(plan.prompt_token_ids)
        self.output = Output(plan, tokenizer)
        self.spec_stats = SpecDecodeStats()
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self.num_cached_prompt_tokens: int | None = None
        """Tokens of the prompt that the target had cached; None until it has said so."""
        self._ended_before = self.output.replay(plan.emitted_token_ids)
        """How the output ended that the session goes on from, if it did: nothing is left to generate."""
        self._unscored = plan.emitted_token_ids[-1:] if self._lacks_only_prompt_logprobs else ()
        """A session never holds the token that ends it."""
        self.tokens.extend(plan.emitted_token_ids[: len(plan.emitted_token_ids) - len(self._unscored)])
        self._policy = policy
        self.speculation = policy.session(plan.num_speculative_tokens)
        """What its draft lengths depend on."""
        self._messages = CommandBuilder(plan, self.tokens)
        self._draft = DraftSide(Readiness.AWAY if draft is None else Readiness.CLOSED, draft or DraftFacts())
        self._target = TargetSide()
        self._drafted = NOTHING_DRAFTED
        self.step = 0
        """Which step it is in."""
        self.why_not = WithoutDraft.NOTHING_PROPOSED
        """Why this step has no proposal, if it has none when it is judged."""
        self._actions: list[Action] = []

    @property
    def _lacks_only_prompt_logprobs(self) -> bool:
        return self._ended_before is not None and self.plan.num_prompt_logprobs is not None

    @property
    def lacks_draft(self) -> bool:
        """Whether it would draft if a draft could be reached or had room for it."""
        return self._draft.readiness is Readiness.AWAY

    @property
    def num_target_losses(self) -> int:
        """How often in a row a target was lost while it owed an answer."""
        return self._target.losses

    @property
    def is_suspect(self) -> bool:
        """Whether targets may break because of it: they did so often in a row."""
        return self._target.losses > MAX_LOSSES_IN_A_ROW

    def take_actions(self) -> list[Action]:
        """What the events since the last call ask for, in order."""
        actions, self._actions = self._actions, []
        return actions

    # Events: of the driver.

    def start(self, session: int) -> None:
        """The session is admitted, for the first time or again, under a number never used on these links."""
        self._messages.session = session
        if self._ended_before is None or self._lacks_only_prompt_logprobs:
            self._begin_step()
        else:
            self._end(self._ended_before)

    def trace_items(self, trace_parent: str) -> None:
        """Items sent from now on carry this; empty: they are not traced."""
        self._messages.trace_parent = trace_parent

    def name_trace(self, trace_id: str) -> None:
        """The services' logs shall name this trace, whether or not items are traced."""
        self._messages.trace_id = trace_id

    def cancel(self) -> None:
        """The caller went away or asked to end it."""
        if self.waiting is not Waiting.NOTHING:
            self._actions.append(self.output.close())
            self._end(Finish(FinishReason.CANCELLED))

    def expire(self) -> None:
        """The caller's time is up."""
        self.fail(DeadlineError("the request's time is up"))

    def fail(self, error: OutriderError) -> None:
        """The request cannot go on."""
        if self.waiting is not Waiting.NOTHING:
            self._end(Fail(error))

    def draft_timed_out(self, timer: int) -> None:
        """The draft's time is up: this step goes without, and the draft is taken back when it answers."""
        if self.waiting is Waiting.DRAFT and timer == self.step:
            self.spec_stats.num_draft_timeouts += 1
            self.why_not = WithoutDraft.LATE
            self._draft.is_late = True
            self._send_score()

    def draft_lost(self) -> None:
        """The draft's link is gone, and with it what the draft held."""
        if self._draft.readiness is not Readiness.GONE:
            self._go_without_draft(Readiness.AWAY, WithoutDraft.AWAY)

    def draft_back(self, facts: DraftFacts) -> None:
        """The draft can be reached again, or may have room again."""
        if self._draft.readiness is Readiness.AWAY:
            self._draft.facts = facts
            self._draft.losses = 0
            self._draft.forget(Readiness.CLOSED)

    def target_lost(self) -> None:
        """The target's link is gone, and with it what the target held.

        A session that was waiting for an answer may be why: it is not sent for ever to targets that break over it.
        """
        if self._target.asked is not None:
            self._target.losses += 1
        self._target.lose(Readiness.AWAY)
        if self._target.losses > MAX_LOSSES_IN_A_ROW + MAX_LOSSES_ALONE:
            self.fail(LostTooOftenError(f"the target was lost {self._target.losses} times over this request"))

    def target_back(self) -> None:
        """A target can be reached again; the session is rebuilt from the tokens here."""
        if self._target.readiness is Readiness.AWAY:
            self._target.forget(Readiness.CLOSED)
            if self.waiting is Waiting.TARGET:
                self._send_score()

    # Events: of the draft.

    def to_check(self, event: Proposal, evidence: SparseEvidence) -> ProposalCase | None:
        """What is to be checked of a proposal that this step waits for, for whoever checks many at once."""
        asked, rules = self._draft.asked, self.plan.rules
        if asked is None or event.generation != asked.generation or rules.rule is not JudgingRule.REJECTION:
            return None
        if not 0 < len(event.token_ids) <= asked.draft_length:
            return None
        return ProposalCase(event.token_ids, evidence, rules.num_token_ids)

    def on_draft_event(self, event: DraftEvent, *, is_sound: bool = False) -> None:
        """An event of this session on the draft's link; ``is_sound``: ``to_check`` was checked and found in order."""
        if self.waiting in (Waiting.NOTHING, Waiting.ADMISSION):
            return
        if isinstance(event, Opened):
            return  # how much of the text a draft had cached is of no interest here
        if isinstance(event, Proposal):
            self._on_proposal(event, is_sound=is_sound)
        elif event.generation < self._draft.opened or self._draft.readiness is not Readiness.OPEN:
            self.spec_stats.num_stale_draft_replies += 1
        elif isinstance(event, SessionLost):
            self._on_draft_session_lost()
        elif isinstance(event, SessionFailed):
            self._go_without_draft(Readiness.GONE, WithoutDraft.FAILED)
        elif isinstance(event, Refused | Preempted):
            self._actions.append(RetryDraftAfter(event.retry_after_ms))
            self._go_without_draft(Readiness.AWAY, WithoutDraft.REFUSED)

    def _on_proposal(self, event: Proposal, *, is_sound: bool) -> None:
        asked = self._draft.asked
        if asked is None or event.generation != asked.generation:
            self.spec_stats.num_stale_draft_replies += 1
            return
        self._draft.note_answer(asked)
        if self.waiting is not Waiting.DRAFT:
            return  # a prefill, or too late for its step: only the books change
        if asked.draft_length == 0:
            self._ask_draft_or_go_on()
            return
        self._drafted = self._check(event, asked, is_sound=is_sound)
        self._actions.append(ClearDraftTimer())
        self._send_score()

    def _check(self, event: Proposal, asked: Asked, *, is_sound: bool) -> Drafted:
        """The proposal if it can be judged, else nothing: bad evidence costs speed and never a wrong token."""
        rules = self.plan.rules
        try:
            if event.base_length != asked.length:
                raise EvidenceError(f"the proposal builds on {event.base_length} tokens, not on {asked.length}")
            if not is_sound:
                check_proposal(
                    event.token_ids,
                    event.evidence,
                    expects=rules.evidence_form,
                    asked=asked.draft_length,
                    num_token_ids=rules.num_token_ids,
                )
        except EvidenceError:
            self.spec_stats.num_bad_evidence += 1
            self.why_not = WithoutDraft.BAD_EVIDENCE
            return NOTHING_DRAFTED
        evidence = event.evidence if rules.evidence_form is not None and event.token_ids else None
        return Drafted(event.token_ids, evidence, self._draft.opened)

    def _on_draft_session_lost(self) -> None:
        self.spec_stats.num_draft_losses += 1
        self._draft.losses += 1
        if self._draft.losses > MAX_LOSSES_IN_A_ROW:
            self._actions.append(RetryDraftAfter(LOST_DRAFT_RETRY_MS))
            self._go_without_draft(Readiness.AWAY, WithoutDraft.LOST)
            return
        self._draft.lose(Readiness.CLOSED)
        if self.waiting is Waiting.DRAFT:
            self._ask_draft_or_go_on()

    def _go_without_draft(self, readiness: Readiness, why: WithoutDraft) -> None:
        self._draft.lose(readiness, why)
        if self.waiting is Waiting.DRAFT:
            self.why_not = why
            self._actions.append(ClearDraftTimer())
            self._send_score()

    # Events: of the target.

    def to_judge(self, event: Scores, scores: SparseScores) -> ScoredCase | None:
        """What is to be judged by scores that this step waits for, for whoever judges many at once."""
        drafted, base, rules = self._drafted, len(self.tokens), self.plan.rules
        if event.generation != self._target.asked or event.base_length != base:
            return None
        if rules.rule is not JudgingRule.REJECTION or not isinstance(drafted.evidence, SparseEvidence):
            return None
        proposal = ProposalCase(drafted.token_ids, drafted.evidence, rules.num_token_ids)
        return ScoredCase(proposal, scores, self.plan.seed, base)

    def on_target_event(self, event: TargetEvent, verdict: Verdict | None = None) -> None:
        """An event of this session on the target's link; ``verdict``: what judging ``to_judge`` came to, if it was."""
        if self.waiting in (Waiting.NOTHING, Waiting.ADMISSION):
            return
        if isinstance(event, Scores):
            self._on_scores(event, verdict)
        elif isinstance(event, Opened):
            self._note_cached(event)
        elif event.generation < self._target.opened or self._target.readiness is not Readiness.OPEN:
            self.spec_stats.num_stale_target_replies += 1
        elif isinstance(event, SessionLost):
            self._on_target_session_lost(event)
        elif isinstance(event, SessionFailed):
            self.fail(as_error(event))
        elif isinstance(event, Refused):
            self._target.forget(Readiness.CLOSED)
            self._park(event.retry_after_ms, event.reason)
        elif isinstance(event, Preempted):
            self.spec_stats.num_preemptions += 1
            self._target.lose(Readiness.CLOSED)
            self._park(event.retry_after_ms, "its pages were needed for older requests")

    def _note_cached(self, event: Opened) -> None:
        """Of the first target that held the session: what a rebuilt one finds is its own work."""
        if event.generation == self._target.opened and self.num_cached_prompt_tokens is None:
            self.num_cached_prompt_tokens = min(event.num_cached_tokens, len(self.plan.prompt_token_ids))

    def _on_scores(self, event: Scores, verdict: Verdict | None) -> None:
        if event.generation != self._target.asked:
            self.spec_stats.num_stale_target_replies += 1
            return
        base, drafted = len(self.tokens), self._drafted
        try:
            if event.base_length != base:
                raise ProtocolError(f"scores build on {event.base_length} tokens, not on {base}")
            verdict = verdict or judge(
                self.plan.rules, drafted.token_ids, drafted.evidence, event.form, seed=self.plan.seed, base=base
            )
            new = (*drafted.token_ids[: verdict.num_accepted], verdict.next_token_id)
            logprobs = self._take_logprobs(event, new)
        except OutriderError as error:
            self.fail(error)
            return
        if self._ended_before is not None:
            self.tokens.extend(self._unscored)
            self._end(self._ended_before)
            return
        self._settle(verdict, base)
        self._grow(new, logprobs)

    def _take_logprobs(self, event: Scores, new: tuple[int, ...]) -> tuple[TokenLogprob, ...] | None:
        plan = self.plan
        if plan.num_prompt_logprobs is not None and self.prompt_logprobs is None:
            self.prompt_logprobs = prompt_logprobs(event, plan.prompt_token_ids)
        return None if plan.num_logprobs is None else emitted_logprobs(event, new, plan.num_logprobs)

    def _settle(self, verdict: Verdict, base: int) -> None:
        """Both sides hold what was accepted; the token after it is new to them."""
        self._target.note_answer(base + verdict.num_accepted)
        self._draft.settle(self._drafted, verdict.num_accepted)
        num_drafted, num_accepted = len(self._drafted.token_ids), verdict.num_accepted
        self.spec_stats.count_step(num_draft_tokens=num_drafted, num_accepted=num_accepted, why_not=self.why_not)
        lag = base + num_accepted - self._draft.held
        self._policy.note_verdict(self.speculation, num_drafted, num_accepted, draft_lag=lag)

    def _grow(self, new: tuple[int, ...], logprobs: tuple[TokenLogprob, ...] | None) -> None:
        growth = self.output.push(new, logprobs)
        self.tokens.extend(growth.emit.token_ids)
        self.spec_stats.num_emitted_tokens += len(growth.emit.token_ids)
        self._actions.append(growth.emit)
        if growth.finish is not None:
            self._end(growth.finish)
        else:
            self._begin_step()

    def _on_target_session_lost(self, event: SessionLost) -> None:
        self.spec_stats.num_target_losses += 1
        self._target.losses += 1
        self._target.lose(Readiness.CLOSED)
        if self._target.losses > MAX_LOSSES_IN_A_ROW:
            self.fail(LostTooOftenError(f"the target lost the session {self._target.losses} times: {event.reason}"))
        elif self.waiting is Waiting.TARGET:
            self._send_score()

    def _park(self, retry_after_ms: int, reason: str) -> None:
        self._leave()
        self.waiting = Waiting.ADMISSION
        self._actions.append(Park(retry_after_ms, reason))

    # Steps.

    def _begin_step(self) -> None:
        self.step += 1
        self._drafted = NOTHING_DRAFTED
        self.why_not = WithoutDraft.NOTHING_PROPOSED
        if self._target.held == 0:
            # Prefill, of a new session or of one to be rebuilt: both sides at once.
            self.why_not = WithoutDraft.PREFILL
            if self._will_draft() and self._draft.asked is None:
                self._ask_draft(0)
            self._send_score()
        elif (length := self._draft_length()) == 0:
            self.why_not = self._why_nothing_is_asked()
            self._send_score()
        elif not self._is_fed:
            self._feed_draft()
            self._send_score()
        else:
            self.waiting = Waiting.DRAFT
            self._actions.append(SetDraftTimer(self.step))
            if self._draft.asked is None:  # otherwise its prefill is not done yet
                self._ask_draft(length)

    @property
    def _is_fed(self) -> bool:
        """Whether to wait for a proposal. Where lengths are controlled, steps go on without one until the draft has the
        text.
        """
        if not self._policy.is_controlled:
            return True
        return self._draft.asked is None and len(self.tokens) - self._draft.held <= LONGEST_INLINE_FEED

    def _feed_draft(self) -> None:
        """Bring the draft what it lacks, if that is not on its way, for a step to come."""
        self.why_not = WithoutDraft.CATCHING_UP
        if self._draft.asked is None:
            self._ask_draft(0)

    def _ask_draft_or_go_on(self) -> None:
        length = self._draft_length()
        if length and self._is_fed:
            self._ask_draft(length)
        else:
            if length:
                self._feed_draft()
            else:
                self.why_not = self._why_nothing_is_asked()
            self._actions.append(ClearDraftTimer())
            self._send_score()

    def _why_nothing_is_asked(self) -> WithoutDraft:
        """Why ``_draft_length`` is 0."""
        why = self._policy.why_none(self.speculation)
        if why is not None:
            return why
        if self.output.num_remaining <= 1:
            return WithoutDraft.LAST_TOKEN
        if not self._draft.is_usable:
            return WithoutDraft.LATE if self._draft.is_late else self._draft.why_away
        return WithoutDraft.OUTGROWN

    def _draft_length(self) -> int:
        """Tokens to ask for in this step: 0 when the draft is not to be called at all."""
        wanted = self._policy.length(self.speculation)
        return self._room_for(wanted, len(self.tokens), self.output.num_remaining - 1)

    def _will_draft(self) -> bool:
        """Whether the step after a prefill, which brings one token, will ask the draft."""
        wanted = int(self._policy.will_draft(self.speculation))
        return self._room_for(wanted, len(self.tokens) + 1, self.output.num_remaining - 2) > 0

    def _room_for(self, wanted: int, length: int, useful: int) -> int:
        """Of the ``wanted`` tokens those that can be drafted after ``length`` committed ones, if so many are of use."""
        if not wanted or not self._draft.is_usable:
            return 0
        return self._draft.room_after(length, min(wanted, useful))

    def _ask_draft(self, length: int) -> None:
        side = self._draft
        if side.readiness is Readiness.CLOSED:
            self.spec_stats.num_draft_rebuilds += side.is_lost
            side.is_lost = False
            opening = self._messages.open_draft(side)
            side.readiness, side.opened = Readiness.OPEN, opening.generation
            self._actions.append(ToDraft(opening))
        command = self._messages.extend(side, length)
        side.asked = Asked(command.generation, len(self.tokens), length)
        self._actions.append(ToDraft(command))

    def _send_score(self) -> None:
        self.waiting = Waiting.TARGET
        side = self._target
        if side.readiness is Readiness.AWAY:
            return  # sent when a target is back
        if side.readiness is Readiness.CLOSED:
            self.spec_stats.num_target_rebuilds += side.is_lost
            side.is_lost = False
            opening = self._messages.open_target(has_prompt_logprobs=self.prompt_logprobs is not None)
            side.readiness, side.opened = Readiness.OPEN, opening.generation
            self._actions.append(ToTarget(opening))
        command = self._messages.score(side, self._drafted)
        side.asked = command.generation
        self._actions.append(ToTarget(command))

    def _end(self, ending: Finish | Fail) -> None:
        self._leave()
        self.waiting = Waiting.NOTHING
        self._actions.append(ending)

    def _leave(self) -> None:
        """Give back what both services hold of this session."""
        self._actions.append(ClearDraftTimer())
        if self._draft.readiness is Readiness.OPEN:
            self._actions.append(ToDraft(self._messages.release()))
            self._draft.forget(Readiness.CLOSED)
        if self._target.readiness is Readiness.OPEN:
            self._actions.append(ToTarget(self._messages.release()))
            self._target.forget(Readiness.CLOSED)
