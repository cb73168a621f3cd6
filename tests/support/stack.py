"""All three services on one event loop, with real models: in process, or with every hop over gRPC."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider import AsyncClient
from outrider.cli.stack.held_ports import HeldPort
from outrider.client.requests import build_request
from outrider.config import CoordinatorSettings, DraftSettings, TargetSettings
from outrider.generation import Delta, GenerationResult
from outrider.ports import Draft, Target
from outrider.transport.remote import RemoteDraft, RemoteTarget
from outrider.transport.server import serve_draft, serve_generation, serve_target
from outrider_coordinator.service import Coordinator
from outrider_draft.service import DraftService
from outrider_target.service import TargetService


@dataclass
class Stack:
    """A running stack, as a test holds it."""

    target: TargetService
    draft: DraftService | None
    coordinator: Coordinator
    client: AsyncClient | None
    """None when everything runs in process."""
    draft_server: Any = None
    target_server: Any = None
    addresses: dict[str, str] = field(default_factory=dict)

    async def generate(self, **options: Any) -> GenerationResult:
        """One generation through the SDK, or straight at the coordinator when there is no wire."""
        if self.client is not None:
            made: GenerationResult = await self.client.generate(**options)
            return made
        last = [delta async for delta in self.stream(**options)][-1]
        assert last.result is not None
        return last.result

    async def stream(self, **options: Any) -> AsyncGenerator[Delta, None]:
        """The same, streamed."""
        if self.client is not None:
            deltas = self.client.stream(**options)
        else:
            request, timeout = build_request(options)  # type: ignore[arg-type]
            deltas = self.coordinator.generate_stream(request, deadline_s=timeout)
        async with contextlib.aclosing(deltas):
            async for delta in deltas:
                yield delta

    def num_pages_used(self) -> tuple[int, int]:
        """Used pages of target and draft; where none are, nothing is under way there, and the books are checked."""
        used = []
        for service in (self.target, self.draft):
            runner = None if service is None else service.runner
            if runner is None:
                used.append(0)
                continue
            used.append(runner.sequences.pool.num_used)
            if not used[-1]:
                runner.sequences.check_integrity()
        return used[0], used[1]


@contextlib.asynccontextmanager
async def run_stack(
    target: Path,
    draft: Path | str | None = None,
    *,
    wire: bool,
    target_settings: dict[str, Any] | None = None,
    draft_settings: dict[str, Any] | None = None,
    **coordinator_settings: Any,
) -> AsyncIterator[Stack]:
    """Run a target with a draft, which is a folder, a method without a model or nothing; ``wire``: over gRPC.

    Draft lengths are fixed unless the settings say otherwise: what a step does then depends on no clock.
    """
    settings: dict[str, Any] = {"draft_length": "fixed", "num_speculative_tokens": 4} | coordinator_settings
    async with contextlib.AsyncExitStack() as cleanup:
        model = {"model": str(target), "num_threads": 1, "cost_profile_s": 0}
        target_service = TargetService.load(TargetSettings.model_validate(model | (target_settings or {})))
        cleanup.push_async_callback(target_service.close)
        draft_service = _load_draft(draft, draft_settings or {})
        if draft_service is not None:
            cleanup.push_async_callback(draft_service.close)
        stack = Stack(target_service, draft_service, None, None)  # type: ignore[arg-type]
        target_port: Target = target_service
        draft_port: Draft | None = draft_service
        if wire:
            target_port, draft_port = await _serve_services(stack, cleanup)
        coordinator = Coordinator(target_port, draft_port, CoordinatorSettings(**settings))
        cleanup.push_async_callback(coordinator.close)
        await coordinator.start()
        stack.coordinator = coordinator
        if wire:
            server = await serve_generation(coordinator, host="127.0.0.1", port=0)
            cleanup.push_async_callback(server.stop)
            stack.addresses["coordinator"] = server.address
            stack.client = await cleanup.enter_async_context(AsyncClient(server.address))
        yield stack


def _load_draft(draft: Path | str | None, settings: dict[str, Any]) -> DraftService | None:
    if draft is None:
        return None
    model = (
        {"method": draft} if isinstance(draft, str) else {"model": str(draft), "num_threads": 1, "cost_profile_s": 0}
    )
    return DraftService.load(DraftSettings.model_validate({**model, **settings}))


async def _serve_services(stack: Stack, cleanup: contextlib.AsyncExitStack) -> tuple[Target, Draft | None]:
    # Held for a server that is away and comes again.
    target_port = cleanup.enter_context(contextlib.closing(HeldPort())).number
    stack.target_server = await serve_target(
        stack.target, host="127.0.0.1", port=target_port, admit_channel=stack.target.admit_channel
    )
    cleanup.push_async_callback(_stop, stack, "target_server")
    stack.addresses["target"] = stack.target_server.address
    if stack.draft is None:
        return RemoteTarget(stack.addresses["target"]), None
    draft_port = cleanup.enter_context(contextlib.closing(HeldPort())).number
    stack.draft_server = await serve_draft(stack.draft, host="127.0.0.1", port=draft_port)
    cleanup.push_async_callback(_stop, stack, "draft_server")
    stack.addresses["draft"] = stack.draft_server.address
    return RemoteTarget(stack.addresses["target"]), RemoteDraft(stack.addresses["draft"])


async def _stop(stack: Stack, name: str) -> None:
    """The server of that name by now: a test may have put another in its place."""
    await getattr(stack, name).stop()
