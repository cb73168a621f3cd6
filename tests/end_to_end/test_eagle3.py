"""An EAGLE-3 draft among real services, in process and with every hop over gRPC: users get what the target says."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import PairMismatchError
from tests.end_to_end.waiting import all_free
from tests.support.eagle3 import build_eagle3
from tests.support.stack import run_stack
from tests.support.tiny_models import cached_tiny_model

TARGET = cached_tiny_model("llama", seed=1)
SCENARIO: list[dict[str, Any]] = [
    {"prompt": "x", "temperature": 0},
    {"prompt": "abcabcabc", "temperature": 0, "logprobs": 2, "prompt_logprobs": 1},
    {"prompt_token_ids": list(range(90)), "temperature": 0, "seed": 2},
    {"prompt_token_ids": list(range(90)), "temperature": 0, "num_speculative_tokens": 1},
    {"prompt": "Grüße, 世界", "temperature": 1.0, "acceptance_method": "coupled", "seed": 3},
    {"prompt": "none", "temperature": 0, "num_speculative_tokens": 0},
]


async def play(draft: Path | None, *, wire: bool, **settings: Any) -> tuple[list[Any], int]:
    """Results of users, and the number of drafted tokens."""
    more = {"method": "eagle3", "target_model": str(TARGET), "page_size": 4, "max_batched_tokens": 24}
    async with run_stack(
        TARGET, draft, wire=wire, draft_settings=more if draft else None,
        target_settings={"max_batched_tokens": 32, "page_size": 4}, draft_timeout_ms=60_000, **settings,
    ) as stack:  # fmt: skip
        options = [{"max_tokens": 24, "ignore_eos": True, **one} for one in SCENARIO]
        results = await asyncio.gather(*(stack.generate(**one) for one in options))
        await all_free(stack)
    held = [(one.token_ids, one.text, _ids(one.logprobs), one.usage.completion_tokens) for one in results]
    return held, sum(one.speculation.num_draft_tokens for one in results)


def _ids(logprobs: Any) -> Any:
    return None if logprobs is None else [entry.token_id for entry in logprobs]


@pytest.mark.parametrize("wire", [False, True])
def test_users_get_what_the_target_says(tmp_path: Path, wire: bool) -> None:
    plain, _ = asyncio.run(play(None, wire=False))
    found, num_drafted = asyncio.run(play(build_eagle3(tmp_path), wire=wire))
    assert found == plain
    assert num_drafted > 100


def test_users_get_what_the_target_says_under_a_controller(tmp_path: Path) -> None:
    plain, _ = asyncio.run(play(None, wire=False))
    found, _ = asyncio.run(play(build_eagle3(tmp_path), wire=False, draft_length="auto"))
    assert found == plain


def test_a_head_for_another_target_is_refused(tmp_path: Path) -> None:
    async def run() -> None:
        other = cached_tiny_model("llama", seed=1, hidden_size=64, head_dim=16)
        settings = {"method": "eagle3", "target_model": str(TARGET)}
        async with run_stack(other, build_eagle3(tmp_path), wire=False, draft_settings=settings):
            pass

    with pytest.raises(PairMismatchError, match="reads hidden states of 32 values"):
        asyncio.run(run())
