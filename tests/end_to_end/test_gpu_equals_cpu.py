"""The same pair, seeds and requests on a GPU and on the CPU, in float32: the same tokens.

A greedy token may differ where the reference's two likeliest are within 1e-4 of each other, and every difference is
looked at. A sampled one differs only where a coin falls within rounding of its bound, which is as rare.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from outrider.demo import DRAFT, TARGET
from outrider.generation import GenerationResult
from tests.support.stack import Stack, run_stack

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

TEXTS = (
    "def load(path):\n",
    "class Queue:\n    def put(self, item):\n",
    "import os\nimport sys\n\n",
    "for i in range(",
)
MAX_TOKENS = 48
LENGTHS = (0, 1, 4, 7)
TIE = 1e-4
METHODS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "rejection": {"temperature": 0.8, "acceptance_method": "rejection"},
    "rejection, nucleus": {"temperature": 1.0, "top_p": 0.9, "acceptance_method": "rejection"},
    "coupled": {"temperature": 0.8, "acceptance_method": "coupled"},
    "typical": {"temperature": 0.8, "acceptance_method": "typical"},
}


def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in TEXTS]


def settings(device: str) -> dict[str, Any]:
    return {"device": device, "dtype": "float32", "num_pages": 512, "max_model_len": 256}


async def outputs(stack: Stack, options: dict[str, Any]) -> list[GenerationResult]:
    """Sixteen requests at once, draft lengths of all kinds."""
    requests = [(prompt, length, 7 * index) for index, prompt in enumerate(prompts()) for length in LENGTHS]
    return await asyncio.gather(
        *(
            stack.generate(
                prompt_token_ids=prompt,
                max_tokens=MAX_TOKENS,
                ignore_eos=True,
                seed=seed,
                num_speculative_tokens=length,
                **options,
            )
            for prompt, length, seed in requests
        )
    )


async def test_tokens_on_a_gpu_are_those_on_the_cpu() -> None:
    found: dict[str, dict[str, list[GenerationResult]]] = {}
    for device in ("cuda", "cpu"):
        async with run_stack(
            TARGET,
            DRAFT,
            wire=False,
            target_settings=settings(device),
            draft_settings=settings(device),
            draft_timeout_ms=60_000,
        ) as stack:
            found[device] = {name: await outputs(stack, options) for name, options in METHODS.items()}
            if device == "cpu":
                of_requests = [prompt for prompt in prompts() for _ in LENGTHS]
                for prompt, *both in zip(of_requests, found["cuda"]["greedy"], found["cpu"]["greedy"], strict=True):
                    await require_equal_or_tied(stack, prompt, both[0], both[1])
    for name in METHODS:
        if name != "greedy":
            for on_gpu, on_cpu in zip(found["cuda"][name], found["cpu"][name], strict=True):
                assert on_gpu.token_ids == on_cpu.token_ids, name


async def require_equal_or_tied(
    stack: Stack, prompt: list[int], ours: GenerationResult, reference: GenerationResult
) -> None:
    if ours.token_ids == reference.token_ids:
        return
    pairs = zip(ours.token_ids, reference.token_ids, strict=True)
    equal = next(index for index, (one, other) in enumerate(pairs) if one != other)
    common = [*prompt, *reference.token_ids[:equal]]
    after = await stack.generate(prompt_token_ids=common, max_tokens=1, temperature=0.0, logprobs=2)
    assert after.logprobs is not None
    (_, first), (_, second) = after.logprobs[0].top[:2]
    assert first - second < TIE, f"token {equal} differs and is no tie: {first - second} apart"
