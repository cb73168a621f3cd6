"""Columns: items of many sessions as arrays, one array for each field, in steady decoding.

A value for each session and step takes several times as long to make as an array for each field of all. Both ports take
and give columns beside single items. Knows no bytes: those are ``outrider.transport.convert``'s.

Shape letters: ``B`` sessions, ``T`` tokens of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from outrider.ports import Extend, ItemTiming, Score, Scores
from outrider.prefix_hash import PrefixHash, chain_size
from outrider.types import SparseScores, TokenScores
from outrider.values import step_value

Column = NDArray[Any]
MAX_ROW_TOKENS = 64
"""Committed tokens of a command that goes as a row. More are a prompt, which travels packed and in parts."""
_NO_PROBS = np.zeros(0, dtype=np.float32)
EventT_co = TypeVar("EventT_co", covariant=True)


@step_value(frozen=True, slots=True)
class AnswerColumns(Generic[EventT_co]):
    """Proposals without evidence, scores that are tokens, or sparse scores of plain steps, of sessions that differ."""

    sessions: Column  # [B] uint64
    generations: Column  # [B] uint64
    base_lengths: Column  # [B] uint32
    counts: Column  # [B] uint32, tokens of each
    token_ids: Column  # [T] uint32
    timings_ns: Sequence[int]  # [5 B] the fields of ``ItemTiming``, or none
    make: Callable[[int, int, int, tuple[int, ...]], EventT_co]
    """The event of session, generation, base length and tokens; not for sparse scores."""
    outside_masses: Column | None = None  # [T] float32
    """Of ``SparseScores`` without supports: then ``token_ids`` are int32, and may be -1. None: of any other answers."""

    def events(self, places: Sequence[int]) -> Iterator[EventT_co]:
        """The answers at these places, one by one."""
        heads = list(zip(self.sessions.tolist(), self.generations.tolist(), self.base_lengths.tolist(), strict=True))
        if self.outside_masses is not None:
            yield from self._sparse_scores(heads, places, self.outside_masses)
            return
        rows = list(_rows(self.counts, self.token_ids))
        for place in places:
            yield self.make(*heads[place], rows[place])

    def _sparse_scores(
        self, heads: Sequence[tuple[int, int, int]], places: Sequence[int], masses: Column
    ) -> Iterator[Any]:
        ends = self.counts.cumsum().tolist()
        starts = [0, *ends]
        for place in places:
            own = slice(starts[place], ends[place])
            yield Scores(*heads[place], SparseScores(_NO_PROBS, masses[own], self.token_ids[own]))

    def timings(self, places: Sequence[int]) -> list[ItemTiming | None]:
        """The items' times at these places; None where the service did not say."""
        if not self.timings_ns:
            return [None] * len(places)
        width = len(self.timings_ns) // len(self.sessions)
        rows = [self.timings_ns[width * place : width * (place + 1)] for place in places]
        if rows.count(rows[0]) == len(rows):  # nearly always: of one message and one forward
            return [ItemTiming(*rows[0])] * len(rows)
        return [ItemTiming(*row) for row in rows]


@step_value(frozen=True, slots=True)
class ExtendColumns:
    """``Extend`` of sessions that differ."""

    sessions: Column  # [B]
    generations: Column  # [B]
    num_kept_tokens: Column  # [B]
    chains: bytes
    """Chains of the prefix hashes, of those sessions that keep a block or more."""
    rests: Column  # [B] uint64, running hashes of the prefix hashes
    counts: Column  # [B] committed tokens of each
    token_ids: Column  # [T]
    draft_lengths: Column  # [B] tokens asked for

    def __len__(self) -> int:
        return len(self.sessions)

    def items(self) -> Iterator[Extend]:
        """The commands, one by one."""
        for head, token_ids, length in zip(_heads(self), _rows(self.counts, self.token_ids),
                                           self.draft_lengths.tolist(), strict=True):  # fmt: skip
            yield Extend(*head, token_ids, length)


@step_value(frozen=True, slots=True)
class ScoreColumns:
    """``Score`` without supports of sessions that differ."""

    sessions: Column  # [B]
    generations: Column  # [B]
    num_kept_tokens: Column  # [B]
    chains: bytes
    rests: Column  # [B] uint64
    counts: Column  # [B]
    token_ids: Column  # [T]
    draft_lengths: Column  # [B] draft tokens of each
    draft_token_ids: Column  # [sum(draft_lengths)]

    def __len__(self) -> int:
        return len(self.sessions)

    def items(self) -> Iterator[Score]:
        """The commands, one by one."""
        drafts = _rows(self.draft_lengths, self.draft_token_ids)
        for head, token_ids, draft in zip(_heads(self), _rows(self.counts, self.token_ids), drafts, strict=True):
            yield Score(*head, token_ids, draft)


CommandColumns = ExtendColumns | ScoreColumns


def token_scores(session: int, generation: int, base_length: int, token_ids: tuple[int, ...]) -> Scores:
    """Scores of the form that greedy and coupled sessions get."""
    return Scores(session, generation, base_length, TokenScores(token_ids))


def num_items(commands: Sequence[Any]) -> int:
    """Commands, those of columns counted one by one."""
    return sum([len(command) if isinstance(command, CommandColumns) else 1 for command in commands])


def one_by_one(commands: Sequence[Any]) -> list[Any]:
    """Commands, those of columns taken out of them, in their order."""
    found: list[Any] = []
    for command in commands:
        if isinstance(command, CommandColumns):
            found += command.items()
        else:
            found.append(command)
    return found


def _heads(columns: CommandColumns) -> Iterator[tuple[int, int, int, PrefixHash]]:
    start = 0
    lists = columns.sessions.tolist(), columns.generations.tolist(), columns.num_kept_tokens.tolist()
    for session, generation, kept, rest in zip(*lists, columns.rests.tolist(), strict=True):
        end = start + chain_size(kept)
        yield session, generation, kept, (columns.chains[start:end], rest)
        start = end


def _rows(counts: Column, values: Column) -> Iterator[tuple[int, ...]]:
    flat, start = values.tolist(), 0
    for count in counts.tolist():
        yield tuple(flat[start : start + count])
        start += count
