"""Counters of speculation: of one session, and of a coordinator since its start."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider.generation import SpeculationStats

if TYPE_CHECKING:
    from outrider_coordinator.session.actions import StepEnded


class WithoutDraft(enum.StrEnum):
    """Reason why a step has no proposal."""

    PREFILL = "prefill"
    """The prompt, or the whole text of a session to be rebuilt, goes to both sides at once."""
    NOT_ASKED = "not_asked"
    """The draft length of the request or of the coordinator is 0, or there is no draft."""
    LOAD = "load"
    """Switched off by ``disable_by_batch_size``."""
    NOT_WORTH = "not_worth"
    """Plain decoding is expected to give more tokens a second."""
    PROMPTS = "prompts"
    """Prompts are being taken in, which longer steps would hold up."""
    DRAFT_PREFILL = "draft_prefill"
    """The draft computes text that it lacks."""
    LAST_TOKEN = "last_token"
    """One token is still wanted, and the target gives that."""
    OUTGROWN = "outgrown"
    """The text is as long as the draft can take."""
    LATE = "late"
    """The draft did not answer in time, in this step or in one before."""
    AWAY = "away"
    """The draft cannot be reached."""
    REFUSED = "refused"
    """The draft has no room for the session, or needed its pages for older ones."""
    LOST = "lost"
    """The draft lost the session too often in a row, and is left alone for a while."""
    FAILED = "failed"
    """The session failed on the draft, which is of no more use to it."""
    BAD_EVIDENCE = "bad_evidence"
    """The proposal could not be judged."""
    FORCED = "forced"
    """The grammar forces the next tokens, which are proposed without a draft."""
    NOTHING_PROPOSED = "nothing_proposed"
    """The draft had nothing to propose."""


@dataclass(slots=True)
class SpecDecodeStats:
    """Counts of speculation, with the names of vLLM's metrics."""

    num_steps: int = 0
    num_drafts: int = 0
    """Steps that had a proposal."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_judged_tokens: int = 0
    """Drafted, and not after its step's first rejection."""
    num_emitted_tokens: int = 0
    accepted_counts: Counter[int] = field(default_factory=Counter)
    """Steps that had a proposal, by how many tokens were accepted."""
    draft_lengths: Counter[int] = field(default_factory=Counter)
    """Steps that had a proposal, by how many tokens it had."""
    without_draft: Counter[WithoutDraft] = field(default_factory=Counter)
    """Steps that had no proposal, by why."""
    draft_tokens_by_model: Counter[str] = field(default_factory=Counter)
    """Draft tokens by the model that drew them, and accepted ones likewise."""
    accepted_tokens_by_model: Counter[str] = field(default_factory=Counter)
    num_forced_tokens: int = 0
    """Proposed because the grammar forces them. They count as no draft tokens."""
    num_accepted_forced_tokens: int = 0
    num_bad_evidence: int = 0
    """Proposals that could not be judged."""
    num_draft_timeouts: int = 0
    num_draft_losses: int = 0
    """``SessionLost`` from the draft."""
    num_target_losses: int = 0
    num_draft_rebuilds: int = 0
    """Rebuilds of sessions on the draft, after a loss of the session or of the link."""
    num_target_rebuilds: int = 0
    num_stale_draft_replies: int = 0
    num_stale_target_replies: int = 0

    @property
    def num_stale_replies(self) -> int:
        """Replies that came too late to mean anything."""
        return self.num_stale_draft_replies + self.num_stale_target_replies

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens of a step that had a proposal, the one after it included, before stops cut them off; 0 without any."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0

    def count_step(self, step: StepEnded, draft_model: str = "") -> None:
        """Count one step; ``draft_model``: of its proposal, if it has one."""
        num_drafted, num_accepted = step.num_draft_tokens, step.num_accepted
        self.num_steps += 1
        self.num_emitted_tokens += len(step.token_ids)
        if not num_drafted:
            self.without_draft[step.no_draft_reason] += 1
            self.num_forced_tokens += step.num_forced_tokens
            self.num_accepted_forced_tokens += num_accepted
            return
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        self.num_judged_tokens += num_accepted + (num_accepted < num_drafted)
        self.accepted_counts[num_accepted] += 1
        self.draft_lengths[num_drafted] += 1
        self.draft_tokens_by_model[draft_model] += num_drafted
        self.accepted_tokens_by_model[draft_model] += num_accepted

    def add(self, other: SpecDecodeStats) -> None:
        """Add another's counts, field by field."""
        for name in self.__slots__:
            mine, its = getattr(self, name), getattr(other, name)
            setattr(self, name, mine + its)

    def accepted_per_position(self) -> tuple[int, ...]:
        """Entry i: how often draft token i was accepted."""
        longest = max(self.draft_lengths, default=0)
        return tuple(sum(n for count, n in self.accepted_counts.items() if count > i) for i in range(longest))

    def summary(self) -> SpeculationStats:
        """Statistics of the result."""
        longest = max(self.draft_lengths, default=-1)
        return SpeculationStats(
            num_steps=self.num_steps,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            num_judged_tokens=self.num_judged_tokens,
            acceptance_histogram=tuple(self.accepted_counts[count] for count in range(longest + 1)),
            mean_acceptance_length=self.mean_acceptance_length,
            num_forced_tokens=self.num_forced_tokens,
            num_accepted_forced_tokens=self.num_accepted_forced_tokens,
        )
