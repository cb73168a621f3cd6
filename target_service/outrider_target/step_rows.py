"""Rows of the running batch in a forward of the target: decode steps, or drafts to score whose scores are all tokens or
all sparse.

Owns how a step's arrays become rows of a forward, and what its kernels found becomes arrays. What follows for a session
that cannot be scored is decided as for single items.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.batched import (
    AnswerBatch,
    Column,
    LogprobBatch,
    ScoreBatch,
    StateBatch,
    SupportBatch,
    token_scores,
)
from outrider.errors import OutriderError
from outrider.kv_cache import KVSequence
from outrider.model_executor.row_batch import RowBatch
from outrider.ports import Scores
from outrider.sampling.sampler import Sampler
from outrider.sampling.scoring.row_scoring import ScoredRows
from outrider.sampling.scoring.score import ScoreOutcome
from outrider.sampling.scoring.session_rows import Ints, SessionRows
from outrider.sampling.session import SessionSampling
from outrider.serving.decode.step import DecodeBatch
from outrider.serving.executor import ExecutorOutput
from outrider.structured_output import PositionMasks, made_within
from outrider.types import HiddenStates, ScoreForm, SparseScores, TokenScores
from outrider_target.jobs import needs_support
from outrider_target.layer_states import StepStates, in_order

if TYPE_CHECKING:
    from outrider.serving.decode.lookahead_step import LookaheadStep
    from outrider_target.planes import TargetPlanes


_NO_IDS = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class SessionBatch:
    """Properties of sessions that do not change between their steps."""

    sequences: list[KVSequence]  # [B]
    samplings: list[SessionSampling]  # [B]
    scoring: SessionRows | None
    """None: one of the sessions may not be rows, as ``ScoredRows`` has it."""
    is_sparse: bool | None
    """True if all scores are about supports, False if none are; None: those of some sessions."""
    layers: tuple[int, ...]
    """Layers whose hidden states all sessions want; empty if one wants others, or none."""
    num_token_ids: int
    """Drafts of all sessions are below it."""
    vocab_size: int

    @classmethod
    def of(cls, sequences: list[KVSequence], samplings: list[SessionSampling], vocab_size: int) -> SessionBatch:
        """Columns of these sessions."""
        metadata = [each.metadata for each in samplings]
        scoring = SessionRows.of(metadata, vocab_size) if all(each.may_be_row for each in metadata) else None
        return cls._with(sequences, samplings, scoring, vocab_size)

    @classmethod
    def _with(
        cls, sequences: list[KVSequence], samplings: list[SessionSampling], scoring: SessionRows | None, vocab_size: int
    ) -> SessionBatch:
        openings = [each.open for each in samplings]
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

    def selected(self, indices: NDArray[np.intp]) -> SessionBatch:
        """Sessions at these indices."""
        chosen = indices.tolist()
        sequences, samplings = [self.sequences[place] for place in chosen], [self.samplings[place] for place in chosen]
        if self.scoring is None:
            return SessionBatch.of(sequences, samplings, self.vocab_size)
        return SessionBatch._with(sequences, samplings, self.scoring.selected(indices), self.vocab_size)

    @staticmethod
    def joined(parts: Sequence[SessionBatch]) -> SessionBatch:
        """All sessions of several."""
        scoring = [part.scoring for part in parts if part.scoring is not None]
        return SessionBatch._with(
            [sequence for part in parts for sequence in part.sequences],
            [sampling for part in parts for sampling in part.samplings],
            SessionRows.joined(scoring) if len(scoring) == len(parts) else None,
            parts[0].vocab_size,
        )


class StepRows:
    """The rows of a step, from their launch to their answers."""

    def __init__(
        self, step: LookaheadStep | DecodeBatch, planes: TargetPlanes | None, *, is_drawn: bool = False
    ) -> None:
        """``planes`` take hidden states; None: they go inline. ``is_drawn``: the tokens are only on the device."""
        self._step, self._planes, self._is_drawn = step, planes, is_drawn
        self._own: SessionBatch = step.rows
        batched = step.batched if isinstance(step, DecodeBatch) else None
        self._arrays = batched if isinstance(batched, ScoreBatch) else None
        """Drafts and what is asked for beside scores; None for decode steps."""
        self._lengths = step.draft_lengths
        self._states: StepStates | None = None
        self._masks: dict[int, PositionMasks] = {}
        """Masks of sessions with a grammar, by their indices; begun once the tokens are known."""
        self._has_begun_masks = not any(sampling.has_grammar for sampling in self._own.samplings)

    @property
    def layers(self) -> Sequence[int]:
        """Layers whose hidden states are wanted."""
        return () if self._arrays is None else layers_of(self._arrays, self._own)

    def batch(self) -> RowBatch:
        """The rows."""
        step, batched = self._step, self._arrays
        if isinstance(step, DecodeBatch):
            if batched is None:
                raise TypeError("a target scores")
            return forward_rows(step, batched, batched.draft_token_ids)
        return RowBatch.plain(self._own.sequences, step.bases - 1, None if self._is_drawn else step.tokens)

    def begin_masks(self, sampler: Sampler, *, is_awaited: bool = False) -> None:
        """Start to make the masks of the grammars; once. The tokens of the rows are known. ``is_awaited``: they are
        needed next.
        """
        if self._has_begun_masks:
            return
        self._has_begun_masks = True
        drafts = None if self._arrays is None else self._arrays.draft_token_ids.tolist()
        ends, bases = self._lengths.cumsum().tolist(), self._step.bases.tolist()
        for place, (sampling, (kept, new)) in enumerate(zip(self._own.samplings, self._texts(), strict=True)):
            if sampling.has_grammar:
                own = () if drafts is None else drafts[ends[place] - int(self._lengths[place]) : ends[place]]
                output = self._own.sequences[place].token_ids[sampling.open.prompt_length : kept]
                output += new[max(0, sampling.open.prompt_length - kept) :]
                self._masks[place] = sampling.masks(output, own, position=bases[place])
        sampler.begin_masks(list(self._masks.values()), is_awaited=is_awaited)

    def _texts(self) -> Iterator[tuple[int, list[int]]]:
        """Committed tokens that each session's sequence keeps, and the new ones of the step."""
        step = self._step
        if isinstance(step, DecodeBatch):
            ids, ends = step.batched.token_ids.tolist(), step.batched.counts.cumsum().tolist()
            new = [ids[start:end] for start, end in itertools.pairwise([0, *ends])]
            return zip(step.kept.tolist(), new, strict=True)
        return zip((step.bases - 1).tolist(), [[token_id] for token_id in step.tokens.tolist()], strict=True)

    def hand_over(self, states: torch.Tensor, layers: Sequence[int]) -> None:  # [T, F]
        """Hand the hidden states of ``layers`` that are asked for to the drafts; the rows are launched."""
        batched, step = self._arrays, self._step
        if batched is not None and batched.hidden_states_from is not None and isinstance(step, DecodeBatch):
            self._states = StepStates(self._planes, step, batched, in_order(states, self._own.layers, layers))

    def begin_scoring(self, sampler: Sampler, logits: torch.Tensor) -> None:  # [R, V]
        """Start to score all positions."""
        own = self._own
        texts = [sequence.token_ids for sequence in own.sequences]
        scored = ScoredRows(
            own.samplings, texts, self._step.bases, self._lengths, self._arrays, own.scoring, self._masks
        )
        self._scoring = sampler.begin_rows(logits, scored)

    @property
    def has_masks(self) -> bool:
        """True if the masks of the grammars are made."""
        return self._has_begun_masks and all(masks.is_ready for masks in self._masks.values())

    def launch_scoring(self) -> bool:
        """Launch all of the scoring, after a wait for masks; False where there are no kernels for it."""
        return self._scoring.launch()

    def drawn(self) -> torch.Tensor | None:
        """Token drawn after each text, [B] on the device; None if the device does not have it."""
        return self._scoring.drawn()

    def finish(self, output: ExecutorOutput[Scores]) -> ExecutorOutput[Scores]:
        """The output of a forward, with the answers of the step, once that has ended."""
        output = self._finish(output)
        if not self._masks:
            return output
        within = made_within(list(self._masks.values()))
        return replace(output, masked_ns=within if output.masked_ns is None else output.masked_ns)

    def _finish(self, output: ExecutorOutput[Scores]) -> ExecutorOutput[Scores]:
        if self._arrays is None:
            return replace(output, plain=self._scoring.next_tokens())
        states = None if self._states is None else self._states.batched
        is_handed, answers = self._states is None or states is not None, None
        tokens, sparse = self._scoring.tokens(), self._scoring.sparse()
        if is_handed and tokens is not None:
            answers = self._answers(self._arrays, tokens, states)
        elif is_handed and sparse is not None:
            answers = self._sparse_answers(self._arrays, sparse, states)
        if answers is not None:
            return replace(output, batched=replace(answers, logprobs=self._scoring.logprobs()))
        outcomes = self._scoring.outcomes()
        if not is_handed or any(outcome.form is None for outcome in outcomes):
            return replace(output, results=self._one_by_one(self._arrays, outcomes, states))
        logprobs = LogprobBatch.of([outcome.logprobs for outcome in outcomes])
        answers = self._joined_answers(self._arrays, [outcome.form for outcome in outcomes], states)
        return replace(output, batched=replace(answers, logprobs=logprobs))

    def _joined_answers(
        self, batched: ScoreBatch, forms: Sequence[ScoreForm | None], states: StateBatch | None
    ) -> AnswerBatch[Scores]:
        """``forms``: those of each session."""
        sparse_forms = [form for form in forms if isinstance(form, SparseScores)]
        if sparse_forms:
            return self._sparse_answers(batched, joined_scores(sparse_forms), states)
        rows = [form.token_ids for form in forms if isinstance(form, TokenScores)]
        found = np.array([token_id for row in rows for token_id in row], dtype=np.uint32)
        return self._answers(batched, found, states)

    def _answers(
        self,
        batched: ScoreBatch,
        token_ids: np.ndarray,  # [sum(K+1)]
        states: StateBatch | None,
        masses: np.ndarray | None = None,
        supports: SupportBatch | None = None,
    ) -> AnswerBatch[Scores]:
        heads = batched.sessions, batched.generations, self._step.bases, self._lengths + 1
        drafts = batched.draft_token_ids if batched.is_direct else None  # said here too: the step may be split
        return AnswerBatch(*heads, token_ids, (), token_scores, masses, states, supports, 0, drafts)

    def _sparse_answers(
        self, batched: ScoreBatch, scores: SparseScores, states: StateBatch | None
    ) -> AnswerBatch[Scores]:
        """``scores``: those of all sessions, one after the other."""
        sizes = _support_sizes(batched.support_counts, self._lengths)
        supports = SupportBatch(sizes, _NO_IDS, scores.support_probs)
        return self._answers(batched, scores.outside_token_ids, states, scores.outside_mass, supports)

    def _one_by_one(
        self, batched: ScoreBatch, outcomes: list[ScoreOutcome], states: StateBatch | None
    ) -> list[Scores | OutriderError | None]:
        heads = zip(batched.sessions.tolist(), batched.generations.tolist(), self._step.bases.tolist(), strict=True)
        handed: Iterable[HiddenStates | None] = [None] * len(outcomes)
        if self._states is not None:
            handed = self._states.inline() if states is None else states.hidden_states()
        drafts: Iterable[tuple[int, ...]] = [()] * len(outcomes)
        if batched.is_direct:
            drafts = [item.draft_token_ids for item in batched.items()]
        return [
            outcome.error
            if outcome.form is None
            else Scores(*head, outcome.form, outcome.logprobs, hidden_states=own, draft_token_ids=drafted)
            for head, outcome, own, drafted in zip(heads, outcomes, handed, drafts, strict=True)
        ]


def forward_rows(step: DecodeBatch, batched: ScoreBatch, draft_token_ids: Column) -> RowBatch:
    """Rows of a step's forward, with these draft tokens."""
    counts, sequences = batched.counts.astype(np.int64, copy=False), step.rows.sequences
    return RowBatch(sequences, step.kept, batched.token_ids, counts, draft_token_ids, step.draft_lengths)


def layers_of(batched: ScoreBatch, rows: SessionBatch) -> list[int]:
    """The layers whose hidden states a forward hands out."""
    return [] if batched.hidden_states_from is None else sorted(set(rows.layers))


def joined_scores(forms: Sequence[SparseScores]) -> SparseScores:
    """Scores of several sessions, one after the other."""
    return SparseScores(
        np.concatenate([form.support_probs for form in forms]),
        np.concatenate([form.outside_mass for form in forms]),
        np.concatenate([form.outside_token_ids for form in forms]),
    )


def _support_sizes(counts: Column | None, lengths: Ints) -> NDArray[np.uint32]:  # [B]
    """Ids in the supports of each session's drafts, of which each token's has ``counts``."""
    if counts is None:
        raise TypeError("sparse scores of drafts answer supports")
    ends = np.concatenate((np.zeros(1, dtype=np.int64), counts.cumsum(dtype=np.int64)))[lengths.cumsum()]
    sizes: NDArray[np.uint32] = np.diff(ends, prepend=0).astype(np.uint32)
    return sizes
