"""The correctness gate: greedy output with speculation must be greedy output without.

Owns the comparison. Equality is exact in float32. In bfloat16 a scoring pass and a single-token pass differ in the
last bits, so where two texts part, the model itself is asked how far apart the two tokens are: within the tolerance
that is a tie, anything else is a failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.benchmarks.serving.workload import Prompt
from outrider.client import AsyncClient
from outrider.errors import OutriderError


class OutputGateError(OutriderError):
    """Speculation changed the output: no figure is given."""


@dataclass(frozen=True, slots=True)
class GateReport:
    """Result of the correctness gate."""

    num_prompts: int
    num_tokens: int
    """Number of compared tokens, those after a tie left out."""
    num_ties: int


async def check_exactness(
    client: AsyncClient,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    num_speculative_tokens: int | None,
    tie_tolerance: float,
) -> GateReport:
    """Compare prompt by prompt; `OutputGateError` names the first token that differs and is no tie.

    `tie_tolerance` is a difference of log-probabilities.
    """
    num_tokens = num_ties = 0
    for prompt in prompts:
        ours, alone = [
            await _greedy(client, prompt, max_tokens=max_tokens, draft_length=length)
            for length in (num_speculative_tokens, 0)
        ]
        equal = _common_length(ours, alone)
        num_tokens += equal
        if not equal == len(ours) == len(alone):
            await _require_tie(client, (*prompt, *alone[:equal]), ours[equal:], alone[equal:], tie_tolerance)
            num_ties += 1
    return GateReport(len(prompts), num_tokens, num_ties)


async def _greedy(client: AsyncClient, prompt: Prompt, *, max_tokens: int, draft_length: int | None) -> tuple[int, ...]:
    result = await client.generate(
        prompt_token_ids=prompt,
        max_tokens=max_tokens,
        temperature=0.0,
        ignore_eos=True,
        num_speculative_tokens=draft_length,
    )
    return result.token_ids


async def _require_tie(
    client: AsyncClient, prefix: Prompt, ours: Sequence[int], alone: Sequence[int], tolerance: float
) -> None:
    where = f"after {len(prefix)} tokens"
    if not ours or not alone:
        raise OutputGateError(f"the outputs differ in length {where}")
    result = await client.generate(
        prompt_token_ids=prefix, max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=2, num_speculative_tokens=0
    )
    likeliest = dict(result.logprobs[0].top) if result.logprobs else {}
    gap = abs(likeliest.get(ours[0], float("-inf")) - likeliest.get(alone[0], float("inf")))
    if not gap <= tolerance:
        raise OutputGateError(
            f"with speculation token {ours[0]}, without it token {alone[0]} {where}; their log-probabilities are "
            f"{gap:.2g} apart, more than the tolerance {tolerance:g}"
        )


def _common_length(ours: Sequence[int], alone: Sequence[int]) -> int:
    shorter = min(len(ours), len(alone))
    return next((index for index in range(shorter) if ours[index] != alone[index]), shorter)
