"""The proposer that the documentation shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.config import DraftSettings
from outrider_draft.proposers.base import DraftTokens, ProposalRequest, Proposer


class RepeatLast(Proposer):
    """Proposes that the last token is repeated, as often as it was lately."""

    @classmethod
    def load(cls, settings: DraftSettings) -> RepeatLast:
        return cls(longest=settings.num_speculative_tokens)

    def __init__(self, longest: int = 4) -> None:
        self.longest = longest

    def propose(self, requests: Sequence[ProposalRequest]) -> list[DraftTokens]:
        return [DraftTokens(self.guess(request)) for request in requests]

    def guess(self, request: ProposalRequest) -> list[int]:
        last, count = request.token_ids[-1], 0
        for token_id in reversed(request.token_ids):
            if token_id != last or count == self.longest:
                break
            count += 1
        return [last] * min(count, request.num_tokens)


class Nothing(RepeatLast):
    """Proposer whose ``load`` forgets to return."""

    @classmethod
    def load(cls, settings: DraftSettings) -> Any:
        return None


class Unfinished(Proposer):
    """Has no ``propose``."""


class Broken(Proposer):
    """Raises where it should propose."""

    def propose(self, requests: Sequence[ProposalRequest]) -> list[DraftTokens]:
        raise RuntimeError("no idea")
