"""Validation of ``Extend`` items, and the length of their proposals; the same for every proposer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from outrider.errors import InvalidRequestError
from outrider.limits import MAX_DRAFT_LENGTH
from outrider.ports import Extend, Open
from outrider.serving.decode.sessions import are_all
from outrider.serving.session import check_ids
from outrider.types import HiddenStates

if TYPE_CHECKING:
    from outrider.serving.decode.sessions import Ints
    from outrider.serving.decode.step import DecodeBatch


def check_extend(opened: Open, item: Extend, *, vocab_size: int) -> None:
    """Raise ``InvalidRequestError``, naming the field, if an item cannot be served."""
    if item.num_kept_tokens < 0:
        raise InvalidRequestError("num_kept_tokens", "must not be negative")
    if not 0 <= item.draft_length <= MAX_DRAFT_LENGTH:
        raise InvalidRequestError("draft_length", f"must be from 0 to {MAX_DRAFT_LENGTH}, not {item.draft_length}")
    base = item.num_kept_tokens + len(item.token_ids)
    if not base:
        raise InvalidRequestError("token_ids", "must hold at least one token when nothing is kept")
    if base > opened.max_length:
        raise InvalidRequestError("token_ids", f"{base} tokens pass the {opened.max_length} the session was opened for")
    check_ids("token_ids", item.token_ids, vocab_size)


def check_hidden_states(item: Extend, states: HiddenStates, *, width: int) -> None:
    """Raise ``InvalidRequestError`` unless the states are of the positions that the item must bring, of ``width``."""
    first, end = max(0, item.num_kept_tokens - 1), item.num_kept_tokens + len(item.token_ids) - 1
    if (states.start, states.end, states.width) != (first, end, width):
        raise InvalidRequestError(
            "hidden_states",
            f"must be of the positions {first} to {end - 1} and of {width} values each, not of {states.start} to"
            f" {states.end - 1} and of {states.width}",
        )


def proposal_length(opened: Open, item: Extend, *, reserved_length: int) -> int:
    """Number of tokens to draft: never past what the session will hold, nor past what this draft can compute.

    A drafted token's own KV is computed only when another is drafted after it, so the last may stand just past the
    reservation.
    """
    base = item.num_kept_tokens + len(item.token_ids)
    return max(0, min(item.draft_length, opened.max_length - base, reserved_length + 1 - base))


def proposal_lengths(step: DecodeBatch) -> Ints:  # [B]
    """``proposal_length`` of each item of a step."""
    room = np.minimum(step.own.max_lengths, step.own.reserved_lengths + 1) - step.bases
    found: Ints = np.minimum(step.draft_lengths, room)
    return found


def keeps_bounds(step: DecodeBatch, *, vocab_size: int) -> bool:
    """True if every item of a step keeps to ``check_extend``."""
    ids = step.batched.token_ids.tolist()
    return (
        min(ids) >= 0
        and max(ids) < vocab_size
        and max(step.draft_lengths.tolist()) <= MAX_DRAFT_LENGTH
        and are_all(step.bases <= np.minimum(step.own.max_lengths, step.own.reserved_lengths))
    )
