"""A toy target that scores and a toy draft that proposes, exactly as the contract says, in plain numpy.

Each is the ``ToyCore`` of one link. Shape letters: ``K`` draft length, ``S`` support width, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from outrider.ports import DraftEvent, Extend, Open, Proposal, Score, Scores, TargetEvent
from outrider.randomness.streams import Stream
from outrider.types import (
    CandidateLogprobs,
    Evidence,
    JudgingRule,
    LogprobsMode,
    ScoreForm,
    SparseEvidence,
    SparseScores,
    TokenScores,
    TypicalScores,
)
from tests.support.toy_language import Row, ToyLanguage, argmax, is_coupled, is_greedy, race, support_of
from tests.support.toy_sessions import Books, ToyCore, ToySession

Misreport = Callable[[SparseEvidence], SparseEvidence]

_LOG_FLOOR = 1e-5


def own_token(open_: Open, row: Row, position: int) -> int:
    """Greedy or coupled: what the model itself takes at ``position``."""
    if is_greedy(open_):
        return argmax(row)
    return race(row.tolist(), range(row.shape[0]), open_.seed, Stream.COUPLED, base=0, position=position)


class ToyDraftCore(ToyCore[DraftEvent]):
    """Proposes; a session past ``max_model_len`` gets an empty proposal."""

    def __init__(
        self,
        books: Books,
        language: ToyLanguage,
        *,
        max_model_len: int,
        support_mass: float,
        support_limit: int,
        proposal_stream: Stream,
        misreport: Misreport | None,
    ) -> None:
        super().__init__(books, language.vocab_size)
        self._language = language
        self._max_model_len = max_model_len
        self._support_mass = support_mass
        self._support_limit = support_limit
        self._proposal_stream = proposal_stream
        self._misreport = misreport

    def answer(self, session: ToySession, item: Extend) -> Proposal:
        open_, base = session.open, len(session.tokens)
        room = min(open_.max_length, self._max_model_len) - base
        drafted: list[int] = []
        rows: list[tuple[np.ndarray, np.ndarray]] = []
        for _ in range(max(0, min(item.draft_length, room))):
            row = self._language.distribution(open_, (*session.tokens, *drafted))
            drafted.append(self._draw(open_, row, base, base + len(drafted), rows))
        # KV of the last draft token is not there: the bonus-token hole.
        session.tokens += drafted[:-1]
        return Proposal(open_.session, session.generation, base, tuple(drafted), self._evidence(open_, rows))

    def _draw(self, open_: Open, row: Row, base: int, position: int, rows: list[tuple[np.ndarray, np.ndarray]]) -> int:
        if is_greedy(open_) or is_coupled(open_):
            return own_token(open_, row, position)
        ids = support_of(row, mass=self._support_mass, limit=self._support_limit)
        probs = (row[ids] / row[ids].sum()).astype(np.float32)
        rows.append((ids, probs))
        return race(probs.tolist(), ids.tolist(), open_.seed, self._proposal_stream, base=base, position=position)

    def _evidence(self, open_: Open, rows: list[tuple[np.ndarray, np.ndarray]]) -> Evidence:
        if not rows or not open_.judging_rule.needs_evidence:
            return None
        evidence = SparseEvidence(
            np.array([ids.shape[0] for ids, _ in rows], dtype=np.int32),
            np.concatenate([ids for ids, _ in rows]).astype(np.int32),
            np.concatenate([probs for _, probs in rows]).astype(np.float32),
        )
        return self._misreport(evidence) if self._misreport is not None else evidence


class ToyTargetCore(ToyCore[TargetEvent]):
    """Scores."""

    def __init__(self, books: Books, language: ToyLanguage) -> None:
        super().__init__(books, language.vocab_size)
        self._language = language

    def answer(self, session: ToySession, item: Score) -> Scores:
        open_, base = session.open, len(session.tokens)
        texts = [(*session.tokens, *item.draft_token_ids[:index]) for index in range(len(item.draft_token_ids) + 1)]
        rows = [self._language.distribution(open_, text) for text in texts]
        form = self._form(open_, texts, rows, item)
        session.tokens += item.draft_token_ids
        emitted = None if open_.num_logprobs is None else _emitted_ids(form, item)
        return Scores(
            open_.session,
            session.generation,
            base,
            form,
            logprobs=() if emitted is None else self._logprobs(open_, texts, emitted),
            prompt_logprobs=self._prompt_logprobs(session, item),
        )

    def _form(self, open_: Open, texts: list[tuple[int, ...]], rows: list[Row], item: Score) -> ScoreForm:
        base = len(texts[0])
        if is_greedy(open_) or is_coupled(open_):
            return TokenScores(tuple(own_token(open_, row, base + index) for index, row in enumerate(rows)))
        if open_.judging_rule is JudgingRule.TYPICAL:
            return _typical(open_, rows, item.draft_token_ids, base)
        return _sparse(open_, rows, _support_rows(item), base)

    def _logs(self, open_: Open, text: tuple[int, ...]) -> Row:  # -> [V]
        raw = open_.logprobs_mode is LogprobsMode.RAW
        row = self._language.raw(text) if raw else self._language.distribution(open_, text)
        with np.errstate(divide="ignore"):
            return np.log(row)

    def _logprobs(
        self, open_: Open, texts: list[tuple[int, ...]], emitted: list[list[int]]
    ) -> tuple[CandidateLogprobs, ...]:
        count = open_.num_logprobs or 0
        return tuple(_position(self._logs(open_, text), ids, count) for text, ids in zip(texts, emitted, strict=True))

    def _prompt_logprobs(self, session: ToySession, item: Score) -> tuple[CandidateLogprobs, ...]:
        open_ = session.open
        if open_.num_prompt_logprobs is None:
            return ()
        count = open_.num_prompt_logprobs
        end = min(item.num_kept_tokens + len(item.token_ids), open_.prompt_length)
        return tuple(
            _position(self._logs(open_, tuple(session.tokens[:place])), [session.tokens[place]], count)
            for place in range(max(item.num_kept_tokens, 1), end)
        )


def _support_rows(item: Score) -> list[np.ndarray]:
    """The support of each of the K+1 positions; the last is empty."""
    if item.support is None:
        return [np.zeros(0, dtype=np.int32)] * (len(item.draft_token_ids) + 1)
    rows = np.split(item.support.token_ids, np.cumsum(item.support.counts)[:-1])
    return [*rows, np.zeros(0, dtype=np.int32)]


def _sparse(open_: Open, rows: list[Row], supports: list[np.ndarray], base: int) -> SparseScores:
    inside, masses, drawn = [], [], []
    for index, (row, support) in enumerate(zip(rows, supports, strict=True)):
        inside.append(row[support])
        outside = row.copy()
        outside[support] = 0.0
        masses.append(float(outside.sum()))
        drawn.append(
            race(outside.tolist(), range(row.shape[0]), open_.seed, Stream.OUTSIDE, base=base, position=base + index)
        )
    return SparseScores(
        np.concatenate(inside).astype(np.float32),
        np.array(masses, dtype=np.float32),
        np.array(drawn, dtype=np.int32),
    )


def _typical(open_: Open, rows: list[Row], draft_token_ids: tuple[int, ...], base: int) -> TypicalScores:
    judged = rows[:-1]
    bonus = race(
        rows[-1].tolist(),
        range(rows[-1].shape[0]),
        open_.seed,
        Stream.OUTSIDE,
        base=base,
        position=base + len(judged),
    )
    return TypicalScores(
        np.array([row[token] for row, token in zip(judged, draft_token_ids, strict=True)], dtype=np.float32),
        np.array([-(row * np.log(row + _LOG_FLOOR)).sum() for row in judged], dtype=np.float32),
        np.array([argmax(row) for row in judged], dtype=np.int32),
        bonus,
    )


def _emitted_ids(form: ScoreForm, item: Score) -> list[list[int]]:
    """Every token that may be emitted at each position."""
    if isinstance(form, TokenScores):
        return [[token] for token in form.token_ids]
    if isinstance(form, SparseScores):
        supports = _support_rows(item)
        outside = [[token] if token >= 0 else [] for token in form.outside_token_ids.tolist()]
        return [[*support.tolist(), *token] for support, token in zip(supports, outside, strict=True)]
    if isinstance(form, TypicalScores):
        argmaxes = form.argmax_token_ids.tolist()
        own = [sorted({token, best}) for token, best in zip(item.draft_token_ids, argmaxes, strict=True)]
        return [*own, [form.bonus_token_id]]
    raise TypeError(f"{type(form).__name__} carries its own logprobs")


def _position(logs: Row, emitted: list[int], count: int) -> CandidateLogprobs:
    top = np.argsort(-logs, kind="stable")[:count]
    ranks = [1 + int((logs > logs[token]).sum()) for token in emitted]
    return CandidateLogprobs(
        np.array(emitted, dtype=np.int32),
        logs[emitted].astype(np.float32),
        np.array(ranks, dtype=np.int32),
        top.astype(np.int32),
        logs[top].astype(np.float32),
    )
