"""Prepared verdicts: sessions that wait for the scores of a proposal, after which the draft is asked for the next.

What is asked depends on how many draft tokens are accepted and on the token after them, so it is computed for each
number that there may be.

Shape letters: ``B`` sessions, ``W`` positions of the longest proposal and of the token after it, ``C`` columns.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from outrider.batched import U4, U8, AnswerBatch, Column, ExtendBatch, StateBatch
from outrider.prefix_hash import BLOCK_TOKENS, following
from outrider_coordinator.acceptance.joint_verdicts import JointVerdicts, PlacedEvidence, verdicts_on
from outrider_coordinator.session import table_columns as col
from outrider_coordinator.session.prepared import (
    DRAFT_NOT_OPEN,
    EVERY,
    UNUSUAL,
    Bools,
    PreparedScores,
    Taken,
    Which,
    chosen,
)
from outrider_coordinator.session.state import DRAFTING, SCORING, SessionState
from outrider_coordinator.session.table import NO_TOKEN, Ints, SessionTable
from outrider_coordinator.speculation import LONGEST_INLINE_FEED, DraftLengthPolicy


def waits_for_verdict(rows: Ints) -> Bools:  # [B, C] -> [B]
    """Rows that wait for the scores of a proposal, are usual, and whose draft holds all before it and may be asked for
    the next. None is a prefill, which has no proposal.
    """
    found: Bools = rows[:, col.FLAGS] & (UNUSUAL | DRAFT_NOT_OPEN) == 0
    found &= rows[:, col.STATUS] == SCORING
    found &= rows[:, col.NUM_DRAFTED] > 0
    found &= rows[:, col.LENGTH] - rows[:, col.TARGET_HELD] == 1
    found &= rows[:, col.DRAFT_HELD] == rows[:, col.LENGTH]
    found &= rows[:, col.DRAFT_ASKED] == 0
    found &= rows[:, col.PROPOSAL_OPENED] == rows[:, col.DRAFT_OPENED]
    return found


class PreparedVerdicts(PreparedScores):
    """Sessions with proposals, which go on with the next ones."""

    def __init__(self, table: SessionTable, index: Ints, rows: Ints) -> None:
        super().__init__(table, index, rows)
        counts, listed = self._counts, self._counts.tolist()
        self._width = width = max(listed) + 1
        asked = counts + 1
        self._asked_counts = asked.astype(U4).tobytes()
        self._drafts = drafts = table.drafted[index, :width]  # [B, W]
        self._firsts = np.arange(0, drafts.size, width)
        """Index of each session's first entry in ``_drafts`` and ``_hash_tails``."""
        self._starts, self._indices = self._firsts, None
        """Start of each session's scores among all, and their indices, [B, W], the last repeated; None: they lie so."""
        at, lasts = np.arange(width), counts[:, None] - 1
        if min(listed) + 1 == width:
            drafts[:, -1] = NO_TOKEN
        else:
            drafts[at > lasts] = NO_TOKEN
            self._starts = asked.cumsum() - asked
            self._indices = self._starts[:, None] + np.minimum(at, counts[:, None])
        self._draft_lists = drafts.tolist()
        self._pairs, self._ones = np.empty((len(rows), 2), dtype=U4), np.ones((len(rows), 2), dtype=np.bool_)
        self._pairs[:, 0] = [draft[count - 1] for draft, count in zip(self._draft_lists, listed, strict=True)]
        """The last draft token of each, and a place for the token after it."""
        num_own = np.zeros(width, dtype=np.int64) if self.reads_states else np.minimum(at, lasts)
        self._kept = (self._base[:, None] + num_own).astype(U4)
        """[B, W]: kept tokens by accepted draft tokens. A draft has KV for all but the last of its own tokens, so after
        that many acceptances it lacks this one too. One that reads hidden states computes its own anew."""
        self._spare = rows[:, col.CAPACITY] - self._base
        self._least_capacity = min((rows[:, col.REMAINING] - 1).tolist() + self._spare.tolist()) - width
        """Tokens that may be asked of every draft, whatever is accepted."""
        self._has_ends = table.may_end(itertools.chain.from_iterable(self._draft_lists))
        self._verdicts = _verdicts_on(self.sessions) if self.is_sparse else None
        self._hands_over = self.hands_over_states()
        self._hash_tails = self._following_hashes(listed)
        self._crossing = not self.reads_states and any(
            base % BLOCK_TOKENS + count > BLOCK_TOKENS for base, count in zip(self._base.tolist(), listed, strict=True)
        )
        """Some session may fill a block."""

    def _following_hashes(self, counts: list[int]) -> Column:  # [B, W]
        """Running hashes of the kept tokens, by accepted draft tokens."""
        if self.reads_states:
            lists = [[rest] * self._width for rest in self._hashes]
        else:
            drafts = zip(self._hashes, self._draft_lists, counts, strict=True)
            found = [following(rest, draft[: count - 1]) for rest, draft, count in drafts]
            lists = [[*each, *each[-1:] * (self._width - len(each))] for each in found]
        return np.array(lists, dtype=U8)

    @classmethod
    def fit(cls, rows: Ints, answers: AnswerBatch[Any]) -> Bools:  # [B, C] -> [B]
        """Rows that wait for the scores of a proposal, with hidden states if their draft reads any."""
        found = super().fit(rows, answers) & waits_for_verdict(rows)
        found &= (rows[:, col.FLAGS] & col.READS_STATES != 0) == (answers.states is not None)
        return found

    def is_of(self, answers: AnswerBatch[Any]) -> bool:
        """True if these are scores of all of these proposals, in the right form, and no row has changed since."""
        if not super().is_of(answers) or answers.counts.tobytes() != self._asked_counts or not self.is_uniform:
            return False
        return self.is_sparse == answers.is_sparse and self.reads_states == (answers.states is not None)

    def take(self, answers: AnswerBatch[Any], policy: DraftLengthPolicy, *, channel: int = 0) -> Taken | None:
        """Judge the scores, and ask for the next proposals; None if none can be taken here."""
        if not self._hands_over or not self._are_own(answers.draft_token_ids):
            return None
        judged = self.judge(answers)
        if judged is None:
            return None
        accepted, next_ids, goes_on = judged
        lengths = self._lengths(accepted, policy)
        goes_on = self._go_on(goes_on, accepted, next_ids, lengths, answers.states)
        states = answers.states
        which: Which = EVERY
        if goes_on is not True and not goes_on.all():
            some = np.flatnonzero(goes_on)
            if not some.size:
                return None
            which, accepted, next_ids, lengths = some, accepted[some], next_ids[some], lengths[some]
            states = None if states is None else states.selected(some)
        return self._asked_next(which, (accepted, next_ids, lengths), states, channel)

    def _are_own(self, scored: Column | None) -> bool:
        """True if these draft tokens were scored, of which the target may have had others."""
        if scored is None:
            return True
        return bool(scored.astype(U4, copy=False).tobytes() == self._drafts[self._drafts != NO_TOKEN].tobytes())

    def judge(self, answers: AnswerBatch[Any]) -> tuple[Ints, Column, Any] | None:
        """Verdicts: of each session the number of accepted tokens, the token after them, and whether both may be (True:
        of all); None if each has to be judged alone.
        """
        if self.is_sparse:
            judged = None if self._verdicts is None else self._verdicts.on_arrays(answers)
            return None if judged is None else (*judged, True)
        ids = answers.unsigned_ids
        scored = ids.reshape(self._drafts.shape) if self._indices is None else ids.take(self._indices)  # [B, W]
        accepted = (scored == self._drafts).argmin(axis=1)  # the first that differs: there is no draft token at the end
        next_ids = ids.take(accepted + self._starts)
        return accepted, next_ids, ids.item(ids.argmax()) < self.limit or scored.max(axis=1) < self.limits

    def _lengths(self, accepted: Ints, policy: DraftLengthPolicy) -> Column:
        """Draft tokens to ask for; 0 or less where there is no room for any."""
        wanted = policy.lengths(self.speculations)
        if max(wanted) <= self._least_capacity:
            return np.array(wanted, dtype=U4)
        rooms = np.minimum(self.rows[:, col.REMAINING] - 2, self._spare - 1)
        found: Ints = np.minimum(np.array(wanted, dtype=np.int64), rooms - accepted)
        return found

    def _go_on(
        self,
        goes_on: Any,  # noqa: ANN401
        accepted: Ints,
        next_ids: Column,
        lengths: Column,
        states: StateBatch | None,
    ) -> Any:  # noqa: ANN401
        """Mask of the sessions that go on with a proposal: True (all), or [B]."""
        if min(lengths.tolist()) < 1:
            goes_on = goes_on & (lengths > 0)
        if self._has_ends or self.table.may_end(next_ids.tolist()):
            goes_on = goes_on & self._do_not_end(self._new_ids(EVERY, accepted, next_ids))
        if self.has_grammars:
            goes_on = goes_on & self._leave_choice(self._new_ids(EVERY, accepted, next_ids), is_drafting=True)
        if states is not None:
            goes_on = goes_on & (states.starts == self._base - 1) & (states.counts == self._counts + 1)
            goes_on = goes_on & (accepted < LONGEST_INLINE_FEED)
        return goes_on

    def _new_ids(self, which: Which, accepted: Ints, next_ids: Column) -> list[list[int]]:
        rows = zip(chosen(self._draft_lists, which), accepted.tolist(), next_ids.tolist(), strict=True)
        return [[*draft[:count], token_id] for draft, count, token_id in rows]

    def _asked_next(
        self,
        which: Which,
        verdicts: tuple[Ints, Column, Column],
        states: StateBatch | None,
        channel: int,
    ) -> Taken:
        """``verdicts``: accepted draft tokens, next tokens and next draft lengths."""
        accepted, next_ids, lengths = verdicts
        counts, chains = self._counts[which], chosen(self._chains, which)
        at = accepted + self._firsts[which]
        tails, kept = self._hash_tails.take(at), self._kept.take(at)
        num_new = accepted + 1 if self.reads_states else (accepted == counts) + U4.type(1)
        commit = partial(self._commit, which, accepted, next_ids, lengths, kept)
        if self._crossing:
            commit = partial(list, commit())
            found, chains = self.hashes(kept.tolist(), which)
            tails = np.array(found, dtype=U8)
        commands = ExtendBatch(
            self.numbers[which],
            self._next_generations[which],
            kept,
            b"".join(chains),
            tails,
            num_new,
            self._extend_ids(which, accepted, next_ids, num_new),
            lengths,
            None if states is None else replace(states, counts=accepted + 1),
            channel,
            self._parents_of(which),
        )
        return Taken(self._listed(which), commands, commit, (counts, accepted))

    def _extend_ids(self, which: Which, accepted: Ints, next_ids: Column, num_new: Column) -> Column:
        """The tokens that the drafts lack, one session after the other."""
        if self.reads_states:
            drafts = self._drafts[which].copy()
            drafts[np.arange(len(drafts)), accepted] = next_ids
            ids: Column = drafts[np.arange(self._width) <= accepted[:, None]]
            return ids
        if max(num_new.tolist()) == 1:
            return next_ids
        pairs, are_new = self._pairs[which], self._ones[which]
        pairs[:, 1] = next_ids
        are_new[:, 0] = num_new > 1
        return pairs[are_new]

    def _commit(self, which: Which, accepted: Ints, next_ids: Column, lengths: Column, kept: Column) -> list[list[int]]:
        after = self._ended(which, accepted + 1, next_ids)
        after[:, col.STATUS], after[:, col.DRAFT_HELD], after[:, col.DRAFT_LENGTH] = DRAFTING, kept, lengths
        after[:, col.DRAFT_ASKED], after[:, col.DRAFT_BASE] = after[:, col.GENERATION], after[:, col.LENGTH]
        return self._write(which, after, self._new_ids(which, accepted, next_ids))


def _verdicts_on(sessions: Sequence[SessionState]) -> JointVerdicts | None:
    evidence = [session.row.evidence for session in sessions]
    return verdicts_on(evidence) if all(isinstance(one, PlacedEvidence) for one in evidence) else None
