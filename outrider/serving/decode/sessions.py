"""Running sessions: what does not change from one step of the same sessions to the next, as arrays.

Shape letters: ``B`` sessions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.serving.session import Session, SessionKey
from outrider.types import JudgingRule

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
_NAMES = ("numbers", "link_ids", "max_lengths", "reserved_lengths", "are_sparse")
_PROPERTIES = np.dtype(list(zip(_NAMES, "Qqqq?", strict=True)), align=True)


@dataclass(eq=False)
class RunningSessions:
    """Sessions that decode together: a row for each session, a column for each property."""

    sessions: list[Session[Any]]  # [B]
    rows: Any
    """The executor's (``Executor.session_rows``)."""
    properties: NDArray[np.void]  # [B]
    endings: frozenset[int] = frozenset()
    """Tokens that end some of them."""

    @classmethod
    def of(cls, sessions: Sequence[Session[Any]], rows: Any) -> RunningSessions:  # noqa: ANN401 - the executor's
        """Running sessions over these."""
        found = [_properties_of(session) for session in sessions]
        endings = frozenset[int]().union(*[session.open.eos_token_ids for session in sessions])
        return cls(list(sessions), rows, np.array(found, dtype=_PROPERTIES), endings)

    def selected(self, indices: NDArray[np.intp]) -> RunningSessions:
        """Sessions at these indices."""
        chosen = [self.sessions[place] for place in indices.tolist()]
        rows = None if self.rows is None else self.rows.selected(indices)
        return RunningSessions(chosen, rows, self.properties[indices], self.endings)

    @staticmethod
    def joined(parts: Sequence[RunningSessions]) -> RunningSessions:
        """One after the other."""
        return RunningSessions(
            [session for part in parts for session in part.sessions],
            parts[0].rows.joined([part.rows for part in parts]),
            np.concatenate([part.properties for part in parts]),
            frozenset().union(*(part.endings for part in parts)),
        )

    @property
    def numbers(self) -> NDArray[np.uint64]:  # [B]
        """Numbers of the sessions on their links."""
        return self.properties["numbers"]

    @property
    def link_ids(self) -> Ints:  # [B]
        """Links of the sessions."""
        return self.properties["link_ids"]

    @property
    def max_lengths(self) -> Ints:  # [B]
        """Maximum lengths, as in ``Open``."""
        return self.properties["max_lengths"]

    @property
    def reserved_lengths(self) -> Ints:  # [B]
        """Tokens that the sequences can grow to."""
        return self.properties["reserved_lengths"]

    @property
    def are_sparse(self) -> Bools:  # [B]
        """True if their answers are ``SparseScores``."""
        return self.properties["are_sparse"]

    def do_not_end(self, token_ids: Ints, bases: Ints) -> Bools:
        """True if these tokens, each after this many, are followed by another step."""
        goes_on = (token_ids >= 0) & (bases + 1 < self.max_lengths)
        if self.endings:
            for place in np.flatnonzero(np.isin(token_ids, list(self.endings))).tolist():
                goes_on[place] &= int(token_ids[place]) not in self.sessions[place].open.eos_token_ids
        return goes_on

    @functools.cached_property
    def keys(self) -> dict[SessionKey, int]:
        """The place of each, in their order. Made once: each command that comes beside a step looks for its own."""
        return {session.key: place for place, session in enumerate(self.sessions)}

    @functools.cached_property
    def indices(self) -> dict[int, int]:
        """The place of each number."""
        return {number: place for place, number in enumerate(self.numbers.tolist())}

    @functools.cached_property
    def number_bytes(self) -> bytes:
        """Bytes of all session numbers: comparing these takes a fifth of the time."""
        return self.numbers.tobytes()


class LastSessions:
    """Running sessions of the last step, which the next one uses too if it is of the same sessions."""

    def __init__(self, rows_of: Callable[[Sequence[Session[Any]]], Any]) -> None:
        """``rows_of`` makes the executor's rows (``Executor.session_rows``)."""
        self._rows_of = rows_of
        self._last: RunningSessions | None = None

    def of(self, sessions: list[Session[Any]]) -> RunningSessions:
        """Running sessions over these."""
        if self._last is None or self._last.sessions != sessions:
            self._last = RunningSessions.of(sessions, self._rows_of(sessions))
        return self._last


def are_all(flags: NDArray[np.bool_]) -> bool:
    """True if all are set: of few, a third of the time of ``flags.all()``."""
    return 0 not in flags.tobytes()


def _properties_of(session: Session[Any]) -> tuple[int, int, int, int, bool]:
    opened = session.open
    return (
        opened.session,
        session.link_id,
        opened.max_length,
        session.reserved_length,
        opened.judging_rule is JudgingRule.REJECTION,
    )
