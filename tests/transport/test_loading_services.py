"""A service that loads while it listens: it is waited for through its health, and taken up when it says SERVING."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from outrider.errors import LoadingError
from outrider.process.hosting import PendingService
from outrider.transport import remote
from outrider.transport.remote import RemoteTarget
from tests.support.scripted_ports import ToyTarget, random_rows
from tests.transport.conftest import Serve

V = 9
DEADLINE_S = 240.0


class _Counted(PendingService[Any, Any]):
    """Counts how often it is asked what it is."""

    def __init__(self) -> None:
        super().__init__()
        self.num_asked = 0

    async def describe(self) -> Any:
        self.num_asked += 1
        return await super().describe()


async def test_a_service_that_loads_is_waited_for_and_not_asked_again(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "LOADING_WAIT_S", DEADLINE_S)
    pending = _Counted()
    server = await serve("target", pending)
    await server.set_serving(False)
    port = RemoteTarget(server.address)
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(LoadingError):
            await port.describe()
        waiting = asyncio.create_task(port.describe())
        done, _ = await asyncio.wait([waiting], timeout=0.2)
        assert not done
        assert pending.num_asked == 1
        toy: Any = ToyTarget(random_rows(V, seed=1), V)
        pending.loaded = toy
        await server.set_serving(True)
        assert (await waiting).model_name == toy.description.model_name
    assert pending.num_asked == 2


async def test_a_service_whose_health_says_nothing_is_asked_again(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "LOADING_WAIT_S", 0.05)
    pending = _Counted()
    server = await serve("target", pending)
    await server.set_serving(False)
    port = RemoteTarget(server.address)
    async with asyncio.timeout(DEADLINE_S):
        for _ in range(3):
            with pytest.raises(LoadingError):
                await port.describe()
    assert pending.num_asked == 3
