"""Reference of a stream: its text alone on the target, and the token that follows each of its positions."""

from __future__ import annotations

import torch

from outrider.config import TargetSettings
from outrider.model_executor.distributed.runner import open_runner
from outrider.model_executor.input_batch import ForwardRow
from outrider.model_executor.model_runner import ModelRunner
from outrider.ports import Open
from outrider.sampling.rows import ScoreRequest
from outrider.sampling.scoring.fused import begin_scoring
from outrider.sampling.session import SessionSampling
from outrider.types import JudgingRule, SamplingParams, TokenScores
from tests.faults.invariance.load import Stream

_CHUNK = 512
_SCORED = 16
"""Positions of a text that are scored as one request's."""


class Alone:
    """The target without anybody else."""

    def __init__(self, settings: TargetSettings) -> None:
        self.runner: ModelRunner = open_runner(settings)

    def first_difference(self, stream: Stream) -> int | None:
        """Place in the output of the first token that is not the one of the text before it alone; None: all are."""
        text, begin = stream.text, len(stream.prompt)
        session = SessionSampling(opening(stream, self.runner.config.vocab_size))
        sequence = self.runner.sequences.open(len(text))
        try:
            for start in range(0, len(text) - 1, _CHUNK):
                stop = min(start + _CHUNK, len(text) - 1)
                logits = self.runner.forward([ForwardRow(sequence, text[start:stop], stop - start)])
                found = _next_tokens(logits, session, text, start)
                for place in range(max(start + 1, begin), stop + 1):
                    if found[place - start - 1] != text[place]:
                        return place - begin
        finally:
            self.runner.sequences.release(sequence)
        return None


def opening(stream: Stream, vocab_size: int) -> Open:
    """The session of the stream's whole text."""
    sampling = SamplingParams(temperature=stream.temperature)
    rule = JudgingRule.COUPLED if stream.temperature else JudgingRule.GREEDY
    return Open(0, 0, sampling, stream.seed, rule, len(stream.prompt), len(stream.text), vocab_size)


def _next_tokens(logits: torch.Tensor, session: SessionSampling, text: list[int], start: int) -> list[int]:
    """Token after each position from ``start`` on, by the rule of the session; drafts are what the text says."""
    stop = start + len(logits)
    requests = [
        ScoreRequest(session, text[:first], first, text[first : min(first + _SCORED - 1, stop)])
        for first in range(start + 1, stop + 1, _SCORED)
    ]
    found: list[int] = []
    for outcome in begin_scoring(logits, requests).outcomes():
        if outcome.error is not None:
            raise outcome.error
        if not isinstance(outcome.form, TokenScores):
            raise TypeError(f"scores of another form: {outcome.form}")
        found += outcome.form.token_ids
    return found
