"""Steady sessions: what does not change from one steady step of the same sessions to the next, as arrays.

Shape letters: ``B`` sessions.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.serving.session import Session, SessionKey

Ints = NDArray[np.int64]


@dataclass(eq=False)
class SteadySessions:
    """Sessions that were answered together."""

    sessions: Sequence[Session[Any]]  # [B]
    rows: Any
    """The executor's (``Executor.session_rows``)."""
    numbers: NDArray[np.uint64]  # [B] on their link
    max_lengths: Ints  # [B] of ``Open``
    reserved_lengths: Ints  # [B] tokens that the sequences can grow to
    num_token_ids: Ints  # [B] of ``Open``

    @classmethod
    def of(cls, sessions: Sequence[Session[Any]], rows: Any) -> SteadySessions:  # noqa: ANN401 - the executor's
        """Of these."""
        openings = [session.open for session in sessions]
        return cls(
            sessions,
            rows,
            np.array([opening.session for opening in openings], dtype=np.uint64),
            np.array([opening.max_length for opening in openings], dtype=np.int64),
            np.array([session.reserved_length for session in sessions], dtype=np.int64),
            np.array([opening.num_token_ids for opening in openings], dtype=np.int64),
        )

    def selected(self, places: NDArray[np.intp]) -> SteadySessions:
        """Those at these places."""
        return SteadySessions(
            [self.sessions[place] for place in places.tolist()],
            None if self.rows is None else self.rows.selected(places),
            self.numbers[places],
            self.max_lengths[places],
            self.reserved_lengths[places],
            self.num_token_ids[places],
        )

    @functools.cached_property
    def keys(self) -> dict[SessionKey, int]:
        """The place of each, in their order. Made once: each command that comes beside a step looks for its own."""
        return {session.key: place for place, session in enumerate(self.sessions)}

    @functools.cached_property
    def places(self) -> dict[int, int]:
        """The place of each number."""
        return {number: place for place, number in enumerate(self.numbers.tolist())}

    @functools.cached_property
    def number_bytes(self) -> bytes:
        """Of all numbers: compared so, they take a fifth of the time."""
        return self.numbers.tobytes()


def are_all(flags: NDArray[np.bool_]) -> bool:
    """Whether all are set: of few, a third of the time of ``flags.all()``."""
    return 0 not in flags.tobytes()
