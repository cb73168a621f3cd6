"""Decode batch: one item of each of many sessions of a link, checked as arrays.

Shape letters: ``B`` sessions.
"""

from __future__ import annotations

from collections.abc import KeysView, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.batched import (
    U4,
    U8,
    CommandBatch,
    ExtendBatch,
    ScoreBatch,
    StateBatch,
)
from outrider.serving.decode.branches import Branch
from outrider.serving.decode.sessions import Ints, RunningSessions
from outrider.serving.session import Session, SessionKey


@dataclass(slots=True, eq=False)
class DecodeBatch:
    """Items that go on from where their sessions are, or from fewer drafts than these hold."""

    link_id: int
    batched: CommandBatch
    own: RunningSessions
    kept: Ints  # [B] tokens to keep, none fewer than were committed
    bases: Ints  # [B] committed tokens, those of the items included
    draft_lengths: Ints  # [B] draft tokens asked for, or to be scored
    arrived_ns: int
    asked: Any = None
    """Result of the executor's check of the step."""
    plan: Any = None
    """The executor's plan of the forward, if the step was expected (``Executor.plan_draft_batch``)."""
    is_asked: bool = True
    """False: a step that is begun before it is asked for (``begun``)."""
    guessed_from: Ints | None = None  # [B]
    """Committed tokens of the steps whose bonus tokens the first draws guess (``guesses``); None: they guess none."""
    branches: Sequence[Branch] | None = None
    """Rows of a draft loop before those of the sessions (``drafts_ahead``); None of any other step."""

    def __len__(self) -> int:
        return len(self.own.sessions)

    @property
    def sessions(self) -> Sequence[Session[Any]]:
        """B."""
        return self.own.sessions

    @property
    def rows(self) -> Any:  # noqa: ANN401 - the executor's
        """Facts of the executor about the sessions, for every step."""
        return self.own.rows

    @property
    def is_scoring(self) -> bool:
        """True if the items are ``Score``."""
        return isinstance(self.batched, ScoreBatch)

    @property
    def num_tokens(self) -> int:
        """Tokens of its forward."""
        num_drafts = sum(self.draft_lengths.tolist()) if self.is_scoring else 0
        return int(self.batched.token_ids.size) + num_drafts

    @property
    def keys(self) -> KeysView[SessionKey]:
        """Keys of the sessions, in their order."""
        return self.own.keys.keys()


def extend_batch(
    sessions: Sequence[Session[Any]],
    kept: Ints,  # [B]
    counts: NDArray[np.uint32],  # [B]
    token_ids: NDArray[np.uint32],  # [T]
    lengths: Ints,  # [B]
    *,
    hashes: Sequence[tuple[bytes, int]] | None = None,
    channel: int = 0,
) -> ExtendBatch:
    """Commands of a step that a service begins by itself: ``lengths`` draft tokens after the first ``kept`` tokens of
    each session and ``counts`` of the given ones. ``hashes`` of the kept tokens; None where nothing compares them.
    """
    given = [(b"", 0)] * len(sessions) if hashes is None else hashes
    return ExtendBatch(
        np.array([session.open.session for session in sessions], dtype=U8),
        np.array([session.generation for session in sessions], dtype=U8),
        kept.astype(U4),
        b"".join([chain for chain, _ in given]),
        np.array([rest for _, rest in given], dtype=U8),
        counts,
        token_ids,
        lengths.astype(U4),
        channel=channel,
    )


def joined(batched: Sequence[CommandBatch]) -> CommandBatch | None:
    """Batches of one kind as one; None where their hidden states go by different planes, or are not of all."""
    if len(batched) == 1:
        return batched[0]
    kind = type(batched[0])
    if len(set(map(_form_of, batched))) > 1:
        return None
    fields: list[Any] = []
    for name in kind.__slots__:
        fields.append(_joined_field(name, [getattr(part, name) for part in batched], batched))
    return kind(*fields)


def _joined_field(name: str, values: Sequence[Any], parts: Sequence[Any]) -> Any:  # noqa: ANN401 - of any field
    first = values[0]
    if name == "chains":
        return b"".join(values)
    if name == "trace_parents":
        parents = [value or [""] * len(part) for value, part in zip(values, parts, strict=True)]
        return [parent for own in parents for parent in own] if any(values) else ()
    if name.startswith("support"):
        return _joined_supports(name, values, parts)
    if name == "channel" and any(value != first for value in values):
        return 0  # proposals of one step leave together
    if isinstance(first, StateBatch):
        arrays = [(each.starts, each.counts, each.offsets_bytes, each.sequences) for each in values]
        return StateBatch(
            first.plane_id, first.width, first.dtype, *(np.concatenate(parts) for parts in zip(*arrays, strict=True))
        )
    return np.concatenate(values) if isinstance(first, np.ndarray) else first


def _joined_supports(name: str, values: Sequence[Any], parts: Sequence[Any]) -> Ints | None:
    if all(value is None for value in values):
        return None
    # Parts without supports have none for each of their draft tokens.
    nothing = {"support_counts": [part.draft_token_ids.size for part in parts], "support_token_ids": [0] * len(parts)}
    return np.concatenate(
        [
            np.zeros(count, dtype=np.int32) if value is None else value
            for value, count in zip(values, nothing[name], strict=True)
        ]
    )


def _form_of(part: CommandBatch) -> object:
    """Form of the arrays' hidden states, alike in all that are joined."""
    if isinstance(part, ExtendBatch):
        return None if part.states is None else (part.states.plane_id, part.states.width, part.states.dtype)
    if part.is_direct:
        return id(part)  # its answers say so, and no others
    return None if part.hidden_states_from is None else part.plane
