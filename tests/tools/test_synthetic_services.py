"""A synthetic pair through the real services over gRPC: what is accepted is what was asked for."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from synthetic_pair.command import make_pair
from synthetic_pair.shapes import SHAPES

from tests.support.stack import run_stack

ACCEPTANCE, NUM_REQUESTS, DRAFT_LENGTH = 0.75, 20, 4


@pytest.mark.parametrize(
    "num_tokens", [100, pytest.param(500, marks=pytest.mark.slow)], ids=["two thousand", "ten thousand"]
)
async def test_tokens_are_accepted_as_often_as_asked(num_tokens: int, tmp_path: Path) -> None:
    """Requests from places spread over the cycle: even the few go round all of it."""
    shapes = SHAPES["tiny-llama"], SHAPES["tiny-llama-draft"]
    pair = make_pair(tmp_path, *shapes, acceptance=ACCEPTANCE, seed=3, dtype=torch.float32, with_weights=False)
    settings = {"load_format": "synthetic", "num_pages": 1000}
    starts = np.linspace(0, len(pair.order), NUM_REQUESTS, endpoint=False).astype(np.int64)
    around = np.resize(pair.order, 2 * len(pair.order))
    async with run_stack(
        tmp_path / "target", tmp_path / "draft", wire=True, target_settings=settings, draft_settings=settings
    ) as stack:
        assert stack.client is not None
        info = await stack.client.model_info()
        results = await asyncio.gather(
            *(
                stack.generate(
                    prompt_token_ids=around[start : start + 1].tolist(),
                    max_tokens=num_tokens,
                    temperature=0,
                    num_speculative_tokens=DRAFT_LENGTH,
                )
                for start in starts
            )
        )
    assert (info.target_model, info.draft_model) == ("target (synthetic)", "draft (synthetic)")
    for start, result in zip(starts, results, strict=True):
        assert result.token_ids == tuple(around[start + 1 : start + 1 + num_tokens])
    stats = [result.speculation for result in results]
    accepted, judged = (
        sum(getattr(one, name) for one in stats) for name in ("num_accepted_tokens", "num_judged_tokens")
    )
    assert accepted / judged == pytest.approx(ACCEPTANCE, abs=0.01)
