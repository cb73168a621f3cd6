"""Hidden states between real services over each tensor plane: the same tokens whatever carries them."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from outrider.config.fields import DraftMethod
from outrider_coordinator.session import draft_side, hidden_states
from outrider_draft.proposers.head_executor import HeadExecutor
from outrider_target.executor import TargetExecutor
from tests.draft_service.test_state_heads import medusa
from tests.end_to_end.test_every_proposer import WRITE
from tests.end_to_end.waiting import DEADLINE_S, all_free, eventually
from tests.support.eagle3 import build_eagle3
from tests.support.pair_heads import build_mimo
from tests.support.stack import Stack, run_stack
from tests.support.tiny_models import cached_tiny_model
from tests.tensor_plane.peers import holdings

HEADS = [DraftMethod.EAGLE, DraftMethod.EAGLE3, DraftMethod.MTP, DraftMethod.DFLASH]
TOKENS: tuple[dict[str, Any], ...] = ({"temperature": 0}, {"temperature": 1.0, "acceptance_method": "coupled"})
TARGET = cached_tiny_model("llama", seed=1)
SCENARIO: list[dict[str, Any]] = [
    {"prompt": "abcabcabc", "temperature": 0},
    {"prompt_token_ids": list(range(90)), "temperature": 0},
    {"prompt": "Grüße, 世界", "temperature": 1.0, "seed": 3},
    {"prompt": "x", "temperature": 0.8, "acceptance_method": "coupled", "seed": 4},
]


def reports(stack: Stack) -> list[str]:
    """Kinds of plane between the coordinator's pairs."""
    return [str(report.kind) for report in stack.coordinator.services.peers.planes.reports()]


def stack_of(method: str, draft: Path, plane: str, *, wire: bool) -> AbstractAsyncContextManager[Stack]:
    return run_stack(
        TARGET, draft, wire=wire,
        draft_timeout_ms=60_000,
        draft_settings={"method": method, "target_model": str(TARGET), "max_batched_tokens": 24},
        target_settings={"max_batched_tokens": 32, "page_size": 4, "tensor_plane": plane},
    )  # fmt: skip


async def results_of(stack: Stack) -> tuple[list[Any], dict[str, int]]:
    """Results of users, and bytes by kind of plane."""
    options = [{"max_tokens": 24, "ignore_eos": True, **one} for one in SCENARIO]
    results = await asyncio.gather(*(stack.generate(**one) for one in options))
    await all_free(stack)
    planes: Any = stack.target.planes
    return [(one.token_ids, one.speculation.num_accepted_tokens) for one in results], dict(planes.sent_bytes)


async def play(method: str, draft: Path, plane: str, *, wire: bool) -> tuple[list[Any], dict[str, int]]:
    """Results of users over a plane that is open."""
    async with stack_of(method, draft, plane, wire=wire) as stack:
        if plane not in {"inline", "cuda_ipc"}:
            await eventually(lambda: reports(stack) == [plane], "the plane is open")
        return await results_of(stack)


@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_the_plane_decides_no_token(tmp_path: Path, method: str) -> None:
    draft = build_eagle3(tmp_path) if method == "eagle3" else tmp_path
    if method == "medusa":
        medusa(tmp_path)
    inline, sent = asyncio.run(play(method, draft, "inline", wire=False))
    assert sent["inline"] > 0
    for plane, wire in (("shared_memory", True), ("gloo", True), ("shared_memory", False)):
        found, sent = asyncio.run(play(method, draft, plane, wire=wire))
        assert found == inline
        assert sent[plane] > 0
        assert sent["inline"] == 0
    asyncio.run(eventually(lambda: holdings()[2] == 0, "no file in shared memory"))


@pytest.mark.parametrize("plane", ["inline", "shared_memory"])
def test_long_prompts_go_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plane: str) -> None:
    whole, _ = asyncio.run(play("eagle3", build_eagle3(tmp_path), plane, wire=False))
    ten_positions = 10 * 3 * 32 * 4
    monkeypatch.setattr(hidden_states, "MAX_FEED_BYTES", ten_positions)
    monkeypatch.setattr(draft_side, "MAX_FEED_BYTES", ten_positions)
    parts, _ = asyncio.run(play("eagle3", tmp_path, plane, wire=True))
    assert parts == whole


def test_a_plane_that_cannot_be_is_told_and_states_go_inline(tmp_path: Path) -> None:
    inline, _ = asyncio.run(play("eagle3", build_eagle3(tmp_path), "inline", wire=False))
    found, sent = asyncio.run(play("eagle3", build_eagle3(tmp_path), "cuda_ipc", wire=False))
    assert found == inline
    assert sent["inline"] > sent["cuda_ipc"] == 0


@pytest.mark.parametrize("opening", ["reader.open_reader", "negotiation.open_writer"])
async def test_a_handshake_that_hangs_keeps_no_request_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opening: str
) -> None:
    """States go inline as long as an end of their plane hangs."""
    inline, _ = await play("eagle3", build_eagle3(tmp_path), "inline", wire=False)
    hangs, is_over = threading.Event(), threading.Event()

    def hang(*_: Any, **__: Any) -> None:
        hangs.set()
        is_over.wait()
        raise ConnectionError("the peer is gone")

    monkeypatch.setattr(f"outrider.tensor_plane.{opening}", hang)
    async with stack_of("eagle3", tmp_path, "gloo", wire=True) as stack:
        await eventually(hangs.is_set, "a handshake")
        try:
            async with asyncio.timeout(DEADLINE_S):
                found, sent = await results_of(stack)
        finally:
            is_over.set()  # before the services wait for their threads
    assert found == inline
    assert sent["inline"] > sent["gloo"] == 0


def counting_steps(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Steps that each side took as columns, and their sessions."""
    count: Counter[str] = Counter()

    def counted(kind: type[Any], name: str) -> None:
        start = kind.start_step

        def start_step(self: Any, step: Any, *batch: Any) -> Any:
            count[name] += 1
            count[f"{name} sessions"] += len(step)
            return start(self, step, *batch)

        monkeypatch.setattr(kind, "start_step", start_step)

    counted(HeadExecutor, "draft")
    counted(TargetExecutor, "target")
    return count


async def play_many(method: DraftMethod, folders: Path, plane: str, *samplings: dict[str, Any]) -> list[Any]:
    """Results of requests that decode together."""
    target = folders / "target"
    settings = {"method": method, "target_model": str(target)}
    async with run_stack(
        target, target if method is DraftMethod.MTP else folders / method, wire=True, draft_timeout_ms=60_000,
        draft_ahead="in_turn",  # begun proposals may have fewer tokens than are asked for
        draft_settings=settings, target_settings={"tensor_plane": plane},
    ) as stack:  # fmt: skip
        if plane != "inline":
            await eventually(lambda: reports(stack) == [plane], "the plane is open")
        requests = [
            {
                "prompt_token_ids": list(range(number, number + 6)),
                "max_tokens": 40 + number,
                "ignore_eos": True,
                "seed": number,
                **samplings[number % len(samplings)],
            }
            for number in range(9)
        ]
        results = await asyncio.gather(*(stack.generate(**one) for one in requests))
        await all_free(stack)
    return [(one.token_ids, one.speculation.num_accepted_tokens) for one in results]


SPARSE: tuple[dict[str, Any], ...] = ({"temperature": 1.0},)
CASES = [
    *((method, "shared_memory", TOKENS) for method in HEADS),
    *((method, "gloo", SPARSE) for method in (DraftMethod.EAGLE3, DraftMethod.DFLASH)),
]
"""Token by token and block by block, heads send and take states of sampled steps in one way."""


@pytest.mark.parametrize(("method", "plane", "samplings"), CASES)
def test_steps_of_many_sessions_go_as_columns(
    method: DraftMethod,
    plane: str,
    samplings: tuple[dict[str, Any], ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build_mimo(tmp_path / "target")
    if method in WRITE:
        WRITE[method](tmp_path / method)
    count = counting_steps(monkeypatch)
    plain = asyncio.run(play_many(method, tmp_path, "inline", *samplings))
    assert count["draft"] == 0
    count.clear()
    assert asyncio.run(play_many(method, tmp_path, plane, *samplings)) == plain
    assert min(count["draft"], count["target"]) > 5, count
    # On a busy machine some are late, and steps of few sessions, or one, are columns too.
    assert count["draft sessions"] > 2 * count["draft"], count
