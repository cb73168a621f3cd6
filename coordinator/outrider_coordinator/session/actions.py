"""Actions of the session state machine: requests to its driver, and reports of its steps. Plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from outrider.errors import OutriderError
from outrider.ports import DraftCommand, ItemTiming, TargetCommand
from outrider.types import FinishReason, TokenLogprob
from outrider.values import step_value
from outrider_coordinator.stats.spec_decode_stats import WithoutDraft


@step_value(frozen=True, slots=True)
class ToDraft:
    """Send a command on the draft's link."""

    command: DraftCommand


@step_value(frozen=True, slots=True)
class ToTarget:
    """Send a command on the target's link."""

    command: TargetCommand


class StepEnded(NamedTuple):
    """A judged step, with everything that output, statistics, traces and the request log need.

    It precedes the commands of the next step and may be processed after they were sent. It ends the wait for the
    target.
    """

    number: int
    """Steps of a session are numbered from 1."""
    base_length: int
    """Committed tokens that the proposal built on."""
    num_draft_tokens: int
    num_accepted: int
    """Number of accepted draft tokens, or of forced ones."""
    token_ids: Sequence[int]
    """New output: accepted tokens and the one after them, up to the token that ends the generation."""
    no_draft_reason: WithoutDraft
    """Counts where ``num_draft_tokens`` is 0."""
    timing: ItemTiming | None = None
    """The target's own time for the scores, where it said so."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One for each of ``token_ids``; None where none are wanted."""
    is_prefill: bool = False
    """True if the target took in the whole text: the first step, and one in which the session was rebuilt."""
    num_forced_tokens: int = 0
    """Tokens that were proposed because the grammar forces them; then there are no draft tokens."""


@step_value(frozen=True, slots=True)
class DraftWaitBegan:
    """The step waits for a proposal: call ``draft_timed_out(step)`` after the draft timeout."""

    step: int


@step_value(frozen=True, slots=True)
class DraftWaitEnded:
    """The step no longer waits for a proposal; the timer can be stopped."""

    timing: ItemTiming | None
    """The draft's own time for the answer that ended the wait; None where none did, or it did not say."""
    is_prefill: bool = False
    """Prefill flag, as in ``StepEnded``."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The generation is complete."""

    reason: FinishReason
    matched_stop: int | str | None = None


@dataclass(frozen=True, slots=True)
class Fail:
    """The request ends with an error."""

    error: OutriderError


@dataclass(frozen=True, slots=True)
class Park:
    """The target has no room: start the session again, with a new number, when it has."""

    retry_after_ms: int


@dataclass(frozen=True, slots=True)
class RetryDraftAfter:
    """The draft has no room for this session: call ``draft_back`` after the delay."""

    retry_after_ms: int


Action = ToDraft | ToTarget | StepEnded | DraftWaitBegan | DraftWaitEnded | RetryDraftAfter | Park | Finish | Fail
