"""Every head over hidden states among real services: users get what the target says, and a head that knows the text is
as often right over the states of a target that two processes share. ``test_every_proposer`` has what holds for all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.draft_service.test_state_heads import medusa, speculator
from tests.end_to_end.waiting import all_free
from tests.support.dflash import build_dflash
from tests.support.eagle3 import build_eagle3, fit_eagle3
from tests.support.pair_heads import build_eagle
from tests.support.stack import run_stack
from tests.support.tiny_models import cached_tiny_model

pytestmark = pytest.mark.timeout(300)

TARGET = cached_tiny_model("llama", seed=1)
REQUESTS: list[dict[str, Any]] = [
    {"prompt": "abcabcabc", "temperature": 0},
    {"prompt_token_ids": list(range(90)), "temperature": 0, "seed": 2},
    {"prompt": "Grüße, 世界", "temperature": 1.0, "acceptance_method": "coupled", "seed": 3},
]
HEADS: dict[str, Callable[[Path], object]] = {
    "dflash": build_dflash,
    "eagle": build_eagle,
    "medusa": medusa,
    "mlp_speculator": speculator,
}


class Played(NamedTuple):
    """Results of users, and outcomes of the drafts."""

    token_ids: list[Any]
    num_drafted: int
    num_accepted: int


async def play(method: str, draft: Path | None, **target_settings: Any) -> Played:
    of_draft = {"method": method, "page_size": 4, "max_batched_tokens": 24, "target_model": str(TARGET)}
    async with run_stack(
        TARGET, draft, wire=False, draft_settings=of_draft if draft else None, draft_length="fixed",
        num_speculative_tokens=3, target_settings={"page_size": 4, "max_batched_tokens": 32, **target_settings},
        draft_timeout_ms=60_000,
    ) as stack:  # fmt: skip
        if size := target_settings.get("tensor_parallel_size"):
            assert (await stack.target.describe()).tensor_parallel_size == size
        options = [{"max_tokens": 20, "ignore_eos": True, **one} for one in REQUESTS]
        results = await asyncio.gather(*(stack.generate(**one) for one in options))
        await all_free(stack)
    stats = [result.speculation for result in results]
    return Played(
        [result.token_ids for result in results],
        sum(one.num_draft_tokens for one in stats),
        sum(one.num_accepted_tokens for one in stats),
    )


@cache
def plain() -> list[Any]:
    return asyncio.run(play("none", None)).token_ids


@pytest.mark.parametrize("method", ["dflash", "eagle", "medusa", "mlp_speculator"])
def test_users_get_what_the_target_says(tmp_path: Path, method: str) -> None:
    HEADS[method](tmp_path / "head")
    found = asyncio.run(play(method, tmp_path / "head"))
    assert found.token_ids == plain()
    assert found.num_drafted > 20


def test_a_target_of_two_processes_hands_out_the_same_states(tmp_path: Path) -> None:
    """A head that knows the target's text by heart from its states is as often right over two processes' states."""
    prompt = REQUESTS[1]["prompt_token_ids"]
    fit_eagle3(build_eagle3(tmp_path, draft_vocab_size=272), TARGET, [[*prompt, *plain()[1]]])
    alone, shared = (asyncio.run(play("eagle3", tmp_path, device="cpu", tensor_parallel_size=size)) for size in (1, 2))
    assert shared.token_ids == alone.token_ids == plain()
    assert alone.num_accepted >= 8
    assert abs(shared.num_accepted - alone.num_accepted) <= 1  # of near ties
