"""Prepared answers: what rows of a session table wait for, and what follows from it, computed while services compute.

A cache: it is derived from the rows, holds while they have not changed (``is_of``), and is made anew where it does not,
from those rows that are answered as expected (``fit``). Each kind has the commands of all sessions but for what the
answers bring, and the rows as they will be.

Shape letters: ``B`` sessions, ``C`` columns of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from outrider.batched import U4, U8, AnswerBatch, Column, ExtendBatch, ScoreBatch
from outrider_coordinator.session import state_feed
from outrider_coordinator.session import table_columns as col
from outrider_coordinator.session.forced_tokens import MAX_FORCED_TOKENS, least_forced
from outrider_coordinator.session.state import NOTHING_PROPOSED
from outrider_coordinator.session.table import Ints, SessionTable
from outrider_coordinator.speculation import DraftLengthPolicy

Bools = NDArray[np.bool_]
Which = Ints | slice
"""Some of the sessions, or all of them as a slice, of which arrays are views."""
EVERY = slice(None)
ValueT = TypeVar("ValueT")
NO_IDS = np.zeros(0, dtype=U4)
UNUSUAL = col.PAUSED | col.HAS_PART | col.IS_SLOW
"""Flags of a row that takes the transitions of one session."""
DRAFT_NOT_OPEN = 3 << col.DRAFT_READINESS | col.IS_LATE


def chosen(values: Sequence[ValueT], which: Which) -> Sequence[ValueT]:
    """Values of these sessions."""
    return values if isinstance(which, slice) else [values[place] for place in which.tolist()]


class Prepared:
    """Sessions of one target and one draft that wait for answers of one kind."""

    asked: ClassVar[int]
    """Column with the generations of what was asked."""

    def __init__(self, table: SessionTable, index: Ints, rows: Ints) -> None:  # [B], [B, C]
        """``rows``: their values."""
        self.table, self.index, self.rows = table, index, rows
        self.sessions: list[Any] = [table.sessions[row] for row in index.tolist()]
        self.numbers = rows[:, col.NUMBER].astype(U8)
        self.speculations = [session.speculation for session in self.sessions]
        parents = [session.commands.trace_parent for session in self.sessions]
        self.trace_parents = parents if any(parents) else ()
        """Trace parents of what is asked next, for each session; empty if nothing is traced."""
        self._row_bytes = rows.tobytes()
        self._generations, self.bases = rows[:, self.asked].astype(U8).tobytes(), rows[:, col.LENGTH].astype(U4)
        self._base_bytes = self.bases.tobytes()
        self.flags: list[int] = rows[:, col.FLAGS].tolist()
        flags = self.flags
        self.is_sparse, self.reads_states = bool(flags[0] & col.IS_SPARSE), bool(flags[0] & col.READS_STATES)
        self.is_uniform = len({flag & (col.IS_SPARSE | col.READS_STATES) for flag in flags}) == 1
        """True if all are judged in the same way, and all or none are handed hidden states."""
        self.has_grammars = any(flag & col.HAS_GRAMMAR for flag in flags)
        self.limits = rows[:, col.LIMIT]
        self.limit = min(self.limits.tolist())

    @classmethod
    def fit(cls, rows: Ints, answers: AnswerBatch[Any]) -> Bools:  # [B, C] -> [B]
        """Rows that wait for such answers to what was asked, and are usual."""
        raise NotImplementedError

    def is_of(self, answers: AnswerBatch[Any]) -> bool:
        """True if these are answers of all of these sessions, whose rows have not changed since, and are in order."""
        return (
            answers.generations.tobytes() == self._generations
            and answers.base_lengths.tobytes() == self._base_bytes
            and self.table.values.take(self.index, axis=0).tobytes() == self._row_bytes
        )

    def hands_over_states(self) -> bool:
        """True if the target hands over the states of just what it scores, if the draft reads any."""
        return not self.reads_states or all(map(state_feed.hands_over_states, self.sessions))

    def hashes(self, kept: Sequence[int], which: Which = EVERY) -> tuple[list[int], list[bytes]]:
        """Running hashes and chains of the first ``kept`` tokens of each session; the chain of none is empty."""
        sessions = chosen(self.sessions, which)
        found = [session.tokens.prefix_hash(count) for session, count in zip(sessions, kept, strict=True)]
        return [rest for _, rest in found], [chain for chain, _ in found]


@dataclass(slots=True)
class Taken:
    """Answers that were taken, and what is asked next; one entry for each session."""

    indices: Sequence[int]
    """Indices among the answers."""
    commands: ExtendBatch | ScoreBatch
    commit: Callable[[], list[list[int]]]
    """Writes the rows as they are from now on, and commits the new tokens, which it returns. Called once the commands
    have left, or before anything else happens."""
    num_tokens: tuple[Ints, Column] | None = None
    """Drafted and accepted tokens of the step; None of proposals, which end none."""
    is_direct: bool = False
    """The target has the proposals already, by a proposal channel."""


class PreparedScores(Prepared):
    """Sessions, all usual, that wait for scores."""

    asked = col.TARGET_ASKED

    def __init__(self, table: SessionTable, index: Ints, rows: Ints) -> None:
        super().__init__(table, index, rows)
        self._counts, self._base = rows[:, col.NUM_DRAFTED], rows[:, col.LENGTH]
        self._next_generations = (rows[:, col.GENERATION] + 1).astype(U8)
        self._committed = [session.tokens.ids for session in self.sessions]
        self._hashes, self._chains = self.hashes(self._base.tolist())

    @classmethod
    def fit(cls, rows: Ints, answers: AnswerBatch[Any]) -> Bools:  # [B, C] -> [B]
        """Rows that wait for scores of as many tokens, in this form, of steps that no target goes on from by itself."""
        found: Bools = rows[:, col.NUM_DRAFTED] + 1 == answers.counts
        if answers.goes_on is not None:
            found &= answers.goes_on == 0
        found &= (rows[:, col.FLAGS] & col.IS_SPARSE != 0) == (answers.outside_masses is not None)
        return found

    def is_of(self, answers: AnswerBatch[Any]) -> bool:
        """True if these are such scores of all of these sessions, whose rows have not changed since."""
        return answers.goes_on is None and super().is_of(answers)

    def take(self, answers: AnswerBatch[Any], policy: DraftLengthPolicy, *, channel: int = 0) -> Taken | None:
        """Judge what the scores bring, and ask for the next steps; None if none can be taken here.

        ``channel``: by which the next proposals may go directly; 0: none.
        """
        raise NotImplementedError

    def _listed(self, which: Which) -> Sequence[int]:
        return chosen(range(len(self.sessions)), which)

    def _parents_of(self, which: Which) -> Sequence[str]:
        return self.trace_parents and chosen(self.trace_parents, which)

    def _ended(self, which: Which, num_new: Ints | int, next_ids: Column) -> Ints:
        """Rows after a step that brings ``num_new`` tokens, the last of them ``next_ids``: a step later, nothing is
        asked or proposed.
        """
        after: Ints = self.rows[which].copy()
        after[:, col.REASON] = NOTHING_PROPOSED
        after[:, col.REMAINING] -= num_new
        after[:, col.LENGTH] += num_new
        after[:, col.TARGET_HELD] += num_new
        after[:, col.STEP : col.GENERATION + 1] += 1
        after[:, col.TARGET_LOSSES : col.ANNOUNCED + 1] = 0  # and what was asked of the target, and the proposal
        after[:, col.PROPOSAL_OPENED] = -1
        after[:, col.LAST] = next_ids
        return after

    def _write(self, which: Which, after: Ints, token_ids: list[list[int]]) -> list[list[int]]:
        """Write the rows as they are from now on, and commit the new tokens, which it returns."""
        self.table.values[self.index[which]] = after
        for place, ids in zip(self._listed(which), token_ids, strict=True):
            self._committed[place] += ids
        return token_ids

    def _do_not_end(self, token_ids: Sequence[Sequence[int]]) -> Bools:
        rows = zip(self.sessions, token_ids, strict=True)
        return np.array([session.output.ending_token_ids.isdisjoint(ids) for session, ids in rows], dtype=np.bool_)

    def _leave_choice(self, token_ids: Sequence[Sequence[int]], *, is_drafting: bool) -> Bools:
        """Sessions whose grammar goes on after their new tokens, and forces too few after them for a proposal. Where no
        proposal is long enough, the grammar is followed when the next commands have left.
        """
        least = [least_forced(session, int(is_drafting)) for session in self.sessions]
        found = [
            fewest > MAX_FORCED_TOKENS or session.output.leaves_choice(ids, most_forced=fewest - 1)
            for session, ids, fewest in zip(self.sessions, token_ids, least, strict=True)
        ]
        return np.array(found, dtype=np.bool_)
