"""The likeliest tokens of a row, cut by mass and by number: what a sparse draft token is drawn from.

Shape letters: ``N`` rows, ``V`` vocabulary, ``S`` tokens of a support.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels.ordering import largest, leading_mass

DEFAULT_SUPPORT_MASS = 0.999
DEFAULT_SUPPORT_LIMIT = 1024


@dataclass(frozen=True, slots=True)
class DraftingRules:
    """Settings of draft sampling that hold for all requests."""

    support_mass: float = DEFAULT_SUPPORT_MASS
    support_limit: int = DEFAULT_SUPPORT_LIMIT
    in_loops: bool = True
    """True if a GPU draws them in loops of its own."""
    takes_argmax: bool = False
    """True if the most likely token is taken, with one-hot evidence, where rejection or typical acceptance would have
    one sampled (``draft_sample_method: greedy``). Coupled draws keep the noise that they share with the target."""


DEFAULT_RULES = DraftingRules()


def choose_support(probs: Tensor, mass: float, limit: int) -> tuple[Tensor, Tensor, list[int]]:  # [N, V] float32
    """The smallest set of likeliest tokens with at least ``mass``, ``limit`` of them at most, renormalised.

    Gives probabilities [N, S] (0 past a row's width), ids [N, S] int64, both best first, and widths [N].
    """
    ordered, token_ids = largest(probs, min(limit, probs.shape[-1]))
    kept, sums = leading_mass(ordered, mass)
    num_kept = kept.sum(-1, keepdim=True)
    # A running sum's last value, so that a row's total does not depend on how wide its neighbours' supports are.
    total = sums.gather(-1, (num_kept - 1).clamp_(min=0))
    widths: list[int] = num_kept.squeeze(-1).tolist()
    width = max(1, *widths)
    scaled = (ordered[:, :width].to(torch.float64) / total).to(torch.float32)
    return scaled.masked_fill_(~kept[:, :width], 0.0), token_ids[:, :width], widths
