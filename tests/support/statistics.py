"""Exact distributions of tiny models, and how well draws follow them.

The distributions come from transformers and from a plain reading of what the sampling parameters mean, and share no
code with what is tested.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import chi2

from outrider.types import SamplingParams
from tests.support.tiny_models import load_reference

Doubles = NDArray[np.float64]

LEAST_EXPECTED = 5.0
"""Cells with fewer draws to be expected are put together: the chi-square distribution is a bad picture of thin ones."""


def sampled_probs(logits: Doubles, sampling: SamplingParams) -> Doubles:  # [V] -> [V]
    """The distribution that temperature, min-p, top-k and top-p, in this order, make of one row of logits."""
    probs = _softmax(logits / sampling.temperature)
    probs = np.where(probs < sampling.min_p * probs.max(), 0.0, probs)
    if sampling.top_k > 0:
        probs = np.where(probs < np.sort(probs)[-min(sampling.top_k, len(probs))], 0.0, probs)
    probs = probs / probs.sum()
    if sampling.top_p < 1:
        order = np.argsort(-probs, kind="stable")
        before = np.concatenate(([0.0], probs[order].cumsum()[:-1]))
        probs[order[before >= sampling.top_p]] = 0.0
    kept: Doubles = probs / probs.sum()
    return kept


def _softmax(logits: Doubles) -> Doubles:
    weights: Doubles = np.exp(logits - logits.max())
    total: Doubles = weights / weights.sum()
    return total


def reference_logits(folder: Path, texts: Sequence[Sequence[int]]) -> list[Doubles]:
    """Logits of each text after each of its tokens [T, V]; texts of one length are cheapest together."""
    model = load_reference(folder)
    with torch.inference_mode():
        return [model(torch.tensor([list(text)])).logits[0].double().numpy() for text in texts]


def joint_law(folder: Path, prompt: Sequence[int], sampling: SamplingParams, length: int) -> Doubles:
    """The exact probabilities of every continuation of ``length`` tokens, [V ** length], the first token leading."""
    model = load_reference(folder)
    size = int(model.config.vocab_size)
    probs = np.ones(1)
    for depth in range(length):
        texts = [[*prompt, *block] for block in itertools.product(range(size), repeat=depth)]
        with torch.inference_mode():
            logits = model(torch.tensor(texts)).logits[:, -1].double().numpy()  # [V ** depth, V]
        rows = np.stack([sampled_probs(row, sampling) for row in logits])
        probs = (probs[:, None] * rows).reshape(-1)
    return probs


def cells(blocks: Sequence[Sequence[int]], size: int) -> NDArray[np.int64]:
    """Counts of the continuations, in the order of ``joint_law``."""
    array = np.array(blocks, dtype=np.int64)  # [N, length]
    length = array.shape[1]
    return np.bincount(array @ size ** np.arange(length)[::-1], minlength=size**length)


def chi_square_p(observed: NDArray[np.int64], distribution: Doubles) -> float:
    """P-value of draws from ``distribution``; 0 when an impossible one was drawn."""
    if observed[distribution == 0].any():
        return 0.0
    seen, expected = observed[distribution > 0].astype(np.float64), distribution[distribution > 0] * observed.sum()
    order = np.argsort(expected)
    seen, expected = seen[order], expected[order]
    thin = int(np.searchsorted(expected, LEAST_EXPECTED))
    # All thin cells, and as many of the next as it takes, are one.
    while 0 < thin < len(expected) and expected[:thin].sum() < LEAST_EXPECTED:
        thin += 1
    if thin:
        seen = np.concatenate(([seen[:thin].sum()], seen[thin:]))
        expected = np.concatenate(([expected[:thin].sum()], expected[thin:]))
    assert len(expected) > 10, "too few cells for the test to see anything"
    return float(chi2.sf(((seen - expected) ** 2 / expected).sum(), len(expected) - 1))
