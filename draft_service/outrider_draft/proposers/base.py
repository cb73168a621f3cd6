"""Proposer: what a draft that keeps no KV cache implements, be it one of ours or a user's own.

A proposer sees the sessions of one batch, each with its committed tokens and its sampling settings, and returns draft
tokens for each. Sessions, links, limits and messages are ``text_executor``'s. Imports no torch.

A proposer of your own is a class in any module that the draft service can import::

    # repeat_last.py
    from outrider_draft.proposers.base import DraftTokens, Proposer


    class RepeatLast(Proposer):
        '''Proposes that the last token is repeated, as often as it was lately.'''

        @classmethod
        def load(cls, settings):
            return cls(longest=settings.num_speculative_tokens)

        def __init__(self, longest=4):
            self.longest = longest

        def propose(self, requests):
            return [DraftTokens(self.guess(request)) for request in requests]

        def guess(self, request):
            last, count = request.token_ids[-1], 0
            for token_id in reversed(request.token_ids):
                if token_id != last or count == self.longest:
                    break
                count += 1
            return [last] * min(count, request.num_tokens)

    # outrider draft --method repeat_last:RepeatLast

Whatever it proposes, the output is the target's: draft tokens without evidence count as certain, so under rejection a
token is kept with the probability that the target gives it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from outrider.ports import Open
from outrider.types import Evidence, HiddenStates

if TYPE_CHECKING:
    from outrider.config import DraftSettings

UNLIMITED_LENGTH = 2**31 - 1
"""The longest session of a proposer that has no limit of its own."""


@dataclass(slots=True, eq=False)
class ProposalRequest:
    """Request of one session to a proposer: the same object from the session's first proposal to its last."""

    open: Open
    """Sampling settings, seed, judging rule and ``num_token_ids``, below which draft tokens have to be."""
    token_ids: Sequence[int]
    """Committed tokens, the prompt first; not to be changed. At least one."""
    num_tokens: int = 0
    """Draft tokens wanted at most, K; 0: the session is only brought up to date."""
    hidden_states: HiddenStates | None = None
    """Target's hidden states, for a proposer with ``hidden_state_layers``: of the latest positions, up to the last but
    one of ``token_ids``; the token after that comes from none. [N, F], at least the last; with ``reads_all_states``
    every position is among those of one request or another. ``states.as_tensor`` makes a tensor of them.
    """
    state: dict[str, Any] = field(default_factory=dict)
    """The proposer's own; empty when the session is opened, or opened anew."""


@dataclass(frozen=True, slots=True)
class DraftTokens:
    """Draft tokens of one session, as a proposer gives them."""

    token_ids: Sequence[int] = ()
    """Up to ``num_tokens``; what comes after them, or after one that may not be drawn, is dropped."""
    evidence: Evidence = None
    """Distributions that the tokens were drawn from, one row a token, where ``open.judging_rule.needs_evidence``; None:
    every token was certain."""


class Proposer(ABC):
    """Proposes draft tokens without a KV cache of its own. One thread calls it."""

    vocab_size: int = 0
    """Token ids of sessions are below this; 0: any."""
    max_model_len: int = UNLIMITED_LENGTH
    """Sessions longer than this get no proposals."""
    hidden_state_layers: tuple[int, ...] = ()
    """Layers of the target whose hidden states it reads: i is the residual stream after i layers, 0 the embedding,
    ``LAST_HIDDEN_STATE`` what the target's head reads."""
    hidden_size: int = 0
    """Size of one layer's state; has to be given with ``hidden_state_layers``."""
    reads_all_states: bool = False
    """True if it needs the states of all positions, and not of the last alone."""

    @classmethod
    def load(cls, settings: DraftSettings) -> Self:
        """The proposer that the draft's settings ask for; ``ConfigError`` or ``ModelError`` where it cannot be."""
        return cls()

    @abstractmethod
    def propose(self, requests: Sequence[ProposalRequest]) -> Sequence[DraftTokens]:
        """Draft tokens for each request, in order.

        An exception fails the sessions of the batch on this draft, which then go on without one.
        """

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Give back what it holds; called once, at the end."""
