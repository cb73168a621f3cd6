"""State of one session: status, committed tokens, output, and what each service holds of it. Decides nothing.

The transitions are functions of this state: ``steps`` (from one step to the next), ``draft_events`` and
``target_events`` (what a service answered).
"""

from __future__ import annotations

import enum

import numpy as np

from outrider.tokenization import TextTokenizer
from outrider.types import JudgingRule, TokenLogprob
from outrider_coordinator.acceptance.joint_verdicts import PlacedEvidence
from outrider_coordinator.session import table_columns as col
from outrider_coordinator.session.actions import Action, Finish
from outrider_coordinator.session.commands import CommandBuilder
from outrider_coordinator.session.committed_tokens import CommittedTokens
from outrider_coordinator.session.draft_side import NOTHING_DRAFTED, Drafted, DraftFacts, DraftSide
from outrider_coordinator.session.engine_request import EngineRequest
from outrider_coordinator.session.output import Output
from outrider_coordinator.session.readiness import MAX_LOSSES_IN_A_ROW, Readiness
from outrider_coordinator.session.table import NO_TOKEN, Flag, IntColumn, Row, SessionTable
from outrider_coordinator.session.target_side import TargetSide
from outrider_coordinator.speculation import DraftLengthPolicy
from outrider_coordinator.stats.spec_decode_stats import SpecDecodeStats, WithoutDraft

_TOKEN_RULES = (JudgingRule.GREEDY, JudgingRule.COUPLED)


class SessionStatus(enum.Enum):
    """Phase of a session: the answer that it waits for."""

    WAITING = "waiting"
    """Waits for admission: it has not begun, its target had no room for it, or it was released while it was paused."""
    DRAFTING = "drafting"
    """Waits for the proposal of this step."""
    SCORING = "scoring"
    """Waits for the scores of this step, or for a target that it can be rebuilt on."""
    PAUSED = "paused"
    """Waits for its reader, between two steps."""
    FINISHED = "finished"
    """Ended."""


_STATUSES = tuple(SessionStatus)
_STATUS_INDEX = {status: index for index, status in enumerate(SessionStatus)}
DRAFTING, SCORING = _STATUS_INDEX[SessionStatus.DRAFTING], _STATUS_INDEX[SessionStatus.SCORING]
"""Values of the column ``STATUS``."""
REASONS = tuple(WithoutDraft)
_REASON_INDEX = {reason: index for index, reason in enumerate(WithoutDraft)}
NOTHING_PROPOSED = _REASON_INDEX[WithoutDraft.NOTHING_PROPOSED]
"""Reasons, and a value of the column ``REASON``, which holds an index of them."""


class SessionState:
    """The complete state of one session: a view of its row, and what no step of many sessions reads."""

    is_paused = Flag(col.PAUSED)
    """True if to begin no step, because the reader is behind."""
    step = IntColumn(col.STEP)
    """The number of the step under way."""

    def __init__(
        self,
        engine_request: EngineRequest,
        policy: DraftLengthPolicy,
        *,
        draft: DraftFacts | None = None,
        tokenizer: TextTokenizer | None = None,
        table: SessionTable | None = None,
    ) -> None:
        """``table`` gives it a row when it starts; None: one of its own. ``draft`` is None while none can be reached.
        Output from before is taken in here, which takes a while for a long one; ``InvalidRequestError`` when it goes on
        past its end.
        """
        self.engine_request = engine_request
        self.policy = policy
        self.table = table or SessionTable()
        self.row = row = Row()
        self.status = SessionStatus.WAITING
        self.tokens = CommittedTokens(engine_request.prompt_token_ids, engine_request.prefix_hash_key, row=row)
        self.output = Output(engine_request, tokenizer, row=row)
        self.spec_stats = SpecDecodeStats()
        """Counters of failures; the receiver of ``StepEnded`` counts steps."""
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self.num_cached_prompt_tokens: int | None = None
        """Tokens of the prompt that the target had cached; None until it has said so."""
        self.resumed_finish = self.output.replay(engine_request.emitted_token_ids)
        """Finish of the output that the session goes on from, if it ended: nothing is left to generate."""
        self.unscored_token_ids = engine_request.emitted_token_ids[-1:] if self.lacks_only_prompt_logprobs else ()
        """A session never holds the token that ends it."""
        self.tokens.extend(
            engine_request.emitted_token_ids[: len(engine_request.emitted_token_ids) - len(self.unscored_token_ids)]
        )
        self.speculation = policy.session(
            engine_request.num_speculative_tokens,
            reads_states=draft is not None and bool(draft.hidden_state_layers),
            max_tokens=self.output.num_remaining,
            num_prompt_tokens=self.tokens.length,
        )
        """Facts on which its draft lengths depend."""
        self.commands = CommandBuilder(engine_request, self.tokens, row)
        self.draft = DraftSide(row, Readiness.AWAY if draft is None else Readiness.CLOSED, draft or DraftFacts())
        self.target = TargetSide(row)
        self.no_draft_reason = WithoutDraft.NOTHING_PROPOSED
        self._note_rules()
        self.actions: list[Action] = []
        """Actions that were asked for and not yet taken, in order."""

    def _note_rules(self) -> None:
        """Write what does not change into the row."""
        rules, values = self.engine_request.rules, self.row.values
        is_sparse = rules.rule is JudgingRule.REJECTION
        is_slow = rules.rule not in _TOKEN_RULES and not (is_sparse and not rules.verifies_blocks)
        is_slow |= self.resumed_finish is not None
        has_grammar = self.engine_request.matcher is not None
        values[col.FLAGS] |= is_sparse * col.IS_SPARSE | is_slow * col.IS_SLOW | has_grammar * col.HAS_GRAMMAR
        values[col.LIMIT] = rules.num_token_ids
        values[col.SEED : col.SEED + 1].view(np.uint64)[0] = self.engine_request.seed

    @property
    def status(self) -> SessionStatus:
        """Answer that it waits for."""
        return _STATUSES[self.row.values.item(col.STATUS)]

    @status.setter
    def status(self, status: SessionStatus) -> None:
        self.row.values[col.STATUS] = _STATUS_INDEX[status]

    @property
    def no_draft_reason(self) -> WithoutDraft:
        """Reason why this step has no proposal, if it has none when it is judged."""
        return REASONS[self.row.values.item(col.REASON)]

    @no_draft_reason.setter
    def no_draft_reason(self, reason: WithoutDraft) -> None:
        self.row.values[col.REASON] = _REASON_INDEX[reason]

    @property
    def proposal(self) -> Drafted:
        """Proposal of this step."""
        row = self.row
        if not (count := row.values.item(col.NUM_DRAFTED)):
            return NOTHING_DRAFTED
        evidence = row.evidence
        if isinstance(evidence, PlacedEvidence):
            evidence = evidence.evidence
        return Drafted(tuple(row.drafted[:count].tolist()), evidence, row.values.item(col.PROPOSAL_OPENED))

    @proposal.setter
    def proposal(self, proposal: Drafted) -> None:
        row, count = self.row, len(proposal.token_ids)
        before = row.values.item(col.NUM_DRAFTED)
        row.values[col.NUM_DRAFTED], row.values[col.PROPOSAL_OPENED] = count, proposal.opened
        row.evidence = proposal.evidence
        if count or before:
            row.drafted[:count] = proposal.token_ids
            row.drafted[count:before] = NO_TOKEN

    @property
    def resumed_ending(self) -> Finish | None:
        """Finish of a session that ends as soon as it is started; None if there is something to compute."""
        return None if self.lacks_only_prompt_logprobs else self.resumed_finish

    @property
    def is_prefill(self) -> bool:
        """True if the target takes in the whole text in this step: the prompt, or what the session is rebuilt from."""
        return self.target.held == 0 or self.no_draft_reason is WithoutDraft.PREFILL

    @property
    def lacks_only_prompt_logprobs(self) -> bool:
        """True if the output it goes on from had ended, and one pass over the text is still wanted."""
        return self.resumed_finish is not None and self.engine_request.num_prompt_logprobs is not None

    @property
    def is_over(self) -> bool:
        """True if the session has finished or failed."""
        return self.status is SessionStatus.FINISHED

    @property
    def is_running(self) -> bool:
        """True if the session may be open on a service."""
        return self.status not in (SessionStatus.WAITING, SessionStatus.FINISHED)

    @property
    def lacks_draft(self) -> bool:
        """True if the session would draft if a draft were available or had room."""
        return self.draft.readiness is Readiness.AWAY and self.engine_request.num_speculative_tokens != 0

    @property
    def is_suspect(self) -> bool:
        """True if targets may break because of this session, after several consecutive losses."""
        return self.target.losses > MAX_LOSSES_IN_A_ROW
