"""What a session's state machine asks its driver to do. Plain values."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.errors import OutriderError
from outrider.ports import DraftCommand, TargetCommand
from outrider.types import FinishReason, TokenLogprob


@dataclass(frozen=True, slots=True)
class ToDraft:
    """Send a command on the draft's link."""

    command: DraftCommand


@dataclass(frozen=True, slots=True)
class ToTarget:
    """Send a command on the target's link."""

    command: TargetCommand


@dataclass(frozen=True, slots=True)
class Emit:
    """Give new output to the user: these tokens, and what has become final of the text (``Output.take_text``)."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None


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
    """The target has no room: start the session again, under a new number, when it has."""

    retry_after_ms: int
    reason: str


@dataclass(frozen=True, slots=True)
class SetDraftTimer:
    """Call ``draft_timed_out(timer)`` when the draft's time is up; replaces an earlier timer."""

    timer: int


@dataclass(frozen=True, slots=True)
class ClearDraftTimer:
    """The timer is not needed any more."""


@dataclass(frozen=True, slots=True)
class RetryDraftAfter:
    """The draft has no room for this session: call ``draft_back`` after a while."""

    retry_after_ms: int


Action = ToDraft | ToTarget | Emit | Finish | Fail | Park | SetDraftTimer | ClearDraftTimer | RetryDraftAfter
