"""The settings the shipped pair was made with.

Owns numbers only.
"""

from dataclasses import dataclass

from demo_pair.heads.eagle3_training import HeadRecipe
from demo_pair.training import TrainingRecipe

SEED = 20
TESTS_SHARE = 0.5
"""Share of the training rows that come from the library's test suites."""


@dataclass(frozen=True, slots=True)
class SampledText:
    """One batch of text drawn from the target for the drafts to learn from."""

    temperature: float
    rows: int
    prompt_tokens: int = 48
    new_tokens: int = 464


TARGET = TrainingRecipe(steps=4200, dropout=0.15, weight_decay=0.1, decay_share=0.7)
DRAFT = TrainingRecipe(
    steps=16000, weight_decay=0.02, decay_share=0.7, text_weight=0.0, teacher_weight=1.0, overlap_weight=3.0
)  # fmt: skip
DRAFT_TEXT = (SampledText(0.0, 2048), SampledText(0.7, 8192), SampledText(1.0, 8192))
SAMPLED_SHARE = 0.6
"""Share of the drafts' rows that come from text the target wrote."""
SHIPPED_DRAFT = "narrow"
"""Half the weights to read for each token, and accepted almost as often: on a CPU that decides."""
HEAD = HeadRecipe(steps=20000)
BLOCK = HeadRecipe(steps=40000, length=512, step_decay=0.8)
HEAD_TEXT = (SampledText(0.0, 4096, new_tokens=208), SampledText(0.7, 10240), SampledText(1.0, 20480))
"""Greedy text soon repeats itself: many short ones teach more. The hotter, the harder to draft: most is hot."""
HEAD_SAMPLED_SHARE = 0.85
"""Share of the head's rows that come from text the target wrote: what it will draft."""
