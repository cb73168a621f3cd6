"""One target with several drafts and one draft with several targets, over tensor planes: the tokens of a run alone,
states on every connection, and each plane shown to people and in metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from outrider import AsyncClient
from outrider.cli.info import info_lines
from outrider.config import CoordinatorSettings, DraftSettings, TargetSettings
from outrider.process.discovery import RemoteReplicas
from outrider.tensor_plane.writer import PlaneWriter
from outrider.transport.remote import RemoteDraft, RemoteTarget
from outrider.transport.server import Server, serve_draft, serve_generation, serve_target
from outrider_coordinator.service import Coordinator
from outrider_draft.service import DraftService
from outrider_target.service import TargetService
from tests.end_to_end.waiting import eventually
from tests.support.eagle3 import build_eagle3
from tests.support.stack import run_stack
from tests.support.tiny_models import cached_tiny_model

TARGET = cached_tiny_model("llama", seed=1)
REQUESTS: list[dict[str, Any]] = [
    {
        "prompt_token_ids": list(range(number, number + 12)),
        "max_tokens": 40,
        "ignore_eos": True,
        "seed": number,
        **({"temperature": 1.0, "acceptance_method": "coupled"} if number % 2 else {"temperature": 0.0}),
    }
    for number in range(8)
]


class Fleet(NamedTuple):
    """Services, and a coordinator in front of them."""

    targets: list[TargetService]
    drafts: list[DraftService]
    coordinator: Coordinator
    client: AsyncClient

    def are_idle(self) -> bool:
        """True if no service has a session."""
        services: list[TargetService | DraftService] = [*self.targets, *self.drafts]
        return not any(service.num_sessions for service in services)


@contextlib.asynccontextmanager
async def fleet(head: Path, plane: str, *, num_targets: int, num_drafts: int) -> AsyncIterator[Fleet]:
    common = {"num_threads": 1, "page_size": 4}
    of_target = {"model": str(TARGET), "tensor_plane": plane, **common}
    of_draft = {"model": str(head), "method": "eagle3", "target_model": str(TARGET), **common}
    async with contextlib.AsyncExitStack() as cleanup:
        targets = [TargetService.load(TargetSettings.model_validate(of_target)) for _ in range(num_targets)]
        drafts = [DraftService.load(DraftSettings.model_validate(of_draft)) for _ in range(num_drafts)]
        served: list[list[Server]] = [
            [await serve_target(target, host="127.0.0.1", port=0) for target in targets],
            [await serve_draft(draft, host="127.0.0.1", port=0) for draft in drafts],
        ]
        services: list[TargetService | DraftService] = [*targets, *drafts]
        for service in services:
            cleanup.push_async_callback(service.close)
        for server in (*served[0], *served[1]):
            cleanup.push_async_callback(server.stop)
        names = [", ".join(server.address for server in servers) for servers in served]
        settings = {"draft_timeout_ms": 60_000, "draft_length": "fixed", "num_speculative_tokens": 3}
        coordinator = Coordinator(
            RemoteReplicas(names[0], RemoteTarget, interval_s=0.1),
            RemoteReplicas(names[1], RemoteDraft, interval_s=0.1),
            CoordinatorSettings.model_validate(settings),
        )
        cleanup.push_async_callback(coordinator.close)
        await coordinator.start()
        server = await serve_generation(coordinator, host="127.0.0.1", port=0)
        cleanup.push_async_callback(server.stop)
        yield Fleet(targets, drafts, coordinator, await cleanup.enter_async_context(AsyncClient(server.address)))


def value_of(service: Any, name: str, plane: str) -> float:
    """Value of a reading that has the plane for a label."""
    (found,) = [one.value for one in service.readings() if one.name == name and plane in str(one.labels)]
    return found  # type: ignore[no-any-return]


async def expected() -> list[tuple[int, ...]]:
    async with run_stack(TARGET, None, wire=False) as stack:
        return [(await stack.generate(**request)).token_ids for request in REQUESTS]


@pytest.mark.parametrize(("num_targets", "num_drafts"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("plane", ["shared_memory", "gloo"])
async def test_states_take_every_connection(
    tmp_path: Path, plane: str, num_targets: int, num_drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed: Counter[int] = Counter()
    put = PlaneWriter.put

    def counted(self: PlaneWriter, *arguments: Any) -> Any:
        found = put(self, *arguments)
        placed[id(self)] += len(found or ())
        return found

    monkeypatch.setattr(PlaneWriter, "put", counted)
    num_pairs = num_targets * num_drafts
    async with fleet(build_eagle3(tmp_path), plane, num_targets=num_targets, num_drafts=num_drafts) as made:
        planes = made.coordinator.services.peers.planes
        await eventually(lambda: [str(one.kind) for one in planes.reports()] == [plane] * num_pairs, "all planes open")
        results = await asyncio.gather(*(made.client.generate(**request) for request in REQUESTS))
        shown = [line for name, line in info_lines(await made.client.model_info()) if name == "hidden states"]
        assert value_of(made.coordinator, "outrider_tensor_planes", plane) == num_pairs
        for target in made.targets:
            assert value_of(target, "outrider_hidden_state_bytes_total", plane) > 0
            assert value_of(target, "outrider_hidden_state_bytes_total", "inline") == 0
        await eventually(made.are_idle, "idle services")
    assert [result.token_ids for result in results] == await expected()
    assert sum(result.speculation.num_draft_tokens for result in results) > 100
    assert len(placed) == num_pairs
    assert min(placed.values()) > 10
    assert len(shown) == num_pairs
    assert all(f": {plane} (" in line and "not inline" not in line for line in shown)
