"""Scoring row: one session that waits for scores of a proposal, and what its draft is asked once these are there.

What ``ScoringBatch`` is for several sessions, by plain numbers: a call on an array of one entry takes as long as one on
many. Scores that are not just what was asked for, and generations that may end, are left to the session's state
machine.

Shape letters: ``K`` draft tokens of the proposal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from outrider.columns import I4, U4, U8, AnswerColumns, Column, ExtendColumns
from outrider.prefix_hash import following
from outrider_coordinator.session.answered import AnsweredScores, Heads, Places
from outrider_coordinator.session.scoring_batch import joint_verdicts, num_before, room
from outrider_coordinator.session.state import SessionState
from outrider_coordinator.speculation import LONGEST_INLINE_FEED, DraftLengthPolicy


class ScoringRow:
    """One session that waits for scores of a proposal. Not changed once it is made."""

    def __init__(self, sessions: Sequence[SessionState]) -> None:
        """``sessions``: one, for which ``ScoringBatch.may_hold`` is true."""
        (session,) = sessions
        draft, base, number = session.proposal.token_ids, session.tokens.length, session.commands.session
        self.numbers = np.array((number,), dtype=U8)
        """Of the session, on its links."""
        self._draft, self._base = draft, base
        self._heads = Heads.of_one(session.target.asked or 0, base, len(draft) + 1)
        self._generations = np.array((session.commands.next_generation,), dtype=U8)
        self._room, self._limit = room(session), session.engine_request.rules.num_token_ids
        self._endings = session.output.ending_token_ids
        self._end = num_before(self._endings, draft)
        self._speculations = [session.speculation]
        self._reads_states = session.draft.reads_states
        self._verdicts = joint_verdicts(sessions)
        self._accepted = np.arange(len(draft) + 1)
        self._put_down_extends(*session.tokens.prefix_hash(base))

    def _put_down_extends(self, chain: bytes, rest: int) -> None:
        """Kept tokens, running hashes after them, and how many tokens are brought, [K+1] by accepted draft tokens, as
        ``ScoringBatch`` has them.
        """
        self._chain, draft, base = chain, self._draft, self._base
        last = len(draft) - 1
        if self._reads_states:
            kept, rests = [base] * len(self._accepted), [rest] * len(self._accepted)
            brought = list(range(1, len(draft) + 2))
        else:
            kept, rests = [*range(base, base + last + 1), base + last], following(rest, draft[:-1])
            rests = [*rests, rests[-1]]
            brought = [*(1 for _ in draft), 2]
        self._kept, self._brought = np.array(kept, dtype=U4), np.array(brought, dtype=U4)
        self._rests = np.array(rests, dtype=U8)

    def take(
        self,
        places: Places,
        rows: Places,
        answers: AnswerColumns[Any],
        policy: DraftLengthPolicy,
        *,
        channel: int = 0,
    ) -> AnsweredScores | None:
        """The verdict and the ``Extend`` that follows; None unless the scores are all that a message brings, and the
        generation goes on with a proposal. ``channel`` as for ``ScoringBatch``.
        """
        states = answers.states
        if not (isinstance(rows, slice) and self._heads.are_of(answers)) or self._reads_states != (states is not None):
            return None
        if (scored := answers.draft_token_ids) is not None and tuple(scored.tolist()) != self._draft:
            return None
        judged = self.judge(answers)
        if judged is None:
            return None
        accepted, next_id = judged
        length = min(policy.lengths(self._speculations)[0], self._room - accepted)
        if length < 1 or accepted > self._end or next_id in self._endings:
            return None
        own = slice(accepted, accepted + 1)
        if states is not None:
            is_handed_over = states.starts.item() == self._base - 1 and states.counts.item() == len(self._accepted)
            if not is_handed_over or accepted >= LONGEST_INLINE_FEED:
                return None
            states = replace(states, counts=self._accepted[own] + 1)
        commands = ExtendColumns(
            self.numbers,
            self._generations,
            self._kept[own],
            self._chain,
            self._rests[own],
            self._brought[own],
            self._brought_ids(accepted, next_id),
            np.array((length,), dtype=U4),
            states,
            channel,
        )
        return AnsweredScores([0], [0], self._accepted[own], np.array((next_id,)), commands)

    def judge(self, answers: AnswerColumns[Any]) -> tuple[int, int] | None:
        """The number of accepted tokens and the token after them; None if the state machine has to judge."""
        if self._verdicts is not None:
            judged = self._verdicts.on_columns(answers)
            return None if judged is None else (judged[0].item(), judged[1].item())
        if answers.is_sparse:
            return None
        ids = answers.token_ids.tolist()
        if max(ids) >= self._limit:
            return None
        accepted = _num_accepted(self._draft, ids)
        return accepted, ids[accepted]

    def _brought_ids(self, accepted: int, next_id: int) -> Column:
        """The tokens that the draft lacks."""
        if self._reads_states:
            return np.array((*self._draft[:accepted], next_id), dtype=I4)
        lacks_two = accepted == len(self._draft)
        return np.array((self._draft[-1], next_id) if lacks_two else (next_id,), dtype=I4)


def _num_accepted(draft: Sequence[int], ids: Sequence[int]) -> int:
    """Draft tokens before the first that differs; ``ids`` are as many or more."""
    for place, token_id in enumerate(draft):
        if token_id != ids[place]:
            return place
    return len(draft)
