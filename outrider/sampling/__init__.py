"""Sampler: tokens and scores from logits, as pure functions over a tensor ``[N, V]`` and descriptions of its rows.

Owns the meaning of the sampling parameters, the drawing of tokens, and what each acceptance rule needs of the target.
"""

from outrider.sampling.logits_processors.process import process_logits
from outrider.sampling.logprobs import prompt_logprobs
from outrider.sampling.proposing import Drawn, propose
from outrider.sampling.rows import LogitRow
from outrider.sampling.scoring.score import ScoreOutcome, ScoreRequest, score

__all__ = [
    "Drawn",
    "LogitRow",
    "ScoreOutcome",
    "ScoreRequest",
    "process_logits",
    "prompt_logprobs",
    "propose",
    "score",
]
