"""Scores ahead: what a target is to score once proposals are there, told to it before or when they have come.

What a batch of sessions and a single one that wait for proposals have in common.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from outrider.columns import U4, AnswerColumns, Column, ScoreAhead, ScoreColumns
from outrider_coordinator.session.state import SessionState

_NO_IDS = np.zeros(0, dtype=U4)


class ScoresAhead(abc.ABC):
    """Sessions that wait for proposals, with all of their ``Score`` but the draft tokens and supports."""

    sessions: Sequence[SessionState]
    numbers: Column  # [B]
    """Of the sessions, on their links."""
    reads_states: bool
    """Whether their draft is handed hidden states; it is the same for all."""
    _generations: Column  # [B]
    _ahead: Column  # [B]
    """Generations of ``ahead``."""
    _channel = _plane = 0
    """Of ``ahead``; no channel: it was not called."""
    _kept: Column  # [B]
    _chain_bytes: bytes
    _rests: Column  # [B]
    _ones: Column  # [B]
    _last: Column  # [B]

    @abc.abstractmethod
    def _asked_for(self) -> tuple[Column, Column]:  # [B] uint32, [B] uint64
        """Draft lengths and generations of the ``Extend`` that were sent."""

    def ahead(self, channel: int, plane: int) -> ScoreAhead:
        """What the target is to score when the proposals come by a channel. Called once at most, before ``take``: any
        other ``Score`` of these sessions is newer.
        """
        lengths, asked = self._asked_for()
        self._channel, self._plane, self._ahead = channel, plane, self._generations
        for session in self.sessions:
            session.commands.skip_generation()
        self._generations = self._ahead + 1
        return ScoreAhead(self._columns(self._ahead, lengths, _NO_IDS, plane), channel, asked)

    def is_ahead(self, row: int, generation: int) -> bool:
        """Whether that is the generation of a row's ``ahead``."""
        return bool(self._channel) and self._ahead.item(row) == generation

    def _have_come(self, answers: AnswerColumns[Any], plane: int, channel: int) -> bool:
        """Whether the target has these proposals by the channel of ``ahead``, and hands states over by this plane."""
        return self._channel != 0 and self._channel == channel == answers.channel and self._plane == plane

    def _scores_of(self, answers: AnswerColumns[Any], plane: int, generations: Column) -> ScoreColumns:
        """What follows from proposals, all of which are sound."""
        columns = self._columns(generations, answers.counts, answers.token_ids, plane)
        if (supports := answers.supports) is None:
            return columns
        return replace(columns, support_counts=supports.counts, support_token_ids=supports.token_ids)

    def _columns(self, generations: Column, lengths: Column, draft_token_ids: Column, plane: int) -> ScoreColumns:
        return ScoreColumns(
            self.numbers,
            generations,
            self._kept,
            self._chain_bytes,
            self._rests,
            self._ones,
            self._last,
            lengths,
            draft_token_ids,
            self._kept if self.reads_states else None,
            plane if self.reads_states else 0,
        )
