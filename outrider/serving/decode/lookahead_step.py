"""Plain step: one token of each of many sessions that is computed before it is asked for, held as arrays.

Shape letters: ``B`` sessions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.batched import AnswerBatch, LogprobBatch, token_scores
from outrider.errors import OutriderError
from outrider.ports import Score, Scores
from outrider.recording import ForwardRecord
from outrider.serving.decode.sessions import Bools, Ints, RunningSessions
from outrider.serving.executor import LookaheadOutcome
from outrider.serving.session import Session, SessionKey
from outrider.types import ScoreForm, SparseScores, TokenScores

Rows = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class KnownTokens:
    """``LookaheadOutcome`` of answers to single items."""

    token_ids: Ints  # [B]
    masses: NDArray[np.float32]  # [B]
    logprobs: LogprobBatch | None = None
    errors: Mapping[int, OutriderError] = field(default_factory=dict)

    @property
    def drawn(self) -> Ints:
        """The same: nothing is queued behind them."""
        return self.token_ids

    @staticmethod
    def is_one(form: ScoreForm) -> bool:
        """True if scores are one token, as those of a plain step are."""
        if isinstance(form, TokenScores):
            return len(form.token_ids) == 1
        return isinstance(form, SparseScores) and len(form.outside_token_ids) == 1

    @classmethod
    def of(cls, answers: Sequence[Scores]) -> KnownTokens:
        """Tokens of scores of one token each."""
        ids, masses = list[int](), list[float]()
        for form in [answer.form for answer in answers]:
            if isinstance(form, TokenScores):
                ids.append(form.token_ids[0])
                masses.append(1.0)
            elif isinstance(form, SparseScores):
                ids.append(int(form.outside_token_ids[0]))
                masses.append(float(form.outside_mass[0]))
        logprobs = LogprobBatch.of([answer.logprobs for answer in answers])
        return cls(np.array(ids, dtype=np.int64), np.array(masses, dtype=np.float32), logprobs)


@dataclass(slots=True, eq=False)
class LookaheadStep:
    """Items that follow each other from the same sessions, asked for or not yet.

    A session leaves a step when something else comes for it: its row then stays, and counts for nothing.
    """

    own: RunningSessions
    bases: Ints  # [B] committed tokens, those of the items included
    tokens: Ints  # [B] of the items; without meaning while ``is_queued``
    indices: Sequence[int] = ()
    """Indices of the sessions in the step that it is queued behind."""
    is_queued: bool = False
    """True while its tokens are known to the device alone."""
    generations: NDArray[np.uint64] = field(init=False)  # [B] of the items that came, else of what they follow
    is_here: Bools = field(init=False)  # [B]
    is_asked: Bools = field(init=False)  # [B]
    is_open: Bools = field(init=False)  # [B] computed, and may be followed by another step
    arrived_ns: Ints = field(init=False)  # [B] of the items that came
    is_late: Bools = field(init=False)  # [B] whether these came after it was computed
    trace_parents: NDArray[np.object_] = field(init=False)  # [B] of the items that came, empty where not traced
    outcome: LookaheadOutcome | None = None
    """Outcome once it is computed."""
    forward: ForwardRecord | None = None
    """Record once it is computed."""
    _indices: dict[SessionKey, int] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        count = len(self.own.sessions)
        self.generations = np.array([session.generation for session in self.own.sessions], dtype=np.uint64)
        self.is_here = np.ones(count, dtype=np.bool_)
        self.is_asked, self.is_open, self.is_late = (np.zeros(count, dtype=np.bool_) for _ in range(3))
        self.arrived_ns = np.zeros(count, dtype=np.int64)
        self.trace_parents = np.full(count, "", dtype=np.object_)

    def __len__(self) -> int:
        return len(self.own.sessions)

    @property
    def sessions(self) -> list[Session[Any]]:
        """B."""
        return self.own.sessions

    @property
    def rows(self) -> Any:  # noqa: ANN401 - the executor's
        """Facts of the executor about the sessions."""
        return self.own.rows

    @property
    def draft_lengths(self) -> Ints:  # [B]
        """No item has drafts."""
        return np.zeros(len(self), dtype=np.int64)

    @property
    def plan(self) -> None:
        """The forward is laid out when it is started."""

    @property
    def is_needed(self) -> bool:
        """True if any of it is to be asked for or followed yet."""
        return bool((self.is_here & (~self.is_asked | self.is_open)).any())

    @property
    def unasked(self) -> Bools:  # [B]
        """Rows that are to be asked for."""
        return self.is_here & ~self.is_asked

    def place_of(self, key: SessionKey) -> int | None:
        """The row of a session that is here."""
        if self._indices is None:
            self._indices = {session.key: place for place, session in enumerate(self.own.sessions)}
        place = self._indices.get(key)
        return place if place is not None and self.is_here[place] else None

    def without_gone(self) -> LookaheadStep:
        """The step with the rows that are here; only before it is started."""
        if self.is_here.all():
            return self
        kept = np.flatnonzero(self.is_here)
        step = LookaheadStep(self.own.selected(kept), self.bases[kept], self.tokens[kept])
        step.generations, step.is_asked = self.generations[kept], self.is_asked[kept]
        step.arrived_ns, step.trace_parents = self.arrived_ns[kept], self.trace_parents[kept]
        return step

    @staticmethod
    def joined(parts: Sequence[LookaheadStep]) -> LookaheadStep:
        """One after the other, of steps that were not started."""
        if len(parts) == 1:
            return parts[0]
        step = LookaheadStep(
            RunningSessions.joined([part.own for part in parts]),
            np.concatenate([part.bases for part in parts]),
            np.concatenate([part.tokens for part in parts]),
        )
        for name in ("generations", "is_here", "is_asked", "arrived_ns", "trace_parents"):
            setattr(step, name, np.concatenate([getattr(part, name) for part in parts]))
        return step

    # Items and answers.

    def item(self, place: int, prefix_hash: tuple[bytes, int]) -> Score:
        """The item of a row; ``prefix_hash`` of the tokens that it keeps."""
        number, generation = int(self.own.numbers[place]), int(self.generations[place])
        base, parent = int(self.bases[place]), self.trace_parents[place]
        return Score(number, generation, base - 1, prefix_hash, (int(self.tokens[place]),), trace_parent=parent)

    def answer(self, place: int) -> Scores:
        """The answer to a row that is computed."""
        outcome = self.outcome
        if outcome is None:
            raise ValueError("a step that is not computed has no answers")
        token_id = outcome.token_ids[place]
        form: ScoreForm = TokenScores((int(token_id),))
        if self.own.are_sparse[place]:
            ids, masses = token_id.reshape(1).astype(np.int32), outcome.masses[place].reshape(1)
            form = SparseScores(np.zeros(0, dtype=np.float32), masses, ids)
        logprobs = () if outcome.logprobs is None else outcome.logprobs.rows()[place]
        return Scores(
            int(self.own.numbers[place]), int(self.generations[place]), int(self.bases[place]), form, logprobs
        )

    def batched(self, indices: Rows, now_ns: int) -> AnswerBatch[Scores]:
        """The answers to rows of one link and form, whose time ends now."""
        outcome = self.outcome
        if outcome is None:
            raise ValueError("a step that is not computed has no answers")
        is_sparse = bool(self.own.are_sparse[indices[0]])
        return AnswerBatch(
            self.own.numbers[indices],
            self.generations[indices],
            self.bases[indices],
            np.ones(len(indices), dtype=np.uint32),
            outcome.token_ids[indices].astype(np.int32),
            self.timings_ns(indices, now_ns).ravel().tolist(),
            token_scores,
            outcome.masses[indices] if is_sparse else None,
            logprobs=None if outcome.logprobs is None else outcome.logprobs.selected(indices),
        )

    def waits_ns(self, started_ns: int) -> list[int]:
        """Waiting times of the items that arrived before it is computed, which began at ``started_ns``."""
        arrived = self.arrived_ns[self.is_here & self.is_asked]
        waits: list[int] = np.maximum(started_ns - arrived, 0).tolist()
        return waits

    def timings_ns(self, indices: Rows, now_ns: int) -> Ints:  # [N, 6]
        """The fields of ``ItemTiming`` of rows, as ``Request`` has them: an item's time begins when it comes."""
        done, arrived = self.forward, self.arrived_ns[indices]
        if done is None:
            raise ValueError("a step that is not computed has no times")
        started = np.maximum(done.started_ns, arrived)
        computed = np.maximum(done.computed_ns, started)
        ended = np.full(len(indices), done.ended_ns)
        stages = np.stack((started - arrived, computed - started, ended - computed, now_ns - ended), axis=1)
        is_late = self.is_late[indices]
        stages[is_late] = 0
        stages[is_late, 3] = now_ns - arrived[is_late]
        others = np.stack((now_ns - arrived, np.full(len(indices), done.mask_ns)), axis=1)
        return np.concatenate((stages, others), axis=1)
