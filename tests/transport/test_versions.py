"""Links between versions: refused by either end, with both versions named, and tried again."""

from __future__ import annotations

import asyncio
import dataclasses

import grpc.aio
import pytest

from outrider import __version__
from outrider.config import CoordinatorSettings
from outrider.errors import ProtocolError
from outrider.generation import GenerationRequest
from outrider.transport.remote import RemoteDraft, RemoteTarget
from outrider.types import SamplingParams
from outrider.v1 import link_pb2
from outrider.v1.link_pb2_grpc import TargetServiceStub
from outrider_coordinator.service import Coordinator
from tests.support.coordinator_stats import stats_of
from tests.support.scripted_ports import ToyDraft, ToyTarget, random_rows
from tests.transport.conftest import Serve

ROWS, VOCAB_SIZE = random_rows(9), 9


@pytest.mark.parametrize("version", ["0.0.9", "99.1", "", "x" * 1000])
async def test_a_service_of_another_version_is_not_used(serve: Serve, version: str) -> None:
    target = ToyTarget(ROWS, VOCAB_SIZE)
    target.description = dataclasses.replace(target.description, version=version)
    server = await serve("target", target)
    port = RemoteTarget(server.address)
    with pytest.raises(ProtocolError, match="both must have the same version") as raised:
        await port.describe()
    assert __version__ in str(raised.value) and version[:40] in str(raised.value)


@pytest.mark.parametrize(("metadata", "named"), [([("outrider-version", "9")], "9"), ([], "0.1.0")])
async def test_a_coordinator_of_another_version_is_refused(
    serve: Serve, metadata: list[tuple[str, str]], named: str
) -> None:
    server = await serve("target", ToyTarget(ROWS, VOCAB_SIZE))
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = TargetServiceStub(channel).Attach(iter([link_pb2.TargetCommands()]), metadata=metadata)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
    assert f"this service runs Outrider {__version__}, and the coordinator {named}" in str(raised.value.details())


async def test_a_draft_of_another_version_is_used_once_it_is_upgraded(serve: Serve) -> None:
    draft = ToyDraft(ROWS, VOCAB_SIZE)
    of_this_version = draft.description
    draft.description = dataclasses.replace(of_this_version, version="0.0.9")
    target_server, draft_server = await serve("target", ToyTarget(ROWS, VOCAB_SIZE)), await serve("draft", draft)
    settings = CoordinatorSettings.model_validate({"draft_length": "fixed"})
    coordinator = Coordinator(RemoteTarget(target_server.address), RemoteDraft(draft_server.address), settings)
    await coordinator.start()
    request = GenerationRequest(prompt_token_ids=(1, 2), max_tokens=12, sampling=SamplingParams(temperature=0))

    async def generate() -> list[int]:
        return [token_id async for delta in coordinator.generate_stream(request) for token_id in delta.token_ids]

    try:
        without = await generate()
        assert (stats_of(coordinator).num_drafts, len(without)) == (0, 12)
        draft.description = of_this_version
        async with asyncio.timeout(120):
            while not stats_of(coordinator).num_drafts:
                await asyncio.sleep(0.01)
        assert await generate() == without
    finally:
        await coordinator.close()
