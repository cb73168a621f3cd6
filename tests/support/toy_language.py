"""A language model that can be enumerated: a function from tokens to a row of probabilities, in numpy.

Owns the distribution a token is drawn from (masks, bias, temperature, truncation; penalties and bad words are
refused), the noise and the draws. For tests: small vocabularies, float64.

Shape letters: ``V`` vocabulary, ``S`` support width, ``K`` draft length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.ports import Open
from outrider.randomness.philox_numpy import gumbel
from outrider.randomness.scalar import philox4x32
from outrider.randomness.streams import LARGEST_UNIT, UNIT, Stream, split_seed
from outrider.types import IntArray, JudgingRule, SamplingParams

Row = NDArray[np.float64]
Rows = Callable[[tuple[int, ...]], np.ndarray]

_MOST_CACHED = 200_000
_FEW_IDS = 64
"""Up to here plain Python makes noise faster than arrays do."""


def is_greedy(open_: Open) -> bool:
    return open_.judging_rule is JudgingRule.GREEDY


def is_coupled(open_: Open) -> bool:
    return open_.judging_rule is JudgingRule.COUPLED


class ToyLanguage:
    """``rows(tokens)`` gives the probabilities [V] of the token after ``tokens``; it must be a pure function."""

    def __init__(self, rows: Rows, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._rows = rows
        self._raw: dict[tuple[int, ...], Row] = {}
        self._laws: dict[tuple[object, ...], Row] = {}

    def raw(self, tokens: tuple[int, ...]) -> Row:  # -> [V]
        """The model's own distribution."""
        row = self._raw.get(tokens)
        if row is None:
            row = np.asarray(self._rows(tokens), dtype=np.float64)
            if row.shape != (self.vocab_size,) or not math.isclose(row.sum(), 1.0, rel_tol=1e-6):
                raise ValueError(f"rows({tokens}) should be {self.vocab_size} probabilities")
            self._remember(self._raw, tokens, row)
        return row

    def distribution(self, open_: Open, tokens: tuple[int, ...]) -> Row:  # -> [V]
        """The distribution the next token is drawn from; at temperature 0 the masked one, for its argmax."""
        bans_ends = len(tokens) - open_.prompt_length < open_.sampling.min_tokens
        banned = open_.banned_token_ids + (open_.eos_token_ids if bans_ends else ())
        key = (open_.sampling, open_.num_token_ids, banned, tokens)
        row = self._laws.get(key)
        if row is None:
            row = _shape(self.raw(tokens), open_.sampling, open_.num_token_ids, banned)
            self._remember(self._laws, key, row)
        return row

    @staticmethod
    def _remember(cache: dict, key: tuple, row: Row) -> None:  # type: ignore[type-arg]
        if len(cache) >= _MOST_CACHED:
            cache.clear()
        cache[key] = row


def _shape(raw: Row, sampling: SamplingParams, num_token_ids: int, banned: Sequence[int]) -> Row:
    _refuse_what_toys_lack(sampling)
    row = raw.copy()
    row[num_token_ids:] = 0.0
    row[list(banned)] = 0.0
    if sampling.allowed_token_ids:
        row[np.setdiff1d(np.arange(row.shape[0]), sampling.allowed_token_ids)] = 0.0
    for token_id, bias in sampling.logit_bias:
        row[token_id] *= math.exp(bias)
    if sampling.temperature not in (0, 1):
        row = (row / row.max()) ** (1.0 / sampling.temperature)
    row /= row.sum()
    return row if sampling.temperature == 0 else _truncate(row, sampling)


def _refuse_what_toys_lack(sampling: SamplingParams) -> None:
    wanted = (sampling.repetition_penalty != 1, sampling.frequency_penalty, sampling.presence_penalty)
    if any(wanted) or sampling.bad_words:
        raise NotImplementedError("toy languages know no penalties and no bad words")


def _truncate(row: Row, sampling: SamplingParams) -> Row:
    """min_p, then top_k, then top_p; ties at the border go to the lower id."""
    row = np.where(row >= sampling.min_p * row.max(), row, 0.0)
    order = np.argsort(-row, kind="stable")
    if sampling.top_k > 0:
        row[order[sampling.top_k :]] = 0.0
    row = row / row.sum()
    if sampling.top_p < 1:
        before = np.cumsum(row[order]) - row[order]
        row[order[before >= sampling.top_p]] = 0.0
    return np.asarray(row / row.sum())


def support_of(row: Row, *, mass: float, limit: int) -> IntArray:  # [V] -> [S]
    """The smallest set of likeliest ids with at least ``mass``, at most ``limit`` of them."""
    order = np.argsort(-row, kind="stable")
    before = np.cumsum(row[order]) - row[order]
    kept = order[(before < mass) & (row[order] > 0)][:limit]
    return kept.astype(np.int32)


def argmax(row: Row) -> int:
    return int(row.argmax())


def race(
    probs: Sequence[float], token_ids: Sequence[int], seed: int, stream: Stream, *, base: int, position: int
) -> int:
    """A token drawn in proportion to ``probs`` by a Gumbel race; a probability of 0 never wins."""
    noises = noise(seed, stream, base=base, position=position, token_ids=token_ids)
    best, best_score = -1, -math.inf
    for token_id, prob, noise_ in zip(token_ids, probs, noises, strict=True):
        score = math.log(prob) + noise_ if prob > 0 else -math.inf
        if score > best_score:
            best, best_score = token_id, score
    return best


def noise(seed: int, stream: Stream, *, base: int, position: int, token_ids: Sequence[int]) -> Sequence[float]:
    """Standard Gumbel noise of each token, by the contract's formula."""
    if len(token_ids) > _FEW_IDS:
        values: list[float] = gumbel(seed, int(stream), base, position, np.asarray(token_ids)).tolist()
        return values
    key = split_seed(seed)
    blocks: dict[int, tuple[int, int, int, int]] = {}
    noises = []
    for token_id in token_ids:
        block = blocks.get(token_id >> 2)
        if block is None:
            block = blocks[token_id >> 2] = philox4x32((token_id >> 2, position, base, int(stream)), key)
        unit = min((block[token_id & 3] + 0.5) * UNIT, LARGEST_UNIT)
        noises.append(-math.log(-math.log1p(-unit)))
    return noises
