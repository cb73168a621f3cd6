"""A runner under random steps: ragged forwards, rollbacks, forks, releases, pages short.

Owns the steps and the truth: now and then a text is computed anew from nothing and must say what the sequence that was
grown, cut and forked says. Pages must add up after every step.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from outrider.errors import OutOfPagesError
from outrider.kv_cache import KVSequence
from outrider.model_executor.input_batch import ForwardRow
from outrider.model_executor.model_runner import ModelRunner

MOST_SEQUENCES = 12
MOST_ROWS = 8
LENGTHS = (1, 1, 1, 2, 3, 5, 8, 9, 17, 40)
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.03}
"""Tolerances of logits, over the largest of them: one forward and several round differently."""


class RunnerSteps:
    """Random steps of one seed; ``AssertionError`` or ``IntegrityError`` where something is wrong."""

    def __init__(self, runner: ModelRunner, seed: int, *, checks_every: int = 10) -> None:
        self.runner = runner
        self.num_checks = 0
        self._random = random.Random(seed)
        self._live: list[KVSequence] = []
        self._checks_every = checks_every

    def run(self, num_steps: int) -> None:
        """Random steps; in the end everything is released and every page is free."""
        for step in range(num_steps):
            self._random.choice(
                [self._open, self._forward, self._forward, self._forward, self._cut, self._fork, self._release]
            )()
            self.runner.sequences.check_integrity()
            if step % self._checks_every == 0:
                self._check_one()
        for sequence in self._live:
            self.runner.sequences.release(sequence)
        self._live.clear()
        self.runner.sequences.check_integrity()
        assert self.runner.sequences.pool.num_used == 0

    def _open(self) -> None:
        if len(self._live) < MOST_SEQUENCES:
            self._add(lambda: self.runner.sequences.open(self._random.randint(1, self.runner.max_model_len)))

    def _fork(self) -> None:
        if self._live and len(self._live) < MOST_SEQUENCES:
            parent = self._random.choice(self._live)
            longest = self._random.randint(max(1, parent.length), self.runner.max_model_len)
            self._add(lambda: self.runner.sequences.fork(parent, longest))

    def _add(self, make: object) -> None:
        before = self.runner.sequences.pool.num_free
        try:
            self._live.append(make())  # type: ignore[operator]
        except OutOfPagesError:
            assert self.runner.sequences.pool.num_free == before

    def _forward(self) -> None:
        rows = [self._row(sequence) for sequence in self._random.sample(self._live, self._num_rows())]
        wanted = [row for row in rows if row is not None]
        if wanted and self._has_capacity([(row.sequence, len(row.token_ids)) for row in wanted]):
            logits = self.runner.forward(wanted)
            assert torch.isfinite(logits).all()

    def _has_capacity(self, growths: Sequence[tuple[KVSequence, int]]) -> bool:
        """True if there are pages for so many more tokens of each: a scheduler asks for no more than that."""
        manager = self.runner.sequences
        return sum(manager.pages_needed(sequence, count) for sequence, count in growths) <= manager.pool.num_free

    def _num_rows(self) -> int:
        return self._random.randint(0, min(MOST_ROWS, len(self._live)))

    def _row(self, sequence: KVSequence) -> ForwardRow | None:
        count = min(self._random.choice(LENGTHS), sequence.max_length - sequence.length)
        tokens = [self._random.randrange(self.runner.config.vocab_size) for _ in range(count)]
        return ForwardRow(sequence, tokens, self._random.randint(0, count)) if count else None

    def _cut(self) -> None:
        if self._live:
            sequence = self._random.choice(self._live)
            self.runner.sequences.truncate(sequence, self._random.randint(0, sequence.length))

    def _release(self) -> None:
        if self._live:
            self.runner.sequences.release(self._live.pop(self._random.randrange(len(self._live))))

    def _check_one(self) -> None:
        """One more token after a text that has been through a lot, and after the same text computed at once."""
        grown = [sequence for sequence in self._live if 0 < sequence.length < sequence.max_length]
        if not grown:
            return
        sequence, token = self._random.choice(grown), self._random.randrange(self.runner.config.vocab_size)
        text = [*sequence.token_ids, token]
        anew = self.runner.sequences.open(len(text))
        if not self._has_capacity([(sequence, 1), (anew, len(text))]):
            self.runner.sequences.release(anew)
            return
        said = self.runner.forward([ForwardRow(sequence, [token], 1)])
        truth = self.runner.forward([ForwardRow(anew, text, 1)])
        self.runner.sequences.release(anew)
        difference = float((said - truth).abs().max() / truth.abs().max())
        assert difference < TOLERANCES[self.runner.dtype], f"{difference} after {len(text)} tokens"
        self.num_checks += 1
