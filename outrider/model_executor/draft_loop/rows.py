"""Rows of a draft loop, and the requests that it can serve.

Plain Python; refuses to know devices and the layout of a launch.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass
from typing import TypeAlias

from outrider.errors import InvalidRequestError
from outrider.kernels.draft_sampling.layout import ALWAYS, MAX_BANNED, Method, RowParameters
from outrider.kv_cache import KVCacheManager, KVSequence
from outrider.model_executor.input_batch import TokenLimits
from outrider.ports import Open
from outrider.randomness.streams import Stream
from outrider.sampling.parameters import SMALLEST_TEMPERATURE, is_coupled, is_greedy, is_truncated

MAX_UNCOMPUTED_TOKENS = 2
"""Tokens that a row of a model may append before its first draw: after a step that kept every draft token they are
two."""
MAX_STEPS = 16
"""Draft tokens of one loop."""
UNKNOWN = [[0] * count for count in range(MAX_STEPS)]
"""Stand-ins for tokens that will be drawn, by their number."""
Words: TypeAlias = "array[int]"
"""32 bits each, as a device reads them."""


@dataclass(frozen=True, slots=True)
class DraftMetadata:
    """Draft sampling parameters of a session, derived once from its ``Open``."""

    open: Open
    needs_evidence: bool
    """True if the device reports what it draws from."""
    is_certain: bool
    """True if evidence is one-hot: the argmax stands for a draw."""
    keys_base: bool
    """True if the base keys the random streams."""
    words: Words  # [NUM_COLUMNS] how the device draws, without what differs from launch to launch

    @classmethod
    def of(cls, open_: Open, vocab_size: int, *, takes_argmax: bool = False) -> DraftMetadata:
        """The metadata of a request that fits; ``takes_argmax`` is ``DraftingRules``'."""
        takes_argmax = takes_argmax and not is_coupled(open_)
        words = array("i", _parameters_of(open_, vocab_size, takes_argmax=takes_argmax).to_numbers())
        needs = open_.judging_rule.needs_evidence
        return cls(open_, needs and not takes_argmax, needs and takes_argmax, not is_coupled(open_), words)


@dataclass(frozen=True, slots=True)
class DraftRow:
    """Append these tokens to this sequence and draw what follows, one token after the other."""

    metadata: DraftMetadata
    sequence: KVSequence
    token_ids: TokenIds[int]
    """1 to ``MAX_UNCOMPUTED_TOKENS``, or what else the loop was made for."""
    num_drafts: int
    """Tokens to draw, 1 to ``MAX_STEPS``; all but the last are appended too."""
    base: int
    """Committed tokens when the proposal was made; keys the random streams."""
    kv_offset: int = 0
    """First tokens of the text that the sequence lacks: 1 for a head, whose KV is of pairs; many for a model with a
    window, which reads the end of a long text.
    """


def check_draft_rows(
    manager: KVCacheManager, rows: TokenIds[DraftRow], limits: TokenLimits, max_prefill: int = MAX_UNCOMPUTED_TOKENS
) -> None:
    """Raise ``InvalidRequestError`` unless every row can be planned; changes nothing."""
    if len({row.sequence for row in rows}) < len(rows):
        raise InvalidRequestError("sequence", "stands in two rows of one draft loop")
    for row in rows:
        if not 1 <= len(row.token_ids) <= max_prefill:
            raise InvalidRequestError("token_ids", f"must be 1 to {max_prefill}, not {len(row.token_ids)}")
        if not 1 <= row.num_drafts <= MAX_STEPS:
            raise InvalidRequestError("num_drafts", f"must be from 1 to {MAX_STEPS}, not {row.num_drafts}")
        more = len(row.token_ids) + row.num_drafts - 1
        manager.require_capacity(row.sequence, more)
        limits.check(row.token_ids, row.sequence.length + more)


def _parameters_of(open_: Open, vocab_size: int, *, takes_argmax: bool) -> RowParameters:
    greedy, sampling = is_greedy(open_), open_.sampling
    return RowParameters(
        method=Method.GREEDY if takes_argmax else _method_of(open_),
        temperature=1.0 if greedy else max(sampling.temperature, SMALLEST_TEMPERATURE),
        seed=open_.seed,
        stream=Stream.COUPLED if is_coupled(open_) else Stream.PROPOSAL,
        base=0,
        position=0,
        length=0,
        num_ids=min(open_.num_token_ids or vocab_size, vocab_size),
        min_p=sampling.min_p,
        top_k=max(0, sampling.top_k),
        top_p=sampling.top_p,
        banned=tuple((token_id, until) for token_id, until in _bans(open_) if 0 <= token_id < vocab_size)[:MAX_BANNED],
    )


def _method_of(open_: Open) -> Method:
    if is_greedy(open_):
        return Method.GREEDY
    if is_coupled(open_):
        return Method.CUT_COUPLED if is_truncated(open_.sampling) else Method.COUPLED
    return Method.SPARSE


def _bans(open_: Open) -> Iterator[tuple[int, int]]:
    """(token id, position from which on it may be drawn)."""
    for token_id in open_.banned_token_ids:
        yield token_id, ALWAYS
    if open_.sampling.min_tokens > 0:
        until = min(open_.prompt_length + open_.sampling.min_tokens, ALWAYS)
        yield from ((token_id, until) for token_id in open_.eos_token_ids)
