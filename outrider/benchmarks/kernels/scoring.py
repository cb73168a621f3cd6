"""Cases of scoring: rows of logits that pass through a cache's size, in every form that acceptance asks for.

The floor is to read the logits once. On a CPU, where there are no kernels, the time is that of the way through PyTorch.
The gate compares with the reference on the CPU, answer by answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from outrider.benchmarks.kernels.cases import KernelCase, KernelPlace
from outrider.ports import Open
from outrider.sampling import ScoreOutcome, ScoreRequest, score
from outrider.sampling.scoring.fused import begin_scoring
from outrider.sampling.scoring.positions import lay_out
from outrider.sampling.session import SessionSampling
from outrider.types import JudgingRule, SamplingParams, SparseScores, Support, TokenScores

_FORMS: dict[str, tuple[JudgingRule, dict[str, Any]]] = {
    "greedy": (JudgingRule.GREEDY, {"temperature": 0.0}),
    "rejection": (JudgingRule.REJECTION, {"temperature": 0.7}),
    "coupled": (JudgingRule.COUPLED, {"temperature": 0.7}),
    "rejection, top-k 50": (JudgingRule.REJECTION, {"temperature": 0.7, "top_k": 50}),
    "rejection, top-p 0.9": (JudgingRule.REJECTION, {"temperature": 0.7, "top_p": 0.9}),
}
_BASE = 100
_PROBABILITIES = 1e-4
_NUM_SETS = 4


def scoring_cases(
    place: KernelPlace, *, num_rows: int, num_positions: int, support_size: int = 64
) -> Iterator[KernelCase]:
    """A case for each form: ``num_rows`` sessions of ``num_positions`` positions."""
    vocab_size = 128_256 if place.is_large else 2048
    logits = [3 * place.random(num_rows * num_positions, vocab_size) for _ in range(_NUM_SETS if place.is_large else 1)]
    generator = np.random.default_rng(0)
    for name, (rule, sampling) in _FORMS.items():
        opens = [_open(rule, sampling, seed, vocab_size) for seed in range(num_rows)]
        requests = [_request(opened, num_positions - 1, support_size, generator) for opened in opens]
        yield _case(place, name, logits, requests)


def _open(rule: JudgingRule, sampling: dict[str, Any], seed: int, vocab_size: int) -> Open:
    return Open(
        session=seed, generation=1, sampling=SamplingParams(**sampling), seed=seed, judging_rule=rule,
        prompt_length=_BASE, max_length=10 * _BASE, num_token_ids=vocab_size,
    )  # fmt: skip


def _request(opened: Open, num_drafts: int, support_size: int, generator: np.random.Generator) -> ScoreRequest:
    vocab_size = opened.num_token_ids
    drafts = tuple(generator.integers(0, vocab_size, num_drafts).tolist())
    if opened.judging_rule is not JudgingRule.REJECTION:
        return ScoreRequest(SessionSampling(opened), (0,) * _BASE, _BASE, drafts)
    if not num_drafts:
        return ScoreRequest(SessionSampling(opened), (0,) * _BASE, _BASE)
    ids = [generator.choice(vocab_size, support_size, replace=False) for _ in range(num_drafts)]
    counts = np.full(num_drafts, support_size, dtype=np.int32)
    return ScoreRequest(
        SessionSampling(opened), (0,) * _BASE, _BASE, drafts, Support(counts, np.concatenate(ids).astype(np.int32))
    )


def _case(place: KernelPlace, name: str, logits: list[torch.Tensor], requests: list[ScoreRequest]) -> KernelCase:
    rows, vocab_size = logits[0].shape

    def difference() -> float:
        few = requests[:2]
        given = logits[0][: sum(request.num_positions for request in few)]
        outcomes = begin_scoring(given, few).outcomes(), score(given.float().cpu(), few)
        return float(np.mean([_differ(*pair) for pair in zip(*outcomes, strict=True)]))

    return KernelCase(
        f"scoring {name}",
        f"{rows} x {vocab_size}",
        rows * vocab_size * logits[0].element_size(),
        _on_device(logits, requests)
        if place.is_large
        else lambda i: begin_scoring(logits[i % len(logits)], requests).outcomes(),
        difference,
        0.0,
        is_capturable=place.is_large,
    )


def _on_device(logits: list[torch.Tensor], requests: list[ScoreRequest]) -> Any:  # noqa: ANN401 - a callable
    from outrider.kernels.scoring import launching  # needs Triton

    starts = np.cumsum([0, *(request.num_positions for request in requests)]).tolist()
    rows = lay_out(requests, starts, range(len(requests)), logits[0].shape[-1]).rows
    described = launching.to_device(rows, logits[0].device)
    return lambda i: launching.launch_kernels(logits[i % len(logits)], described, rows)


def _differ(found: ScoreOutcome, truth: ScoreOutcome) -> bool:
    if isinstance(found.form, TokenScores):
        return found.form != truth.form
    if not isinstance(found.form, SparseScores) or not isinstance(truth.form, SparseScores):
        return True
    pairs = ((found.form.support_probs, truth.form.support_probs), (found.form.outside_mass, truth.form.outside_mass))
    close = all(np.allclose(ours, expected, rtol=_PROBABILITIES, atol=1e-30) for ours, expected in pairs)
    return not close or not np.array_equal(found.form.outside_token_ids, truth.form.outside_token_ids)
