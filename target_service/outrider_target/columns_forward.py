"""One forward of the target over a step that came as columns: sessions with drafts, whose scores are all tokens, or
all sparse.

Owns how the columns become rows of a forward, and what its kernels found becomes columns. What follows for a session
that cannot be scored is decided as for single items.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from outrider.columns import AnswerColumns, Column, ScoreColumns, StateColumns, SupportColumns, token_scores
from outrider.errors import OutriderError
from outrider.kernels.device_stream import Mark
from outrider.kv_cache import KVSequence
from outrider.model_executor.input_columns import RowColumns
from outrider.model_executor.model_runner import ModelRunner
from outrider.ports import Scores
from outrider.sampling.scoring.columns import ScoringStep
from outrider.sampling.scoring.score import ScoreOutcome
from outrider.sampling.scoring.session_rows import Ints, SessionRows, may_be_rows
from outrider.sampling.session import SessionSampling
from outrider.serving.executor import ExecutorOutput
from outrider.types import HiddenStates, SparseScores, TokenScores
from outrider_target.jobs import needs_support
from outrider_target.layer_states import StepStates, in_order

if TYPE_CHECKING:
    from outrider.serving.steady.step import SteadyStep
    from outrider_target.planes import TargetPlanes


_NO_IDS = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class SteadyRows:
    """What does not change between the steps of sessions."""

    sequences: list[KVSequence]  # [B]
    samplings: list[SessionSampling]  # [B]
    scoring: SessionRows | None
    """None: one of the sessions may not be rows, as ``ScoringStep`` has it."""
    is_sparse: bool | None
    """Whether scores are about supports; None: of some sessions alone."""
    layers: tuple[int, ...]
    """Whose hidden states all sessions want; empty where one wants others, or none."""
    num_token_ids: int
    """Drafts of all sessions are below it."""
    vocab_size: int

    @classmethod
    def of(cls, sequences: list[KVSequence], samplings: list[SessionSampling], vocab_size: int) -> SteadyRows:
        """Of sessions that are steady."""
        metadata, openings = [each.metadata for each in samplings], [each.open for each in samplings]
        scoring = SessionRows.of(metadata, vocab_size) if all(map(may_be_rows, metadata)) else None
        forms = {needs_support(opened) for opened in openings}
        layers = {opened.hidden_state_layers for opened in openings}
        return cls(
            sequences,
            samplings,
            scoring,
            forms.pop() if len(forms) == 1 else None,
            layers.pop() if len(layers) == 1 else (),
            min([opened.num_token_ids for opened in openings]),
            vocab_size,
        )

    def selected(self, places: NDArray[np.intp]) -> SteadyRows:
        """Those at these places."""
        chosen = places.tolist()
        sequences, samplings = [self.sequences[place] for place in chosen], [self.samplings[place] for place in chosen]
        return SteadyRows.of(sequences, samplings, self.vocab_size)


class ColumnsForward:
    """A forward and its scoring, both started."""

    def __init__(
        self,
        runner: ModelRunner,
        step: SteadyStep,
        columns: ScoreColumns,
        rows: SteadyRows,
        planes: TargetPlanes | None = None,
    ) -> None:
        """``planes`` take hidden states; None: they go inline."""
        self._step, self._columns = step, columns
        layers = layers_of(columns, rows)
        forwarded = forward_rows(step, columns, columns.draft_token_ids)
        logits, states = runner.forward_columns(forwarded, layers, plan=step.plan)
        self._states: StepStates | None = None
        if columns.hidden_states_from is not None:
            # Before the mark below: when that is reached, they are where the draft finds them.
            self._states = StepStates(planes, step, columns, in_order(states, rows.layers, layers))
        self._forward = Mark(runner.device)
        # While the device computes:
        texts = [sequence.token_ids for sequence in rows.sequences]
        scoring = ScoringStep(rows.samplings, texts, step.bases, step.draft_lengths, columns, rows.scoring)
        self._scoring = runner.sampler.begin_columns(logits, scoring)
        self._num_positions = step.draft_lengths + 1
        self._support_sizes = _support_sizes(columns.support_counts, step.draft_lengths) if rows.is_sparse else None

    def is_done(self) -> bool:
        """Whether the forward has ended."""
        return self._forward.is_reached()

    def finish(self) -> ExecutorOutput[Scores]:
        """Wait for it; called once."""
        self._forward.wait()
        computed = time.perf_counter_ns()
        tokens = self._scoring.tokens()
        states = None if self._states is None else self._states.columns
        is_handed = self._states is None or states is not None
        if is_handed and tokens is not None:
            return ExecutorOutput((), computed, columns=self._answers(tokens, states))
        if is_handed and (sparse := self._scoring.sparse()) is not None:
            return ExecutorOutput((), computed, columns=self._sparse_answers(sparse, states))
        outcomes = self._scoring.outcomes()
        if not is_handed or any(outcome.form is None for outcome in outcomes):
            return ExecutorOutput(self._one_by_one(outcomes, states), computed)
        forms = [outcome.form for outcome in outcomes]
        sparse_forms = [form for form in forms if isinstance(form, SparseScores)]
        if sparse_forms:
            return ExecutorOutput((), computed, columns=self._sparse_answers(joined_scores(sparse_forms), states))
        rows = [form.token_ids for form in forms if isinstance(form, TokenScores)]
        found = np.array([token_id for row in rows for token_id in row], dtype=np.uint32)
        return ExecutorOutput((), computed, columns=self._answers(found, states))

    def _answers(
        self,
        token_ids: np.ndarray,  # [sum(K+1)]
        states: StateColumns | None,
        masses: np.ndarray | None = None,
        supports: SupportColumns | None = None,
    ) -> AnswerColumns[Scores]:
        columns = self._columns
        heads = columns.sessions, columns.generations, self._step.bases, self._num_positions
        drafts = columns.draft_token_ids if columns.is_direct else None  # said here too: the step may be taken apart
        return AnswerColumns(*heads, token_ids, (), token_scores, masses, states, supports, 0, drafts)

    def _sparse_answers(self, scores: SparseScores, states: StateColumns | None) -> AnswerColumns[Scores]:
        """``scores``: those of all sessions, one after the other."""
        if self._support_sizes is None:
            raise TypeError("sparse scores of drafts answer supports")
        supports = SupportColumns(self._support_sizes, _NO_IDS, scores.support_probs)
        return self._answers(scores.outside_token_ids, states, scores.outside_mass, supports)

    def _one_by_one(
        self, outcomes: list[ScoreOutcome], states: StateColumns | None
    ) -> list[Scores | OutriderError | None]:
        columns = self._columns
        heads = zip(columns.sessions.tolist(), columns.generations.tolist(), self._step.bases.tolist(), strict=True)
        handed: Iterable[HiddenStates | None] = [None] * len(outcomes)
        if self._states is not None:
            handed = self._states.inline() if states is None else states.hidden_states()
        drafts: Iterable[tuple[int, ...]] = [()] * len(outcomes)
        if columns.is_direct:
            drafts = [item.draft_token_ids for item in columns.items()]
        return [
            outcome.error
            if outcome.form is None
            else Scores(*head, outcome.form, hidden_states=own, draft_token_ids=drafted)
            for head, outcome, own, drafted in zip(heads, outcomes, handed, drafts, strict=True)
        ]


def forward_rows(step: SteadyStep, columns: ScoreColumns, draft_token_ids: Column) -> RowColumns:
    """What a step's forward computes, with these draft tokens."""
    counts, sequences = columns.counts.astype(np.int64, copy=False), step.rows.sequences
    return RowColumns(sequences, step.kept, columns.token_ids, counts, draft_token_ids, step.draft_lengths)


def layers_of(columns: ScoreColumns, rows: SteadyRows) -> list[int]:
    """The layers whose hidden states a forward hands out."""
    return [] if columns.hidden_states_from is None else sorted(set(rows.layers))


def joined_scores(forms: Sequence[SparseScores]) -> SparseScores:
    """Those of several sessions, one after the other."""
    return SparseScores(
        np.concatenate([form.support_probs for form in forms]),
        np.concatenate([form.outside_mass for form in forms]),
        np.concatenate([form.outside_token_ids for form in forms]),
    )


def _support_sizes(counts: Column | None, lengths: Ints) -> NDArray[np.uint32] | None:  # [B]
    """Ids in the supports of each session's drafts, of which each token's has ``counts``."""
    if counts is None:
        return None
    ends = np.concatenate((np.zeros(1, dtype=np.int64), counts.cumsum(dtype=np.int64)))[lengths.cumsum()]
    sizes: NDArray[np.uint32] = np.diff(ends, prepend=0).astype(np.uint32)
    return sizes
