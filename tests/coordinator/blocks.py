"""Toy services over a language of blocks, quick enough for a hundred thousand draws through the real loop.

A message of many sessions is computed in one go. ``tests.support.scripted_ports`` has the toys for everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outrider.ports import (
    DraftEvent,
    Extend,
    Open,
    Prepare,
    Proposal,
    Release,
    Score,
    Scores,
    SessionLost,
    TargetCommand,
    TargetEvent,
)
from outrider.randomness.philox_numpy import gumbel
from outrider.randomness.streams import Stream
from outrider.types import (
    JudgingRule,
    SparseEvidence,
    SparseScores,
    TokenScores,
)

Rows = NDArray[np.float32]  # [N, V]


class Language:
    """Next-token rows by what came before: the tokens since the last multiple of ``period`` behind the prompt.

    So the output falls into blocks of ``period`` tokens with one and the same joint distribution.
    """

    def __init__(self, vocab_size: int, *, period: int = 3, seed: int = 0, sharpness: float = 1.5) -> None:
        self.vocab_size, self.period, self._sharpness, self._seed = vocab_size, period, sharpness, seed
        self._rows: dict[tuple[int, ...], Rows] = {}
        self.change: Callable[[Rows], Rows] | None = None

    def changed(self, change: Callable[[Rows], Rows]) -> Language:
        """A language whose logits are made from this one's."""
        other = Language(self.vocab_size, period=self.period, seed=self._seed, sharpness=self._sharpness)
        other.change = change
        return other

    def row(self, tokens: Sequence[int], prompt_length: int) -> Rows:
        """Log probabilities [V] of the token after ``tokens``."""
        since = max(0, len(tokens) - prompt_length) % self.period
        block = tuple(tokens[len(tokens) - since :])
        found = self._rows.get(block)
        if found is None:
            key = [self._seed, *(token + 1 for token in block)]
            drawn = np.random.default_rng(key).normal(size=self.vocab_size) * self._sharpness
            logits = drawn.astype(np.float32)
            found = self._rows[block] = log_softmax(logits if self.change is None else self.change(logits))
        return found

    def joint(self, length: int) -> NDArray[np.float64]:
        """The exact probabilities of all blocks of ``length`` tokens, [V ** length]."""
        blocks: list[tuple[int, ...]] = [()]
        probs = np.ones(1)
        for _ in range(length):
            rows = np.stack([np.exp(self.row(block, 0).astype(np.float64)) for block in blocks])
            probs = (probs[:, None] * rows / rows.sum(axis=1, keepdims=True)).reshape(-1)
            blocks = [(*block, token) for block in blocks for token in range(self.vocab_size)]
        return probs


def log_softmax(logits: Rows) -> Rows:
    shifted = logits - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()), dtype=np.float32)


@dataclass(slots=True)
class Held:
    open: Open
    generation: int
    tokens: list[int] = field(default_factory=list)

    def rewind(self, command: Extend | Score) -> SessionLost | None:
        assert command.generation > self.generation, "each command has a higher generation"
        self.generation = command.generation
        if command.num_kept_tokens > len(self.tokens):
            return SessionLost(command.session, command.generation, "too little is held")
        del self.tokens[command.num_kept_tokens :]
        self.tokens.extend(command.token_ids)
        return None


class BlockTarget:
    """Scores exactly, by every rule."""

    def __init__(self, language: Language) -> None:
        self.language = language
        self.sessions: dict[int, Held] = {}

    def handle(self, commands: Iterable[TargetCommand]) -> list[TargetEvent]:
        """One message in, its answers out."""
        events: list[TargetEvent] = []
        ready: list[tuple[Held, Score]] = []
        for command in commands:
            if isinstance(command, Open):
                self.sessions[command.session] = Held(command, command.generation)
            elif isinstance(command, Release):
                self.sessions.pop(command.session, None)
            elif isinstance(command, Prepare):
                continue  # leave to compute ahead, which is not made use of here
            elif (held := self.sessions.get(command.session)) is None:
                events.append(SessionLost(command.session, command.generation, "not open"))
            elif lost := held.rewind(command):
                events.append(lost)
            else:
                ready.append((held, command))
        return events + (self._score(ready) if ready else [])

    def _score(self, ready: Sequence[tuple[Held, Score]]) -> list[Scores]:
        rows, keys = [], []
        for held, command in ready:
            base = len(held.tokens)
            held.tokens.extend(command.draft_token_ids)
            for position in range(base, len(held.tokens) + 1):
                rows.append(self.language.row(held.tokens[:position], held.open.prompt_length))
                keys.append((held.open.seed, base, position))
        logs = np.stack(rows)  # [N, V]
        outside = np.ones(logs.shape, dtype=bool)
        start = 0
        for _, command in ready:
            _exclude(outside[start:], command)
            start += len(command.draft_token_ids) + 1
        coupled = np.fromiter((h.open.judging_rule is JudgingRule.COUPLED for h, c in ready
                               for _ in range(len(c.draft_token_ids) + 1)), dtype=bool)  # fmt: skip
        noise = noise_of(keys, coupled, Stream.OUTSIDE, logs.shape[1])
        raced = np.where(outside | coupled[:, None], logs + noise, -np.inf).argmax(axis=1)
        answers, start = [], 0
        for held, command in ready:
            count = len(command.draft_token_ids) + 1
            part = slice(start, start + count)
            answers.append(_answer(held, command, logs[part], outside[part], raced[part]))
            start += count
        return answers


def _exclude(outside: NDArray[np.bool_], command: Score) -> None:
    if command.support is not None:
        rows = np.repeat(np.arange(len(command.support.counts)), command.support.counts)
        outside[rows, command.support.token_ids] = False


def noise_of(keys: Sequence[tuple[int, int, int]], coupled: NDArray[np.bool_], stream: Stream, width: int) -> Rows:
    seeds, bases, positions = (np.array(part, dtype=np.uint64)[:, None] for part in zip(*keys, strict=True))
    streams = np.where(coupled, int(Stream.COUPLED), int(stream))[:, None]
    return gumbel(seeds, streams, np.where(coupled[:, None], 0, bases), positions, np.arange(width))


def _answer(held: Held, command: Score, logs: Rows, outside: NDArray[np.bool_], raced: NDArray[np.int64]) -> Scores:
    opened = held.open
    count = len(command.draft_token_ids)
    probs = np.exp(logs)
    form: TokenScores | SparseScores
    if opened.judging_rule is JudgingRule.COUPLED:
        form = TokenScores(tuple(int(token) for token in raced))
    else:
        inside = np.empty(0, np.float32)
        if command.support is not None:
            rows = np.repeat(np.arange(count), command.support.counts)
            inside = probs[rows, command.support.token_ids]
        mass = (probs * outside).sum(axis=1)
        ids = np.where(outside.any(axis=1), raced, -1).astype(np.int32)
        form = SparseScores(inside, mass.astype(np.float32), ids)
    return Scores(command.session, command.generation, len(held.tokens) - count, form)


class BlockDraft:
    """Drafts from a language; draws from its likeliest ``support`` tokens and says so exactly."""

    def __init__(self, language: Language, *, support: int | None = None) -> None:
        self.language = language
        self.support = support or language.vocab_size
        self.sessions: dict[int, Held] = {}

    def handle(self, commands: Iterable[Open | Extend | Release]) -> list[DraftEvent]:
        """One message in, its answers out."""
        events: list[DraftEvent] = []
        ready: list[tuple[Held, Extend]] = []
        for command in commands:
            if isinstance(command, Open):
                self.sessions[command.session] = Held(command, command.generation)
            elif isinstance(command, Release):
                self.sessions.pop(command.session, None)
            elif (held := self.sessions.get(command.session)) is None:
                events.append(SessionLost(command.session, command.generation, "not open"))
            elif lost := held.rewind(command):
                events.append(lost)
            else:
                ready.append((held, command))
        return events + (self._propose(ready) if ready else [])

    def _propose(self, ready: Sequence[tuple[Held, Extend]]) -> list[DraftEvent]:
        drawn: list[list[int]] = [[] for _ in ready]
        parts: list[list[Rows]] = [[] for _ in ready]
        bases = [len(held.tokens) for held, _ in ready]
        for turn in range(max(command.draft_length for _, command in ready)):
            live = [i for i, (_, command) in enumerate(ready) if turn < command.draft_length]
            logs = np.stack([self.language.row(ready[i][0].tokens, ready[i][0].open.prompt_length) for i in live])
            reported, tokens = self._draw(logs, [ready[i][0] for i in live], [bases[i] for i in live])
            for i, row, token in zip(live, reported, tokens, strict=True):
                drawn[i].append(int(token))
                parts[i].append(row)
                ready[i][0].tokens.append(int(token))
        for (held, _), tokens_of in zip(ready, drawn, strict=True):
            del held.tokens[len(held.tokens) - (1 if tokens_of else 0) :]  # the last has no KV: the bonus-token hole
        return [
            Proposal(c.session, c.generation, base, tuple(d), self._evidence(h.open, np.array(p)))
            for (h, c), base, d, p in zip(ready, bases, drawn, parts, strict=True)
        ]

    def _draw(self, logs: Rows, sessions: Sequence[Held], bases: Sequence[int]) -> tuple[Rows, NDArray[np.int64]]:
        """(reported probabilities [N, V], drawn tokens [N])."""
        coupled = np.array([h.open.judging_rule is JudgingRule.COUPLED for h in sessions])
        probs = self.report(logs)
        keys = [(h.open.seed, base, len(h.tokens)) for h, base in zip(sessions, bases, strict=True)]
        noise = noise_of(keys, coupled, Stream.PROPOSAL, logs.shape[1])
        with np.errstate(divide="ignore"):
            distributions = np.where(coupled[:, None], logs, np.log(probs))
        return probs, (distributions + noise).argmax(axis=1)

    def report(self, logs: Rows) -> Rows:
        """The distributions to draw from [N, V]: the likeliest tokens, renormalised."""
        probs = np.exp(logs)
        if self.support < probs.shape[1]:
            floor = np.sort(probs, axis=1)[:, -self.support][:, None]
            probs = np.where(probs >= floor, probs, 0)
        return np.asarray(probs / probs.sum(axis=1, keepdims=True), dtype=np.float32)

    @staticmethod
    def _evidence(opened: Open, probs: Rows) -> SparseEvidence | None:
        if not opened.judging_rule.needs_evidence or not len(probs):
            return None
        where = np.nonzero(probs)
        return SparseEvidence((probs > 0).sum(axis=1).astype(np.int32), where[1].astype(np.int32), probs[where])


class LookupDraft(BlockDraft):
    """No model: what followed the latest earlier occurrence of the last token, drawn with certainty."""

    def _propose(self, ready: Sequence[tuple[Held, Extend]]) -> list[DraftEvent]:
        events: list[DraftEvent] = []
        certain = np.eye(self.language.vocab_size, dtype=np.float32)
        for held, command in ready:
            tokens = held.tokens
            found = next((i for i in range(len(tokens) - 2, -1, -1) if tokens[i] == tokens[-1]), len(tokens))
            drafted = tuple(tokens[found + 1 :][: command.draft_length])
            evidence = self._evidence(held.open, certain[list(drafted)])
            events.append(Proposal(command.session, command.generation, len(tokens), drafted, evidence))
            held.tokens.extend(drafted[:-1])
        return events
