"""A controller that drafts nothing: the target beside a head does what it does without one, forward by forward."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.config.fields import DraftMethod
from outrider.model_executor.model_runner import ModelRunner
from outrider.model_executor.row_batch import RowBatch
from outrider_coordinator.speculation.controller import DraftLengthController
from outrider_draft.proposers.head_executor import HeadExecutor
from tests.end_to_end.test_every_proposer import WRITE
from tests.end_to_end.waiting import all_free
from tests.support.pair_heads import build_mimo
from tests.support.stack import run_stack

pytestmark = pytest.mark.timeout(300)

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
