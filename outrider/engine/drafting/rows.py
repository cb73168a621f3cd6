"""What a draft loop is asked of each sequence, and which requests it can serve.

Plain Python; refuses to know devices and the layout of a launch.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass
from typing import TypeAlias

from outrider.engine.kernels.draft_sampling.layout import ALWAYS, MAX_BANNED, Column, Method, RowParameters
from outrider.engine.sampling.process import SMALLEST_TEMPERATURE
from outrider.engine.sampling.rows import has_penalties, is_coupled, is_greedy, needs_evidence
from outrider.engine.sampling.support import DEFAULT_SUPPORT_LIMIT, DEFAULT_SUPPORT_MASS
from outrider.kv_cache import KVSequence
from outrider.ports import Open
from outrider.randomness.streams import Stream

MAX_CATCH_UP = 2
"""Tokens that a row may append before its first draw: after a step that kept every draft token they are two."""
MAX_STEPS = 8
"""Draft tokens of one launch."""
Words: TypeAlias = "array[int]"
"""32 bits each, as a device reads them."""


@dataclass(frozen=True, slots=True)
class DraftingRules:
    """How sparse draft tokens are drawn, the same for all requests."""

    support_mass: float = DEFAULT_SUPPORT_MASS
    support_limit: int = DEFAULT_SUPPORT_LIMIT


@dataclass(frozen=True, slots=True)
class DraftTerms:
    """What drafting for a session keeps to from its first launch to its last, worked out once for its ``Open``."""

    open: Open
    needs_evidence: bool
    keys_base: bool
    """Whether the base keys the random streams."""
    words: Words  # [NUM_COLUMNS] how the device draws, without what differs from launch to launch

    @classmethod
    def of(cls, open_: Open, vocab_size: int) -> DraftTerms:
        """The terms of a request that fits."""
        words = array("i", _parameters_of(open_, vocab_size).to_numbers())
        return cls(open_, needs_evidence(open_), not is_coupled(open_), words)


@dataclass(frozen=True, slots=True)
class DraftRow:
    """Append these tokens to this sequence and draw what follows, one token after the other."""

    terms: DraftTerms
    sequence: KVSequence
    token_ids: TokenIds[int]
    """1 to ``MAX_CATCH_UP``."""
    num_drafts: int
    """Tokens to draw, 1 to ``MAX_STEPS``; all but the last are appended too."""
    base: int
    """Committed tokens when the proposal was made; keys the random streams."""

    def words(self) -> Words:  # [NUM_COLUMNS]
        """How the device draws for this row, whose tokens have not been appended yet."""
        words = self.terms.words[:]
        words[Column.BASE] = self.base if self.terms.keys_base else 0
        words[Column.POSITION] = self.sequence.length + len(self.token_ids)
        words[Column.LENGTH] = self.num_drafts
        return words


def fits_loop(open_: Open) -> bool:
    """Whether a request's draft tokens can be drawn on the device; the others are drawn from logits, one by one."""
    sampling = open_.sampling
    if has_penalties(sampling) or sampling.logit_bias or sampling.bad_words or sampling.allowed_token_ids:
        return False
    if len(_banned(open_)) > MAX_BANNED:
        return False
    return is_greedy(open_) or not (sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0 or _is_dense(open_))


def _parameters_of(open_: Open, vocab_size: int) -> RowParameters:
    coupled, greedy = is_coupled(open_), is_greedy(open_)
    return RowParameters(
        method=Method.GREEDY if greedy else Method.COUPLED if coupled else Method.SPARSE,
        temperature=1.0 if greedy else max(open_.sampling.temperature, SMALLEST_TEMPERATURE),
        seed=open_.seed,
        stream=Stream.COUPLED if coupled else Stream.PROPOSAL,
        base=0,
        position=0,
        length=0,
        num_ids=min(open_.num_token_ids or vocab_size, vocab_size),
        banned=tuple((token_id, until) for token_id, until in _banned(open_) if 0 <= token_id < vocab_size),
    )


def _is_dense(open_: Open) -> bool:
    return open_.dense and not is_coupled(open_)


def _banned(open_: Open) -> tuple[tuple[int, int], ...]:
    """(token id, position from which on it may be drawn)."""
    return tuple(_bans(open_))


def _bans(open_: Open) -> Iterator[tuple[int, int]]:
    for token_id in open_.banned_token_ids:
        yield token_id, ALWAYS
    if open_.sampling.min_tokens > 0:
        until = min(open_.prompt_length + open_.sampling.min_tokens, ALWAYS)
        yield from ((token_id, until) for token_id in open_.eos_token_ids)
