"""Rows of many sessions for the scoring kernels, from arrays that were made once.

What kernels are told of a session does not change between its steps but for a few numbers, so the rows of a batch are
an array of which some columns are filled in: one row a session for plain steps, K+1 for steps with drafts.

Shape letters: ``B`` sessions, ``R`` rows of all of them, ``T`` draft tokens of all of them, ``M`` ids of all supports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.kernels.scoring import NO_IDS, Findings, Found, Rows, ScoringColumn, Words
from outrider.sampling.metadata import SamplingMetadata
from outrider.types import JudgingRule

Ints = NDArray[np.int64]
LOWEST_DRAWABLE = -1e30
"""A row whose largest logit is not above this has no token left to draw."""


@dataclass(frozen=True, slots=True)
class SessionRows:
    """Parameters of sessions for the kernels, independent of their texts."""

    words: Words  # [B, columns] of the row after the last draft token
    draft_flags: Words  # [B] of the row of a draft token with a support
    found: Ints  # [B] the column in which a row's token is found
    column: Found | None
    """Column of the drawn token, if it is the same for all."""
    bound: float
    """No larger than any session's ``SamplingMetadata.bound``."""

    @classmethod
    def of(cls, metadata: Sequence[SamplingMetadata], vocab_size: int) -> SessionRows:
        """Rows of sessions whose ``may_be_row`` is true."""
        words = np.zeros((len(metadata), len(ScoringColumn)), dtype=np.int32)
        words[:, ScoringColumn.FLAGS :] = _asked([own.last for own in metadata])
        limits = np.array([own.limit or vocab_size for own in metadata], dtype=np.int64)
        words[:, ScoringColumn.LIMIT] = np.minimum(limits, vocab_size)
        flags = _asked([own.draft for own in metadata])[:, 0]
        columns = [drawn_column(own) for own in metadata]
        return cls(words, flags, np.array(columns), _common(columns), min([own.bound for own in metadata]))

    def __len__(self) -> int:
        return len(self.words)

    def selected(self, indices: NDArray[np.intp]) -> SessionRows:
        """Rows at these indices."""
        found = self.found[indices]
        column = _common(found.tolist()) if self.column is None else self.column
        return SessionRows(self.words[indices], self.draft_flags[indices], found, column, self.bound)

    @staticmethod
    def joined(parts: Sequence[SessionRows]) -> SessionRows:
        """One after the other."""
        return SessionRows(
            np.concatenate([part.words for part in parts]),
            np.concatenate([part.draft_flags for part in parts]),
            np.concatenate([part.found for part in parts]),
            _common([part.column for part in parts]),
            min([part.bound for part in parts]),
        )

    def at(self, bases: Ints) -> Rows:
        """Rows of logits one after the other, each for the token after ``bases`` [B] tokens."""
        words = self.words.copy()
        words[:, ScoringColumn.INDEX] = np.arange(len(words))
        words[:, ScoringColumn.POSITION] = words[:, ScoringColumn.BASE] = bases
        return Rows(words, NO_IDS)

    def with_drafts(self, bases: Ints, lengths: Ints, supports: tuple[Words, Words] | None = None) -> Rows:
        """Rows of logits one after the other, K+1 of each session: for the tokens after ``bases`` [B] tokens and after
        each of ``lengths`` [B] draft tokens. ``supports``: ids in the support of each draft token [T], and the ids [M].
        """
        counts = lengths + 1
        words, ends = self.words.repeat(counts, axis=0), counts.cumsum()
        words[:, ScoringColumn.INDEX] = indices = np.arange(len(words))
        words[:, ScoringColumn.BASE] = bases.repeat(counts)
        words[:, ScoringColumn.POSITION] = (bases - ends + counts).repeat(counts) + indices
        if supports is None:
            return Rows(words, NO_IDS)
        is_draft = np.ones(len(words), dtype=np.bool_)
        is_draft[ends - 1] = False
        sizes = np.zeros(len(words), dtype=np.int64)
        sizes[is_draft] = supports[0]
        words[:, ScoringColumn.SUPPORT_STOP] = stops = sizes.cumsum()
        words[:, ScoringColumn.SUPPORT_START] = stops - sizes
        words[is_draft, ScoringColumn.FLAGS] = self.draft_flags.repeat(lengths)
        return Rows(words, supports[1].astype(np.int32, copy=False))


def are_sound(findings: Findings, bound: float) -> bool:
    """True if nothing is wrong with any row, of which the largest logits are to be below ``bound``."""
    largest = findings.of(Found.LARGEST)
    lowest, highest = float(largest.min()), float(largest.max())  # no numbers if one of them is none
    return max(LOWEST_DRAWABLE, -bound) < lowest and highest < bound and not findings.of(Found.STATUS).any()


def drawn_column(metadata: SamplingMetadata) -> Found:
    """Column in which the kernels leave the token that follows a text."""
    if metadata.rule is JudgingRule.GREEDY:
        return Found.ARGMAX
    return Found.GUMBEL_ARGMAX if metadata.rule is JudgingRule.COUPLED else Found.OUTSIDE


def _common(columns: Sequence[int | None]) -> Found | None:
    first = columns[0]
    return None if first is None or any(column != first for column in columns) else Found(first)


def _asked(parts: Sequence[bytes]) -> Words:  # [B, columns from FLAGS on]
    return np.frombuffer(b"".join(parts), dtype=np.int32).reshape(len(parts), -1)
