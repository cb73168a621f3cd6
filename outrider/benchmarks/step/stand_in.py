"""Services whose forward takes a time that is known in advance: the executors of a draft and a target without models.

Owns a made-up language in which each token follows from the one before it, and a draft that is right about it as
often as it is told to be. The time of a forward is spent as a GPU's is: the thread waits and leaves the interpreter
alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from outrider import __version__
from outrider.batched import AnswerBatch, CommandBatch, ScoreBatch, SupportBatch, token_scores
from outrider.benchmarks.step.stamps import BEGAN, ENDED
from outrider.ports import (
    DraftCommand,
    DraftEvent,
    Extend,
    Open,
    Proposal,
    Score,
    Scores,
    TargetCommand,
    TargetEvent,
)
from outrider.serving.decode.step import DecodeBatch
from outrider.serving.engine_core import EngineCore
from outrider.serving.executor import Executor, ExecutorOutput
from outrider.serving.in_process.service import InProcessService
from outrider.serving.session import Limits, Session
from outrider.serving.session_registry import SessionRegistry
from outrider.types import ModelDescription, SparseEvidence, SparseScores, TokenScores
from outrider_draft.texts import PlainSequence, PlainSequences

VOCAB_SIZE = 2048
MAX_MODEL_LEN = 1 << 20
SUPPORT = 64
"""Ids of each draft position's support, where evidence is asked for."""
_STEP = 389
"""Each token is the one before it and this, modulo the vocabulary."""
_SPIN_S = 200e-6
"""A sleep ends late by up to this much, so the end of a wait is watched for."""

ItemT = TypeVar("ItemT", Extend, Score)
EventT = TypeVar("EventT", bound=Proposal | Scores)


@dataclass(slots=True)
class StandInJob(Generic[ItemT]):
    """One item under way."""

    open: Open
    item: ItemT
    text: PlainSequence
    num_left: int = 1
    num_last: int = 1


Answer = Callable[[StandInJob[ItemT]], EventT]
Note = Callable[[int, Sequence[Extend | Score | CommandBatch]], None]


class StandInExecutor(Executor[PlainSequence, ItemT, StandInJob[ItemT], EventT]):
    """Answers after ``busy_s``, however many sessions there are."""

    def __init__(self, answer: Answer[ItemT, EventT], *, busy_s: float, note: Note) -> None:
        """``note`` is called with the items of a forward, when it begins and when it has ended."""
        self._answer: Answer[ItemT, EventT] = answer
        self._busy_s = busy_s
        self._note = note

    def begin(self, session: Session[PlainSequence], item: ItemT) -> StandInJob[ItemT]:
        """The text is brought up to date at once, drafted tokens included."""
        session.sequence.extend(item.token_ids)
        job = StandInJob(session.open, item, session.sequence)
        if isinstance(item, Score):
            session.sequence.extend(item.draft_token_ids)
        return job

    def execute(self, batch: Sequence[tuple[StandInJob[ItemT], int]]) -> ExecutorOutput[EventT]:
        """Wait, then answer all."""
        items = [job.item for job, _ in batch]
        self._note(BEGAN, items)
        wait_until(time.perf_counter() + self._busy_s)
        computed_ns = time.perf_counter_ns()
        self._note(ENDED, items)
        return ExecutorOutput([self._answer(job) for job, _ in batch], computed_ns)

    # Batches of commands.

    def is_decoding(self, session: Session[PlainSequence]) -> bool:
        """All are."""
        return True

    def takes_batch(self, step: DecodeBatch) -> bool:
        """True unless some sessions are sampled and others are not."""
        return len({session.open.sampling.temperature == 0 for session in step.sessions}) == 1

    def start_step(self, step: Any, batch: Sequence[tuple[Any, int]] = ()) -> StandInStep:  # noqa: ANN401
        """Texts are brought up to date at once, drafted tokens included."""
        batched = step.batched
        rows, counts = batched.token_ids.tolist(), batched.counts.tolist()
        drafts = batched.draft_token_ids.tolist() if isinstance(batched, ScoreBatch) else []
        lengths = step.draft_lengths.tolist()
        start = first = 0
        for session, count, length in zip(step.sessions, counts, lengths, strict=True):
            text = session.sequence
            text.extend(rows[start : start + count])
            start += count
            if drafts:
                text.extend(drafts[first : first + length])
                first += length
        self._note(BEGAN, [batched])
        return StandInStep(self, step, time.perf_counter() + self._busy_s)

    def answer_batch(self, step: DecodeBatch) -> AnswerBatch[EventT]:
        """Answers as single items."""
        self._note(ENDED, [step.batched])
        items: list[Any] = list(step.batched.items())
        answers: list[Any] = [
            self._answer(StandInJob(session.open, item, session.sequence))
            for session, item in zip(step.sessions, items, strict=True)
        ]
        heads = step.batched.sessions, step.batched.generations, step.bases
        make: Any = token_scores if step.is_scoring else Proposal
        masses = supports = None
        if step.is_scoring and isinstance(answers[0].form, SparseScores):
            forms = [answer.form for answer in answers]
            rows = [form.outside_token_ids for form in forms]
            masses = np.concatenate([form.outside_mass for form in forms])
            sizes = np.array([form.support_probs.size for form in forms], dtype=np.uint32)
            supports = SupportBatch(sizes, rows[0][:0], np.concatenate([form.support_probs for form in forms]))
        elif step.is_scoring:
            rows = [answer.form.token_ids for answer in answers]
        else:
            rows = [answer.token_ids for answer in answers]
            parts = [
                (one.evidence.counts, one.evidence.token_ids, one.evidence.probs) for one in answers if one.evidence
            ]
            supports = SupportBatch(*map(np.concatenate, zip(*parts, strict=True))) if parts else None
        token_ids = np.array([token_id for row in rows for token_id in row], dtype=np.int32)
        counts = np.array(list(map(len, rows)), dtype=np.uint32)
        return AnswerBatch(*heads, counts, token_ids, (), make, masses, supports=supports)


@dataclass(frozen=True, slots=True)
class StandInStep:
    """A forward over a step of arrays."""

    executor: StandInExecutor[Any, Any]
    step: DecodeBatch
    ends: float

    def is_done(self) -> bool:
        """Always: ``finish`` waits."""
        return True

    def finish(self) -> ExecutorOutput[Any]:
        """Wait, then answer all."""
        wait_until(self.ends)
        computed_ns = time.perf_counter_ns()
        return ExecutorOutput((), computed_ns, batched=self.executor.answer_batch(self.step))


def wait_until(when: float) -> None:
    """Wait until a reading of ``time.perf_counter``, without holding the interpreter."""
    while (left := when - time.perf_counter()) > 0:
        time.sleep(left - _SPIN_S if left > _SPIN_S else 0)


def follow(token_id: int, count: int) -> tuple[int, ...]:
    """The ``count`` tokens after this one."""
    return tuple((token_id + _STEP * (index + 1)) % VOCAB_SIZE for index in range(count))


def is_right(position: int, acceptance: float) -> bool:
    """True if the draft is right at a position: so for this share of all, spread evenly."""
    return (position * 0x9E3779B1 & 0xFFFFFFFF) < acceptance * 2**32


def propose(job: StandInJob[Extend], acceptance: float) -> Proposal:
    """K tokens; in a sampled session with a support that holds them and its neighbours, all alike."""
    item, base = job.item, len(job.text.token_ids)
    last, drafted = job.text.token_ids[-1], []
    for position in range(base, base + item.draft_length):
        last = follow(last, 1)[0] if is_right(position, acceptance) else (last + 1) % VOCAB_SIZE
        drafted.append(last)
    job.text.extend(drafted[:-1])  # as a model has no KV of the last one
    evidence = None if job.open.sampling.temperature == 0 else _evidence(drafted)
    return Proposal(item.session, item.generation, base, tuple(drafted), evidence)


def _evidence(drafted: Sequence[int]) -> SparseEvidence:
    rows = [(np.arange(SUPPORT) + token_id) % VOCAB_SIZE for token_id in drafted]
    ids = np.concatenate(rows) if rows else np.zeros(0)
    counts = np.full(len(rows), SUPPORT, dtype=np.int32)
    return SparseEvidence(counts, ids.astype(np.int32), np.full(ids.size, 1 / SUPPORT, dtype=np.float32))


def score(job: StandInJob[Score], acceptance: float) -> Scores:
    """Greedy: the tokens that follow. Sampled: ``acceptance`` of the mass is on the draft's support."""
    item = job.item
    base, num_drafted = item.num_kept_tokens + len(item.token_ids), len(item.draft_token_ids)
    if job.open.sampling.temperature == 0:
        before = (item.token_ids[-1], *item.draft_token_ids)
        return Scores(item.session, item.generation, base, TokenScores(tuple(follow(one, 1)[0] for one in before)))
    num_support = 0 if item.support is None else item.support.token_ids.size
    outside = np.full(num_drafted + 1, 1 - acceptance, dtype=np.float32)
    outside[-1] = 1
    drawn = np.array(follow(item.token_ids[-1], num_drafted + 1), dtype=np.int32)
    form = SparseScores(np.full(num_support, acceptance / SUPPORT, dtype=np.float32), outside, drawn)
    return Scores(item.session, item.generation, base, form)


def make_draft(*, busy_s: float, acceptance: float, note: Note) -> InProcessService[DraftCommand, DraftEvent]:
    """A draft that takes ``busy_s`` for a proposal."""
    executor: StandInExecutor[Extend, Proposal] = StandInExecutor(
        lambda job: propose(job, acceptance), busy_s=busy_s, note=note
    )
    return InProcessService(EngineCore(new_session_registry(), executor), describe_stand_in("draft"))


def make_target(
    *, busy_s: float, acceptance: float, note: Note, max_model_len: int = MAX_MODEL_LEN
) -> InProcessService[TargetCommand, TargetEvent]:
    """A target that takes ``busy_s`` to score."""
    executor: StandInExecutor[Score, Scores] = StandInExecutor(
        lambda job: score(job, acceptance), busy_s=busy_s, note=note
    )
    return InProcessService(EngineCore(new_session_registry(), executor), describe_stand_in("target", max_model_len))


def new_session_registry() -> SessionRegistry[PlainSequence]:
    """Sessions without KV."""
    return SessionRegistry(PlainSequences(), Limits(VOCAB_SIZE, MAX_MODEL_LEN, trims=False))


def describe_stand_in(role: str, max_model_len: int = MAX_MODEL_LEN) -> ModelDescription:
    """The description of a stand-in."""
    return ModelDescription(
        role=role,
        model_name=f"stand-in {role}",
        architecture="",
        vocab_size=VOCAB_SIZE,
        num_token_ids=VOCAB_SIZE,
        max_model_len=max_model_len,
        version=__version__,
    )
