"""From logits to tokens and scores: pure functions over a tensor ``[N, V]`` and plain descriptions of its rows.

Owns the sampling parameters' meaning, the drawing of tokens and the forms in which a target judges. Knows no pages, no
sessions, no links.
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
