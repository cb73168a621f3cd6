"""FP8 keys and values in both models of the embedded pair: drafts change no token, and are accepted as often."""

from __future__ import annotations

import asyncio
import inspect
import textwrap
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from outrider.demo import PROMPTS
from outrider.generation import GenerationResult
from outrider.model_executor.input_batch import ForwardRow
from outrider.model_executor.loader.model import KVCacheDtype
from outrider.model_executor.model_runner import ModelRunner
from tests.end_to_end.test_preemption import value
from tests.support.stack import run_stack

PAIR = Path(__file__).parents[2] / "outrider" / "demo" / "pair"
NUM_TOKENS = 24
LARGEST_LOSS = 0.02


async def results(kind: str, *, with_draft: bool, **options: Any) -> list[GenerationResult]:
    """Results of all prompts, twice: the second time they begin with cached pages."""
    settings = {"kv_cache_dtype": kind, "page_size": 4, **options}
    async with run_stack(
        PAIR / "target", PAIR / "draft" if with_draft else None, wire=False, target_settings=settings,
        draft_settings=settings if with_draft else None, acceptance_method="coupled", draft_timeout_ms=60_000,
    ) as stack:  # fmt: skip
        found = []
        for _ in range(2):
            found += await asyncio.gather(
                *(
                    stack.generate(
                        prompt=prompt, max_tokens=NUM_TOKENS, ignore_eos=True, seed=index,
                        temperature=0.8 * (index % 2), **({"num_speculative_tokens": 4} if with_draft else {}),
                    )
                    for index, prompt in enumerate(PROMPTS)
                )
            )  # fmt: skip
        if "num_pages" in options:
            assert value(stack.target, "outrider_sessions_preempted_total") > 0
        return found


async def test_drafts_change_no_token_and_are_accepted_as_often() -> None:
    """Greedy and coupled, in one batch, with cached prefixes and under preemption."""
    alone = await results("fp8", with_draft=False)
    drafted = await results("fp8", with_draft=True)
    tight = await results("fp8", with_draft=True, num_pages=36)
    wide = await results("auto", with_draft=False)
    expected = [result.token_ids for result in alone]
    assert expected[: len(PROMPTS)] == expected[len(PROMPTS) :]
    assert [result.token_ids for result in drafted] == expected
    assert [result.token_ids for result in tight] == expected
    assert [result.token_ids for result in wide] != expected  # rounding shows
    assert sum(result.speculation.num_accepted_tokens for result in drafted) > NUM_TOKENS


def agreement(kind: KVCacheDtype, ids: list[int]) -> float:
    """Expected acceptance of a token that the draft draws, over a text."""
    probs = []
    for side in ("target", "draft"):
        runner = ModelRunner.load(PAIR / side, dtype="float32", page_size=16, num_pages=64, kv_cache_dtype=kind)
        logits = runner.forward([ForwardRow(runner.sequences.open(len(ids)), ids, len(ids))])
        probs.append(logits.float().softmax(-1).clone())
    return float(torch.minimum(*probs).sum(-1).mean())


def test_drafts_are_accepted_as_often() -> None:
    """Acceptance over one text: over texts that each generates, it differs by more than rounding costs."""
    source = inspect.getsource(textwrap)[:2500]
    ids = Tokenizer.from_file(str(PAIR / "target" / "tokenizer.json")).encode(source).ids
    wide, narrow = (agreement(kind, ids) for kind in ("auto", "fp8"))
    assert wide > 0.5
    assert narrow > wide - LARGEST_LOSS, (narrow, wide)
