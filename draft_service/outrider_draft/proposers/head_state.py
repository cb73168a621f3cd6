"""State of a draft head for one session, from one proposal to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.model_executor.draft_loop import DraftMetadata
from outrider.sampling.session import SessionSampling

_MAX_KEPT_BYTES = 1 << 19
"""Bound on a step's states that stay with a session for their last row: less time than a copy for each session."""


@dataclass(slots=True)
class HeadState:
    """State of one session."""

    sampling: SessionSampling
    metadata: DraftMetadata | None = None
    """Sampling metadata for drawing its tokens in one launch; None: they are drawn one by one."""
    last_state: torch.Tensor | None = None
    """[1, F] of the last pair, which is computed again when nothing new comes with the next item."""


def last_of(states: torch.Tensor) -> torch.Tensor:
    """The last row of states [N, F], copied only where it would keep many others in memory."""
    last = states[-1:]
    return last if states.untyped_storage().nbytes() <= _MAX_KEPT_BYTES else last.clone()


def last_of_each(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The last row of each part [n, F], in one copy where one is needed."""
    if len(parts) == 1:
        return [last_of(parts[0])]
    return list(torch.cat([part[-1:] for part in parts]).split(1))  # type: ignore[no-untyped-call]
