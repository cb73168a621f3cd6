"""Heads over hidden states among real services: over gRPC, over the states of a target that two processes share, and
beside a controller that drafts nothing. ``test_every_proposer`` has what holds for each, ``test_head_kinds`` good and
bad ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from outrider.config.fields import DraftMethod
from outrider.model_executor.model_runner import ModelRunner
from outrider.model_executor.row_batch import RowBatch
from outrider_coordinator.speculation.controller import DraftLengthController
from outrider_draft.proposers.head_executor import HeadExecutor
from tests.end_to_end.test_every_proposer import WRITE
from tests.end_to_end.waiting import all_free
from tests.support.eagle3 import build_eagle3, fit_eagle3
from tests.support.pair_heads import build_mimo
from tests.support.stack import run_stack
from tests.support.tiny_models import cached_tiny_model

TARGET = cached_tiny_model("llama", seed=1)
REQUESTS: list[dict[str, Any]] = [
    {"prompt": "abcabcabc", "temperature": 0, "logprobs": 2, "prompt_logprobs": 1},
    {"prompt_token_ids": list(range(90)), "temperature": 0, "seed": 2},
    {"prompt": "Grüße, 世界", "temperature": 1.0, "acceptance_method": "coupled", "seed": 3},
    {"prompt_token_ids": list(range(90)), "temperature": 0, "num_speculative_tokens": 1},
    {"prompt": "none", "temperature": 0, "num_speculative_tokens": 0},
]


class Played(NamedTuple):
    """Results that users hold, and outcomes of the drafts."""

    held: list[Any]
    token_ids: list[Any]
    num_drafted: int
    num_accepted: int


async def play_requests(draft: Path | None, *, wire: bool = False, **target_settings: Any) -> Played:
    of_draft = {"method": "eagle3", "page_size": 4, "max_batched_tokens": 24, "target_model": str(TARGET)}
    async with run_stack(
        TARGET, draft, wire=wire, draft_settings=of_draft if draft else None, draft_length="fixed",
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
        [(one.token_ids, one.text, _ids(one.logprobs), one.usage.completion_tokens) for one in results],
        [result.token_ids for result in results],
        sum(one.num_draft_tokens for one in stats),
        sum(one.num_accepted_tokens for one in stats),
    )


def _ids(logprobs: Any) -> Any:
    return None if logprobs is None else [entry.token_id for entry in logprobs]


@cache
def plain() -> Played:
    return asyncio.run(play_requests(None))


def test_over_grpc_users_get_what_the_target_says(tmp_path: Path) -> None:
    found = asyncio.run(play_requests(build_eagle3(tmp_path), wire=True))
    assert found.held == plain().held
    assert found.num_drafted > 20


def test_a_target_of_two_processes_hands_out_the_same_states(tmp_path: Path) -> None:
    """A head that knows the target's text by heart from its states is as often right over two processes' states."""
    prompt = REQUESTS[1]["prompt_token_ids"]
    fit_eagle3(build_eagle3(tmp_path, draft_vocab_size=272), TARGET, [[*prompt, *plain().token_ids[1]]])
    alone, shared = (asyncio.run(play_requests(tmp_path, device="cpu", tensor_parallel_size=size)) for size in (1, 2))
    assert shared.token_ids == alone.token_ids == plain().token_ids
    assert alone.num_accepted >= 8
    assert abs(shared.num_accepted - alone.num_accepted) <= 1  # of near ties


# A controller that drafts nothing: the target beside a head does what it does without one, forward by forward.


PAGE = 4
PROMPTS: list[dict[str, Any]] = [
    {"prompt_token_ids": list(range(3)), "temperature": 0.0},
    {"prompt_token_ids": list(range(90)), "temperature": 0.0},
    {"prompt_token_ids": list(range(40, 70)), "temperature": 1.0, "seed": 1, "acceptance_method": "coupled"},
]
Forwards = list[tuple[int, ...]]
"""Tokens of each row, forward by forward."""


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> Forwards:
    """Forwards of the target; hidden states and drafts fail the test."""
    found: Forwards = []
    forward = ModelRunner.forward_batch

    def counted(
        self: ModelRunner, batch: RowBatch, layers: Sequence[int] = (), **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert not layers, "nothing is drafted"
        found.append(tuple(batch.counts.tolist()))
        return forward(self, batch, **more)

    def refused(*_: object, **__: object) -> Any:
        raise AssertionError("nothing is drafted")

    monkeypatch.setattr(ModelRunner, "forward_batch", counted)
    monkeypatch.setattr(HeadExecutor, "begin", refused)
    return found


@pytest.fixture
def chooses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real controller, which stays with plain decoding."""
    monkeypatch.setattr(DraftLengthController, "is_speculating", False)
    monkeypatch.setattr(DraftLengthController, "choose", lambda _: False)


async def play(target: Path, draft: Path | None, method: str) -> list[Any]:
    """Results of users, one request after the other."""
    settings = {"method": method, "target_model": str(target), "page_size": PAGE} if draft else None
    async with run_stack(
        target, draft, wire=False, draft_settings=settings, draft_length="auto",
        target_settings={"page_size": PAGE, "max_batched_tokens": 32, "tensor_plane": "inline"},
    ) as stack:  # fmt: skip
        results = [await stack.generate(max_tokens=24, ignore_eos=True, **one) for one in PROMPTS]
        await all_free(stack)
        planes: Any = stack.target.planes
        assert not any(planes.sent_bytes.values())
    assert not any(one.speculation.num_draft_tokens for one in results)
    return [one.token_ids for one in results]


@pytest.mark.usefixtures("chooses_nothing")
@pytest.mark.parametrize("method", [DraftMethod.EAGLE3, DraftMethod.DFLASH])
def test_the_target_computes_what_it_does_without_a_head(
    method: DraftMethod, tmp_path: Path, forwards: Forwards
) -> None:
    target = build_mimo(tmp_path / "target")
    WRITE[method](tmp_path / "head")
    expected = asyncio.run(play(target, None, method))
    alone = list(forwards)
    forwards.clear()
    assert asyncio.run(play(target, tmp_path / "head", method)) == expected
    assert forwards == alone
    assert len(alone) > 3 * 24
