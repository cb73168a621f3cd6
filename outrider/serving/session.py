"""Session: one request's state in a service, the sequence that it holds, and the limits that it is opened within.

Knows the fields of ``Open`` and their bounds. Which sessions are open is ``outrider.serving.session_registry``'s; what
their tokens lead to is the executor's, and where KV lies the ``SequenceStore``'s.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from outrider.errors import InvalidRequestError
from outrider.ports import Open
from outrider.prefix_hash import MAX_KEY_BYTES, PrefixHash
from outrider.types import JudgingRule, are_within


class TokenSequence(Protocol):
    """Tokens that a session holds."""

    @property
    def length(self) -> int:
        """Number of tokens."""
        ...

    @property
    def token_ids(self) -> Sequence[int]:
        """Token ids of the text."""
        ...


SequenceT = TypeVar("SequenceT", bound=TokenSequence)
SequenceT_inv = TypeVar("SequenceT_inv", bound=TokenSequence)


class SequenceStore(Protocol[SequenceT_inv]):
    """Keeps sequences; ``outrider.kv_cache.KVCacheManager`` is one."""

    def open(self, max_length: int, cache_salt: str = "", prefix_hash_key: bytes = b"") -> SequenceT_inv:
        """An empty sequence that can grow to ``max_length``."""
        ...

    def adopt_prefix(self, sequence: SequenceT_inv, token_ids: Sequence[int]) -> int:
        """Give an empty sequence what is cached of ``token_ids``, always less than all; how many tokens that is."""
        ...

    def num_pages(self, sequence: SequenceT_inv) -> int:
        """KV pages that it holds."""
        ...

    def commit(self, sequence: SequenceT_inv, length: int) -> None:
        """The first ``length`` tokens are computed and final: others may share them."""
        ...

    def truncate(self, sequence: SequenceT_inv, length: int) -> None:
        """Keep the first ``length`` tokens."""
        ...

    def prefix_hash(self, sequence: SequenceT_inv, length: int) -> PrefixHash:
        """Prefix hash of the first ``length`` tokens."""
        ...

    def hash_tails(self, sequence: SequenceT_inv, start: int) -> tuple[bytes, list[int]]:
        """The chain of the first ``start`` tokens, and the running hashes of these, of one more and so on, within
        their block.
        """
        ...

    def release(self, sequence: SequenceT_inv) -> None:
        """Give back what it takes."""
        ...


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Limits on the open sessions of one link, and on the time a session may stay unused."""

    max_per_link: int | None = None
    """More are refused; None: any number."""
    idle_timeout_s: float | None = None
    """A session for which nothing comes for so long ends; None: never."""


UNBOUNDED = SessionLimits()


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a service."""

    vocab_size: int
    """Token ids are below this; 0: any."""
    max_model_len: int
    trims: bool
    """A longer session is taken all the same, and kept as far as it fits (a draft); otherwise it fails."""
    max_cached_tokens: int = 0
    """Tokens that the whole KV cache has room for; 0: any number."""
    retry_after_ms: int = 200
    """Delay that ``Refused`` and ``Preempted`` carry."""
    sessions: SessionLimits = UNBOUNDED

    @property
    def max_length(self) -> int:
        """The longest session that is kept."""
        return min(self.max_model_len, self.max_cached_tokens or self.max_model_len)


SessionKey = tuple[int, int]


@dataclass(slots=True)
class Session(Generic[SequenceT]):
    """One open session."""

    link_id: int
    open: Open
    sequence: SequenceT
    reserved_length: int
    """Tokens that ``sequence`` can grow to."""
    generation: int
    """The newest item's."""
    num_committed: int = 0
    """Tokens of the text that was answered last; drafts come after them."""
    used_ns: int = 0
    """Time of the last message for it."""
    is_opened_reported: bool = False
    """True if its ``Open`` was answered with ``Opened``."""
    lookahead_credit: int = 0
    """Plain steps that may yet be computed before they are asked for: what is left of a ``Prepare``."""
    executor_state: object = None
    """State that the executor derives from ``open`` at the session's first item; it ends with the session."""
    key: SessionKey = field(init=False)
    """Link and number on it; read many times an item."""
    trace_parent: str = ""
    """Trace parent of its newest item that was answered, where records are made."""
    age: tuple[int, str, int, int] = field(init=False)
    """Compares less than that of a younger session."""

    def __post_init__(self) -> None:
        self.key = self.link_id, self.open.session
        self.age = self.open.arrival_ns, self.open.request_id, *self.key


def check_open(command: Open, limits: Limits) -> None:
    """Raise ``InvalidRequestError`` naming the field for which a session cannot be opened here."""
    _require(command.max_length >= 1, "max_length", "must be at least 1")
    if not limits.trims:
        _require(command.max_length <= limits.max_model_len, "max_length", f"must be at most {limits.max_model_len}")
        room = limits.max_cached_tokens
        _require(
            not room or command.max_length <= room, "max_length", f"must be at most {room}: all that the pages hold"
        )
    _require(0 <= command.prompt_length <= command.max_length, "prompt_length", "must be from 0 to max_length")
    highest = limits.vocab_size or math.inf
    _require(1 <= command.num_token_ids <= highest, "num_token_ids", f"must be from 1 to {highest}")
    _require(0 <= command.seed < 2**64, "seed", "must be from 0 to 2**64 - 1")
    _require(len(command.prefix_hash_key) <= MAX_KEY_BYTES, "prefix_hash_key", f"has at most {MAX_KEY_BYTES} bytes")
    is_greedy = command.judging_rule is JudgingRule.GREEDY
    _require(is_greedy == (command.sampling.temperature == 0), "judging_rule", "greedy goes with temperature 0 alone")
    _require((command.num_logprobs or 0) >= 0, "num_logprobs", "must not be negative")
    _require((command.num_prompt_logprobs or 0) >= 0, "num_prompt_logprobs", "must not be negative")
    _check_sampling(command, limits.vocab_size)


def _check_sampling(command: Open, vocab_size: int) -> None:
    sampling = command.sampling
    _require(math.isfinite(sampling.temperature), "temperature", "must be a number")
    _require(sampling.temperature >= 0, "temperature", "must not be negative")
    _require(0 < sampling.top_p <= 1, "top_p", "must be above 0 and at most 1")
    _require(0 <= sampling.min_p <= 1, "min_p", "must be from 0 to 1")
    _require(sampling.top_k >= -1, "top_k", "must be at least -1")
    _require(sampling.repetition_penalty > 0, "repetition_penalty", "must be above 0")
    _require(all(math.isfinite(bias) for _, bias in sampling.logit_bias), "logit_bias", "must be numbers")
    check_ids("logit_bias", (token_id for token_id, _ in sampling.logit_bias), vocab_size)
    check_ids("allowed_token_ids", sampling.allowed_token_ids, vocab_size)
    check_ids("bad_words", (token_id for word in sampling.bad_words for token_id in word), vocab_size)
    check_ids("eos_token_ids", command.eos_token_ids, vocab_size)
    check_ids("banned_token_ids", command.banned_token_ids, vocab_size)


def check_ids(name: str, token_ids: Iterable[int], limit: int) -> None:
    """Raise ``InvalidRequestError`` unless every id is from 0 to ``limit`` - 1; a limit of 0 is none."""
    ids = token_ids if isinstance(token_ids, tuple) else tuple(token_ids)
    if are_within(ids, 0, limit - 1 if limit else sys.maxsize):
        return
    wrong = next(token_id for token_id in ids if token_id < 0 or (limit and token_id >= limit))
    bounds = f"from 0 to {limit - 1}" if limit else "at least 0"
    raise InvalidRequestError(name, f"token id {wrong} must be {bounds}")


def _require(holds: bool, name: str, message: str) -> None:
    if not holds:
        raise InvalidRequestError(name, message)
