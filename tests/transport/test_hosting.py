"""The life of a service's process: in process with a scripted service, and as a real process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial

import pytest

from outrider.cli.stack.held_ports import hold_port
from outrider.config import DraftSettings
from outrider.config.fields import DraftMethod
from outrider.errors import ConfigError, UnavailableError
from outrider.ports import DraftCommand, DraftEvent, EventBatch, Opened, Proposal, Refused, Release
from outrider.process import hosting
from outrider.process.hosting import OnFailure, PendingService, host_service
from outrider.process.loading import LoadProgress
from outrider.process.watchdog import Watchdog
from outrider.transport.remote import RemoteDraft
from outrider.transport.server import Server, serve_draft
from outrider_draft.service import DraftService
from tests.support.core_driver import extend_item, open_session

DEADLINE_S = 240.0
HEALTH_NAME = "outrider.v1.DraftService"


def settings(**changes: object) -> DraftSettings:
    return DraftSettings.model_validate({"method": DraftMethod.NGRAM, "hang_timeout_s": 0, **changes})


class Hosted:
    """A hosted n-gram draft, with a hand on its loading and its engine."""

    def __init__(self, *, delay_s: float = 0.0, grace_s: float = DEADLINE_S) -> None:
        self.port = hold_port()
        self.may_load = threading.Event()
        self.may_load.set()
        self.loading = threading.Event()
        self.fail: OnFailure | None = None
        self.task = asyncio.create_task(
            host_service(
                self.listen,
                self._load,
                settings(drain_delay_s=delay_s, drain_grace_s=grace_s),
            )
        )

    @property
    def remote(self) -> RemoteDraft:
        return RemoteDraft(f"127.0.0.1:{self.port}")

    async def until_serving(self) -> None:
        await until(lambda: asyncio.to_thread(health_of, self.port, HEALTH_NAME), "SERVING")

    async def end(self) -> None:
        await asyncio.wait_for(self.task, DEADLINE_S)

    async def listen(self, pending: PendingService[DraftCommand, DraftEvent]) -> Server:
        return await serve_draft(pending, host="127.0.0.1", port=self.port)

    def _load(self, progress: LoadProgress, on_failure: OnFailure) -> DraftService:
        self.loading.set()
        while not self.may_load.wait(0.01):
            progress.weights(0, 1)
        self.fail = on_failure
        return DraftService.with_ngram(min_n=1, max_n=3, on_failure=on_failure)


async def until(ask: Callable[[], object], expected: str) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while await ask() != expected:  # type: ignore[misc]
            await asyncio.sleep(0.01)


def health_of(port: int, name: str) -> str:
    """Health as a plain client reads it; empty when nothing answers."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=name), timeout=20, wait_for_ready=True
            )
        except grpc.RpcError:
            return ""
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


@pytest.fixture
async def hosted() -> AsyncIterator[Hosted]:
    host = Hosted()
    yield host
    host.may_load.set()
    if not host.task.done():
        os.kill(os.getpid(), signal.SIGTERM)
    with contextlib.suppress(UnavailableError):
        await host.end()


def signal_self(number: signal.Signals = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


async def test_a_hang_is_told_by_health_while_the_engine_cannot_be_closed(
    hosted: Hosted, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs: list[Callable[[str], None]] = []

    class ToldWatchdog(Watchdog):
        def start(self) -> None:
            assert self._on_hang is not None
            hangs.append(self._on_hang)

    may_close, close = asyncio.Event(), DraftService.close

    async def close_late(self: DraftService) -> None:
        await may_close.wait()
        await close(self)

    monkeypatch.setattr(hosting, "Watchdog", ToldWatchdog)
    monkeypatch.setattr(DraftService, "close", close_late)
    await hosted.until_serving()
    await asyncio.to_thread(hangs[0], "the engine hangs")
    for name in ("", HEALTH_NAME, "liveness"):
        await until(partial(asyncio.to_thread, health_of, hosted.port, name), "NOT_SERVING")
    may_close.set()
    with pytest.raises(UnavailableError, match="the engine hangs"):
        await hosted.end()


async def test_not_serving_while_it_loads(hosted: Hosted) -> None:
    hosted.may_load.clear()
    await until(lambda: asyncio.to_thread(health_of, hosted.port, HEALTH_NAME), "NOT_SERVING")
    assert await asyncio.to_thread(health_of, hosted.port, "liveness") == "SERVING"
    with pytest.raises(UnavailableError, match="loaded"):
        await hosted.remote.describe()
    hosted.may_load.set()
    await hosted.until_serving()
    assert (await hosted.remote.describe()).model_name == "ngram"


async def test_a_signal_stops_it_while_it_loads(hosted: Hosted) -> None:
    hosted.may_load.clear()
    assert await asyncio.to_thread(hosted.loading.wait, DEADLINE_S)
    signal_self()
    await hosted.end()


async def _until_proposal(batches: AsyncIterator[EventBatch[DraftEvent]]) -> AsyncIterator[DraftEvent]:
    async for batch in batches:
        for event in batch.all_events():
            yield event
            if isinstance(event, Proposal):
                return


async def test_a_signal_lets_open_sessions_finish_and_refuses_new_ones(hosted: Hosted) -> None:
    await hosted.until_serving()
    link = await hosted.remote.attach()
    events = link.events()
    opened = open_session(0, prompt_length=4, max_length=60, num_token_ids=9)
    link.send([opened, extend_item(0, 2, [1, 2, 1], 1)])
    async with asyncio.timeout(DEADLINE_S):
        answers = [event async for event in _until_proposal(events)]
    assert [type(event) for event in answers] == [Opened, Proposal]
    signal_self()
    await until(lambda: asyncio.to_thread(health_of, hosted.port, HEALTH_NAME), "NOT_SERVING")
    generation = 3
    async with asyncio.timeout(DEADLINE_S):
        while True:  # the refusal begins a moment after health has changed
            session = generation
            link.send([open_session(session, prompt_length=4, max_length=60, num_token_ids=9), Release(session, 2)])
            link.send([extend_item(0, generation, [1, 2, 1, 2], 1)])
            batch = await anext(events)
            generation += 1
            if any(isinstance(event, Refused) for event in batch.events):
                break
    assert not hosted.task.done()
    link.send([Release(0, generation)])
    await hosted.end()


async def test_the_grace_is_bounded_by_a_second_signal(hosted: Hosted) -> None:
    await hosted.until_serving()
    link = await hosted.remote.attach()
    link.send([open_session(0, prompt_length=4, max_length=60, num_token_ids=9), extend_item(0, 2, [1], 1)])
    await asyncio.wait_for(anext(link.events()), DEADLINE_S)
    signal_self()
    await until(lambda: asyncio.to_thread(health_of, hosted.port, HEALTH_NAME), "NOT_SERVING")
    signal_self(signal.SIGINT)
    await hosted.end()


async def test_an_engine_that_fails_ends_the_process_with_the_reason(hosted: Hosted) -> None:
    await hosted.until_serving()
    assert hosted.fail is not None
    hosted.fail(RuntimeError("device lost"))
    with pytest.raises(UnavailableError, match="device lost"):
        await hosted.end()


async def test_a_port_in_use_is_said_before_anything_is_loaded() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        host = Hosted.__new__(Hosted)
        host.port = int(listener.getsockname()[1])

        def load(progress: LoadProgress, on_failure: OnFailure) -> DraftService:
            raise AssertionError("loaded in vain")

        with pytest.raises(ConfigError, match="in use"):
            await host_service(host.listen, load, settings(drain_delay_s=0, drain_grace_s=0))


def start(*argv: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", *argv], stderr=subprocess.PIPE, text=True)


async def test_a_real_process_serves_and_ends_with_0() -> None:
    port = hold_port()
    process = start("outrider_draft", "--method", "ngram", "--port", str(port), "--drain-delay-s", "0")
    try:
        await until(lambda: asyncio.to_thread(health_of, port, HEALTH_NAME), "SERVING")
        remote = RemoteDraft(f"127.0.0.1:{port}")
        assert (await remote.describe()).model_name == "ngram"
    finally:
        process.send_signal(signal.SIGTERM)
        _, errors = await asyncio.to_thread(process.communicate, timeout=DEADLINE_S)
    assert process.returncode == 0, errors


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["outrider_target", "--model", "/nowhere"], "/nowhere is not a folder"),
        (["outrider_draft"], "--method"),
        (["outrider_draft", "--model", "/nowhere"], "/nowhere is not a folder"),
        (["outrider_target", "--page-sise", "4"], "page-size"),
    ],
)
def test_a_real_process_says_in_one_line_why_it_cannot_serve(argv: list[str], message: str) -> None:
    process = start(*argv, "--port", str(hold_port()))
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode != 0
    assert message in errors.splitlines()[-1]
    assert "Traceback" not in errors
