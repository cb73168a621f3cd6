"""Job of a ``Score``: the request, checked, and its progress. Owns no tensor; knows nothing of forwards."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider.errors import InvalidRequestError
from outrider.kv_cache import KVSequence
from outrider.ports import Open, Score
from outrider.serving.session import check_ids
from outrider.types import LAST_HIDDEN_STATE, CandidateLogprobs, JudgingRule, Support

if TYPE_CHECKING:
    from outrider.sampling.session import SessionSampling


@dataclass(slots=True)
class ScoreJob:
    """One ``Score`` under way."""

    sampling: SessionSampling
    score: Score
    sequence: KVSequence
    token_ids: tuple[int, ...]
    """Committed and drafted tokens to be appended."""
    base: int
    """Committed tokens; the first draft token stands at this position."""
    link_id: int = 0
    """Link of the session, to which states go that leave before the answer."""
    num_fed: int = 0
    prompt_logprobs: list[CandidateLogprobs] = field(default_factory=list)

    @property
    def open(self) -> Open:
        """The session's request."""
        return self.sampling.open

    @property
    def num_left(self) -> int:
        """Tokens still to be appended."""
        return len(self.token_ids) - self.num_fed

    @property
    def num_last(self) -> int:
        """The last committed token and the drafts after it, K+1."""
        return len(self.score.draft_token_ids) + 1

    @property
    def wants_states(self) -> bool:
        """True if hidden states are asked for."""
        return self.score.hidden_states_from is not None

    @property
    def is_last_step(self) -> bool:
        """True if the token that is drawn now is the session's last, after which nothing is asked for."""
        return self.base + 1 >= self.open.max_length

    @property
    def num_prompt_rows(self) -> int:
        """Number of the next tokens before a known prompt token whose logprob is wanted."""
        if self.open.num_prompt_logprobs is None:
            return 0
        return max(0, min(self.open.prompt_length, self.base) - 1 - self.sequence.length)


def check_layers(opened: Open, *, num_layers: int) -> None:
    """Raise ``InvalidRequestError`` for a layer that the model has not."""
    for layer in opened.hidden_state_layers:
        if layer != LAST_HIDDEN_STATE and not 0 <= layer <= num_layers:
            raise InvalidRequestError(
                "hidden_state_layers", f"layer {layer} must be from 0 to {num_layers}, or {LAST_HIDDEN_STATE}"
            )


def check_score(opened: Open, item: Score, *, vocab_size: int) -> None:
    """Raise ``InvalidRequestError`` naming the field for which an item cannot be scored."""
    base, num_drafts = item.num_kept_tokens + len(item.token_ids), len(item.draft_token_ids)
    if item.num_kept_tokens < 0:
        raise InvalidRequestError("num_kept_tokens", "must not be negative")
    if not item.token_ids:
        raise InvalidRequestError("token_ids", "must hold at least one token")
    if base > opened.max_length:
        raise InvalidRequestError("token_ids", f"{base} tokens pass the {opened.max_length} the session was opened for")
    if base + num_drafts > opened.max_length:
        raise InvalidRequestError(
            "draft_token_ids",
            f"{num_drafts} drafts after {base} tokens pass the {opened.max_length} the session was opened for",
        )
    first = item.hidden_states_from
    if first is not None and not (opened.hidden_state_layers and item.num_kept_tokens <= first < base):
        raise InvalidRequestError(
            "hidden_states_from",
            f"must be from num_kept_tokens {item.num_kept_tokens} to {base - 1}, of a session that was opened with"
            f" hidden_state_layers, not {first}",
        )
    check_ids("token_ids", item.token_ids, vocab_size)
    check_ids("draft_token_ids", item.draft_token_ids, opened.num_token_ids)
    if needs_support(opened) and num_drafts:
        _check_support(opened, item.support, num_drafts)


def needs_support(opened: Open) -> bool:
    """True if the answer is about the ids of a support."""
    return opened.judging_rule is JudgingRule.REJECTION


def _check_support(opened: Open, support: Support | None, num_drafts: int) -> None:
    if support is None:
        raise InvalidRequestError("support", "is needed for rejection with draft tokens")
    counts: list[int] = support.counts.tolist()
    if len(counts) != num_drafts or min(counts) < 0 or sum(counts) != len(support.token_ids):
        raise InvalidRequestError(
            "support",
            f"{len(counts)} counts over {len(support.token_ids)} ids do not fit {num_drafts} draft tokens",
        )
    check_ids("support", (support.token_ids.min(initial=0), support.token_ids.max(initial=0)), opened.num_token_ids)
