"""Prepared scores: sessions that wait for their target, and what is asked next once the scores are there.

Shape letters: ``B`` sessions, ``C`` columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.columns import U8, AnswerColumns, Column, ExtendColumns, ScoreColumns
from outrider_coordinator.session import table_columns as col
from outrider_coordinator.session.prepared import Bools, Prepared, Which
from outrider_coordinator.session.table import Ints, SessionTable
from outrider_coordinator.speculation import DraftLengthPolicy

UNUSUAL = col.PAUSED | col.HAS_PART | col.IS_SLOW
"""Flags of a row that takes the transitions of one session."""


@dataclass(slots=True)
class TakenScores:
    """Steps that ended, and what is asked next; one entry for each session."""

    places: Sequence[int]
    """Among the answers."""
    num_drafted: Ints
    num_accepted: Column
    next_ids: Column
    commands: ExtendColumns | ScoreColumns
    commit: Callable[[], list[list[int]]]
    """Writes the rows as they are from now on, and commits the new tokens, which it returns. Called once the commands
    have left, or before anything else happens."""


class PreparedScores(Prepared):
    """Sessions, all usual, that wait for scores."""

    def __init__(self, table: SessionTable, index: Ints, rows: Ints) -> None:
        super().__init__(table, index, rows, col.TARGET_ASKED)
        self._counts, self._base = rows[:, col.NUM_DRAFTED], rows[:, col.LENGTH]
        self._next_generations = (rows[:, col.GENERATION] + 1).astype(U8)
        self._committed = [session.tokens.ids for session in self.sessions]
        self._hashes, self._chains = self.hashes(self._base.tolist())

    def take(self, answers: AnswerColumns[Any], policy: DraftLengthPolicy, *, channel: int = 0) -> TakenScores | None:
        """Judge what the scores bring, and ask for the next steps; None if none can be taken here.

        ``channel``: by which the next proposals may go directly; 0: none.
        """
        raise NotImplementedError

    def _listed(self, which: Which) -> Sequence[int]:
        return range(len(self.sessions)) if isinstance(which, slice) else which.tolist()

    def _joined_chains(self, which: Which) -> bytes:
        chains = self._chains
        return b"".join(chains if isinstance(which, slice) else [chains[place] for place in which.tolist()])

    def _write(self, which: Which, after: Ints, token_ids: list[list[int]]) -> list[list[int]]:
        """Write the rows as they are from now on, and commit the new tokens, which it returns."""
        self.table.values[self.index[which]] = after
        for place, ids in zip(self._listed(which), token_ids, strict=True):
            self._committed[place] += ids
        return token_ids

    def _do_not_end(self, token_ids: Sequence[Sequence[int]]) -> Bools:
        rows = zip(self.sessions, token_ids, strict=True)
        return np.array([session.output.ending_token_ids.isdisjoint(ids) for session, ids in rows], dtype=np.bool_)

    def _leave_choice(self, token_ids: Sequence[Sequence[int]], *, most_forced: int) -> Bools:
        """Sessions whose grammar goes on after their new tokens and forces no more than ``most_forced`` after them."""
        rows = zip(self.sessions, token_ids, strict=True)
        return np.array(
            [session.output.leaves_choice(ids, most_forced=most_forced) for session, ids in rows], dtype=np.bool_
        )
